"""Run folders are found at any depth below what is given, without following links, and it is said how many."""

import pytest
from bench_runs import refusal
from run_folders import write_run

from nanogpt_bench.runs.load import find_runs


@pytest.fixture
def runs(tmp_path):
    """A folder of runs as commands leave it: a run, a comparison, and two modes of a sweep."""
    top = tmp_path / "runs"
    for place in ("e4m3", "compare-1/a", "sweep-lr/grid/b", "sweep-lr/grid/a", "sweep-lr/tune/c"):
        write_run(top / place, steps=20)
    (top / "compare-1" / "corpus").mkdir()
    return top


def test_all_runs_below_a_folder_are_found_and_counted(runs):
    said = []
    found = [path.relative_to(runs).as_posix() for path in find_runs([runs], said.append)]
    assert found == ["e4m3", "compare-1/a", "sweep-lr/grid/a", "sweep-lr/grid/b", "sweep-lr/tune/c"]
    assert said == [f"{runs}: 5 runs found in 4 folders"]


def test_links_are_not_followed_and_are_counted(runs, tmp_path):
    write_run(tmp_path / "elsewhere" / "d", steps=20)
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    (runs / "sweep-lr" / "back").symlink_to(runs)  # a circle
    said = []
    assert len(find_runs([runs], said.append)) == 5
    assert said[0] == f"{runs}: 5 runs found in 4 folders (2 links not followed)"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "d").symlink_to(tmp_path / "elsewhere" / "d")
    with refusal(r"holds none \(1 link not followed\)"):
        find_runs([tmp_path / "links"])
    assert len(find_runs([tmp_path / "links" / "d"])) == 1  # one that is named is meant
