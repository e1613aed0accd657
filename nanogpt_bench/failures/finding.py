"""What is said about a run's failures: plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: the classes of failure, in the order in which they are listed
KINDS = (
    *("stall", "rounding_noise", "overflow", "outlier_explosion", "attention_collapse"),
    *("zero_gradients", "exploding_gradients", "nan", "plateau", "divergence"),
)
#: figures by name, ready for JSON
Facts = dict[str, float | int | str | None]
FOUND, CLEAR, NOT_JUDGED = "found", "clear", "not judged"


@dataclass(frozen=True)
class Criterion:
    """One condition of a class: a series of figures, the threshold, and the first step at which it was crossed."""

    #: the metric of the record, or what was derived from one
    metric: str
    #: "above" (>=) or "below" (<=): on which side of the threshold the failure lies
    side: str
    threshold: float
    #: first step of those at which it held in a row; None: it never did
    step: int | None
    #: the figure at that step
    value: float | None
    #: the figure furthest towards the failure, and its step
    extreme: float | None
    extreme_step: int | None
    #: figures there were; 0 when the run did not record the metric
    looks: int

    @property
    def fired(self) -> bool:
        return self.step is not None


@dataclass(frozen=True)
class Finding:
    """What the records say about one class of failure."""

    kind: str
    #: "found", "clear" or "not judged", the last when a metric it needs was not recorded
    state: str
    #: first step at which the class's criterion held
    step: int | None
    #: one sentence of facts
    message: str
    evidence: Facts = field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    #: metrics that were not recorded and would have been needed
    missing: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return self.state == FOUND

    def summary_entry(self) -> dict[str, Any]:
        """Return the entry in the list `failures` of summary.json."""
        return {"kind": self.kind, "step": self.step, "evidence": {"message": self.message, **self.evidence}}


@dataclass(frozen=True)
class Event:
    """One line of a run's timeline: a criterion that held from this step on, the first alert of a kind, or the end."""

    step: int
    #: class of failure, kind of alert, or status of the run
    kind: str
    #: "criterion", "alert" or "end"
    source: str
    text: str
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class LeadTime:
    """How long before the failure the blocks' outputs had a kurtosis worth an alert; negative when it came after."""

    alert_step: int
    failure_step: int
    failure_kind: str
    #: failure_step - alert_step
    steps: int
    #: the same by the run's clock; None when it has none
    seconds: float | None


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about how a run failed: the ten classes, the order of events, the warning's lead."""

    findings: tuple[Finding, ...]
    timeline: tuple[Event, ...]
    #: None without a kurtosis alert or without a failure it could have announced
    lead_time: LeadTime | None

    @property
    def found(self) -> tuple[Finding, ...]:
        """The classes that were found, in the order in which they set in."""
        return tuple(sorted((finding for finding in self.findings if finding.found), key=lambda f: f.step or 0))


@dataclass(frozen=True)
class Prediction:
    """A prediction about a run, and what the records say: confirmed, refuted, or None when they don't tell."""

    #: plateau, update_sparsity or zero_gradient_zones
    name: str
    #: the prediction as a sentence, with its threshold
    statement: str
    confirmed: bool | None
    #: the answer as a sentence, with its figures
    text: str
    figures: Facts = field(default_factory=dict)
    missing: tuple[str, ...] = ()
