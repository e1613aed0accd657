"""Three predictions about E7M0 with nearest rounding, each answered by a run's records."""

from __future__ import annotations

import statistics
from pathlib import Path

from nanogpt_bench.config.watching import FailureConfig
from nanogpt_bench.failures.criteria import LOSS, SHORTEST, find_rest
from nanogpt_bench.failures.evidence import Evidence, Facts, Prediction, Series, read
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.monitors.zones import ZERO_GRADIENT_ZONE
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.words import counted


def is_e7m0_nearest(run: Run | Path) -> bool:
    """Whether a run's weights are E7M0 throughout and written back by nearest rounding."""
    evidence = read(run)
    return evidence.run.format == "E7M0" and evidence.setting("optimizer.writeback") == "nearest"


def predictions(run: Run | Path, thresholds: FailureConfig | None = None) -> tuple[Prediction, ...]:
    """Answer "plateau within 10 steps", "update sparsity" and "zero-gradient zones" for a run, in this order.

    `confirmed` is None where the metric was not recorded; `missing` then names it.

    Raises:
        BenchError: the path is no run folder.
    """
    evidence = read(run, thresholds)
    return _plateau(evidence), _sparsity(evidence), _zones(evidence)


def _plateau(evidence: Evidence) -> Prediction:
    """Compare the mean loss just after the predicted step with the lowest the run reached."""
    limits, series = evidence.limits, evidence.series(LOSS)
    statement = f"plateau within {counted(limits.early_plateau, 'step')}: the training loss does not fall after that"
    rest = find_rest(series, limits.smoothing, limits.plateau)
    early = _after(series, limits.early_plateau, limits.smoothing)
    if rest is None or early is None:
        short = max(SHORTEST, limits.early_plateau + 1)
        return Prediction(
            "plateau", statement, None, f"the run has {counted(len(series), 'step')}; {short} would tell", {}, (LOSS,)
        )
    later = max(early - rest.level, 0.0)
    share = later / rest.fall if rest.fall > 0 else 0.0
    figures: Facts = {
        "loss_early": early,
        "lowest_level": rest.level,
        "fall_after": later,
        "share_after": share,
        "allowed_fall": rest.band,
        "plateau_step": rest.step,
        "steps": series.steps[-1],
    }
    text = (
        f"after step {limits.early_plateau} the training loss fell by another {later:.3f} nats, {share:.1%} of its "
        f"whole fall, to {rest.level:.3f} at step {rest.step} of {series.steps[-1]}"
    )
    return Prediction("plateau", statement, later <= rest.band, text, figures)


def _after(series: Series, step: int, window: int) -> float | None:
    """Mean of the `window` values from `step` on; None when there are none."""
    late = [value for at, value in zip(series.steps, series.values, strict=True) if at >= step]
    return statistics.fmean(late[:window]) if late else None


def _sparsity(evidence: Evidence) -> Prediction:
    return _share(
        evidence, "update_sparsity", UPDATE_LOST.name, evidence.limits.sparsity, "update sparsity", "lost their update"
    )


def _zones(evidence: Evidence) -> Prediction:
    what = "lie in a zone where half a ULP to either side changes nothing"
    return _share(
        evidence, "zero_gradient_zones", ZERO_GRADIENT_ZONE.name, evidence.limits.zero_zone, "zero-gradient zones", what
    )


def _share(evidence: Evidence, name: str, metric: str, limit: float, title: str, what: str) -> Prediction:
    """A prediction that a share of the weights, in the mean over the run, reaches a limit."""
    statement = f"{title}: at least {limit:.0%} of the weights {what}"
    series = evidence.series(metric)
    mean = series.mean
    if mean is None:
        return Prediction(name, statement, None, f"not judged: the run did not record {metric}", {}, (metric,))
    high, highest = evidence.worst_layer(metric)
    low, lowest = evidence.worst_layer(metric, lowest=True)
    figures: Facts = {
        "mean": mean,
        "first": series.values[0],
        "first_step": series.steps[0],
        "last": series.values[-1],
        "last_step": series.steps[-1],
        "looks": len(series),
        "highest_layer": high,
        "highest_share": highest,
        "lowest_layer": low,
        "lowest_share": lowest,
    }
    layers = f"; by layer from {lowest:.1%} ({low}) to {highest:.1%} ({high})" if high else ""
    text = f"{mean:.1%} of the weights {what}, {series.values[0]:.1%} at step {series.steps[0]} and "
    text += f"{series.values[-1]:.1%} at step {series.steps[-1]}{layers}"
    return Prediction(name, statement, mean >= limit, text, figures)
