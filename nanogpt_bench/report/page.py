"""The page: its sections, each from the results, in one HTML file with data, code and styles, without a network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import yaml

from nanogpt_bench.failures.table import VERDICT
from nanogpt_bench.monitors import CHARTED, charted
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.monitors.stall import UPDATE_LOST
from nanogpt_bench.report import figures, sweep_charts
from nanogpt_bench.report.chart import CONFIG, THEMES, Chart, Look, Spec, short, theme_colours
from nanogpt_bench.report.curve_charts import TITLES, loss_charts, stall_chart, watched_charts
from nanogpt_bench.report.failure_pages import failed_runs, failure_section
from nanogpt_bench.report.markup import Cell, Section, chart_places, legend, table
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import Row, left_aside, loss_unit
from nanogpt_bench.report.sweep_charts import Studies
from nanogpt_bench.report.tables import TUNING_HEADINGS, TUNING_WORDS, Column, shown_columns, tuning_cells
from nanogpt_bench.report.verdict import describe_ending
from nanogpt_bench.runs.environment import history_comment
from nanogpt_bench.runs.load import Run

DIFFERENCE_NOTE = (
    "Paired difference: that of the final validation losses of the same seed, mean with its 95% t-interval and the "
    "p-value of the paired t-test, adjusted over the rows of the table (Holm); of one seed it is a lead and no more. "
)
# Only the page's own content may run or be shown: a report from elsewhere can't call home.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# The page uses Vega's drawing and the interpreter that reads expressions instead of compiling them.
VEGA = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Page:
    """The content of the page: title, facts of the runs (in order), and results."""

    title: str
    facts: Mapping[str, str]
    results: Sequence[Result]
    looks: Mapping[str, Look]
    studies: Studies = field(default_factory=Studies)

    @property
    def rows(self) -> list[Row]:
        return [result.row for result in self.results]

    @property
    def references(self) -> list[Row]:
        return [result.row for result in self.results if result.reference]

    def legend(self, drawn: Sequence[Chart]) -> str:
        return legend([row.label for row in self.rows], self.looks, drawn)


def all_sections(page: Page) -> list[Section]:
    """Return all sections with data, in reading order."""
    found: list[Section | None] = [
        _what(page),
        _results(page),
        tuned_section(page.studies.tunings),
        _loss(page),
        failure_section(failed_runs(page.results), page.references, page.looks),
        _studies(page),
        _stall(page),
        *(_watched(page, namespace) for namespace in CHARTED if namespace != UPDATE_LOST.namespace),
        _alerts(page),
        _endings(page),
        _configs(page),
    ]
    return [section for section in found if section is not None]


def _what(page: Page) -> Section:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    return Section("what", "What was run", f"<dl>{facts}</dl>")


def _results(page: Page) -> Section:
    note = f'<p class="muted">{escape(_results_note(page))}</p>'
    return Section("results", "Results", _results_table(page.results) + note)


def _results_table(results: Sequence[Result]) -> str:
    columns = shown_columns(results)
    head = [(column.heading, "number" if column.numeric else "") for column in columns]
    kinds = ["reference" if result.reference else "" for result in results]
    return table(head, [_results_line(result, columns) for result in results], kinds)


def _results_line(result: Result, columns: Sequence[Column]) -> list[Cell]:
    *_, verdict = columns
    kinds = {verdict: f"words {result.verdict.outcome}"}
    return [(c.cell(result), "number" if c.numeric else kinds.get(c, "words")) for c in columns]


def _results_note(page: Page) -> str:
    seeds = max((len(result.row.runs) for result in page.results), default=1)
    measured = bool(page.references)
    return (
        f"Losses in {loss_unit(page.rows)}"
        + "; the gap is that of the final validation losses" * measured
        + (f", ± the standard deviation over {seeds} seeds" if seeds > 1 else "")
        + ". "
        + (DIFFERENCE_NOTE if any(result.difference is not None for result in page.results) else "")
        + "Bytes a parameter: measured on the tensors alive after the training, quantised and other "
        "weights, scales and optimizer state together. Stall, a mean over the looks: share of weights that a nonzero "
        "requested update left on the same grid value, where that loses it; (code) marks a float32 master copy, where "
        "the update is kept though the code is the same. Arrived, a mean over the looks: the share of the requested "
        "movement that the write-back made, about 100% where it is unbiased."
        + (
            f" Verdict: final validation loss at most {VERDICT['outside'].bound:.0%} above the reference's, doubtful "
            f"with a mean gradient cosine of {VERDICT['cosine'].bound:g} or less; a stall of "
            f"{VERDICT['stall'].bound:.0%} or more is named where it is short of the reference."
        )
        * measured
    )


def _loss(page: Page) -> Section | None:
    drawn = loss_charts(page.rows, page.looks)
    marked = any("tooltip" in layer["encoding"] for chart in drawn for layer in chart.spec["layer"])
    words = '<p class="muted">Open diamonds: an alert of divergence, or the end of a run that failed.</p>'
    return _curves(page, "loss", "Loss curves", drawn, below=words if marked else "")


def _curves(
    page: Page, name: str, title: str, drawn: Sequence[Chart], *, above: str = "", below: str = ""
) -> Section | None:
    """Return a section of curves, with text above and below their legend; None without any."""
    return Section(name, title, f"{above}{page.legend(drawn)}{below}{chart_places(drawn)}", drawn) if drawn else None


def _studies(page: Page) -> Section | None:
    found = [
        *sweep_charts.sensitivity_charts(page.studies.sensitivities),
        sweep_charts.rate_chart(page.rows, page.looks),
        sweep_charts.parallel_chart(page.rows, page.looks),
    ]
    drawn = [chart for chart in found if chart is not None]
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.studies.notes)
    if not drawn and not notes:
        return None
    body = (f"<ul>{notes}</ul>" if notes else "") + page.legend(drawn) + chart_places(drawn)
    return Section("settings", "Across settings", body, drawn)


def _stall(page: Page) -> Section | None:
    watched = watched_charts(page.rows, page.looks, charted(UPDATE_LOST.namespace), {})
    drawn = [*stall_chart(page.rows, page.looks), *watched]
    words = (
        "Share of all quantised weights whose nonzero requested update left them on the same grid value, at single "
        "steps, where such an update is gone, as with nearest rounding; with a master copy (code unchanged) it is kept "
        "in float32. With stochastic rounding a weight moves with probability |update| / ULP, so that standing still "
        "at most steps and arriving on average go together: there what counts is the movement that arrived."
    )
    return _curves(page, "stall", "Stall", drawn, above=f'<p class="muted">{words}</p>')


def _watched(page: Page, namespace: str) -> Section | None:
    title = TITLES.get(namespace, namespace.capitalize())
    drawn = watched_charts(page.rows, page.looks, charted(namespace), {COSINE.name: VERDICT["cosine"].bound})
    return _curves(page, title.lower(), title, drawn)


def _alerts(page: Page) -> Section | None:
    lines = [line for result in page.results for run in result.row.runs for line in _alert_lines(result.row.label, run)]
    if not lines:
        return None
    head = [(name, "") for name in ("run", "alert", "level", "first step", "times", "first message")]
    return Section("alerts", "Alerts", table(head, lines))


def _alert_lines(label: str, run: Run) -> list[list[Cell]]:
    lines = []
    for kind, count in run.alert_counts.items():
        first = next((alert for alert in run.alerts if alert.kind == kind), None)
        facts = (first.level, str(first.step), str(count), first.message) if first else ("", "", str(count), "")
        lines.append([(text, "words") for text in (f"{label} · {run.name}", kind, *facts)])
    return lines


def _endings(page: Page) -> Section | None:
    runs = [run for row in page.rows for run in row.runs]
    items = [f"{run.name}: {describe_ending(run)}" for run in runs if run.status != "finished"]
    items += [f"{run.name}: {note}" for run in runs for note in run.notes]
    items += [line for row in page.rows for line in left_aside(row.label, row.runs, row.aside)]
    items += [f"{row.label}: {row.why or 'not run'}" for row in page.rows if not row.runs]
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return Section("endings", "Early ends and gaps in the record", f"<ul>{listed}</ul>") if items else None


def _configs(page: Page) -> Section:
    blocks = [_config(row.label, run) for row in page.rows for run in row.runs]
    return Section("configs", "Configuration of every run", "".join(blocks))


def _config(label: str, run: Run) -> str:
    text: Any = dict(run.config)
    listed = yaml.safe_dump(text, sort_keys=False, allow_unicode=True) if text else "no configuration on disk\n"
    listed = history_comment(run.environment) + listed
    return f"<details><summary>{escape(label)} — {escape(run.name)}</summary><pre>{escape(listed)}</pre></details>"


def tuned_section(tunings: Sequence[Sequence[Mapping[str, Any]]]) -> Section | None:
    """Return the tables of all tunings; None without any."""
    if not tunings:
        return None
    words = (
        "Every row of the table above was trained at the values in the column best. They had the lowest final "
        "validation loss, a mean over the tuning's own seeds, among those tried, from neighbour to neighbour."
    )
    return Section("tuned", "What was tuned", f'<p class="muted">{words}</p>{"".join(map(_tuning_html, tunings))}')


def _tuning_html(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = [""] * TUNING_WORDS + ["number"] * (len(TUNING_HEADINGS) - TUNING_WORDS)
    head, *lines = ([*zip(cells, kinds, strict=True)] for cells in (TUNING_HEADINGS, *tuning_cells(rows)))
    return table(head, lines)


def render(page: Page, sections: Sequence[Section]) -> str:
    """Return the page as one string of HTML; all text of a run is escaped."""
    drawn = [chart for section in sections for chart in section.charts]
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(page.title)}</title><style>{_theme()}{_asset('page.css')}</style></head>\n<body><main>",
            _header(page, sections),
            *(section.html() for section in sections),
            f'</main>\n<script id="charts" type="application/json">{_packed(drawn)}</script>\n',
            f"<script>{_vega()}</script>\n<script>{_asset('page.js')}</script>\n</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Return the code that draws the charts; bundling it takes seconds."""
    return figures.javascript(VEGA)


def _packed(charts: Sequence[Chart]) -> str:
    """Return JSON for a script element, without `<`, `>` and `&`."""
    content = {"config": CONFIG, "charts": [short(_on_page(chart)) for chart in charts]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _on_page(chart: Chart) -> Spec:
    """Return a chart as wide as its place, with rows that hide and axes that a drag magnifies."""
    spec = {
        **chart.spec,
        "width": "container",
        "height": chart.height,
        "autosize": {"type": "fit", "contains": "padding"},
    }
    if chart.rows:
        spec |= _hiding(spec) | {"params": [{"name": "hidden", "value": []}]}
        spec["layer"] = [_hiding(layer) for layer in spec["layer"]]
    if chart.drag:
        select = {"type": "interval", "encodings": list(chart.drag), "translate": False, "zoom": False, "clear": False}
        first = next(i for i, layer in enumerate(spec["layer"]) if "data" not in layer)
        dragged = {**spec["layer"][first], "params": [{"name": "zoom", "select": select, "bind": "scales"}]}
        spec["layer"] = [*spec["layer"][:first], dragged, *spec["layer"][first + 1 :]]
    return {"name": chart.name, "rows": chart.rows, "drag": chart.drag, "spec": spec}


def _hiding(view: Spec) -> Spec:
    """Return a view whose own data, if of rows, leave out hidden ones."""
    if "row" not in next(iter(view.get("data", {}).get("values", ())), ()):
        return view
    return view | {"transform": [{"filter": "indexof(hidden, datum.row) < 0"}, *view.get("transform", ())]}


def _theme() -> str:
    """Return both themes as CSS variables, from the palette of the pictures."""
    blocks = [
        ":root{" + "".join(f"--{name}:{_css(value)};" for name, value in theme_colours(theme).items()) + "}"
        for theme in THEMES
    ]
    return f"{blocks[0]}@media (prefers-color-scheme: dark){{{blocks[1]}}}\n"


def _css(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _header(page: Page, sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    return f"<h1>{escape(page.title)}</h1><nav>{links}</nav>"
