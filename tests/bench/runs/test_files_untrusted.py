"""Files are replaced whole, no link leads a writing out of a folder, and files of others are read with care."""

import json
import os
from pathlib import Path

import pytest
from laws import each
from run_folders import write_run

from nanogpt_bench.checkpoint import steps
from nanogpt_bench.cli import main
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.system.errors import nearest
from nanogpt_bench.system.files import remove_parts, replacing, write_text
from nanogpt_bench.system.untrusted import DEEPEST, Refused, parse_json, parse_yaml, read_json, read_text

SECRET = "what was there before"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def test_a_failure_leaves_the_old_file_and_no_part(tmp_path):
    path = write_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", "text"])
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


def test_a_name_that_is_taken_by_a_link_is_not_written_through(tmp_path, secret, monkeypatch):
    names = []
    with replacing(tmp_path / "a") as file:
        names.append(Path(file.name).name)
    with replacing(tmp_path / "a") as file:
        names.append(Path(file.name).name)
    assert names[0] != names[1]
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)  # one that could be foreseen after all
    (tmp_path / f".a.{'0' * 16}.part").symlink_to(secret)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "a", "new")
    assert secret.read_text() == SECRET


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / f".a.{'0f' * 8}.part").write_text("half")
    for name in (".a.part", "a.0f0f0f0f0f0f0f0f.part", ".keep", "metrics.jsonl"):
        (tmp_path / name).write_text("kept")
    remove_parts(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_long_name_and_half_a_surrogate_pair_are_written(tmp_path):
    assert write_text(tmp_path / ("x" * 250), "\ud800").read_bytes() == b"\\ud800"


@pytest.fixture
def _corpus(here):
    """A corpus in the current folder."""
    (here / "text").write_text("a line of text\n" * 200)
    prepare_text(here / "text", here / "corpus", "byte")


SMALL = ("--model.n_layer=1", "--model.n_head=1", "--model.n_embd=8", "--model.block_size=8", "--eval.batches=1")


@pytest.mark.usefixtures("_corpus")
def test_a_run_is_not_taken_up_in_files_that_lie_elsewhere(tmp_path, secret, capsys):
    words = ["run", "bf16_baseline", "--name=a", "--data.dir=corpus", *SMALL, "--checkpoint.every=2"]
    assert main([*words, "--train.max_steps=4"]) == 0
    run = tmp_path / "runs" / "a"
    assert steps(run)
    secret.write_bytes((run / "metrics.jsonl").read_bytes() + b"{}\n")
    for name in ("metrics.jsonl", "config.yaml", "summary.json", "environment.json"):
        content = (run / name).read_bytes()
        (run / name).unlink()
        (run / name).symlink_to(secret if name == "metrics.jsonl" else secret.with_name(name))
        (run / name).touch()
        if name != "metrics.jsonl":
            secret.with_name(name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in secret.parent.iterdir()}
    capsys.readouterr()
    assert main([*words, "--train.max_steps=4", "--resume"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in secret.parent.iterdir()} == before


@pytest.mark.usefixtures("_corpus")
def test_a_sweep_has_no_run_behind_a_link(tmp_path, secret, capsys):
    from nanogpt_bench.sweep.file import read_sweep
    from nanogpt_bench.sweep.plan import plan_sweep

    file = tmp_path / "s.yaml"
    file.write_text("settings: {data.dir: corpus, model.block_size: 8, train.max_steps: 1}\naxes: {seed: [1]}\n")
    (run,) = plan_sweep(read_sweep(file))
    out = tmp_path / "out"
    out.mkdir()
    (out / "sweep.json").write_text(json.dumps({"mode": "grid", "runs": []}))
    (out / run.name).symlink_to(secret.parent)
    assert main(["sweep", "s.yaml", "--out", "out"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]


def test_a_report_writes_to_no_file_that_lies_elsewhere(tmp_path, secret):
    runs = [write_run(tmp_path / "runs" / name, rule=name) for name in ("fp32", "nearest")]
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    names = ("report.html", "results.csv", "table.md", "figures/loss_curves.svg")
    for name in names:
        (out / name).symlink_to(secret)
    assert main(["report", *map(str, runs), "--out", str(out)]) == 2
    assert secret.read_text() == SECRET


def test_an_honest_alias_and_merge_are_read():
    text = "base: &base {a: 1, b: [2, 3]}\nother: {<<: *base, c: *base}\n"
    assert parse_yaml(text)["other"] == {"a": 1, "b": [2, 3], "c": {"a": 1, "b": [2, 3]}}


@each("depth", [DEEPEST - 2, DEEPEST + 1, 100_000])
def test_nesting_is_read_to_the_bound(depth):
    for parse in (parse_yaml, parse_json):
        text = "[" * depth + "]" * depth
        if depth < DEEPEST:
            assert json.dumps(parse(text)) == text
        else:
            with pytest.raises(Refused, match=f"nests more than {DEEPEST} deep"):
                parse(text)


def test_a_file_is_read_to_the_bound_and_only_an_ordinary_one(tmp_path):
    path, link, pipe = tmp_path / "a.json", tmp_path / "link", tmp_path / "pipe"
    path.write_bytes(b"[1]      ")
    link.symlink_to("a.json")
    os.mkfifo(pipe)
    assert read_json(path) == read_json(link) == [1]
    assert read_text(path, most=9) == "[1]      "
    for place, options, said in (
        (path, {"most": 8}, "more than 8 bytes"),
        (tmp_path, {}, "not an ordinary file"),
        (pipe, {}, "not an ordinary file"),
        (link, {"links": False}, "symbolic link"),
    ):
        with pytest.raises(Refused, match=said):
            read_text(place, **options)


def test_one_edit_is_nearer_than_likeness():
    assert nearest("model.n_eabd", FIELDS) == "model.n_embd"
    assert nearest("sede", ["sides", "seed"]) == "seed"
    assert nearest("x" * 10**6, FIELDS) is None
