"""The report: one HTML file that carries its data, its charts' code and its styles, and needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

import yaml
from plotly.offline import get_plotlyjs

from nanogpt_bench.report import charts
from nanogpt_bench.report.bars import gap_bars
from nanogpt_bench.report.charts import Chart
from nanogpt_bench.report.load import Run
from nanogpt_bench.report.palette import COLOURS, INK, Look
from nanogpt_bench.report.results import Result, findings
from nanogpt_bench.report.tables import Column, shown_columns
from nanogpt_bench.report.verdict import Thresholds, describe_ending

RELOAD_SECONDS = 15
# Nothing but what is in the page itself may run or be shown: a report from elsewhere can't call home.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
THEMES = {
    "light": {"page": "#FFFFFF", "shade": "#F3F4F6", "rule": "#D9DCE1", "muted": "#5B616B"},
    "dark": {"page": "#15181D", "shade": "#20242B", "rule": "#3A404A", "muted": "#A3AAB5"},
}
VERDICT_COLOURS = {"good": ("#00694B", "#4CD1A5"), "bad": ("#B03A00", "#FF9A5C")}
SVG_DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}


@dataclass(frozen=True)
class Page:
    """What the page shows: its title, the facts of what was run (in order), the results, and whether more will come."""

    title: str
    facts: Mapping[str, str]
    results: Sequence[Result]
    looks: Mapping[str, Look]
    thresholds: Thresholds = field(default_factory=Thresholds)
    running: bool = False


def render(page: Page) -> str:
    """The whole page as one string of HTML; every text that a run brings is escaped."""
    drawn = _all_charts(page)
    reload = f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">' if page.running else ""
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark">{reload}',
            f"<title>{escape(page.title)}</title><style>{_theme()}{_asset('page.css')}</style></head>\n<body><main>",
            _header(page),
            _results_section(page),
            _loss_section(page, drawn),
            _stall_section(page, drawn),
            _weights_section(drawn),
            _endings_section(page),
            _configs_section(page),
            f'</main>\n<script id="charts" type="application/json">{_json(drawn.values())}</script>\n',
            f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>\n</body></html>\n",
        )
    )


def _all_charts(page: Page) -> dict[str, Chart]:
    rows = [result.row for result in page.results]
    found: list[Chart | None] = [
        *charts.loss_charts(rows, page.looks, next((r.row.label for r in page.results if r.reference), None)),
        charts.stall_chart(rows, page.looks),
        *charts.histogram_charts(page.results, page.looks),
    ]
    return {chart.name: chart for chart in found if chart is not None}


def _json(drawn: Iterable[Chart]) -> str:
    """The charts as JSON that can stand inside a script element: no `<`, `>` or `&` is left in it."""
    text = json.dumps([chart.figure() for chart in drawn], allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _theme() -> str:
    """The two themes as CSS variables, from the same palette as the pictures."""
    pairs = {f"c{i}": pair for i, pair in enumerate(COLOURS)} | {"ink": INK} | VERDICT_COLOURS
    blocks = []
    for place, theme in enumerate(("light", "dark")):
        colours = THEMES[theme] | {name: pair[place] for name, pair in pairs.items()}
        blocks.append(":root{" + "".join(f"--{name}:{value};" for name, value in colours.items()) + "}")
    return f"{blocks[0]}@media (prefers-color-scheme: dark){{{blocks[1]}}}\n"


def _header(page: Page) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    live = f'<p class="live">Still running: this page reloads every {RELOAD_SECONDS} seconds.</p>'
    return (
        f"<h1>{escape(page.title)}</h1>{live if page.running else ''}"
        f'<section id="what"><h2>What was run</h2><dl>{facts}</dl></section>'
    )


def _results_section(page: Page) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(page.results))
    return (
        '<section id="results"><h2>Results</h2>'
        + (f'<ul class="findings">{sentences}</ul>' if sentences else "")
        + f'<div class="scroll">{_table(page.results)}</div>'
        + f'<p class="muted">{escape(_table_note(page))}</p>'
        + f"{gap_bars(page.results, page.looks)}</section>"
    )


def _table(results: Sequence[Result]) -> str:
    columns = shown_columns(results)
    head = "".join(f"<th{_class('number' if c.numeric else '')}>{escape(c.heading)}</th>" for c in columns)
    body = "".join(_table_row(result, columns) for result in results)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(result: Result, columns: Sequence[Column]) -> str:
    cells = []
    for column in columns:
        verdict = f"words {result.verdict.outcome}" if column is columns[-1] else "words"
        kind = _class("number" if column.numeric else verdict)
        cells.append(f"<td{kind}>{escape(column.cell(result))}</td>")
    return f"<tr{_class('reference' if result.reference else '')}>{''.join(cells)}</tr>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _table_note(page: Page) -> str:
    seeds = max((len(result.row.runs) for result in page.results), default=1)
    return (
        "Losses in nats per token; the gap is that of the final validation losses"
        + (f", ± the standard deviation over {seeds} seeds" if seeds > 1 else "")
        + ". Bytes a parameter: measured on the tensors alive after the training, quantised and other weights, scales "
        "and optimizer state together. Stall: share of weights that a nonzero requested update left on the same grid "
        "value; (code) marks a float32 master copy, where the update is kept though the code is the same. "
        f"Verdict: final validation loss at most {100 * page.thresholds.within:.4g}% above the reference's; a stall "
        f"of {page.thresholds.stall:.0%} or more is named where it is not."
    )


def _loss_section(page: Page, drawn: Mapping[str, Chart]) -> str:
    shown = [chart for name, chart in drawn.items() if name.startswith(("val-", "train-"))]
    if not shown:
        return ""
    return f'<section id="loss"><h2>Loss curves</h2>{_keys(page, drawn)}{_figures(shown)}</section>'


def _stall_section(page: Page, drawn: Mapping[str, Chart]) -> str:
    if "stall" not in drawn:
        return ""
    words = (
        "Share of all quantised weights whose nonzero requested update left them on the same grid value, at single "
        "steps. With nearest rounding such an update is gone. With stochastic rounding a weight moves with "
        "probability |update| / ULP, so that standing still at most steps and arriving on average go together. "
        "With a master copy (code unchanged) the update is kept in float32."
    )
    return (
        f'<section id="stall"><h2>Stall</h2><p class="muted">{words}</p>'
        f"{_keys(page, drawn, only='stall')}{_figures([drawn['stall']])}</section>"
    )


def _weights_section(drawn: Mapping[str, Chart]) -> str:
    shown = [chart for name, chart in drawn.items() if name.startswith("weights-")]
    if not shown:
        return ""
    words = (
        "Where the quantised weights lay at the end of each row's first seed. The axis counts grid values (codes) "
        "and is labelled with the values at some of them."
    )
    return (
        f'<section id="weights"><h2>Weights on the grid</h2><p class="muted">{words}</p>'
        f"{_figures(shown, small=True)}</section>"
    )


def _figures(shown: Sequence[Chart], *, small: bool = False) -> str:
    blocks = [
        f"<figure{_class('wide' if chart.wide else '')}><h3>{escape(chart.title)}</h3>"
        f"<figcaption>{escape(chart.caption)}</figcaption>"
        f'<div id="chart-{chart.name}" style="height:{chart.height}px"></div></figure>'
        for chart in shown
    ]
    return f'<div class="charts{" small" if small else ""}">{"".join(blocks)}</div>'


def _keys(page: Page, drawn: Mapping[str, Chart], only: str = "") -> str:
    """The legend shared by the line charts: a button a row, which shows and hides that row everywhere."""
    named = [chart.traces for name, chart in drawn.items() if not only or name == only]
    rows = {trace["meta"]["row"] for traces in named for trace in traces if "meta" in trace}
    buttons = [
        _key(result.row.label, page.looks[result.row.label]) for result in page.results if result.row.label in rows
    ]
    return f'<div class="keys" aria-label="Rows: press to show or hide">{"".join(buttons)}</div>'


def _key(label: str, look: Look) -> str:
    sample = (
        '<svg width="30" height="8" aria-hidden="true"><line x1="0" x2="30" y1="4" y2="4" stroke-width="2.5" '
        f'style="stroke:var({look.variable})" stroke-dasharray="{SVG_DASHES[look.dash]}"/></svg>'
    )
    text = escape(label)
    return (
        f'<button class="key" type="button" aria-pressed="true" data-row="{text}">{sample}<span>{text}</span></button>'
    )


def _endings_section(page: Page) -> str:
    """Runs that failed or ended early, and run folders that could not be read in full."""
    runs = [run for result in page.results for run in result.row.runs]
    items = [f"{run.name}: {describe_ending(run)}" for run in runs if run.status != "finished"]
    items += [f"{run.name}: {note}" for run in runs for note in run.notes]
    items += [f"{result.row.label}: not run" for result in page.results if not result.row.runs]
    if page.running or not items:
        return ""
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<section id="endings"><h2>Failures and gaps in the record</h2><ul>{listed}</ul></section>'


def _configs_section(page: Page) -> str:
    blocks = [_config(result.row.label, run) for result in page.results for run in result.row.runs]
    return f'<section id="configs"><h2>Configuration of every run</h2>{"".join(blocks)}</section>'


def _config(label: str, run: Run) -> str:
    text: Any = dict(run.config)
    listed = yaml.safe_dump(text, sort_keys=False, allow_unicode=True) if text else "no configuration on disk\n"
    return f"<details><summary>{escape(label)} — {escape(run.name)}</summary><pre>{escape(listed)}</pre></details>"
