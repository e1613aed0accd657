"""Rounding noise: a plateau on which updates drown in their rounding, lower at a larger batch size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanogpt_bench.failures import Finding, classify

Make = Callable[..., Path]
STOCHASTIC: dict[str, Any] = {"optimizer": {"writeback": "stochastic"}}
#: update over rounding noise, falling below 0.1 at step 80
DROWNING = {step: 0.3 if step < 80 else 0.04 for step in range(20, 201, 20)}


def resting_at(level: float) -> list[float]:
    return [5.5, 5.0, 4.5, 4.0] + [level + 0.02 * (step % 2) for step in range(196)]


def batch_of(size: int) -> dict[str, Any]:
    return STOCHASTIC | {"train": {"batch_size": size}}


def noise(path: Path, *siblings: Path) -> Finding:
    return next(finding for finding in classify(path, siblings=siblings) if finding.kind == "rounding_noise")


def test_small_updates_on_a_plateau_are_rounding_noise(make: Make) -> None:
    path = make(loss=resting_at(3.5), settings=STOCHASTIC, series={"grad/update_to_noise": DROWNING})
    finding = noise(path)
    assert (finding.state, finding.step) == ("found", 80)
    assert finding.evidence["lowest"] == pytest.approx(0.04)


def test_without_a_plateau_there_is_none(make: Make) -> None:
    assert noise(make(settings=STOCHASTIC, series={"grad/update_to_noise": DROWNING})).state == "clear"


def test_nearest_rounding_makes_none(make: Make) -> None:
    assert noise(make(loss=resting_at(3.5), series={"grad/update_to_noise": DROWNING})).state == "clear"


def test_without_either_sign_it_is_not_judged(make: Make) -> None:
    finding = noise(make(loss=resting_at(3.5), settings=STOCHASTIC))
    assert finding.state == "not judged"
    assert "grad/update_to_noise" in finding.missing


def test_a_plateau_that_falls_with_the_batch_size_is_found_in_every_run_of_the_series(make: Make) -> None:
    runs = [make(f"b{size}", loss=resting_at(level), settings=batch_of(size)) for size, level in ((4, 3.5), (64, 3.2))]
    for path in runs:
        finding = noise(path, *runs)
        assert finding.found
        assert finding.evidence["batch_fall"] == pytest.approx(0.3, abs=0.01)
        assert finding.evidence["level_batch_4"] == pytest.approx(3.51, abs=0.01)


def test_a_plateau_that_stays_is_not_noise_even_if_updates_are_small(make: Make) -> None:
    series = {"grad/update_to_noise": DROWNING}
    runs = [make(f"b{size}", loss=resting_at(3.5), settings=batch_of(size), series=series) for size in (4, 64)]
    assert noise(*runs).state == "clear"


def test_updates_above_their_noise_are_not_rounding_noise_even_if_the_plateau_falls(make: Make) -> None:
    clear_of_it = {"grad/update_to_noise": dict.fromkeys(range(20, 201, 20), 0.3)}
    small = make("small", loss=resting_at(3.5), settings=batch_of(4), series=clear_of_it)
    large = make("large", loss=resting_at(3.2), settings=batch_of(64), series=clear_of_it)
    assert noise(small, large).state == "clear"


def test_only_runs_of_the_same_setting_are_compared(make: Make) -> None:
    small = make("small", loss=resting_at(3.5), settings=batch_of(4))
    other = make("other", loss=resting_at(3.2), settings=batch_of(64) | {"model": {"formats": {"*": "E5M2"}}})
    assert noise(small, other).state == "not judged"


def test_seeds_are_averaged_and_accumulation_counts_as_batch(make: Make) -> None:
    accumulated = STOCHASTIC | {"train": {"batch_size": 4, "accumulation": 8}}
    runs = [
        make("small", loss=resting_at(3.5), settings=batch_of(4)),
        make("small-2", loss=resting_at(3.7), settings=batch_of(4) | {"data": {"seed": 7}}),
        make("large", loss=resting_at(3.2), settings=accumulated),
    ]
    finding = noise(runs[0], *runs[2:])
    assert finding.evidence["level_batch_32"] == pytest.approx(3.21, abs=0.01)
    assert finding.evidence["level_batch_4"] == pytest.approx(3.51, abs=0.01)
