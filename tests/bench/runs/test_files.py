"""Files are replaced whole, and no link leads a writing out of a folder."""

import json

import pytest
from run_folders import write_run

from nanogpt_bench.checkpoint import steps
from nanogpt_bench.cli import main
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.system.files import remove_parts, replacing, write_text

SECRET = "what was there before"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def test_a_failure_leaves_the_old_file_and_odd_texts_and_names_are_written(
    tmp_path,
):
    path = write_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", "text"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"
    assert write_text(tmp_path / ("x" * 250), "\ud800").read_bytes() == b"\\ud800"


def test_a_name_that_is_taken_by_a_link_is_not_written_through(tmp_path, secret, monkeypatch):
    with replacing(tmp_path / "a") as file, replacing(tmp_path / "a") as second_file:
        assert file.name != second_file.name
    monkeypatch.setattr(
        "secrets.token_hex", lambda count: "0" * 2 * count
    )  # one that could be foreseen after all
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


@pytest.fixture
def _corpus(working_folder):
    """A corpus in the current folder."""
    (working_folder / "text").write_text("a line of text\n" * 200)
    prepare_text(working_folder / "text", working_folder / "corpus", "byte")


SMALL = (
    "--model.n_layer=1",
    "--model.n_head=1",
    "--model.n_embd=8",
    "--model.block_size=8",
    "--eval.batches=1",
)


@pytest.mark.usefixtures("_corpus")
def test_a_run_is_not_taken_up_in_files_that_lie_elsewhere(tmp_path, secret, refused):
    words = [
        "run",
        "bf16_baseline",
        "--name=a",
        "--data.dir=corpus",
        *SMALL,
        "--checkpoint.every=2",
    ]
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
    old_contents = {path.name: path.read_bytes() for path in secret.parent.iterdir()}
    assert "is a symbolic link" in refused(*words, "--train.max_steps=4", "--resume")
    assert {path.name: path.read_bytes() for path in secret.parent.iterdir()} == old_contents


@pytest.mark.usefixtures("_corpus")
def test_a_sweep_has_no_run_behind_a_link(tmp_path, secret, refused):
    file = tmp_path / "s.yaml"
    file.write_text(
        "settings: {data.dir: corpus, model.block_size: 8, train.max_steps: 1}\naxes: {seed: [1]}\n"
    )
    (run,) = plan_sweep(read_sweep(file))
    out = tmp_path / "out"
    out.mkdir()
    (out / "sweep.json").write_text(json.dumps({"mode": "grid", "runs": []}))
    (out / run.name).symlink_to(secret.parent)
    assert "is a symbolic link" in refused("sweep", "s.yaml", "--out", "out")
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]


def test_a_report_writes_to_no_file_that_lies_elsewhere(tmp_path, secret):
    runs = [write_run(tmp_path / "runs" / name, rule=name) for name in ("fp32", "nearest")]
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    for name in ("report.html", "results.csv", "table.md", "figures/loss_curves.svg"):
        (out / name).symlink_to(secret)
    assert main(["report", *map(str, runs), "--out", str(out)]) == 2
    assert secret.read_text() == SECRET
