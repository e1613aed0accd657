"""How the outcome depends on the learning rate, from runs that differ in nothing else but their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanogpt_bench.report.rows import Row, row_label, setting_without
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import finite

RATE_KEYS = frozenset({"optimizer.lr", "optimizer.float_lr"})


@dataclass(frozen=True)
class RatePoint:
    """The mean final val loss (nats) over the seeds at one learning rate, None when all failed; and those that did."""

    rate: float
    loss: float | None
    failed: int


@dataclass(frozen=True)
class RateCurve:
    """One setting at several learning rates; `row` is the label of the first row on it, whose look it takes."""

    label: str
    row: str
    points: list[RatePoint]


def rate_curves(rows: Sequence[Row]) -> list[RateCurve]:
    """A curve for every setting that was run at two learning rates or more."""
    groups: dict[str, list[tuple[Row, Run, float]]] = {}
    for row in rows:
        for run in row.runs:
            rate = learning_rate(run)
            if rate is not None and run.config:
                groups.setdefault(setting_without(run, RATE_KEYS), []).append((row, run, rate))
    several = [group for group in groups.values() if len({rate for _, _, rate in group}) > 1]
    labels = _labels([group[0][0] for group in several])
    return [_curve(label, group) for label, group in zip(labels, several, strict=True)]


def learning_rate(run: Run) -> float | None:
    """The peak learning rate of a run's own record, None when it names none above 0."""
    optimizer = run.config.get("optimizer")
    configured = optimizer.get("lr") if isinstance(optimizer, Mapping) else None
    rate = finite(run.summary.get("lr", configured))
    return rate if rate is not None and rate > 0 else None


def _labels(rows: Sequence[Row]) -> list[str]:
    """Format and rule; numbered where settings that differ otherwise share them."""
    plain = [row_label(row.rule, row.format) for row in rows]
    return [
        f"{label} ({plain[: i + 1].count(label)})" if plain.count(label) > 1 else label for i, label in enumerate(plain)
    ]


def _curve(label: str, group: Sequence[tuple[Row, Run, float]]) -> RateCurve:
    rates = sorted({rate for _, _, rate in group})
    return RateCurve(
        label, group[0][0].label, [_point(rate, [run for _, run, r in group if r == rate]) for rate in rates]
    )


def _point(rate: float, runs: Sequence[Run]) -> RatePoint:
    finished = [run.at_end("final_val_loss") for run in runs]
    losses = [loss for loss in finished if loss is not None]
    return RatePoint(rate, statistics.fmean(losses) if losses else None, len(runs) - len(losses))


def rate_ticks(rates: Iterable[float], most: int = 4) -> list[float]:
    """Those of the learning rates to label on a logarithmic axis, far enough from each other to be read.

    >>> rate_ticks([0.001, 0.0011, 0.01, 0.1])
    [0.001, 0.01, 0.1]
    """
    ordered = sorted(set(rates))
    least = math.log(ordered[-1] / ordered[0]) / most if ordered else 0.0
    kept: list[float] = []
    for rate in ordered:
        if not kept or math.log(rate / kept[-1]) >= least:
            kept.append(rate)
    return kept
