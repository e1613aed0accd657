"""Rounding noise: a plateau on which updates drown in their rounding, lower at a larger batch size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanogpt_bench.failures import Finding, classify

Make = Callable[..., Path]
STOCHASTIC: dict[str, Any] = {"optimizer": {"writeback": "stochastic"}, "data": {"seed": 42}}
#: update over rounding noise, falling below 1 at step 80
DROWNING = {step: 2.0 if step < 80 else 0.4 for step in range(20, 201, 20)}


def resting_at(level: float) -> list[float]:
    return [5.5, 5.0, 4.5, 4.0] + [level + 0.02 * (step % 2) for step in range(196)]


def batch_of(size: int) -> dict[str, Any]:
    return STOCHASTIC | {"train": {"batch_size": size}}


def noise(path: Path, *siblings: Path) -> Finding:
    return next(finding for finding in classify(path, siblings=siblings) if finding.kind == "rounding_noise")


def series_of(make: Make, small: float, large: float, ratio: dict[int, float] | None = None) -> list[Path]:
    """Two runs, batch 4 and batch 64, by the levels at which they rest."""
    series = {"grad/update_to_noise": DROWNING if ratio is None else ratio}
    return [
        make(f"b{size}", loss=resting_at(level), settings=batch_of(size), series=series)
        for size, level in ((4, small), (64, large))
    ]


def test_a_plateau_of_drowning_updates_that_falls_with_the_batch_size_is_found_in_both_runs(make: Make) -> None:
    runs = series_of(make, 3.5, 3.2)
    for path in runs:
        finding = noise(path, *runs)
        assert (finding.state, finding.step) == ("found", 80)
        assert finding.evidence["lowest"] == pytest.approx(0.4)
        assert finding.evidence["batch_fall"] == pytest.approx(0.3, abs=0.01)
        assert finding.evidence["level_batch_4"] == pytest.approx(3.51, abs=0.01)


def test_updates_above_their_noise_are_not_drowned(make: Make) -> None:
    assert noise(*series_of(make, 3.5, 3.2, dict.fromkeys(range(20, 201, 20), 5.0))).state == "clear"


def test_nearest_rounding_makes_none(make: Make) -> None:
    assert noise(make(loss=resting_at(3.5), series={"grad/update_to_noise": DROWNING})).state == "clear"


def test_without_the_noise_or_another_batch_size_it_is_not_judged(make: Make) -> None:
    unwatched = noise(make("unwatched", loss=resting_at(3.5), settings=STOCHASTIC))
    assert (unwatched.state, unwatched.missing) == ("not judged", ("grad/update_to_noise",))
    alone = noise(series_of(make, 3.5, 3.2)[0])
    assert (alone.state, alone.missing) == ("not judged", ("a run with another batch size",))


def test_only_runs_of_the_same_setting_are_compared(make: Make) -> None:
    small, _ = series_of(make, 3.5, 3.2)
    other = make("other", loss=resting_at(3.2), settings=batch_of(64) | {"model": {"formats": {"*": "E5M2"}}})
    assert noise(small, other).state == "not judged"


def test_seeds_are_averaged_and_accumulation_counts_as_batch(make: Make) -> None:
    series = {"grad/update_to_noise": DROWNING}
    accumulated = STOCHASTIC | {"train": {"batch_size": 4, "accumulation": 8}}
    runs = [
        make("small", loss=resting_at(3.5), settings=batch_of(4), series=series),
        make("small-2", loss=resting_at(3.7), settings=batch_of(4) | {"data": {"seed": 7}}, series=series),
        make("large", loss=resting_at(3.2), settings=accumulated, series=series),
    ]
    finding = noise(runs[0], *runs[1:])
    assert finding.evidence["level_batch_4"] == pytest.approx(3.61, abs=0.01)
    assert finding.evidence["level_batch_32"] == pytest.approx(3.21, abs=0.01)
