"""Tables: results as CSV (full precision) and Markdown, and the tuning of a sweep.

Tables for people, in Markdown, on the terminal and on the page, have the columns in
which rows differ, as many as fit.
"""

import csv
import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS, Metric
from nanogpt_bench.failures.table import VERDICT as BOUNDS
from nanogpt_bench.monitors.stall import CODE_UNCHANGED
from nanogpt_bench.report.results import MARK, Figure, Result, difference_text, reference_name
from nanogpt_bench.report.rows import learning_rate, shortfall
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import cell, one_line

#: the text of a cell without a value
NOTHING = "-"
RUN, GAP, PAIRED, BEST, VERDICT = (
    "run",
    "gap",
    "paired difference (95%)",
    "best val loss",
    "verdict",
)
#: suffix of the first heading if all gaps rest on one seed
LEAD = "one seed: a lead"
#: characters per line of a table
WIDEST = 120
#: the most characters of a verdict that count towards the width; a failed run's message
#: makes only its line longer
WIDEST_VERDICT = 24


@dataclass(frozen=True)
class Column:
    """A column of all tables: heading and cell of tables for people, fields of the CSV,
    axis, and note on the page.

    An optional column is dropped if no row fills it. With `dash_counts` a dash means
    zero and counts as a value.
    """

    heading: str
    cell: Callable[[Result], str]
    #: functions that return a CSV field's value, by the field's name
    csv: Mapping[str, Callable[[Result], object]] = field(default_factory=dict)
    #: place in the order in which columns are dropped from a table that is too wide;
    #: None: never dropped
    goes: int | None = None
    #: its axis in the chart of parallel coordinates: place, name, and key in `FIGURES`
    axis: tuple[int, str, str] | None = None
    #: sentences of the note below the page's table
    note: str = ""
    numeric: bool = True
    optional: bool = False
    dash_counts: bool = False


def _part(name: str, part: str, result: Result) -> Any:
    """A part, such as the mean, of a field that a result may lack."""
    return getattr(getattr(result, name), part, None)


def _fields(name: str, **parts: str) -> dict[str, Callable[[Result], object]]:
    """CSV fields, each a part of one field of the result; mean and spread if no parts
    are named.
    """
    named = parts or {name: "mean", f"{name}_spread": "spread"}
    return {key: partial(_part, name, part) for key, part in named.items()}


def _figure_cell(name: str) -> Callable[[Result], str]:
    return lambda result: format_figure(getattr(result, name))


def _mean_cell(name: str, spec: str) -> Callable[[Result], str]:
    """A cell with only the mean, formatted by `spec`."""
    return lambda result: (
        NOTHING if (mean := _part(name, "mean", result)) is None else format(mean, spec)
    )


def _beside(metric: Metric) -> Column:
    """The column of another metric of the validation: F1, R-precision, the loss on
    another text.
    """
    found = partial(lambda name, result: result.beside.get(name), metric.figure)
    mean = {metric.figure: lambda result: getattr(found(result), "mean", None)}
    return Column(
        metric.title, lambda result: format_figure(found(result)), mean, goes=10, optional=True
    )


COLUMNS = (
    Column(
        *(RUN, lambda r: r.row.label),
        {
            "run": lambda r: r.row.label,
            "rule": lambda r: r.row.rule,
            "format": lambda r: r.row.format,
            "seeds": lambda r: len(r.row.runs),
        },
        numeric=False,
    ),
    Column(
        *("lr", lambda r: format_rates(r)),
        {"lr": lambda r: " ".join(f"{rate:g}" for rate in _rates(r))},
        goes=8,
        optional=True,
    ),
    Column(
        *("val loss", _figure_cell("final_val_loss"), _fields("final_val_loss")),
        axis=(6, "final val loss", "final_val_loss"),
    ),
    Column(
        *("val s.e.", lambda r: NOTHING if r.val_loss_se is None else f"{r.val_loss_se:.4f}"),
        {"final_val_loss_se": lambda r: r.val_loss_se},
        goes=1,
        optional=True,
    ),
    Column(BEST, _figure_cell("best_val_loss"), _fields("best_val_loss"), goes=4),
    *map(_beside, BESIDE_LOSS),
    Column(
        "its difference (95%)", lambda r: difference_text(r.also_difference), goes=7, optional=True
    ),
    Column(
        GAP,
        lambda r: format_gap(r),
        {**_fields("gap"), "gap_share": lambda r: r.gap_share},
        goes=12,
    ),
    Column(
        *(PAIRED, lambda r: difference_text(r.difference)),
        _fields(
            "difference",
            difference="mean",
            difference_seeds="seeds",
            difference_low="low",
            difference_high="high",
            difference_p="p",
            difference_p_holm="holm",
        ),
        goes=13,
        note="Paired difference: that of the final validation losses of the same seed, mean with "
        "its 95% t-interval and the p-value of the paired t-test, adjusted over the rows of "
        "the table (Holm); with one seed it is only a lead.",
        optional=True,
    ),
    Column(
        *(
            "bytes",
            lambda r: NOTHING if r.bytes_per_parameter is None else f"{r.bytes_per_parameter:.2f}",
        ),
        {"bytes_per_parameter": lambda r: r.bytes_per_parameter},
        goes=11,
        axis=(1, "bytes/param", "bytes_per_parameter"),
        note="Bytes per parameter: tensors in memory after the training, that is all weights, "
        "scales and optimizer state.",
    ),
    Column(
        *("stall", lambda r: format_stall(r)),
        {**_fields("stall"), "stall_metric": lambda r: r.stall_metric},
        goes=9,
        axis=(3, "stall", "stall"),
        note="Stall, a mean over the measurements: share of weights that a nonzero requested "
        "update left on the same grid value, where that loses the update; (code) marks a "
        "float32 master copy, which keeps it although the code stays the same.",
    ),
    Column(
        *("arrived", _mean_cell("arrived", ".1%"), _fields("arrived")),
        goes=5,
        axis=(4, "arrived", "arrived"),
        note="Arrived, a mean over the measurements: the share of the requested movement that the "
        "write-back made, about 100% where it is unbiased.",
        optional=True,
    ),
    Column(
        *("grad cosine", _figure_cell("cosine")),
        _fields("cosine", grad_cosine="mean", grad_cosine_spread="spread"),
        goes=3,
        axis=(5, "grad cosine", "cosine"),
        optional=True,
    ),
    Column(
        *("alerts", lambda r: str(r.alerts_fired or NOTHING)),
        {
            "alerts": lambda r: r.alerts_fired,
            "alert_kinds": lambda r: " ".join(
                f"{kind}:{count}" for kind, count in r.alerts.items()
            ),
            "failures": lambda r: " ".join(
                dict.fromkeys(found.kind for run in r.row.runs for found in run.failures)
            ),
        },
        goes=2,
        optional=True,
        dash_counts=True,
    ),
    Column(
        *(
            "tokens/s",
            _mean_cell("tokens_per_s", ",.0f"),
            _fields("tokens_per_s", tokens_per_s="mean"),
        ),
        goes=6,
        axis=(2, "tokens/s", "tokens_per_s"),
    ),
    Column(
        *(VERDICT, lambda r: r.verdict.text, {"verdict": lambda r: r.verdict.text}),
        note=f"Verdict: within {BOUNDS['outside'].bound:.0%} of the reference's final val loss or "
        f"outside; ahead or behind by {BOUNDS['behind'].bound:g} nats and two standard "
        f"errors; doubtful at a mean gradient cosine of {BOUNDS['cosine'].bound:g} or less; a "
        f"stall is named from {BOUNDS['stall'].bound:.0%} on.",
        numeric=False,
    ),
)


def shown_columns(results: Sequence[Result]) -> tuple[Column, ...]:
    """Return the columns of a table of these rows: those in which rows differ, as many
    as fit into 120 characters.

    A column is dropped if it is empty, if its known cells are all equal, or if it
    repeats the column before (the best loss where it is the last). The heading of the
    gap names the reference. The first heading says if all gaps are from one seed (then
    there are no intervals) and how many runs are missing. Without a reference there is
    no gap.
    """
    leads = [result.difference.is_lead for result in results if result.difference is not None]
    measured = any(result.reference for result in results)
    left_out = ({PAIRED} if all(leads) else set()) | (set() if measured else {GAP})
    shown = [
        column for column in COLUMNS if column.heading not in left_out and _tells(column, results)
    ]
    apart = any(result.difference.apart for result in results if result.difference is not None)
    headings = {
        GAP: f"{GAP} to {reference_name(results)}",
        RUN: run_heading(results, lead=bool(leads) and all(leads)),
    }
    headings |= {PAIRED: f"{PAIRED}{MARK}: two processors"} if apart else {}
    most = {VERDICT: WIDEST_VERDICT}
    widths = {}
    for column in shown:
        lengths = [
            min(len(one_line(column.cell(result))), most.get(column.heading, sys.maxsize))
            for result in results
        ]
        widths[column.heading] = max([len(headings.get(column.heading, column.heading)), *lengths])
    paired = PAIRED in widths
    droppable = [column for column in COLUMNS if column.goes is not None]
    for column in sorted(droppable, key=lambda column: column.goes or 0):
        # the paired difference is never dropped, or without it the gap
        if line_width(widths.values()) > WIDEST and column.heading != (PAIRED if paired else GAP):
            widths.pop(column.heading, None)
    return tuple(
        replace(c, heading=headings.get(c.heading, c.heading)) for c in shown if c.heading in widths
    )


def _tells(column: Column, results: Sequence[Result]) -> bool:
    """True if a column is worth its width: for one row if it is filled, for several if
    they differ in it.
    """
    cells = [column.cell(result) for result in results]
    known = [cell for cell in cells if cell != NOTHING]
    if column.goes is None or column.heading == GAP:
        return True
    if len(results) < 2:
        return bool(known) or not column.optional
    if column.heading == BEST and cells == [
        format_figure(result.final_val_loss) for result in results
    ]:
        return False
    alike = set(cells if column.dash_counts else known)
    return bool(known) and (len(alike) > 1 or len(known) == 1)


def line_width(widths: Iterable[int]) -> int:
    """Return the characters per line of a table with columns of these widths.

    >>> line_width([3, 4]) == len("| run | loss |")
    True
    """
    known = list(widths)
    return sum(known) + 3 * len(known) + 1


def run_heading(results: Sequence[Result], *, lead: bool = False) -> str:
    """Return the heading of the rows' names, with notes on missing runs and on gaps
    from one seed.
    """
    notes = "; ".join(
        filter(None, (shortfall(result.row for result in results), LEAD if lead else ""))
    )
    return f"{RUN} ({notes})" if notes else RUN


def format_figure(value: Figure | None) -> str:
    """Format the mean, and the spread over seeds if there is one; a dash if unknown.

    >>> format_figure(Figure(1.5, 0.0125)), format_figure(Figure(1.5)), format_figure(None)
    ('1.500 ± 0.013', '1.500', '-')
    """
    if value is None:
        return NOTHING
    return f"{value.mean:.3f}" + (f" ± {value.spread:.3f}" if value.spread is not None else "")


def format_rates(result: Result) -> str:
    """Format the learning rates of the row's runs, in the unit of their optimizer."""
    return ", ".join(f"{rate:g}" for rate in _rates(result)) or NOTHING


def _rates(result: Result) -> list[float]:
    """The learning rates of the row's runs, in the unit of their optimizer."""
    return sorted({rate for run in result.row.runs if (rate := learning_rate(run)) is not None})


def format_gap(result: Result) -> str:
    """Format the gap to the reference in nats and per cent; a dash for the reference
    itself.
    """
    if result.reference or result.gap is None:
        return NOTHING
    spread = f" ± {result.gap.spread:.3f}" if result.gap.spread is not None else ""
    share = f" ({result.gap_share:+z.1%})" if result.gap_share is not None else ""
    return f"{result.gap.mean:+z.3f}{spread}{share}"


def format_stall(result: Result) -> str:
    """Format the share of weights that a requested update left unmoved; `code` marks
    code_unchanged.
    """
    if result.stall is None:
        return NOTHING
    mark = " code" if result.stall_metric == CODE_UNCHANGED.name else ""
    return f"{result.stall.mean:.1%}{mark}"


def to_csv(results: Sequence[Result]) -> str:
    """Return one line per row, with numbers in full, empty cells for unknown ones, and
    no text that is a formula.

    Other metrics of the validation (F1, R-precision, the loss on another text) get
    columns if any row has them. If runs are missing, every line has their count in a
    last column.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    there = shortfall(result.row for result in results)
    beside = {
        metric.figure: any(metric.figure in result.beside for result in results)
        for metric in BESIDE_LOSS
    }
    every = {name: value for column in COLUMNS for name, value in column.csv.items()}
    fields = {name: value for name, value in every.items() if name not in beside}
    fields |= {name: every[name] for name, known in beside.items() if known}
    fields |= {"partial": lambda _: there} if there else {}
    writer.writerow(fields)
    writer.writerows([cell(value(result)) for value in fields.values()] for result in results)
    return text.getvalue()


def to_text(results: Sequence[Result]) -> str:
    """Return the table as plain text with aligned columns; a verdict that is too long
    continues on the next lines.
    """
    return _table(results, one_line, fold=True)


def to_markdown(results: Sequence[Result]) -> str:
    """Return a GitHub table, with padded columns so that it is also readable as plain
    text.
    """
    return _table(
        results, lambda text: " ".join(re.sub(r"([\\|<>*_`\[\]])", r"\\\1", text).split())
    )


def _table(results: Sequence[Result], text_of: Callable[[str], str], *, fold: bool = False) -> str:
    columns = shown_columns(results)
    lines = [[text_of(column.cell(result)) for column in columns] for result in results]
    widths = [
        max([len(column.heading), *(len(line[i]) for line in lines)])
        for i, column in enumerate(columns)
    ]
    room = max(
        WIDEST_VERDICT, WIDEST - line_width([*widths[:-1], 0])
    )  # of the verdict, the last column
    folded = []
    for *cells, verdict in lines:
        first, *rest = (textwrap.wrap(verdict, room) if fold else [verdict]) or [""]
        folded += [[*cells, first], *([*("" for _ in cells), more] for more in rest)]
    return padded(
        [[column.heading for column in columns], *folded],
        [column.numeric for column in columns],
        room,
    )


def padded(
    lines: Sequence[Sequence[str]],
    numeric: Sequence[bool] | None = None,
    most_of_last: int | None = None,
) -> str:
    """Return lines of cells, the heading first, as a GitHub table; by default all
    columns but the first are numeric.

    A cell in the last column with more than `most_of_last` characters makes only its
    own line longer.

    >>> print(padded([["run", "loss"], ["fp32", "2.1"]]), end="")
    | run  | loss |
    | ---- | ---: |
    | fp32 |  2.1 |
    """
    numbers = [place > 0 for place in range(len(lines[0]))] if numeric is None else numeric
    widths = [max(len(line[i]) for line in lines) for i in range(len(numbers))]
    if most_of_last is not None:
        widths[-1] = min(widths[-1], most_of_last)
    rule = [
        "-" * (w - 1) + ":" if number else "-" * w
        for number, w in zip(numbers, widths, strict=True)
    ]
    text = ""
    for line in (lines[0], rule, *lines[1:]):
        cells = [
            c.rjust(w) if number else c.ljust(w)
            for c, number, w in zip(line, numbers, widths, strict=True)
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


TUNING_HEADINGS = ("tuned", "key", "best", "tried", "trials", "steps", "seconds")
TUNING_COSTS = ("runs", "steps", "seconds")
#: the number of columns of text
TUNING_WORDS = 2


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tuned values and the cost of tuning as a Markdown table."""
    rule = ["---"] * TUNING_WORDS + ["---:"] * (len(TUNING_HEADINGS) - TUNING_WORDS)
    return "".join(
        f"| {' | '.join(cells)} |\n" for cells in (TUNING_HEADINGS, rule, *tuning_cells(rows))
    )


def tuning_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table's lines, one per row and key, and a last one with the total cost."""
    total = dict.fromkeys(TUNING_COSTS, 0.0)
    for row in rows:
        spent = {name: finite(_mapping(row, "cost").get(name)) or 0.0 for name in TUNING_COSTS}
        total = {name: total[name] + spent[name] for name in TUNING_COSTS}
        costs = [f"{value:,.0f}" for value in spent.values()]
        for key in _mapping(row, "start"):
            best = finite(_mapping(row, "best").get(key))
            found = NOTHING if best is None else f"{best:g}"
            yield [one_line(str(row.get("label") or "")), key, found, _tried(row, key), *costs]
            costs = [""] * len(TUNING_COSTS)  # one search tries all keys of a row
    yield ["all", "", "", "", *(f"{value:,.0f}" for value in total.values())]


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = row.get(key)
    return part if isinstance(part, Mapping) else {}


def _tried(row: Mapping[str, Any], key: str) -> str:
    """The range of values tried, with a note if the best of a finished search is at an
    end of it.
    """
    trials = row.get("trials")
    trials = (
        [trial for trial in trials if isinstance(trial, Mapping)]
        if isinstance(trials, list)
        else []
    )
    known = [
        value
        for trial in trials
        if (value := finite(_mapping(trial, "values").get(key))) is not None
    ]
    edge = ", best not inside" if row.get("over") and not _mapping(row, "inside").get(key) else ""
    return f"{min(known):g} to {max(known):g}{edge}" if known else NOTHING
