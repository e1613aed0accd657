"""What keeps and judges the records of a run: files, alerts, trackers, where the losses are heading."""

from nanogpt_bench.observers.alerts import AlertObserver
from nanogpt_bench.observers.jsonl import JsonlObserver
from nanogpt_bench.observers.trend import TrendObserver, baseline_curve
from nanogpt_bench.runs.load import Alert

__all__ = ["Alert", "AlertObserver", "JsonlObserver", "TrendObserver", "baseline_curve"]
