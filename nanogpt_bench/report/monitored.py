"""Monitors' measurements of a run at two steps: early, and at its end.

A results file has these two in place of the whole curves.
"""

from collections.abc import Mapping

from nanogpt_bench.config.metrics import GRAD_NORM, SMOOTHED_LOSS, TRAIN_LOSS, Metric
from nanogpt_bench.monitors import METRICS
from nanogpt_bench.monitors.floor import FLOOR
from nanogpt_bench.monitors.shadow import SHADOW_OVERHEAD
from nanogpt_bench.runs.load import Run

#: share of a run's steps at which monitors' measurements are exported, beside its end
TENTH = 0.1
#: metrics of records that are no monitor's alone: the norm of all gradients is missing
#: where nothing is clipped in the backward pass, the smoothed loss without `trend`
ALWAYS = (TRAIN_LOSS.name, SMOOTHED_LOSS.name, GRAD_NORM.name)
#: significant digits of an exported value: enough for ranks
EXPORTED_DIGITS = 4


def _is_of_model(metric: Metric) -> bool:
    """Return whether a monitor measures it on the model, and not on the machine."""
    is_monitored = bool(metric.monitor)
    return is_monitored and metric.monitor != "resources" and metric != SHADOW_OVERHEAD


def _names_of_metrics() -> tuple[str, ...]:
    names = list(ALWAYS)
    for metric in METRICS:
        if _is_of_model(metric):
            names += [part.name for part in metric.parts]
    return tuple(dict.fromkeys(names))


#: names of the monitors' metrics, in the order of display, without those of the machine
MONITORED = _names_of_metrics()


def monitored_names(run: Run) -> tuple[str, ...]:
    """Return the names of the monitors' metrics in a run.

    Floors are named by format and kind of layer, beside their sums.
    """
    floors = (name for name in run.metrics.names if name.startswith(f"{FLOOR.name}/"))
    return tuple(dict.fromkeys((*MONITORED, *floors)))


def monitored_figures(run: Run) -> dict[int, Mapping[str, float]]:
    """Return monitors' measurements at two steps, by step.

    They are the last ones within a tenth of the run's steps, and the last ones. If the
    monitors ran too seldom, there is only the second step. A run from a results file has
    those of the file. Values that are not finite are left out.
    """
    planned = run.number("steps_planned")
    if run.looks or not planned:
        return dict(run.looks)
    names = monitored_names(run)
    points = {name: list(zip(*run.curve(name), strict=True)) for name in names}
    steps: set[float] = set()
    for name in names:
        if name not in ALWAYS:
            steps.update(step for step, _ in points[name] if step > 0)
    figures: dict[int, Mapping[str, float]] = {}
    for limit in (TENTH * planned, planned):
        last = max((step for step in steps if step <= limit), default=None)
        if last is not None:
            figures[int(last)] = _values_until(points, last)
    return figures


def _values_until(
    points: Mapping[str, list[tuple[float, float | None]]], last: float
) -> dict[str, float]:
    """Return the last known value of each curve after step 0 and up to a step.

    Monitors have different intervals, so it may be of an earlier step.
    """
    values = {}
    for name, curve in points.items():
        known = [value for step, value in curve if 0 < step <= last and value is not None]
        if known:
            values[name] = float(f"{known[-1]:.{EXPORTED_DIGITS}g}")
    return values
