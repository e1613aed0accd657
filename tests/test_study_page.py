"""The study's pages show every results file. That their tables are what they were, `test_generated.py` says."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from nanogpt_bench.report.results import Difference
from nanogpt_bench.report.results_file import read_export

ROOT = Path(__file__).parent.parent

STUDY = sorted((ROOT / "study" / "results").glob("*.json"))


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws the study's pages can be imported."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.syspath_prepend(ROOT / "study")


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a results file."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of a results file by the label of their row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in (entry for entry in entries_of(path) if entry["kind"] == "run"):
        rows.setdefault(run["label"], []).append(run)
    return rows


def test_the_first_tables_are_drawn_from_the_results() -> None:
    front = import_module("_front")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert front.front_table() in readme
    assert front.front_table(front.MORE) in (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    table = readme[readme.index("| training |") :].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [cell[0].split(",")[0] for cell in cells] == ["AdamW"] * 3 + ["Muon"] * 3
    assert [cell[2:] for cell in cells if cell[0].endswith(", float32")] == [["0", "0", "1.0"]] * 2


def test_a_map_has_the_mean_gap_of_every_layer_in_every_format() -> None:
    path = STUDY[0].with_stem("study_q3")
    losses = {label: {run["seed"]: run["final_val_loss"] for run in runs} for label, runs in rows_of(path).items()}
    found = import_module("_maps").map_of(read_export(path))
    for pattern, gaps in zip(found.patterns, found.gap, strict=True):
        for fmt, gap in zip(found.formats, gaps, strict=True):
            own = losses[f"{fmt} {'*' if pattern == 'all layers' else pattern}"]
            assert gap == pytest.approx(sum(own[seed] - losses["fp32"][seed] for seed in own) / len(own))


def test_the_first_picture_shows_what_the_study_found() -> None:
    frontier = import_module("_frontier")
    found = frontier.points()
    for path in (frontier.PICTURE, frontier.NARROW):
        with Image.open(path) as picture:
            assert json.loads(picture.info["Description"]) == found
        assert f"docs/_static/{path.name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_look_that_came_later_is_not_told_as_that_of_a_tenth() -> None:
    """Runs of 1,000 steps that look every 200 have none within their first 100."""
    told = import_module("_weights").kurtosis_table(read_export(STUDY[0].with_stem("study_q4"))).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in told[2:]]
    assert {tenth for tenth, _ in cells} == {"-"}
    assert "-" not in {end for _, end in cells}
    told = import_module("_weights").kurtosis_table(read_export(STUDY[0].with_stem("study_q1")))
    assert "| - |" not in told


def test_a_gap_appears_where_an_interval_first_leaves_0_out() -> None:
    _ladders = import_module("_ladders")

    def rung(low: float, high: float) -> SimpleNamespace:
        return SimpleNamespace(difference=Difference((low + high) / 2, 3, low, high))

    rungs = {400: rung(0.01, 0.03), 100: rung(-0.02, 0.02), 200: rung(-0.01, 0.03), 800: rung(-0.01, 0.1)}
    assert _ladders.appearance(rungs) == 400
    assert _ladders.appearance({100: rungs[100]}) is None
    assert _ladders.appearance({100: SimpleNamespace(difference=Difference(0.5, 1)), 400: rungs[400]}) == 400
    assert _ladders.appearance({50: rung(-0.03, -0.01), **rungs}) == 50
