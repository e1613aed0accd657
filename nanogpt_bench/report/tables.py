"""Tables: results as CSV (full precision) and Markdown, and what a sweep tuned.

Readable tables, those of terminal and page among them, have the columns that tell rows apart, as many as fit.
"""

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.monitors.stall import CODE_UNCHANGED
from nanogpt_bench.report.results import MARK, Figure, Result, difference_text, reference_name
from nanogpt_bench.report.rows import learning_rate, shortfall
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import cell, one_line


@dataclass(frozen=True)
class Column:
    """A column of the readable tables: heading, cell, and alignment, to the right for numbers.

    An optional column is dropped if no row fills it. With `dash_counts` a dash means zero, and is a value like others.
    """

    heading: str
    cell: Callable[[Result], str]
    numeric: bool = True
    optional: bool = False
    dash_counts: bool = False


def _beside(name: str, result: Result) -> str:
    return format_figure(result.beside.get(name))


RUN, GAP, PAIRED = "run", "gap", "paired difference (95%)"
LOSS, BEST, VERDICT = "val loss", "best val loss", "verdict"
#: suffix of the first heading if all gaps rest on one seed
LEAD = "one seed: a lead"
#: characters per line of a table
WIDEST = 120
#: characters of a verdict that count; the message of a failed run exceeds its line
WIDEST_VERDICT = 24
COLUMNS = (
    Column(RUN, lambda r: r.row.label, numeric=False),
    Column("lr", lambda r: format_rates(r), optional=True),
    Column(LOSS, lambda r: format_figure(r.final_val_loss)),
    Column("val s.e.", lambda r: NOTHING if r.val_loss_se is None else f"{r.val_loss_se:.4f}", optional=True),
    Column(BEST, lambda r: format_figure(r.best_val_loss)),
    *(Column(metric.title, partial(_beside, metric.figure), optional=True) for metric in BESIDE_LOSS),
    Column("its difference (95%)", lambda r: difference_text(r.also_difference), optional=True),
    Column(GAP, lambda r: format_gap(r)),
    Column(PAIRED, lambda r: difference_text(r.difference), optional=True),
    Column("bytes", lambda r: "-" if r.bytes_per_parameter is None else f"{r.bytes_per_parameter:.2f}"),
    Column("stall", lambda r: format_stall(r)),
    Column("arrived", lambda r: NOTHING if r.arrived is None else f"{r.arrived.mean:.1%}", optional=True),
    Column("grad cosine", lambda r: format_figure(r.cosine), optional=True),
    Column("alerts", lambda r: str(r.alerts_fired or NOTHING), optional=True, dash_counts=True),
    Column("tokens/s", lambda r: "-" if r.tokens_per_s is None else f"{r.tokens_per_s.mean:,.0f}"),
    Column(VERDICT, lambda r: r.verdict.text, numeric=False),
)
NOTHING = "-"
#: the order in which columns are dropped from a table that is too wide; others stay
FIRST_TO_GO = (
    *("val s.e.", "alerts", "grad cosine", BEST, "arrived", "tokens/s", "its difference (95%)", "lr"),
    *("stall", *(metric.title for metric in BESIDE_LOSS), "bytes", GAP, PAIRED),
)


def shown_columns(results: Sequence[Result]) -> tuple[Column, ...]:
    """Return the columns of a table of these rows: those that tell rows apart, as many as fit into 120 characters.

    A column is dropped if it is empty, if its known cells are all equal, or if it repeats the column before (the best
    loss where it is the last). The heading of the gap names the reference. The first heading says if all gaps rest on
    one seed (then there are no intervals) and how many runs are missing. Without a reference there is no gap.
    """
    leads = [result.difference.is_lead for result in results if result.difference is not None]
    measured = any(result.reference for result in results)
    left_out = ({PAIRED} if all(leads) else set()) | (set() if measured else {GAP})
    shown = [column for column in COLUMNS if column.heading not in left_out and _tells(column, results)]
    apart = any(result.difference.apart for result in results if result.difference is not None)
    headings = {GAP: f"{GAP} to {reference_name(results)}", RUN: run_heading(results, lead=bool(leads) and all(leads))}
    headings |= {PAIRED: f"{PAIRED}{MARK}: two processors"} if apart else {}
    widths = {c.heading: _width(headings.get(c.heading, c.heading), c, results) for c in shown}
    paired = PAIRED in widths
    for heading in FIRST_TO_GO:
        # either the gap or its interval stays
        if line_width(widths.values()) > WIDEST and heading != (PAIRED if paired else GAP):
            widths.pop(heading, None)
    return tuple(replace(c, heading=headings.get(c.heading, c.heading)) for c in shown if c.heading in widths)


def _tells(column: Column, results: Sequence[Result]) -> bool:
    """True if a column is worth its width: for one row if it is filled, for several if it tells them apart."""
    cells = [column.cell(result) for result in results]
    known = [cell for cell in cells if cell != NOTHING]
    if column.heading in (RUN, LOSS, GAP, VERDICT):
        return True
    if len(results) < 2:
        return bool(known) or not column.optional
    if column.heading == BEST and cells == [format_figure(result.final_val_loss) for result in results]:
        return False
    alike = set(cells if column.dash_counts else known)
    return bool(known) and (len(alike) > 1 or len(known) == 1)


def _width(heading: str, column: Column, results: Sequence[Result]) -> int:
    widest = max((len(one_line(column.cell(result))) for result in results), default=0)
    return max(len(heading), min(widest, WIDEST_VERDICT) if column.heading == VERDICT else widest)


def line_width(widths: Iterable[int]) -> int:
    """Return the characters per line of a table with columns of these widths.

    >>> line_width([3, 4]) == len("| run | loss |")
    True
    """
    known = list(widths)
    return sum(known) + 3 * len(known) + 1


def run_heading(results: Sequence[Result], *, lead: bool = False) -> str:
    """Return the heading of the rows' names, with a note on missing runs and on gaps of one seed."""
    said = "; ".join(filter(None, (shortfall(result.row for result in results), LEAD if lead else "")))
    return f"{RUN} ({said})" if said else RUN


def format_figure(value: Figure | None) -> str:
    """Format the mean, and the spread over seeds if there is one; a dash if unknown.

    >>> format_figure(Figure(1.5, 0.0125)), format_figure(Figure(1.5)), format_figure(None)
    ('1.500 ± 0.013', '1.500', '-')
    """
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + (f" ± {value.spread:.3f}" if value.spread is not None else "")


def format_rates(result: Result) -> str:
    """Format the learning rates of the row's runs, in the unit of their optimizer."""
    return ", ".join(f"{rate:g}" for rate in _rates(result)) or NOTHING


def _rates(result: Result) -> list[float]:
    return sorted({rate for run in result.row.runs if (rate := learning_rate(run)) is not None})


def format_gap(result: Result) -> str:
    """Format the gap to the reference in nats and per cent; a dash for the reference itself."""
    if result.reference or result.gap is None:
        return "-"
    spread = f" ± {result.gap.spread:.3f}" if result.gap.spread is not None else ""
    share = f" ({result.gap_share:+z.1%})" if result.gap_share is not None else ""
    return f"{result.gap.mean:+z.3f}{spread}{share}"


def format_stall(result: Result) -> str:
    """Format the share of weights that a requested update left unmoved; `code` marks code_unchanged."""
    if result.stall is None:
        return "-"
    mark = " code" if result.stall_metric == CODE_UNCHANGED.name else ""
    return f"{result.stall.mean:.1%}{mark}"


def to_csv(results: Sequence[Result]) -> str:
    """Return one line per row, numbers in full, empty if unknown, without text that a spreadsheet runs as a formula.

    Measurements beside the loss (F1, R-precision, the loss on another text) get columns if any row has them. If runs
    are missing, a last column has their count on every line.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    there = shortfall(result.row for result in results)
    named = [metric.figure for metric in BESIDE_LOSS if any(metric.figure in result.beside for result in results)]
    beside = {name: partial(_mean_beside, name) for name in named}
    fields: dict[str, Callable[[Result], object]] = {
        **CSV_FIELDS,
        **beside,
        **({"partial": lambda _: there} if there else {}),
    }
    writer.writerow(fields)
    writer.writerows([cell(field(result)) for field in fields.values()] for result in results)
    return text.getvalue()


def _mean_beside(name: str, result: Result) -> object:
    return getattr(result.beside.get(name), "mean", None)


def _mean(name: str) -> Callable[[Result], object]:
    return lambda result: getattr(getattr(result, name), "mean", None)


def _spread(name: str) -> Callable[[Result], object]:
    return lambda result: getattr(getattr(result, name), "spread", None)


CSV_FIELDS: dict[str, Callable[[Result], object]] = {
    "run": lambda r: r.row.label,
    "rule": lambda r: r.row.rule,
    "format": lambda r: r.row.format,
    "seeds": lambda r: len(r.row.runs),
    "lr": lambda r: " ".join(f"{rate:g}" for rate in _rates(r)),
    "final_val_loss": _mean("final_val_loss"),
    "final_val_loss_spread": _spread("final_val_loss"),
    "final_val_loss_se": lambda r: r.val_loss_se,
    "best_val_loss": _mean("best_val_loss"),
    "best_val_loss_spread": _spread("best_val_loss"),
    "gap": _mean("gap"),
    "gap_spread": _spread("gap"),
    "gap_share": lambda r: r.gap_share,
    "difference": lambda r: getattr(r.difference, "mean", None),
    "difference_seeds": lambda r: getattr(r.difference, "seeds", None),
    "difference_low": lambda r: getattr(r.difference, "low", None),
    "difference_high": lambda r: getattr(r.difference, "high", None),
    "difference_p": lambda r: getattr(r.difference, "p", None),
    "difference_p_holm": lambda r: getattr(r.difference, "holm", None),
    "bytes_per_parameter": lambda r: r.bytes_per_parameter,
    "stall": _mean("stall"),
    "stall_spread": _spread("stall"),
    "stall_metric": lambda r: r.stall_metric,
    "arrived": _mean("arrived"),
    "arrived_spread": _spread("arrived"),
    "grad_cosine": _mean("cosine"),
    "grad_cosine_spread": _spread("cosine"),
    "alerts": lambda r: r.alerts_fired,
    "alert_kinds": lambda r: " ".join(f"{kind}:{count}" for kind, count in r.alerts.items()),
    "failures": lambda r: " ".join(dict.fromkeys(finding.kind for run in r.row.runs for finding in run.findings)),
    "tokens_per_s": _mean("tokens_per_s"),
    "verdict": lambda r: r.verdict.text,
}


def to_text(results: Sequence[Result]) -> str:
    """Return the table in plain text, columns aligned; a verdict too long for its line goes on in the next ones."""
    columns = shown_columns(results)
    lines = [[one_line(column.cell(result)) for column in columns] for result in results]
    return _padded(columns, [folded for line in lines for folded in _folded(line, _room(columns, lines))])


def to_markdown(results: Sequence[Result]) -> str:
    """Return a GitHub table, columns padded so that it reads as plain text too."""
    columns = shown_columns(results)
    return _padded(columns, [[_markdown_cell(column.cell(result)) for column in columns] for result in results])


def _padded(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> str:
    headings = [column.heading for column in columns]
    return padded([headings, *lines], [column.numeric for column in columns], _room(columns, lines))


def _room(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> int:
    """Return the characters that the others leave to the last column, the verdict."""
    others = [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns[:-1])]
    return max(WIDEST_VERDICT, WIDEST - line_width([*others, 0]))


def _folded(line: Sequence[str], room: int) -> Iterator[list[str]]:
    """Yield a line of cells, its last one on as many lines as it takes."""
    *others, last = line
    first, *rest = textwrap.wrap(last, room) or [""]
    yield [*others, first]
    yield from ([*("" for _ in others), more] for more in rest)


def padded(
    lines: Sequence[Sequence[str]], numeric: Sequence[bool] | None = None, most_of_last: int | None = None
) -> str:
    """Return lines of cells, the heading first, as a GitHub table; by default all columns but the first are numeric.

    A cell of the last column that has more than `most_of_last` characters makes its own line longer, and no other.

    >>> print(padded([["run", "loss"], ["fp32", "2.1"]]), end="")
    | run  | loss |
    | ---- | ---: |
    | fp32 |  2.1 |
    """
    numbers = [place > 0 for place in range(len(lines[0]))] if numeric is None else numeric
    widths = [max(len(line[i]) for line in lines) for i in range(len(numbers))]
    if most_of_last is not None:
        widths[-1] = min(widths[-1], most_of_last)
    rule = ["-" * (w - 1) + ":" if number else "-" * w for number, w in zip(numbers, widths, strict=True)]
    every = [lines[0], rule, *lines[1:]]
    return "".join(f"| {' | '.join(_aligned(line, numbers, widths))} |\n" for line in every)


def _aligned(cells: Sequence[str], numeric: Sequence[bool], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if number else cell.ljust(width)
        for cell, number, width in zip(cells, numeric, widths, strict=True)
    ]


def _markdown_cell(text: str) -> str:
    for character in "\\|<>*_`[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


TUNING_HEADINGS = ("tuned", "key", "best", "tried", "trials", "steps", "seconds")
TUNING_COSTS = ("runs", "steps", "seconds")
#: the number of columns of text
TUNING_WORDS = 2


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what was tuned and what it cost as a Markdown table."""
    lines = [
        TUNING_HEADINGS,
        ["---"] * TUNING_WORDS + ["---:"] * (len(TUNING_HEADINGS) - TUNING_WORDS),
        *tuning_cells(rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def tuning_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table's lines, one per row and key, and one of the total cost."""
    for row in rows:
        costs = [_count(_part(row, "cost").get(name)) for name in TUNING_COSTS]
        for key in _part(row, "start"):
            yield [one_line(str(row.get("label") or "")), key, _best(row, key), _tried(row, key), *costs]
            costs = [""] * len(TUNING_COSTS)  # one search tries all keys of a row
    total = [sum(finite(_part(row, "cost").get(name)) or 0.0 for row in rows) for name in TUNING_COSTS]
    yield ["all", "", "", "", *map(_count, total)]


def _part(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = row.get(key)
    return part if isinstance(part, Mapping) else {}


def _best(row: Mapping[str, Any], key: str) -> str:
    value = finite(_part(row, "best").get(key))
    return "-" if value is None else f"{value:g}"


def _tried(row: Mapping[str, Any], key: str) -> str:
    """Return the range of values tried, with a note if the best of a finished search is at an end of it."""
    trials = row.get("trials")
    trials = [trial for trial in trials if isinstance(trial, Mapping)] if isinstance(trials, list) else []
    values = [finite(_part(trial, "values").get(key)) for trial in trials]
    known = [value for value in values if value is not None]
    edge = ", best not inside" if row.get("over") and not _part(row, "inside").get(key) else ""
    return f"{min(known):g} to {max(known):g}{edge}" if known else "-"


def _count(value: Any) -> str:
    return f"{finite(value) or 0.0:,.0f}"
