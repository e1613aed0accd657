"""What watches a run: objects called at named points of every step."""

from nanogpt_bench.observers.alerts import AlertObserver
from nanogpt_bench.observers.jsonl import HistogramObserver, JsonlObserver
from nanogpt_bench.observers.stall import Stall
from nanogpt_bench.observers.trend import TrendObserver, baseline_curve
from nanogpt_bench.observers.updates import UpdateObserver
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.training.points import Observer, Step

__all__ = [
    "Alert",
    "AlertObserver",
    "HistogramObserver",
    "JsonlObserver",
    "Observer",
    "Stall",
    "Step",
    "TrendObserver",
    "UpdateObserver",
    "baseline_curve",
]
