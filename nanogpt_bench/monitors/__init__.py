"""Monitors of a run, one module each: functions of tensors, the metrics that they
compute, and the observer.

A monitor `NAME` of `monitor.watch` is the module of that name. Its metrics are
constants, and its function `build` returns the observer for a `Watched`, or None where
there is nothing to watch.
"""

from importlib import import_module
from typing import Final

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MONITORS, Metric
from nanogpt_bench.monitors.points import Observer, Step

__all__ = ["CHARTED", "METRICS", "MODULES", "Observer", "Step", "charted"]

#: the modules of all monitors by name, and that of the shadow, which has its own
#: section of settings
MODULES: Final = {name: import_module(f"{__name__}.{name}") for name in ("shadow", *MONITORS)}
_ALL = [
    value
    for module in (metrics, *MODULES.values())
    for value in vars(module).values()
    if isinstance(value, Metric)
]
#: every metric, in the order in which they are shown
METRICS: Final = tuple(dict.fromkeys(_ALL))
#: namespaces of metrics with charts
CHARTED: Final = tuple(dict.fromkeys(metric.namespace for metric in METRICS if metric.chart))


def charted(namespace: str) -> tuple[Metric, ...]:
    """Return the metrics of a namespace that have a chart, operand by operand."""
    return tuple(
        one
        for metric in METRICS
        if metric.chart and metric.namespace == namespace
        for one in metric.each
    )
