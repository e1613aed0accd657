"""The study's maps, ladders and predictions about E7M0; that its tables are fresh is in `test_generated.py`."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanogpt_bench.report.results import Difference
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import Records

ROOT = Path(__file__).parent.parent

STUDY = sorted((ROOT / "study" / "results").glob("*.json"))


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the modules that draw the study's pages."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.syspath_prepend(ROOT / "study")


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in (entry for entry in json.loads(path.read_text(encoding="utf-8")) if entry["kind"] == "run"):
        rows.setdefault(run["label"], []).append(run)
    return rows


@pytest.mark.extra("matplotlib")
def test_the_first_tables_are_drawn_from_the_results() -> None:
    front = import_module("_front")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert front.front_table() in readme
    assert front.front_table(front.MORE) in (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in front.front_table().splitlines()[2:]]
    assert [cell[0].split(",")[0] for cell in cells] == ["AdamW"] * 3 + ["Muon"] * 3
    assert [cell[2:] for cell in cells if cell[0].endswith(", float32")] == [["0", "0"]] * 2


def test_a_map_has_the_mean_gap_of_every_layer_in_every_format() -> None:
    path = STUDY[0].with_stem("study_q3")
    losses = {label: {run["seed"]: run["final_val_loss"] for run in runs} for label, runs in rows_of(path).items()}
    found = import_module("_maps").map_of(read_export(path))
    for pattern, gaps in zip(found.patterns, found.gap, strict=True):
        for fmt, gap in zip(found.formats, gaps, strict=True):
            own = losses[f"{fmt} {'*' if pattern == 'all layers' else pattern}"]
            assert gap == pytest.approx(sum(own[seed] - losses["fp32"][seed] for seed in own) / len(own))


@pytest.mark.extra("matplotlib")
def test_the_first_pictures_are_made_from_the_figures() -> None:
    frontier = import_module("_frontier")
    for path, spec in (item for name in frontier.PICTURES for item in frontier.themed(name).items()):
        assert frontier.mark(spec) in path.read_text(encoding="utf-8"), "python study/make.py --front"
        assert f'="docs/_static/{path.name}"' in (ROOT / "README.md").read_text(encoding="utf-8")


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


#: a loss that falls for eight steps and then stays
STUCK = [5.5 - 0.2 * step for step in range(8)] + [4.0 + 0.02 * (step % 2) for step in range(192)]
LEARNS = [2.2 + 3.3 * (step + 1) ** -0.5 for step in range(200)]


def run_of(losses: list[float], lost: float | None = None, zone: float | None = None, **more: Any) -> Run:
    shares = {"stall/update_lost": lost, "stall/zero_gradient_zone": zone}
    known = {name: share for name, share in shares.items() if share is not None}
    records = [
        {"step": step, "train/loss": loss, **(known if step % 20 == 0 else {})} for step, loss in enumerate(losses, 1)
    ]
    return Run(Path("a"), more, metrics=Records(records), summary={"format": "E7M0"})


@pytest.mark.parametrize(
    ("run", "answers"),
    [
        (run_of(STUCK, 0.97, 0.6), [True, True, True]),
        (run_of(LEARNS, 0.5, 0.01), [False, False, False]),
        (run_of(STUCK[:9]), [None, None, None]),
    ],
)
def test_each_prediction_is_confirmed_refuted_or_open(run: Run, answers: list[bool | None]) -> None:
    assert [each.confirmed for each in import_module("e7m0").predictions(run)] == answers


def test_predictions_are_about_nearest_rounding() -> None:
    nearest, other = (
        run_of(STUCK, 0.97, 0.2, optimizer={"writeback": writeback}) for writeback in ("nearest", "stochastic")
    )
    lines = import_module("e7m0").table([nearest, other]).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in lines] == ["confirmed", "confirmed", "refuted"]
    assert "97.0%, 97.0% at step 20 and 97.0% at step 200" in lines[1]
