"""How a run failed: ten classes of failure judged from its folder, and a timeline."""

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
)

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
    "classify",
    "diagnose",
    "failures_of",
]
