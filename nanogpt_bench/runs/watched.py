"""What a run recorded beside its metrics: alerts, distributions, and the reasons found for its failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.runs.read import finite, numbers, records

ALERTS = "alerts.jsonl"
DISTRIBUTIONS = "histograms.jsonl"


@dataclass(frozen=True)
class Alert:
    """One line of alerts.jsonl; `value` and `threshold` are None where the alert has none."""

    step: int
    kind: str
    level: str = "WARN"
    message: str = ""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Distribution:
    """Counts over the bins between `edges`, or over single `values`; one of the two is there."""

    step: int
    counts: tuple[float, ...]
    edges: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None

    @property
    def total(self) -> float:
        return sum(self.counts)


@dataclass(frozen=True)
class Finding:
    """A way in which the run failed, the first step at which its criterion held, and the figures behind it."""

    kind: str
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def read_alerts(path: Path, notes: list[str]) -> tuple[Alert, ...]:
    """The alerts of a run in the order they fired; no file means none."""
    if not path.is_file():
        return ()
    return tuple(_alert(record) for _, record in records(path, notes))


def _alert(record: Mapping[str, Any]) -> Alert:
    return Alert(
        step=int(record["step"]),
        kind=str(record.get("kind") or "unnamed"),
        level=str(record.get("level") or "WARN"),
        message=" ".join(str(record.get("message") or "").split()),
        value=finite(record.get("value")),
        threshold=finite(record.get("threshold")),
    )


def read_distributions(path: Path, notes: list[str]) -> dict[str, Distribution]:
    """The last distribution recorded under each name; no file means none."""
    if not path.is_file():
        return {}
    last = {str(record.get("name")): (number, record) for number, record in records(path, notes)}
    found: dict[str, Distribution] = {}
    for name, (number, record) in last.items():
        distribution = _distribution(record)
        if distribution is None:
            notes.append(f"{path.name}: line {number}, {name}: counts do not fit its edges or values; left out")
        else:
            found[name] = distribution
    return found


def _distribution(record: Mapping[str, Any]) -> Distribution | None:
    counts, edges, values = (numbers(record.get(key)) for key in ("counts", "edges", "values"))
    if counts is None or not counts:
        return None
    step = int(record["step"])
    if values is not None and len(values) == len(counts):
        return Distribution(step, counts, values=values)
    if edges is not None and len(edges) == len(counts) + 1:
        return Distribution(step, counts, edges=edges)
    return None


def findings_in(summary: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The failures a summary names; what has no kind is left out."""
    listed = summary.get("failures")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return ()
    return tuple(_finding(entry) for entry in listed if isinstance(entry, Mapping) and entry.get("kind"))


def _finding(entry: Mapping[str, Any]) -> Finding:
    step, evidence = finite(entry.get("step")), entry.get("evidence")
    return Finding(
        kind=str(entry["kind"]),
        step=None if step is None else int(step),
        evidence=evidence if isinstance(evidence, Mapping) else {},
    )
