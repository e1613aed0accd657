"""The sections of the page, each from the results; one without anything to show is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import yaml

from nanogpt_bench.config.metrics import CHARTED, COSINE, UPDATE_LOST, charted
from nanogpt_bench.report import fields, loss_charts, monitor_charts, sweep_charts, weight_charts
from nanogpt_bench.report.chart import Chart
from nanogpt_bench.report.distributions import distribution_charts
from nanogpt_bench.report.e7m0_page import e7m0_section
from nanogpt_bench.report.failed import failed_runs, predicted_runs
from nanogpt_bench.report.failure_page import failure_section
from nanogpt_bench.report.length import LADDERS, ladder_section
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.processes import processes_section
from nanogpt_bench.report.results import Result, Row, findings, loss_unit
from nanogpt_bench.report.section import Section, css_class, figures, legend
from nanogpt_bench.report.seeds import left_aside
from nanogpt_bench.report.studies import Studies
from nanogpt_bench.report.tables import Column, shown_columns
from nanogpt_bench.report.tuned import tuned_section
from nanogpt_bench.report.verdict import Thresholds, describe_ending
from nanogpt_bench.runs.environment import history_comment
from nanogpt_bench.runs.load import Run


@dataclass(frozen=True)
class Page:
    """What the page shows: its title, the facts of what was run (in order), the results, and whether more will come."""

    title: str
    facts: Mapping[str, str]
    results: Sequence[Result]
    looks: Mapping[str, Look]
    thresholds: Thresholds = field(default_factory=Thresholds)
    studies: Studies = field(default_factory=Studies)
    running: bool = False

    @property
    def rows(self) -> list[Row]:
        return [result.row for result in self.results]

    @property
    def references(self) -> list[Row]:
        return [result.row for result in self.results if result.reference]

    def legend(self, drawn: Sequence[Chart]) -> str:
        return legend([row.label for row in self.rows], self.looks, drawn)


def all_sections(page: Page) -> list[Section]:
    """Everything there is data for, in reading order; failures are told once nothing is running any more."""
    ended = not page.running
    found: list[Section | None] = [
        _what(page),
        _results(page),
        processes_section(page.rows),
        *(ladder_section(ladder, page.results, page.looks) for ladder in LADDERS),
        tuned_section(page.studies.tunings),
        _loss(page),
        e7m0_section(predicted_runs(page.results), page.references, page.looks) if ended else None,
        failure_section(failed_runs(page.results), page.references, page.looks) if ended else None,
        _studies(page),
        _stall(page),
        *(_watched(page, namespace) for namespace in CHARTED if namespace != UPDATE_LOST.namespace),
        _spreads(page),
        _weights(page),
        _alerts(page),
        _endings(page) if ended else None,
        _configs(page),
    ]
    return [section for section in found if section is not None]


def _what(page: Page) -> Section:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    return Section("what", "What was run", f"<dl>{facts}</dl>")


def _results(page: Page) -> Section:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(page.results))
    gap = loss_charts.gap_chart(page.results, page.looks)
    drawn = [gap] if gap else []
    body = (
        (f'<ul class="findings">{sentences}</ul>' if sentences else "")
        + f'<div class="scroll">{_table(page.results)}</div>'
        + f'<p class="muted">{escape(_table_note(page))}</p>'
        + figures(drawn)
    )
    return Section("results", "Results", body, drawn)


def _table(results: Sequence[Result]) -> str:
    columns = shown_columns(results)
    head = "".join(f"<th{css_class('number' if c.numeric else '')}>{escape(c.heading)}</th>" for c in columns)
    body = "".join(_table_row(result, columns) for result in results)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(result: Result, columns: Sequence[Column]) -> str:
    cells = []
    for column in columns:
        verdict = f"words {result.verdict.outcome}" if column is columns[-1] else "words"
        kind = css_class("number" if column.numeric else verdict)
        cells.append(f"<td{kind}>{escape(column.cell(result))}</td>")
    return f"<tr{css_class('reference' if result.reference else '')}>{''.join(cells)}</tr>"


DIFFERENCE_NOTE = (
    "Paired difference: that of the final validation losses of the same seed, mean with its 95% t-interval and the "
    "p-value of the paired t-test, adjusted over the rows of the table (Holm); of one seed it is a lead and no more. "
)


def _table_note(page: Page) -> str:
    seeds = max((len(result.row.runs) for result in page.results), default=1)
    limits = page.thresholds
    measured = bool(page.references)
    return (
        f"Losses in {loss_unit(page.rows)}"
        + "; the gap is that of the final validation losses" * measured
        + (f", ± the standard deviation over {seeds} seeds" if seeds > 1 else "")
        + ". "
        + (DIFFERENCE_NOTE if any(result.difference is not None for result in page.results) else "")
        + (
            f"Tokens to gap: the first at which the smoothed training loss lay {limits.gap:g} nats above the "
            "reference's. " * measured
        )
        + "Bytes a parameter: measured on the tensors alive after the training, quantised and other "
        "weights, scales and optimizer state together. Stall, a mean over the looks: share of weights that a nonzero "
        "requested update left on the same grid value, where that loses it; (code) marks a float32 master copy, where "
        "the update is kept though the code is the same. Arrived, a mean over the looks: the share of the requested "
        "movement that the write-back made, about 100% where it is unbiased."
        + (_verdict_note(limits) if measured else "")
    )


def _verdict_note(limits: Thresholds) -> str:
    return (
        f" Verdict: final validation loss at most {100 * limits.within:.4g}% above the reference's"
        + f", doubtful with a mean gradient cosine of {limits.cosine:g} or less"
        + ("" if limits.alerts is None else f" or more than {limits.alerts} alerts")
        + f"; a stall of {limits.stall:.0%} or more is named where it is short of the reference."
    )


def _loss(page: Page) -> Section | None:
    label = page.references[0].label if page.references else None
    drawn = loss_charts.loss_charts(page.rows, page.looks, label)
    if not drawn:
        return None
    marked = any("tooltip" in layer["encoding"] for chart in drawn for layer in chart.spec["layer"])
    words = '<p class="muted">Open diamonds: an early-divergence alert, or the end of a run that failed.</p>'
    return Section("loss", "Loss curves", f"{page.legend(drawn)}{words if marked else ''}{figures(drawn)}", drawn)


def _studies(page: Page) -> Section | None:
    """What the runs say together: sensitivity, learning rates, and all runs across all axes."""
    found = [
        *sweep_charts.sensitivity_charts(page.studies.sensitivities),
        sweep_charts.rate_chart(page.rows, page.looks),
        sweep_charts.limit_chart(page.studies.limits),
        sweep_charts.parallel_chart(page.rows, page.looks),
    ]
    drawn = [chart for chart in found if chart is not None]
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.studies.notes)
    if not drawn and not notes:
        return None
    body = (f"<ul>{notes}</ul>" if notes else "") + page.legend(drawn) + figures(drawn)
    return Section("settings", "Across settings", body, drawn)


def _stall(page: Page) -> Section | None:
    chart = loss_charts.stall_chart(page.rows, page.looks)
    watched = monitor_charts.watched_charts(page.rows, page.looks, charted(UPDATE_LOST.namespace), {})
    drawn = [*([chart] if chart else []), *watched]
    words = (
        "Share of all quantised weights whose nonzero requested update left them on the same grid value, at single "
        "steps, where such an update is gone, as with nearest rounding; with a master copy (code unchanged) it is kept "
        "in float32. With stochastic rounding a weight moves with probability |update| / ULP, so that standing still "
        "at most steps and arriving on average go together: there what counts is the movement that arrived."
    )
    if not drawn:
        return None
    return Section("stall", "Stall", f'<p class="muted">{words}</p>{page.legend(drawn)}{figures(drawn)}', drawn)


def _watched(page: Page, namespace: str) -> Section | None:
    title = monitor_charts.TITLES.get(namespace, namespace.capitalize())
    drawn = monitor_charts.watched_charts(
        page.rows, page.looks, charted(namespace), {COSINE.name: page.thresholds.cosine}
    )
    return Section(title.lower(), title, f"{page.legend(drawn)}{figures(drawn)}", drawn) if drawn else None


def _spreads(page: Page) -> Section | None:
    drawn = distribution_charts(page.rows, page.looks)
    words = '<p class="muted">As last recorded in each row\'s first run, over all layers.</p>'
    return Section("spreads", "Distributions", f"{words}{page.legend(drawn)}{figures(drawn)}", drawn) if drawn else None


def _weights(page: Page) -> Section | None:
    """Where the weights ended: histograms over the grid, code use by layer, stiffness by layer."""
    parts = (
        ("", weight_charts.histogram_charts(page.results, page.looks), True),
        ("Code use by layer", weight_charts.code_use_charts(page.results), False),
        ("Stiffness by layer", weight_charts.stiffness_charts(page.results), False),
        ("Code use of activations and gradients", weight_charts.operand_charts(page.results), False),
    )
    drawn = [chart for _, found, _ in parts for chart in found]
    if not drawn:
        return None
    left_out = fields.fields_left_out(page.results)
    words = (
        "Where the quantised weights lay at the end of each row's first run. The axis counts grid values (codes) "
        "and is labelled with the values at some of them. The stiffness S is the distance between neighbouring values."
        + (
            f" The heat maps show the first {fields.MOST_PANELS} rows of {fields.MOST_PANELS + left_out}."
            * bool(left_out)
        )
    )
    blocks = [_part(title) + figures(found, small=small) for title, found, small in parts if found]
    return Section("weights", "Weights on the grid", f'<p class="muted">{words}</p>{"".join(blocks)}', drawn)


def _part(title: str) -> str:
    return f'<h3 class="part">{escape(title)}</h3>' if title else ""


def _alerts(page: Page) -> Section | None:
    """Every kind of alert of every run, with the first of its messages."""
    lines = [line for result in page.results for run in result.row.runs for line in _alert_lines(result.row.label, run)]
    if not lines:
        return None
    head = "".join(f"<th>{name}</th>" for name in ("run", "alert", "level", "first step", "times", "first message"))
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    return Section("alerts", "Alerts", table)


def _alert_lines(label: str, run: Run) -> list[str]:
    lines = []
    for kind, count in run.alert_counts.items():
        first = next((alert for alert in run.alerts if alert.kind == kind), None)
        facts = (first.level, str(first.step), str(count), first.message) if first else ("", "", str(count), "")
        cells = "".join(f'<td class="words">{escape(text)}</td>' for text in (f"{label} · {run.name}", kind, *facts))
        lines.append(f"<tr>{cells}</tr>")
    return lines


def _endings(page: Page) -> Section | None:
    """Runs that failed or ended early, and run folders that could not be read in full."""
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
