"""How a run failed: ten classes of failure judged from its folder, a timeline, and what was predicted of E7M0."""

from nanogpt_bench.failures.classify import classify, diagnose, failures_of
from nanogpt_bench.failures.criteria import BatchEffect
from nanogpt_bench.failures.evidence import (
    CLEAR,
    FOUND,
    KINDS,
    NOT_JUDGED,
    Criterion,
    Diagnosis,
    Event,
    Finding,
    LeadTime,
    Prediction,
)
from nanogpt_bench.failures.predictions import is_e7m0_nearest, predictions

__all__ = [
    "CLEAR",
    "FOUND",
    "KINDS",
    "NOT_JUDGED",
    "BatchEffect",
    "Criterion",
    "Diagnosis",
    "Event",
    "Finding",
    "LeadTime",
    "Prediction",
    "classify",
    "diagnose",
    "failures_of",
    "is_e7m0_nearest",
    "predictions",
]
