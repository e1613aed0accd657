"""Pages of runs that failed: classes found, evidence and timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanogpt_bench.config.metrics import TRAIN_LOSS
from nanogpt_bench.failures import Diagnosis, Event, Finding, diagnose
from nanogpt_bench.report.chart import DOTTED, Chart, Look, Spec, ink, lines, over, quantity
from nanogpt_bench.report.curve_charts import lines_of, loss_range
from nanogpt_bench.report.markup import Section, chart_places
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import Row, loss_unit, reference_beside
from nanogpt_bench.report.verdict import class_name, describe_ending
from nanogpt_bench.runs.load import Run

POINTS = 150  # of a curve: there may be a chart for each of many runs
OPEN_PAGES = 4  # more failure pages start closed


@dataclass(frozen=True)
class Failed:
    """A run with a failure of the loop, or with a failure class in its records."""

    label: str
    run: Run
    diagnosis: Diagnosis


def failed_runs(results: Sequence[Result]) -> list[Failed]:
    """Return the runs that failed or have a failure class in their records, in the order of the table."""
    judged = [
        Failed(result.row.label, run, diagnose(run))
        for result in results
        for run in result.row.runs
        if run.metrics or run.status == "failed"
    ]
    return [failed for failed in judged if failed.run.status == "failed" or failed.diagnosis.found]


def failure_section(failed: Sequence[Failed], references: Sequence[Row], looks: Mapping[str, Look]) -> Section | None:
    """Return all failure pages, one per run, each with its own address."""
    if not failed:
        return None
    pages = [
        _failure_page(i, entry, references, looks, opened=len(failed) <= OPEN_PAGES) for i, entry in enumerate(failed)
    ]
    words = "One page for each run that failed or in whose records a class of failure was found."
    body = f'<p class="muted">{words}</p>' + "".join(body for body, _ in pages)
    return Section("failures", "Failures", body, [chart for _, charts in pages for chart in charts])


def _failure_page(
    place: int, failed: Failed, references: Sequence[Row], looks: Mapping[str, Look], *, opened: bool
) -> tuple[str, list[Chart]]:
    chart = _loss_chart(place, failed, references, looks)
    charts = [chart] if chart else []
    body = (
        f'<details class="page" id="failure-{place}"{" open" if opened else ""}>'
        f"<summary><h3>{escape(_title(failed))}</h3><span>{escape(_how(failed))}</span></summary>"
        f"{_ending(failed)}{_timeline(failed)}{_evidence(failed.diagnosis)}{chart_places(charts)}</details>"
    )
    return body, charts


def _title(failed: Failed) -> str:
    return failed.label if failed.label == failed.run.name else f"{failed.label} · {failed.run.name}"


def sentence(text: str) -> str:
    """Return text as a sentence: with a capital first letter and a full stop.

    >>> sentence("the loss fell")
    'The loss fell.'
    """
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""


def _how(failed: Failed) -> str:
    """Return the classes found, in order of onset."""
    found = [f"{class_name(f.kind)} from step {f.step}" for f in failed.diagnosis.found]
    return "; ".join(found) or "failed without a class of failure in its records"


def _ending(failed: Failed) -> str:
    if failed.run.status == "finished":
        return ""
    return f"<p>The run {escape(describe_ending(failed.run))}.</p>"


def _timeline(failed: Failed) -> str:
    """Return the first step of every criterion and alert, on a track from the first step to the last."""
    events = failed.diagnosis.timeline
    last = max([event.step for event in events] + [failed.run.last_step or 0, 1])
    rows = "".join(_event(event, last) for event in events)
    return f'<h4>Timeline, step 0 to {last}</h4><div class="timeline">{rows}</div>' if events else ""


def _event(event: Event, last: int) -> str:
    return (
        f'<div class="event {escape(event.source)}"><span class="event-name">{escape(class_name(event.kind))}</span>'
        f'<span class="event-track"><i style="left:{100 * event.step / last:.2f}%"></i></span>'
        f'<span class="event-step">step {event.step}</span>'
        f'<span class="event-text">{escape(event.source)}: {escape(event.text)}</span></div>'
    )


def _evidence(diagnosis: Diagnosis) -> str:
    found = "".join(_finding(finding) for finding in diagnosis.found)
    rest = [_others("Clear", [f for f in diagnosis.findings if f.state == "clear"])]
    rest.append(_others("Not judged", [f for f in diagnosis.findings if f.state not in ("clear", "found")]))
    return f"<h4>Evidence</h4>{found}{''.join(rest)}"


def _finding(finding: Finding) -> str:
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in finding.evidence.items() if value is not None)
    return (
        f'<div class="finding"><b>{escape(class_name(finding.kind))}</b> <span>from step {finding.step}</span>'
        f'<p>{escape(sentence(finding.message))}</p><p class="muted">{escape(figures)}</p></div>'
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _others(title: str, listed: Sequence[Finding]) -> str:
    if not listed:
        return ""
    items = [class_name(f.kind) + (f" (no {', '.join(f.missing)})" if f.missing else "") for f in listed]
    return f'<p class="muted">{title}: {escape("; ".join(items))}.</p>'


def _loss_chart(place: int, failed: Failed, references: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Return the run's training loss and the reference's, with a line at the onset of every class."""
    own = Row(failed.label, failed.run.rule, failed.run.format, (failed.run,))
    other = reference_beside(failed.run, references)
    drawn = lines_of([own, *other], TRAIN_LOSS.name, smoothed=True, points=POINTS)
    if failed.label not in {line.label for line in drawn}:
        return None
    found = [finding for finding in failed.diagnosis.found if finding.step is not None]
    x, y = quantity("x", "step"), quantity("y", loss_unit([own]), loss_range(drawn))
    spec = lines(drawn, looks, x, y, marked=False)
    spec["layer"] += _class_marks(found, x) if found else []
    caption = "Smoothed; the reference in ink. Dotted: the first step of each class of failure."
    # A run stays visible on its own page if its row is hidden elsewhere.
    return Chart(f"failure-{place}", "Training loss", caption, spec, wide=True)


def _class_marks(found: Sequence[Finding], x: Spec) -> list[Spec]:
    """Return a line at every class's first step, with its name above the chart, staggered against overlap."""
    values = [
        {"x": finding.step or 0, "text": class_name(finding.kind), "above": -9 - 14 * (i % 4)}
        for i, finding in enumerate(found)
    ]
    name = {"type": "text", "align": "left", "fontSize": 11, "clip": False, "color": ink("ink")}
    above = {"field": "above", "type": "quantitative", "scale": None, "axis": None}
    return [
        over(values, {"type": "rule", "color": ink("muted"), **DOTTED}, x=x),
        over(values, name, x=x, y=above, text={"field": "text"}),
    ]
