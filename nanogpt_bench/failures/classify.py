"""How a run failed: the ten classes judged from its folder, a timeline, and the lead time of the warning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import ABOVE, ELAPSED
from nanogpt_bench.config.watching import FailureConfig
from nanogpt_bench.failures.criteria import KURTOSIS_OF_BLOCKS, findings
from nanogpt_bench.failures.evidence import Criterion, Diagnosis, Event, Evidence, Finding, LeadTime, read, worst
from nanogpt_bench.runs.load import Alert, Run
from nanogpt_bench.runs.read import finite

#: what a kurtosis alert warns of, beside the failure that ended a run
ANNOUNCED = ("nan", "divergence", "exploding_gradients")


def classify(
    run: Run | Path, *, siblings: Iterable[Run | Path] = (), thresholds: FailureConfig | None = None
) -> list[Finding]:
    """Judge the ten classes of failure from a run's folder; one finding a class, in the order of `KINDS`.

    A class whose metric was not recorded is "not judged" and says what is missing. Thresholds are those of the
    section `failure` of the run's own config unless given. Of `siblings`, those that differ from the run in batch
    size and seeds only tell whether a plateau falls with the batch size.

    Raises:
        BenchError: a path is no run folder.
    """
    return list(findings(read(run, thresholds), [read(other, thresholds) for other in siblings]))


def diagnose(
    run: Run | Path, *, siblings: Iterable[Run | Path] = (), thresholds: FailureConfig | None = None
) -> Diagnosis:
    """Return the findings of `classify`, the timeline, and the lead time of the kurtosis alert.

    Raises:
        BenchError: a path is no run folder.
    """
    evidence = read(run, thresholds)
    found = findings(evidence, [read(other, thresholds) for other in siblings])
    return Diagnosis(found, _timeline(evidence, found), _lead_time(evidence, found))


def failures_of(run: Run | Path) -> list[dict[str, Any]]:
    """Return the list `failures` of summary.json: the classes found, in the order in which they set in."""
    return [finding.summary_entry() for finding in diagnose(run).found]


def _timeline(evidence: Evidence, judged: Sequence[Finding]) -> tuple[Event, ...]:
    """The first step of every criterion that held, of every kind of alert, and the end, in the order of steps."""
    events = [
        _criterion_event(finding.kind, criterion)
        for finding in judged
        for criterion in finding.criteria
        if criterion.fired
    ]
    firsts = {alert.kind: alert for alert in reversed(evidence.run.alerts)}
    events += [_alert_event(alert) for alert in firsts.values()]
    if evidence.run.last_step is not None:
        text = str((evidence.run.failure or {}).get("message") or f"the run ended: {evidence.run.status}")
        events.append(Event(evidence.run.last_step, evidence.run.status, "end", text))
    return tuple(sorted(events, key=lambda event: (event.step, event.source == "end")))


def _criterion_event(kind: str, criterion: Criterion) -> Event:
    sign = ">=" if criterion.side == ABOVE else "<="
    text = f"{criterion.metric} {criterion.value:.4g} {sign} {criterion.threshold:.4g}"
    return Event(criterion.step or 0, kind, "criterion", text, criterion.value, criterion.threshold)


def _alert_event(alert: Alert) -> Event:
    return Event(alert.step, alert.kind, "alert", alert.message or alert.kind, alert.value, alert.threshold)


def _lead_time(evidence: Evidence, judged: Sequence[Finding]) -> LeadTime | None:
    begin, failed = _warned(evidence), _failure(evidence, judged)
    if begin is None or failed is None:
        return None
    kind, end = failed
    clock = dict(zip(*evidence.run.curve(ELAPSED.name), strict=True))
    times = clock.get(begin), clock.get(end)
    seconds = None if times[0] is None or times[1] is None else times[1] - times[0]
    return LeadTime(begin, end, kind, end - begin, seconds)


def _warned(evidence: Evidence) -> int | None:
    """The first step at which the kurtosis of the blocks' outputs was worth an alert.

    Alerts themselves tell only where those figures are missing: the first of a run is mostly about the gradient of the
    output layer, whose kurtosis is high by nature, and a cool-down keeps later ones back.
    """
    series, limit = worst(evidence, KURTOSIS_OF_BLOCKS), finite(evidence.setting("alerts.kurtosis"))
    if series:
        bound = evidence.limits.kurtosis if limit is None else limit
        above = (step for step, value in zip(series.steps, series.values, strict=True) if value > bound)
        return next(above, None)
    alert = evidence.first_alert("kurtosis")
    return None if alert is None else alert.step


def _failure(evidence: Evidence, judged: Sequence[Finding]) -> tuple[str, int] | None:
    """The kind and step of what the alert could have announced: the first sign, or what ended the run."""
    signs = [(f.kind, f.step) for f in judged if f.kind in ANNOUNCED and f.step is not None]
    failure = evidence.run.failure or {}
    step = finite(failure.get("step"))
    if step is not None:
        signs.append((str(failure.get("kind")), int(step)))
    return min(signs, key=lambda sign: sign[1], default=None)
