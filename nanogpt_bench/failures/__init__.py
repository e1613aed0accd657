"""Failures of a run: one table of criteria, a judge that reads a run's records by it, and a timeline."""

from nanogpt_bench.failures.judge import (
    CLEAR,
    FOUND,
    NOT_JUDGED,
    Criterion,
    Diagnosis,
    Event,
    Finding,
    classify,
    diagnose,
    failures_of,
)
from nanogpt_bench.failures.table import CLASSES, KINDS, Limit

__all__ = [
    "CLASSES",
    "CLEAR",
    "FOUND",
    "KINDS",
    "NOT_JUDGED",
    "Criterion",
    "Diagnosis",
    "Event",
    "Finding",
    "Limit",
    "classify",
    "diagnose",
    "failures_of",
]
