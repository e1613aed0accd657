"""The judge of a run: which rows of the table hold in its records, and since when; asked as it goes and afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import ABOVE
from nanogpt_bench.failures.evidence import Evidence, Series, read
from nanogpt_bench.failures.table import CLASSES, KINDS, Row
from nanogpt_bench.runs.load import Run

FOUND, CLEAR, NOT_JUDGED = "found", "clear", "not judged"
#: figures by name, ready for JSON
Facts = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Criterion:
    """A row of the table, and what a series says of it."""

    row: Row
    #: the row's, or more where it grows with the first look
    bound: float
    #: first step from which on it held; None: it never did
    step: int | None
    #: the look at that step, the first look, the one furthest towards the failure and its step, and their mean
    value: float | None
    first: float
    extreme: float
    extreme_step: int
    mean: float | None
    looks: int

    def describe(self) -> str:
        """Return the look at which it began to hold, and the bound."""
        return f"{self.row.figure} {self.value:.4g} {'>=' if self.row.side == ABOVE else '<='} {self.bound:.4g}"


@dataclass(frozen=True)
class Finding:
    """What the records say about one class of failure."""

    kind: str
    #: "found", "clear", or "not judged" where too little was recorded
    state: str
    #: first step at which one of its criteria held
    step: int | None
    #: one sentence of facts
    message: str
    evidence: Facts = field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    #: figures that were not recorded and would have been needed
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


def holds(row: Row, series: Series, *, died: bool = False, running: bool = False) -> Criterion:
    """Return whether, and since when, a row of the table holds in a series that has a look at least.

    A series of fewer looks than the row's patience has to lie beyond its bound throughout; of a run that still goes
    on it says nothing.
    """
    values = series.values
    first = values[0]
    beyond = [row.beyond(value, first) for value in values]
    needed = row.patience if row.filled or running else min(row.patience, len(values))
    at = _first_run(beyond, needed, broken_off=died and row.broken_off, lasting=row.lasting)
    if at is not None and row.filled:
        at += row.patience - 1
    furthest = (max if row.side == ABOVE else min)(range(len(values)), key=values.__getitem__)
    return Criterion(
        row=row,
        bound=row.limit(first),
        step=None if at is None else series.steps[at],
        value=None if at is None else values[at],
        first=first,
        extreme=values[furthest],
        extreme_step=series.steps[furthest],
        mean=series.mean,
        looks=len(values),
    )


def holds_now(row: Row, values: Sequence[float]) -> bool:
    """Whether the last looks, as many as the row's patience, lie beyond its bound."""
    return len(values) >= row.patience and all(map(row.beyond, values[-row.patience :]))


def _first_run(beyond: Sequence[bool], needed: int, *, broken_off: bool, lasting: bool) -> int | None:
    """Index at which the first long enough run of true values begins."""
    begin = 0
    for index, held in enumerate([*beyond, False]):
        if held:
            continue
        at_end = index == len(beyond)
        if index - begin >= (1 if at_end and broken_off else needed) and (at_end or not lasting):
            return begin
        begin = index + 1
    return None


def judge(evidence: Evidence, *, running: bool = False) -> tuple[Finding, ...]:
    """Return a finding for every class of the table, by the records up to the last step that there is."""
    return tuple(_finding(evidence, kind, running) for kind in KINDS)


def _finding(evidence: Evidence, kind: str, running: bool) -> Finding:
    if (excuse := evidence.excuse(kind)) is not None:
        return Finding(kind, CLEAR, None, excuse)
    rows = [row for row in CLASSES if row.kind == kind]
    series = [(row, looks) for row in rows if (looks := evidence.of(row))]
    if not series:
        missing = tuple(row.figure for row in rows)
        return Finding(kind, NOT_JUDGED, None, f"too little was recorded of {' or '.join(missing)}", missing=missing)
    criteria = tuple(holds(row, looks, died=evidence.died, running=running) for row, looks in series)
    held = [criterion for criterion in criteria if criterion.step is not None]
    if not held:
        return Finding(kind, CLEAR, None, "no criterion held", criteria=criteria)
    first = min(held, key=lambda criterion: criterion.step or 0)
    layer, of_layer = evidence.worst_layer(first.row.figure, lowest=first.row.side != ABOVE)
    message = first.row.says.format(**vars(first)) + (f", most of all in {layer}" if layer else "")
    facts: Facts = {"metric": first.row.figure, "threshold": first.bound, "value": first.value, "first": first.first}
    facts |= {"extreme": first.extreme, "extreme_step": first.extreme_step, "mean": first.mean, "looks": first.looks}
    facts |= {"worst_layer": layer, "worst_value": of_layer}
    return Finding(kind, FOUND, first.step, f"{message}; from step {first.step} on", facts, criteria)


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about how a run failed: every class of failure, and the order of events."""

    findings: tuple[Finding, ...]
    timeline: tuple[Event, ...]

    @property
    def found(self) -> tuple[Finding, ...]:
        """The classes that were found, in the order in which they set in."""
        return tuple(sorted((finding for finding in self.findings if finding.found), key=lambda f: f.step or 0))


def classify(run: Run | Path) -> list[Finding]:
    """Judge the classes of failure from a run's folder; one finding a class, in the order of `KINDS`.

    A class whose figures were not recorded is "not judged" and says what is missing.

    Raises:
        BenchError: the path is no run folder.
    """
    return list(judge(read(run)))


def diagnose(run: Run | Path) -> Diagnosis:
    """Return the findings of `classify`, and the timeline.

    Raises:
        BenchError: the path is no run folder.
    """
    evidence = read(run)
    found = judge(evidence)
    return Diagnosis(found, _timeline(evidence.run, found))


def failures_of(run: Run | Path) -> list[dict[str, Any]]:
    """Return the list `failures` of summary.json: the classes found, in the order in which they set in."""
    return [finding.summary_entry() for finding in diagnose(run).found]


def _timeline(run: Run, judged: Sequence[Finding]) -> tuple[Event, ...]:
    """The first step of every criterion that held, of every kind of alert, and the end, in the order of steps."""
    held = [(finding.kind, criterion) for finding in judged for criterion in finding.criteria]
    events = [Event(c.step, kind, "criterion", c.describe()) for kind, c in held if c.step is not None]
    firsts = {alert.kind: alert for alert in reversed(run.alerts)}
    events += [Event(alert.step, alert.kind, "alert", alert.message or alert.kind) for alert in firsts.values()]
    if run.last_step is not None:
        text = str((run.failure or {}).get("message") or f"the run ended: {run.status}")
        events.append(Event(run.last_step, run.status, "end", text))
    return tuple(sorted(events, key=lambda event: (event.step, event.source == "end")))
