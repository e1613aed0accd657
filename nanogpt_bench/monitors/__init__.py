"""Monitors of a run, a module a theme: functions of tensors, the metrics that they find, and the observer.

A monitor `NAME` of `monitor.watch` is the module of that name. It has its metrics as constants, and `build`
makes its observer of a `Watched`, or None where there is nothing to watch.
"""

from importlib import import_module
from typing import Final

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MONITORS, Metric
from nanogpt_bench.monitors.points import Observer, Step

__all__ = ["CHARTED", "METRICS", "MODULES", "Observer", "Step", "charted"]

#: the modules of all monitors, by name, and that of the shadow, which has a section of its own
MODULES: Final = {name: import_module(f"{__name__}.{name}") for name in ("shadow", *MONITORS)}
_ALL = [
    value for module in (metrics, *MODULES.values()) for value in vars(module).values() if isinstance(value, Metric)
]
#: every figure, in the order in which they are shown
METRICS: Final = tuple(dict.fromkeys(_ALL))
#: namespaces of figures that get charts
CHARTED: Final = tuple(dict.fromkeys(metric.namespace for metric in METRICS if metric.chart))


def charted(namespace: str) -> tuple[Metric, ...]:
    """Return the figures of a namespace that get a chart of their own, operand by operand."""
    return tuple(one for metric in METRICS if metric.chart and metric.namespace == namespace for one in metric.each)
