"""`verify` takes a run folder as it was written for whole.

Every damage is named, and what an interruption leaves is none.
"""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from damages import changed, cut, text

from nanogpt_bench.checkpoint import Contents, commit_checkpoint, step_file
from nanogpt_bench.cli import main
from nanogpt_bench.commands.verify import check_run
from nanogpt_bench.loop import train as loop
from nanogpt_bench.loop.train import run
from nanogpt_bench.runs.read import AT_END, AT_START, SUMS


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A finished run of six steps with checkpoints of the fourth and the sixth."""
    folder = tmp_path_factory.mktemp("runs") / "e4m3"
    run(tiny(model__format="E4M3", monitor__interval=3), folder)
    shutil.rmtree(folder / "checkpoints")
    for step in (4, 6):
        commit_checkpoint(
            folder, Contents(step, {"model": {"w": torch.full((5,), float(step))}}), keep_last=2
        )
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "e4m3"))


def test_a_finished_run_is_whole(folder, capsys):
    findings = check_run(folder)
    assert (findings.problems, findings.notes, findings.last_step, findings.whole) == (
        [],
        [],
        6,
        [4, 6],
    )
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: whole, steps up to 6, 2 whole checkpoints\n"


def test_what_an_interruption_leaves_is_noted(folder, capsys):
    (folder / "summary.json").unlink()
    cut()(folder / "metrics.jsonl")
    for name in (".step-7.safetensors.part", "notes.txt"):
        (folder / "checkpoints" / name).touch()
    step_file(folder, 6).unlink()
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: whole, steps up to 5, 1 whole checkpoint",
        "  note: summary.json is missing: the run has not ended",
        "  note: metrics.jsonl: the last line is cut off; the 6 complete records were read",
        "  note: checkpoints/.step-7.safetensors.part is left by an interruption; the next start "
        "removes it",
        "  note: checkpoints/notes.txt is not a checkpoint, and is ignored",
        "  note: checkpoints/step-6.safetensors.sha256 is left by an interruption; the next start "
        "removes it",
    ]


def test_a_folder_of_runs_stands_for_the_runs_in_it(folder, capsys):
    shutil.copytree(folder, folder.with_name("other"), ignore=shutil.ignore_patterns("checkpoints"))
    cut(1)(step_file(folder, 6))
    assert main(["verify", str(folder.parent)]) == 1
    output = capsys.readouterr().out
    assert "e4m3: not whole" in output
    assert "step-6.safetensors': has another sha256 than step-6.safetensors.sha256 gives" in output
    assert (
        "other: whole, steps up to 6, 0 whole checkpoints\n  note: there are no checkpoints\n"
        in output
    )


def digit_changed(data):
    """Change a digit into its neighbour.

    Whatever the file is, it can still be read.
    """
    place = next(
        place for place in range(len(data) // 2, len(data)) if data[place : place + 1].isdigit()
    )
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES = {
    "cut between lines": changed(
        lambda data: (
            data[: data.index(b"\n", len(data) // 2) + 1] if data.count(b"\n") > 1 else data[:-2]
        )
    ),
    "cut": changed(lambda data: data[: len(data) // 2]),
    "emptied": text(""),
    "a digit changed": changed(digit_changed),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_file_of_a_finished_run_or_of_one_that_was_killed_is_damaged_without_a_word(
    folder, damage
):
    def check(*names):
        for name in names:
            assert check_run(folder).problems == [], name
            whole = (folder / name).read_bytes()
            DAMAGES[damage](folder / name)
            problems = check_run(folder).problems
            assert any(name in problem for problem in problems) or (name == SUMS and problems), name
            (folder / name).write_bytes(whole)

    check(*(name for name in AT_END if name != "alerts.jsonl"), SUMS)
    known = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(known[: len(AT_START)]))
    (folder / "summary.json").unlink()
    check(*AT_START)


@pytest.mark.parametrize(
    "missing",
    [*(slice(count, None) for count in range(1, len(AT_END) - 1)), slice(2, 3)],
    ids=lambda missing: "the third" if missing.stop else f"from {missing.start}",
)
def test_digests_cut_to_whole_lines_are_noticed(folder, missing):
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    remaining = lines.copy()
    del remaining[missing]
    assert len(remaining) < len(lines)
    (folder / SUMS).write_text("".join(remaining))
    assert any(SUMS in problem for problem in check_run(folder).problems)


def test_a_run_may_have_no_digests(folder, tiny, monkeypatch):
    """As those of older versions, and one that was killed before it wrote them."""
    (folder / SUMS).unlink()
    assert check_run(folder).problems == []

    monkeypatch.setattr(loop, "failures_of", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tiny(train__max_steps=2), folder.parent / "killed")
    assert (folder.parent / "killed" / "summary.json").is_file()
    assert check_run(folder.parent / "killed").problems == []


def test_digests_are_those_of_the_run_that_goes_on(tiny, tmp_path):
    config = {"checkpoint__every": 2, "monitor__watch": "[trend]"}
    run(tiny(train__max_steps=4, **config), tmp_path / "r")
    run(tiny(train__max_steps=6, **config), tmp_path / "r", resume=True, allow_config_change=True)
    assert check_run(tmp_path / "r").problems == []
    assert "summary.json" in (tmp_path / "r" / SUMS).read_text()
