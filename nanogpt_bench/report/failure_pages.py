"""Pages of runs that failed, and of E7M0 with nearest rounding: classes found, evidence, timeline and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanogpt_bench.config.metrics import TRAIN_LOSS
from nanogpt_bench.failures import Diagnosis, Event, Finding, Prediction, diagnose, is_e7m0_nearest, predictions
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.monitors.zones import ZERO_GRADIENT_ZONE
from nanogpt_bench.report.chart import DOTTED, Chart, Look, Spec, ink, limit_line, lines, over, quantity
from nanogpt_bench.report.curve_charts import first_lines, lines_of, loss_range
from nanogpt_bench.report.markup import Section, chart_places
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import Row, loss_unit, reference_beside, setting_without
from nanogpt_bench.report.verdict import class_name, describe_ending
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.words import counted

POINTS = 150  # of a curve: there may be a chart for each of many runs
OPEN_PAGES = 4  # more failure pages start closed
BATCH_KEYS = frozenset({"train.batch_size", "train.accumulation"})
FIRST_STEPS = 60
PREDICTED_STEPS = 10
PREDICTION_TITLES = {
    "plateau": "Plateau within 10 steps",
    "update_sparsity": "Update sparsity",
    "zero_gradient_zones": "Zero-gradient zones",
}
ANSWERS = {True: "confirmed", False: "refuted", None: "not judged"}
SHARES = (
    (UPDATE_LOST, "updates lost", 0),
    (ZERO_GRADIENT_ZONE, "in a zero-gradient zone", 1),
)


@dataclass(frozen=True)
class Failed:
    """A run with a failure of the loop, or with a failure class in its records."""

    label: str
    run: Run
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Predicted:
    """A run of E7M0 with nearest rounding, and its predictions with their answers."""

    label: str
    run: Run
    predictions: tuple[Prediction, ...]


def failed_runs(results: Sequence[Result]) -> list[Failed]:
    """Return the runs that failed or have a failure class in their records, in the order of the table."""
    series = _batch_series([run for result in results for run in result.row.runs])
    judged = [
        Failed(
            result.row.label,
            run,
            diagnose(run, siblings=[other for other in series[setting_without(run, BATCH_KEYS)] if other is not run]),
        )
        for result in results
        for run in result.row.runs
        if run.metrics or run.status == "failed"
    ]
    return [failed for failed in judged if failed.run.status == "failed" or failed.diagnosis.found]


def _batch_series(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    """Group runs that differ in batch size and seeds only: together they separate noise from a floor."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_without(run, BATCH_KEYS), []).append(run)
    return groups


def predicted_runs(results: Sequence[Result]) -> list[Predicted]:
    """Return the first run of every row of E7M0 with nearest rounding."""
    firsts = [(result.row.label, result.row.runs[0]) for result in results if result.row.runs]
    return [Predicted(label, run, predictions(run)) for label, run in firsts if run.metrics and is_e7m0_nearest(run)]


def failure_section(failed: Sequence[Failed], references: Sequence[Row], looks: Mapping[str, Look]) -> Section | None:
    """Return all failure pages, one per run, each with its own address."""
    if not failed:
        return None
    pages = [
        _failure_page(i, entry, references, looks, opened=len(failed) <= OPEN_PAGES) for i, entry in enumerate(failed)
    ]
    words = (
        "One page for each run that failed or in whose records a class of failure was found; the criteria and their "
        "thresholds are those of the run's own configuration, section failure."
    )
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
        f"{_ending(failed)}{_timeline(failed)}{_evidence(failed.diagnosis)}{_lead(failed)}{chart_places(charts)}</details>"
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


def _lead(failed: Failed) -> str:
    """Return the lead time of the kurtosis alert before the failure."""
    lead = failed.diagnosis.lead_time
    if lead is None:
        return ""
    seconds = "" if lead.seconds is None else f" ({abs(lead.seconds):.3g} s)"
    order = "before" if lead.steps >= 0 else "after"
    apart = f"{counted(abs(lead.steps), 'step')}{seconds} {order}"
    words = f"Lead time of the kurtosis alert: at step {lead.alert_step}, {apart} the"
    return f"<p>{escape(words)} {escape(class_name(lead.failure_kind))} at step {lead.failure_step}.</p>"


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


def e7m0_section(
    predicted: Sequence[Predicted], references: Sequence[Row], looks: Mapping[str, Look]
) -> Section | None:
    """Return the section on E7M0 with nearest rounding; None without such a row."""
    if not predicted:
        return None
    words = (
        "E7M0 has powers of two only. With neighbours at half and at twice its value, nearest rounding leaves a weight "
        "where it is until a step reaches a quarter of it inwards or half of it outwards. Three things were predicted "
        "of that."
    )
    pages = [_e7m0_page(i, entry, references, looks) for i, entry in enumerate(predicted)]
    body = f'<p class="muted">{words}</p>' + "".join(body for body, _ in pages)
    return Section("e7m0", "E7M0 with nearest rounding", body, [chart for _, charts in pages for chart in charts])


def _e7m0_page(
    place: int, entry: Predicted, references: Sequence[Row], looks: Mapping[str, Look]
) -> tuple[str, list[Chart]]:
    drawn = [_first_steps_chart(place, entry, references, looks), _shares_chart(place, entry)]
    charts = [chart for chart in drawn if chart is not None]
    answers = "".join(_answer(prediction) for prediction in entry.predictions)
    title = f"<h3>{escape(entry.label)} · {escape(entry.run.name)}</h3>"
    return f'{title}<div class="answers">{answers}</div>{chart_places(charts)}', charts


def _answer(prediction: Prediction) -> str:
    answer, title = ANSWERS[prediction.confirmed], PREDICTION_TITLES.get(prediction.name, prediction.name)
    return (
        f'<div class="answer {answer.replace(" ", "-")}"><b>{escape(title)}</b>'
        f'<span class="badge">{answer}</span><p class="muted">Predicted: {escape(prediction.statement)}.</p>'
        f"<p>{escape(sentence(prediction.text))}</p></div>"
    )


def _first_steps_chart(
    place: int, entry: Predicted, references: Sequence[Row], looks: Mapping[str, Look]
) -> Chart | None:
    """Return the training loss of the first steps, as recorded, beside the reference's."""
    own = Row(entry.label, entry.run.rule, entry.run.format, (entry.run,))
    other = reference_beside(entry.run, references)
    drawn = first_lines([own, *other], TRAIN_LOSS.name, FIRST_STEPS)
    if not drawn:
        return None
    x, y = quantity("x", "step"), quantity("y", loss_unit([own]))
    spec = lines(drawn, looks, x, y)
    spec["layer"].append(limit_line(PREDICTED_STEPS, x=x))
    caption = f"The first {FIRST_STEPS} steps, the reference in ink; dotted: step {PREDICTED_STEPS}."
    return Chart(f"e7m0-loss-{place}", "Training loss at first", caption, spec)


def _shares_chart(place: int, entry: Predicted) -> Chart | None:
    """Return the shares of weights that lost their update and that lie in a zero-gradient zone, by step."""
    own = Row(entry.label, entry.run.rule, entry.run.format, (entry.run,))
    found = [(line, words) for metric, words, _ in SHARES for line in lines_of([own], metric.name)]
    if not found:
        return None
    values = [{"name": words, "x": line.xs, "y": line.ys} for line, words in found]
    y = quantity("y", "share of weights", (-0.02, 1.04), format=".0%")
    places = {"x": quantity("x", "step"), "y": y}
    scale = {"domain": [words for _, words, _ in SHARES], "range": [ink(colour) for *_, colour in SHARES]}
    colour = {"field": "name", "type": "nominal", "scale": scale, "legend": {"orient": "top", "title": None}}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["x", "y"]}],
        "layer": [{"mark": {"type": "line", "point": {"size": 22}}, "encoding": places | {"color": colour}}],
    }
    return Chart(f"e7m0-shares-{place}", "Updates lost, by step", "Of all quantised weights.", spec)
