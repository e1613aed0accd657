"""Which runs failed and how, as the classification sees it; what the failure pages are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import setting_without
from nanogpt_bench.runs.load import Run

if TYPE_CHECKING:
    from nanogpt_bench.failures import Diagnosis, Prediction

BATCH_KEYS = frozenset({"train.batch_size", "train.accumulation"})


@dataclass(frozen=True)
class Failed:
    """One run with something to explain: a failure of the loop, or a class of failure found in its records."""

    label: str
    run: Run
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Predicted:
    """One run of E7M0 with nearest rounding, and the answers to what was predicted of it."""

    label: str
    run: Run
    predictions: tuple[Prediction, ...]


def failed_runs(results: Sequence[Result]) -> list[Failed]:
    """Every run that failed or in whose records a class of failure was found, in the order of the table."""
    # Imported here because the classification reads runs through this package.
    from nanogpt_bench.failures import diagnose

    series = _batch_series([run for result in results for run in result.row.runs])
    judged = [
        Failed(
            result.row.label,
            run,
            diagnose(run, siblings=[other for other in series[setting_without(run, BATCH_KEYS)] if other is not run]),
        )
        for result in results
        for run in result.row.runs
        if run.metrics or run.status == "failed"
    ]
    return [failed for failed in judged if failed.run.status == "failed" or failed.diagnosis.found]


def _batch_series(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    """Runs that differ in batch size and seeds only: together they tell noise that averages out from a floor."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_without(run, BATCH_KEYS), []).append(run)
    return groups


def predicted_runs(results: Sequence[Result]) -> list[Predicted]:
    """The first run of every row of E7M0 with nearest rounding."""
    from nanogpt_bench.failures import is_e7m0_nearest, predictions

    firsts = [(result.row.label, result.row.runs[0]) for result in results if result.row.runs]
    return [Predicted(label, run, predictions(run)) for label, run in firsts if run.metrics and is_e7m0_nearest(run)]
