"""What watches a run: objects called at named points of every step."""

from nanogpt_bench.observers.base import Observer, Step
from nanogpt_bench.observers.jsonl import HistogramObserver, JsonlObserver
from nanogpt_bench.observers.stall import StallObserver

__all__ = ["HistogramObserver", "JsonlObserver", "Observer", "StallObserver", "Step"]
