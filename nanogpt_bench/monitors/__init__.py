"""Monitors of a run: functions of tensors, their metrics, and observers.

A monitor `NAME` of `monitor.watch` is the module of that name. Its metrics are
module-level constants. Its function `build` takes a `Watched` and returns the observer,
or None where there is nothing to watch.
"""

from importlib import import_module
from typing import Final

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MONITORS, Metric
from nanogpt_bench.monitors.points import Observer, Step

__all__ = ["CHARTED", "METRICS", "MODULES", "Observer", "Step", "charted"]

#: the modules of all monitors by name, and those of the shadow and the floor, which have
#: settings of their own
MODULES: Final = {
    name: import_module(f"{__name__}.{name}") for name in ("shadow", *MONITORS, "floor")
}


def _collect_metrics() -> tuple[Metric, ...]:
    # The keys of a dict are a set that keeps its order.
    collected: dict[Metric, None] = {}
    for module in (metrics, *MODULES.values()):
        for value in vars(module).values():
            if isinstance(value, Metric):
                collected[value] = None
    return tuple(collected)


#: every metric, in the order in which they are shown
METRICS: Final = _collect_metrics()
#: namespaces of metrics with charts
CHARTED: Final = tuple(dict.fromkeys(metric.namespace for metric in METRICS if metric.chart))


def charted(namespace: str) -> tuple[Metric, ...]:
    """Return the metrics of a namespace that have a chart, operand by operand."""
    metrics_of_charts: list[Metric] = []
    for metric in METRICS:
        if metric.chart and metric.namespace == namespace:
            metrics_of_charts.extend(metric.parts)
    return tuple(metrics_of_charts)
