"""Sections of the page, made from the results: tables, charts, failures, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.metrics import TRAIN_LOSS
from nanogpt_bench.failures import Diagnosis, Finding, RunEvent, State, diagnose
from nanogpt_bench.failures.table import VERDICT_BOUNDS
from nanogpt_bench.monitors import CHARTED, charted
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.report.columns import COLUMNS, PAIRED, VERDICT_COLUMN
from nanogpt_bench.report.curve_charts import (
    TITLES,
    lines_of,
    loss_charts,
    loss_range,
    stall_chart,
    watched_charts,
)
from nanogpt_bench.report.page import (
    Cell,
    Legend,
    PageSection,
    SectionLayout,
    Table,
    TableLine,
    make_legend,
)
from nanogpt_bench.report.parallel_chart import parallel_chart
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import Row, loss_unit, reference_beside, row_runs, uncounted_lines
from nanogpt_bench.report.setting_charts import rate_chart, sensitivity_charts
from nanogpt_bench.report.studies import Studies
from nanogpt_bench.report.tables import (
    TUNING_HEADINGS,
    TUNING_TEXT_COLUMNS,
    shown_columns,
    tuning_cells,
)
from nanogpt_bench.report.vega_spec import DOTTED, Chart, data_layer, lines, named_colour, quantity
from nanogpt_bench.report.verdicts import class_name, describe_ending
from nanogpt_bench.runs.environment import history_comment
from nanogpt_bench.runs.load import Run

#: points of a failed run's curve; few, since there may be many such charts
POINTS = 150
#: more failure pages start closed
OPEN_PAGES = 4


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    #: facts about the runs, in order
    facts: Mapping[str, str]
    results: Sequence[Result]
    #: by the row's label
    styles: Mapping[str, Style]
    studies: Studies = field(default_factory=Studies)

    @property
    def rows(self) -> list[Row]:
        return [result.row for result in self.results]

    @property
    def references(self) -> list[Row]:
        return [result.row for result in self.results if result.reference]

    def legend(self, charts: Sequence[Chart]) -> Legend:
        return make_legend([row.label for row in self.rows], self.styles, charts)


def all_sections(page: Page) -> list[PageSection]:
    """Return all sections with data, in reading order."""
    namespaces = [name for name in CHARTED if name != UPDATE_LOST.namespace]
    sections = [
        _facts_section(page),
        _results_section(page),
        _tuned_section(page),
        _loss_section(page),
        _failures_section(page),
        _studies_section(page),
        _stall_section(page),
        *(_watched_section(page, namespace) for namespace in namespaces),
        _alerts_section(page),
        _endings_section(page),
        _configs_section(page),
    ]
    return [section for section in sections if section is not None]


def _facts_section(page: Page) -> PageSection:
    return PageSection("what", "What was run", SectionLayout.FACTS, {"facts": page.facts})


def _results_section(page: Page) -> PageSection:
    columns = shown_columns(page.results)
    head = [Cell(column.heading, "number" if column.numeric else "") for column in columns]
    lines = []
    for result in page.results:
        cells = [
            Cell(column.cell(result), "number" if column.numeric else "words")
            for column in columns[:-1]
        ]
        # The verdict, in the last column, has the colour of its judgement.
        cells.append(Cell(columns[-1].cell(result), f"words {result.verdict.outcome}"))
        lines.append(TableLine(cells, "reference" if result.reference else ""))
    tables = [Table(head, lines)]
    return _tables_section("results", "Results", tables, below=_results_note(page))


def _tables_section(
    name: str, title: str, tables: Sequence[Table], *, above: str = "", below: str = ""
) -> PageSection:
    content = {"above": above, "tables": tables, "below": below}
    return PageSection(name, title, SectionLayout.TABLES, content)


def _results_note(page: Page) -> str:
    """Return the unit of the losses, and the notes of the columns."""
    seeds = max((len(result.row.runs) for result in page.results), default=1)
    first = f"Losses in {loss_unit(page.rows)}"
    if page.references:
        first += "; the gap is that of the final validation losses"
    if seeds > 1:
        first += f", ± the standard deviation over {seeds} seeds"
    without_note = set()
    if not page.references:
        without_note.add(VERDICT_COLUMN)
    if all(result.difference is None for result in page.results):
        without_note.add(PAIRED)
    notes = [
        column.note for column in COLUMNS if column.note and column.heading not in without_note
    ]
    return " ".join([f"{first}.", *notes])


def _loss_section(page: Page) -> PageSection | None:
    charts = loss_charts(page.rows, page.styles)
    marked = any(_has_marks(chart) for chart in charts)
    words = "Open diamonds: an alert of divergence, or the end of a run that failed."
    below = words if marked else ""
    return _curves_section(page, "loss", "Loss curves", charts, below=below)


def _has_marks(chart: Chart) -> bool:
    return any("tooltip" in layer["encoding"] for layer in chart.spec["layer"])


def _curves_section(
    page: Page,
    name: str,
    title: str,
    charts: Sequence[Chart],
    *,
    above: str = "",
    notes: Sequence[str] = (),
    below: str = "",
) -> PageSection | None:
    """Return a section of curves; None without any curve or note.

    A text and a list of notes may stand above their legend, and a text below.
    """
    if not charts and not notes:
        return None
    content = {"above": above, "notes": notes, "legend": page.legend(charts), "below": below}
    return PageSection(name, title, SectionLayout.CURVES, content, charts)


def _studies_section(page: Page) -> PageSection | None:
    charts = sensitivity_charts(page.studies.sensitivities)
    for chart in (rate_chart(page.rows, page.styles), parallel_chart(page.rows, page.styles)):
        if chart is not None:
            charts.append(chart)
    return _curves_section(page, "settings", "Across settings", charts, notes=page.studies.notes)


STALL_WORDS = (
    "Share of all quantised weights that a nonzero requested update left on the same grid value, "
    "at single steps. With nearest rounding such an update is lost. A master copy (code "
    "unchanged) keeps it in float32. With stochastic rounding a weight moves with probability "
    "|update| / ULP: it stays put at most steps, and moves as far as it should on average, so "
    "look at the movement that arrived instead."
)


def _stall_section(page: Page) -> PageSection | None:
    watched = watched_charts(page.rows, page.styles, charted(UPDATE_LOST.namespace), {})
    charts = [*stall_chart(page.rows, page.styles), *watched]
    return _curves_section(page, "stall", "Stall", charts, above=STALL_WORDS)


def _watched_section(page: Page, namespace: str) -> PageSection | None:
    title = TITLES.get(namespace, namespace.capitalize())
    limits = {COSINE.name: VERDICT_BOUNDS.cosine.bound}
    charts = watched_charts(page.rows, page.styles, charted(namespace), limits)
    return _curves_section(page, title.lower(), title, charts)


ALERT_HEADINGS = ("run", "alert", "level", "first step", "times", "first message")


def _alerts_section(page: Page) -> PageSection | None:
    lines = []
    for row, run in row_runs(page.rows):
        for kind, count in run.alert_counts.items():
            cells = [f"{row.label} · {run.name}", kind, *_first_alert(run, kind, count)]
            lines.append(TableLine([Cell(text, "words") for text in cells]))
    if not lines:
        return None
    head = [Cell(heading) for heading in ALERT_HEADINGS]
    return _tables_section("alerts", "Alerts", [Table(head, lines)])


def _first_alert(run: Run, kind: str, count: int) -> list[str]:
    """Return level and step of the first alert of a kind, the count, and its message.

    Only the count is known if the run's alerts are gone.
    """
    for alert in run.alerts:
        if alert.kind == kind:
            return [alert.level, str(alert.step), str(count), alert.message]
    return ["", "", str(count), ""]


def _endings_section(page: Page) -> PageSection | None:
    runs = [run for _, run in row_runs(page.rows)]
    items = [
        f"{run.name}: {describe_ending(run)}" for run in runs if run.status != RunStatus.FINISHED
    ]
    for run in runs:
        items += [f"{run.name}: {note}" for note in run.notes]
    for row in page.rows:
        items += uncounted_lines(row)
    items += [f"{row.label}: {row.reason or 'not run'}" for row in page.rows if not row.runs]
    if not items:
        return None
    title = "Early ends and gaps in the record"
    return PageSection("endings", title, SectionLayout.LISTING, {"texts": items})


def _configs_section(page: Page) -> PageSection:
    runs = [
        {"title": f"{row.label} — {run.name}", "text": configuration_text(run)}
        for row, run in row_runs(page.rows)
    ]
    return PageSection(
        "configs", "Configuration of every run", SectionLayout.CONFIGS, {"runs": runs}
    )


def configuration_text(run: Run) -> str:
    """Return a run's configuration as YAML, below its history as comments."""
    text = "no configuration on disk\n"
    if run.config:
        text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    return history_comment(run.environment) + text


TUNED_WORDS = (
    "Every row of the table above was trained at the values in the column best. Among the values "
    "that were tried, stepping from neighbour to neighbour, they had the lowest final validation "
    "loss, averaged over the tuning's own seeds."
)


def _tuned_section(page: Page) -> PageSection | None:
    if not page.studies.tunings:
        return None
    tables = [_tuning_table(tuning) for tuning in page.studies.tunings]
    return _tables_section("tuned", "What was tuned", tables, above=TUNED_WORDS)


def _tuning_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    kinds = [""] * TUNING_TEXT_COLUMNS + ["number"] * (len(TUNING_HEADINGS) - TUNING_TEXT_COLUMNS)
    head = list(map(Cell, TUNING_HEADINGS, kinds))
    return Table(head, [TableLine(list(map(Cell, texts, kinds))) for texts in tuning_cells(rows)])


@dataclass(frozen=True)
class FailedRun:
    """A run that failed, or in whose records a failure was found."""

    label: str
    run: Run
    diagnosis: Diagnosis


def _failures_section(page: Page) -> PageSection | None:
    """Return one page for each run that failed or has a failure in its records.

    They are in the order of the table; without any there is no section.
    """
    failed = []
    for row, run in row_runs(page.rows):
        if run.metrics or run.status == RunStatus.FAILED:
            diagnosis = diagnose(run)
            if run.status == RunStatus.FAILED or diagnosis.found:
                failed.append(FailedRun(row.label, run, diagnosis))
    if not failed:
        return None
    pages = []
    charts: list[Chart] = []
    for place, failed_run in enumerate(failed):
        run_charts = _loss_until_failure(place, failed_run, page)
        pages.append(
            _failure_page(place, failed_run, run_charts, is_open=len(failed) <= OPEN_PAGES)
        )
        charts += run_charts
    return PageSection("failures", "Failures", SectionLayout.FAILURES, {"pages": pages}, charts)


class TimelineEvent(NamedTuple):
    """An event of the timeline, on a track from the first step to the last."""

    name: str
    source: str
    #: the place on the track
    percent: str
    step: int
    text: str


class ShownFinding(NamedTuple):
    """A class of failure that was found, and its evidence."""

    name: str
    step: int | None
    sentence: str
    figures: str


@dataclass(frozen=True)
class FailurePage:
    """What the template shows of one failed run."""

    place: int
    title: str
    summary: str
    #: "" for a run that finished
    ending: str
    events: Sequence[TimelineEvent]
    last_step: int
    findings: Sequence[ShownFinding]
    #: one line each, "" without any such class
    clear: str
    unjudged: str
    charts: Sequence[Chart]
    is_open: bool


def _failure_page(
    place: int, failed: FailedRun, charts: Sequence[Chart], *, is_open: bool
) -> FailurePage:
    run = failed.run
    diagnosis = failed.diagnosis
    onsets = "; ".join(f"{class_name(one.kind)} from step {one.step}" for one in diagnosis.found)
    clear = [one for one in diagnosis.findings if one.state is State.CLEAR]
    unjudged = [one for one in diagnosis.findings if one.state is State.NOT_JUDGED]
    last = max([event.step for event in diagnosis.timeline] + [run.last_step or 0, 1])
    return FailurePage(
        place=place,
        title=failed.label if failed.label == run.name else f"{failed.label} · {run.name}",
        summary=onsets or "failed, and its records show no class of failure",
        ending="" if run.status == RunStatus.FINISHED else describe_ending(run),
        events=[_timeline_event(event, last) for event in diagnosis.timeline],
        last_step=last,
        findings=[_shown_finding(finding) for finding in diagnosis.found],
        clear=_class_list("Clear", clear),
        unjudged=_class_list("Not judged", unjudged),
        charts=charts,
        is_open=is_open,
    )


def _timeline_event(event: RunEvent, last: int) -> TimelineEvent:
    percent = f"{100 * event.step / last:.2f}"
    return TimelineEvent(class_name(event.kind), event.source, percent, event.step, event.text)


def _shown_finding(finding: Finding) -> ShownFinding:
    figures = []
    for name, value in finding.evidence.items():
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            figures.append(f"{name} {text}")
    sentence = ""
    if finding.message:
        sentence = finding.message[:1].upper() + finding.message[1:].rstrip(".") + "."
    return ShownFinding(class_name(finding.kind), finding.step, sentence, ", ".join(figures))


def _class_list(title: str, findings: Sequence[Finding]) -> str:
    """Return classes of failure in one line, with the metrics that each lacked."""
    if not findings:
        return ""
    items = []
    for finding in findings:
        missing = f" (no {', '.join(finding.missing)})" if finding.missing else ""
        items.append(class_name(finding.kind) + missing)
    return f"{title}: {'; '.join(items)}."


def _loss_until_failure(place: int, failed: FailedRun, page: Page) -> list[Chart]:
    """Return the chart of the run's training loss and the reference's.

    It has a line at the onset of every class, its name staggered. It is [] without
    losses of the run.
    """
    row = Row(failed.label, failed.run.rule, failed.run.format, (failed.run,))
    rows = [row, *reference_beside(failed.run, page.references)]
    run_lines = lines_of(rows, TRAIN_LOSS.name, smoothed=True, points=POINTS)
    if failed.label not in {line.label for line in run_lines}:
        return []
    x = quantity("x", "step")
    y = quantity("y", loss_unit([row]), loss_range(run_lines))
    spec = lines(run_lines, page.styles, x, y, marked=False)
    onsets = [finding for finding in failed.diagnosis.found if finding.step is not None]
    values = []
    for number, finding in enumerate(onsets):
        # Names of four lines beside each other are at four heights.
        above = -9 - 14 * (number % 4)
        values.append({"x": finding.step or 0, "text": class_name(finding.kind), "above": above})
    if values:
        name = {
            "type": "text",
            "align": "left",
            "fontSize": 11,
            "clip": False,
            "color": named_colour("ink"),
        }
        rule = {"type": "rule", "color": named_colour("muted"), **DOTTED}
        height = {"field": "above", "type": "quantitative", "scale": None, "axis": None}
        spec["layer"].append(data_layer(values, rule, x=x))
        spec["layer"].append(data_layer(values, name, x=x, y=height, text={"field": "text"}))
    caption = (
        "Smoothed losses; the reference in black or white. Dotted: the first step of each class "
        "of failure."
    )
    # No `rows`, so that a run stays visible on its own page if its row is hidden.
    return [Chart(f"failure-{place}", "Training loss", caption, spec, wide=True)]
