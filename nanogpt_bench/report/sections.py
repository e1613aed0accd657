"""Sections of the page, made from the results: tables, charts, failures, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import yaml

from nanogpt_bench.config.metrics import TRAIN_LOSS
from nanogpt_bench.failures import Diagnosis, Event, Finding, diagnose
from nanogpt_bench.failures.table import VERDICT as BOUNDS
from nanogpt_bench.monitors import CHARTED, charted
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.report.columns import COLUMNS, PAIRED, VERDICT
from nanogpt_bench.report.curve_charts import (
    TITLES,
    lines_of,
    loss_charts,
    loss_range,
    stall_chart,
    watched_charts,
)
from nanogpt_bench.report.page import Section, chart_places, legend, table
from nanogpt_bench.report.parallel_chart import parallel_chart
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import Row, loss_unit, reference_beside, row_runs, uncounted_lines
from nanogpt_bench.report.setting_charts import rate_chart, sensitivity_charts
from nanogpt_bench.report.studies import Studies
from nanogpt_bench.report.tables import TUNING_HEADINGS, TUNING_WORDS, shown_columns, tuning_cells
from nanogpt_bench.report.vega_spec import DOTTED, Chart, ink, lines, over, quantity
from nanogpt_bench.report.verdicts import class_name, describe_ending
from nanogpt_bench.runs.environment import history_comment
from nanogpt_bench.runs.load import Run

POINTS = 150  # of a failed run's curve; few, since there may be many such charts
OPEN_PAGES = 4  # more failure pages start closed


@dataclass(frozen=True)
class Page:
    """The content of the page: facts about the runs (in order), results, styles of the
    rows, and studies.
    """

    facts: Mapping[str, str]
    results: Sequence[Result]
    styles: Mapping[str, Style]
    studies: Studies = field(default_factory=Studies)

    @property
    def rows(self) -> list[Row]:
        return [result.row for result in self.results]

    @property
    def references(self) -> list[Row]:
        return [result.row for result in self.results if result.reference]

    def legend(self, drawn: Sequence[Chart]) -> str:
        return legend([row.label for row in self.rows], self.styles, drawn)


def all_sections(page: Page) -> list[Section]:
    """Return all sections with data, in reading order."""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items()
    )
    settings = "".join(_config(row.label, run) for row, run in row_runs(page.rows))
    found: list[Section | None] = [
        Section("what", "What was run", f"<dl>{facts}</dl>"),
        _results(page),
        _tuned(page),
        _loss(page),
        _failures(page),
        _studies(page),
        _stall(page),
        *(_watched(page, namespace) for namespace in CHARTED if namespace != UPDATE_LOST.namespace),
        _alerts(page),
        _endings(page),
        Section("configs", "Configuration of every run", settings),
    ]
    return [section for section in found if section is not None]


def _results(page: Page) -> Section:
    columns = shown_columns(page.results)
    head = [(column.heading, "number" if column.numeric else "") for column in columns]
    lines = []
    for result in page.results:
        *kinds, _ = ("number" if column.numeric else "words" for column in columns)
        cells = [column.cell(result) for column in columns]
        lines.append(list(zip(cells, [*kinds, f"words {result.verdict.outcome}"], strict=True)))
    drawn = table(head, lines, ["reference" if result.reference else "" for result in page.results])
    return Section(
        "results", "Results", f'{drawn}<p class="muted">{escape(_results_note(page))}</p>'
    )


def _results_note(page: Page) -> str:
    """The unit of the losses, and the notes of the columns."""
    seeds = max((len(result.row.runs) for result in page.results), default=1)
    measured = bool(page.references)
    first = (
        f"Losses in {loss_unit(page.rows)}"
        + "; the gap is that of the final validation losses" * measured
    )
    first += f", ± the standard deviation over {seeds} seeds" if seeds > 1 else ""
    silent = set() if measured else {VERDICT}
    silent |= set() if any(result.difference is not None for result in page.results) else {PAIRED}
    notes = [column.note for column in COLUMNS if column.note and column.heading not in silent]
    return " ".join((f"{first}.", *notes))


def _loss(page: Page) -> Section | None:
    drawn = loss_charts(page.rows, page.styles)
    marked = any("tooltip" in layer["encoding"] for chart in drawn for layer in chart.spec["layer"])
    words = '<p class="muted">Open diamonds: an alert of divergence, or the end of a run that failed.</p>'
    return _curves(page, "loss", "Loss curves", drawn, below=words if marked else "")


def _curves(
    page: Page, name: str, title: str, drawn: Sequence[Chart], *, above: str = "", below: str = ""
) -> Section | None:
    """Return a section of curves, with text above and below their legend; None without
    any.
    """
    return (
        Section(name, title, f"{above}{page.legend(drawn)}{below}{chart_places(drawn)}", drawn)
        if drawn
        else None
    )


def _studies(page: Page) -> Section | None:
    found = [
        *sensitivity_charts(page.studies.sensitivities),
        rate_chart(page.rows, page.styles),
        parallel_chart(page.rows, page.styles),
    ]
    drawn = [chart for chart in found if chart is not None]
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.studies.notes)
    if not drawn and not notes:
        return None
    body = (f"<ul>{notes}</ul>" if notes else "") + page.legend(drawn) + chart_places(drawn)
    return Section("settings", "Across settings", body, drawn)


def _stall(page: Page) -> Section | None:
    watched = watched_charts(page.rows, page.styles, charted(UPDATE_LOST.namespace), {})
    drawn = [*stall_chart(page.rows, page.styles), *watched]
    words = (
        "Share of all quantised weights that a nonzero requested update left on the same grid "
        "value, at single steps. With nearest rounding such an update is lost; a master copy (code "
        "unchanged) has it in float32. With stochastic rounding a weight moves with probability "
        "|update| / ULP: it stays at most steps and is right on average, so look at the movement "
        "that arrived."
    )
    return _curves(page, "stall", "Stall", drawn, above=f'<p class="muted">{words}</p>')


def _watched(page: Page, namespace: str) -> Section | None:
    title = TITLES.get(namespace, namespace.capitalize())
    drawn = watched_charts(
        page.rows, page.styles, charted(namespace), {COSINE.name: BOUNDS["cosine"].bound}
    )
    return _curves(page, title.lower(), title, drawn)


def _alerts(page: Page) -> Section | None:
    lines = []
    for row, run in row_runs(page.rows):
        for kind, count in run.alert_counts.items():
            first = next((alert for alert in run.alerts if alert.kind == kind), None)
            level, step, message = (
                (first.level, str(first.step), first.message) if first else ("", "", "")
            )
            cells = (f"{row.label} · {run.name}", kind, level, step, str(count), message)
            lines.append([(text, "words") for text in cells])
    head = [
        (name, "") for name in ("run", "alert", "level", "first step", "times", "first message")
    ]
    return Section("alerts", "Alerts", table(head, lines)) if lines else None


def _endings(page: Page) -> Section | None:
    runs = [run for row in page.rows for run in row.runs]
    items = [f"{run.name}: {describe_ending(run)}" for run in runs if run.status != "finished"]
    items += [f"{run.name}: {note}" for run in runs for note in run.notes]
    items += [line for row in page.rows for line in uncounted_lines(row)]
    items += [f"{row.label}: {row.reason or 'not run'}" for row in page.rows if not row.runs]
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return (
        Section("endings", "Early ends and gaps in the record", f"<ul>{listed}</ul>")
        if items
        else None
    )


def _config(label: str, run: Run) -> str:
    text: Any = dict(run.config)
    listed = (
        yaml.safe_dump(text, sort_keys=False, allow_unicode=True)
        if text
        else "no configuration on disk\n"
    )
    listed = history_comment(run.environment) + listed
    return f"<details><summary>{escape(label)} — {escape(run.name)}</summary><pre>{escape(listed)}</pre></details>"


def _tuned(page: Page) -> Section | None:
    words = (
        "Every row of the table above was trained at the values in the column best: of those "
        "tried, from neighbour to neighbour, they had the lowest final validation loss, averaged "
        "over the tuning's own seeds."
    )
    kinds = [""] * TUNING_WORDS + ["number"] * (len(TUNING_HEADINGS) - TUNING_WORDS)
    tables = ""
    for tuning in page.studies.tunings:
        head, *lines = (
            [*zip(cells, kinds, strict=True)] for cells in (TUNING_HEADINGS, *tuning_cells(tuning))
        )
        tables += table(head, lines)
    return (
        Section("tuned", "What was tuned", f'<p class="muted">{words}</p>{tables}')
        if tables
        else None
    )


@dataclass(frozen=True)
class FailedRun:
    """A run that failed, or in whose records a failure was found."""

    label: str
    run: Run
    diagnosis: Diagnosis


def _failures(page: Page) -> Section | None:
    """One page for each run that failed or in whose records a failure was found, in the
    order of the table.
    """
    judged = [
        FailedRun(row.label, run, diagnose(run))
        for row, run in row_runs(page.rows)
        if run.metrics or run.status == "failed"
    ]
    failed = [each for each in judged if each.run.status == "failed" or each.diagnosis.found]
    if not failed:
        return None
    body, charts = "", list[Chart]()
    for place, each in enumerate(failed):
        drawn = _loss_until_failure(place, each, page)
        body += _failure_page(place, each, drawn, opened=len(failed) <= OPEN_PAGES)
        charts += drawn
    words = "One page for each run that failed or in whose records a class of failure was found."
    return Section("failures", "Failures", f'<p class="muted">{words}</p>{body}', charts)


def _failure_page(place: int, failed: FailedRun, charts: Sequence[Chart], *, opened: bool) -> str:
    run, diagnosis = failed.run, failed.diagnosis
    title = failed.label if failed.label == run.name else f"{failed.label} · {run.name}"
    onsets = "; ".join(f"{class_name(f.kind)} from step {f.step}" for f in diagnosis.found)
    how = onsets or "failed without a class of failure in its records"
    ending = "" if run.status == "finished" else f"<p>The run {escape(describe_ending(run))}.</p>"
    last = max([event.step for event in diagnosis.timeline] + [run.last_step or 0, 1])
    events = "".join(_event(event, last) for event in diagnosis.timeline)
    timeline = (
        f'<h4>Timeline, step 0 to {last}</h4><div class="timeline">{events}</div>' if events else ""
    )
    found = "".join(map(_finding, diagnosis.found))
    clear = _others("Clear", [f for f in diagnosis.findings if f.state == "clear"])
    rest = _others(
        "Not judged", [f for f in diagnosis.findings if f.state not in ("clear", "found")]
    )
    return (
        f'<details class="page" id="failure-{place}"{" open" if opened else ""}>'
        f"<summary><h3>{escape(title)}</h3><span>{escape(how)}</span></summary>"
        f"{ending}{timeline}<h4>Evidence</h4>{found}{clear}{rest}{chart_places(charts)}</details>"
    )


def _event(event: Event, last: int) -> str:
    """An event of the timeline, on a track from the first step to the last."""
    return (
        f'<div class="event {escape(event.source)}"><span '
        f'class="event-name">{escape(class_name(event.kind))}</span><span class="event-track"><i '
        f'style="left:{100 * event.step / last:.2f}%"></i></span><span class="event-step">step '
        f'{event.step}</span><span class="event-text">{escape(event.source)}: '
        f"{escape(event.text)}</span></div>"
    )


def _finding(finding: Finding) -> str:
    known = {name: value for name, value in finding.evidence.items() if value is not None}
    texts = {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in known.items()
    }
    figures = ", ".join(f"{name} {text}" for name, text in texts.items())
    message = finding.message
    sentence = message[:1].upper() + message[1:].rstrip(".") + "." if message else ""
    return (
        f'<div class="finding"><b>{escape(class_name(finding.kind))}</b> <span>from step '
        f"{finding.step}</span><p>{escape(sentence)}</p><p "
        f'class="muted">{escape(figures)}</p></div>'
    )


def _others(title: str, listed: Sequence[Finding]) -> str:
    items = [
        class_name(f.kind) + (f" (no {', '.join(f.missing)})" if f.missing else "") for f in listed
    ]
    return f'<p class="muted">{title}: {escape("; ".join(items))}.</p>' if items else ""


def _loss_until_failure(place: int, failed: FailedRun, page: Page) -> list[Chart]:
    """The run's training loss and the reference's, with a line at the onset of every
    class, its name staggered.
    """
    own = Row(failed.label, failed.run.rule, failed.run.format, (failed.run,))
    other = reference_beside(failed.run, page.references)
    drawn = lines_of([own, *other], TRAIN_LOSS.name, smoothed=True, points=POINTS)
    if failed.label not in {line.label for line in drawn}:
        return []
    x, y = quantity("x", "step"), quantity("y", loss_unit([own]), loss_range(drawn))
    spec = lines(drawn, page.styles, x, y, marked=False)
    found = [finding for finding in failed.diagnosis.found if finding.step is not None]
    values = [
        {"x": finding.step or 0, "text": class_name(finding.kind), "above": -9 - 14 * (i % 4)}
        for i, finding in enumerate(found)
    ]
    if values:
        name = {"type": "text", "align": "left", "fontSize": 11, "clip": False, "color": ink("ink")}
        above = {"field": "above", "type": "quantitative", "scale": None, "axis": None}
        spec["layer"].append(over(values, {"type": "rule", "color": ink("muted"), **DOTTED}, x=x))
        spec["layer"].append(over(values, name, x=x, y=above, text={"field": "text"}))
    caption = "Smoothed; the reference in ink. Dotted: the first step of each class of failure."
    # No `rows`, so that a run stays visible on its own page if its row is hidden.
    return [Chart(f"failure-{place}", "Training loss", caption, spec, wide=True)]
