"""What the monitors saw of a run at a tenth of its training and at its end: a few hundred bytes of its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanogpt_bench.config.metrics import GRAD_NORM, METRICS, OVERHEAD, SMOOTHED_LOSS, TRAIN_LOSS, Metric
from nanogpt_bench.runs.load import Run

TENTH = 0.1
#: what every record has, look or no look
ALWAYS = (TRAIN_LOSS.name, SMOOTHED_LOSS.name, GRAD_NORM.name)
#: of a figure: what a rank needs
DIGITS = 4


def _is_watched(metric: Metric) -> bool:
    """Whether a figure tells of the model: one for all its layers, of no bit, and not of the machine."""
    return bool(metric.monitor) and metric.monitor != "resources" and metric != OVERHEAD and metric.name[-2:] != "_I"


#: in the order in which they are shown
_WATCHED = (one.name for metric in METRICS if _is_watched(metric) for one in metric.each)
FIGURES = tuple(dict.fromkeys((*ALWAYS, *_WATCHED)))


def looks_of(run: Run) -> dict[int, Mapping[str, float]]:
    """Return the figures by step at two times: of the last look within a tenth of the run's steps, and of its last one.

    A run that had no look by then, as its monitors look too seldom, has but the last; one of a results file those that
    the file has. What is not finite is left out.
    """
    planned = run.number("steps_planned")
    if run.looks or not planned:
        return dict(run.looks)
    curves = {name: list(zip(*run.curve(name), strict=True)) for name in FIGURES}
    seen = sorted({step for name in FIGURES if name not in ALWAYS for step, _ in curves[name] if step > 0})
    ends = [max((step for step in seen if step <= limit), default=None) for limit in (TENTH * planned, planned)]
    return {int(end): _until(curves, end) for end in ends if end is not None}


def _until(curves: Mapping[str, Sequence[tuple[float, float | None]]], end: float) -> dict[str, float]:
    """The last value of every figure up to a step: monitors may look at times of their own."""
    known = {name: [y for x, y in points if 0 < x <= end and y is not None] for name, points in curves.items()}
    return {name: float(f"{values[-1]:.{DIGITS}g}") for name, values in known.items() if values}
