"""The table of results as CSV (full precision), Markdown and LaTeX.

The readable tables, the terminal's and the page's among them, have the columns that tell rows apart, as many as fit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanogpt_bench.config.metrics import BESIDE_LOSS, CODE_UNCHANGED
from nanogpt_bench.report.results import Figure, Result, difference_text, reference_name
from nanogpt_bench.report.rows import learning_rate, shortfall
from nanogpt_bench.system.csv_cells import cell
from nanogpt_bench.system.errors import one_line


@dataclass(frozen=True)
class Column:
    """One column of the readable tables: its heading, its cell, and whether numbers line up on the right.

    An optional column is left out of a table in which no row has anything in it. Of one whose dash says none, and not
    that it is unknown, a dash is a value as others are.
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
#: behind the heading of the rows' names where all gaps rest on one seed
LEAD = "one seed: a lead"
#: characters of a line of a table
WIDEST = 120
#: of a verdict as it is counted; the message of a failed run goes on beyond the others' lines
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
    Column("tokens to gap", lambda r: format_tokens(r.tokens_to_gap), optional=True),
    Column("bytes", lambda r: "-" if r.bytes_per_parameter is None else f"{r.bytes_per_parameter:.2f}"),
    Column("stall", lambda r: format_stall(r)),
    Column("arrived", lambda r: NOTHING if r.arrived is None else f"{r.arrived.mean:.1%}", optional=True),
    Column("grad cosine", lambda r: format_figure(r.cosine), optional=True),
    Column("alerts", lambda r: str(r.alerts_fired or NOTHING), optional=True, dash_counts=True),
    Column("tokens/s", lambda r: "-" if r.tokens_per_s is None else f"{r.tokens_per_s.mean:,.0f}"),
    Column(VERDICT, lambda r: r.verdict.text, numeric=False),
)
NOTHING = "-"
#: the columns that go first where a table is too wide; those that are not named stay
FIRST_TO_GO = (
    *("tokens to gap", "val s.e.", "alerts", "grad cosine", BEST, "arrived", "tokens/s", "its difference (95%)", "lr"),
    *("stall", *(metric.title for metric in BESIDE_LOSS), "bytes", GAP, PAIRED),
)


def shown_columns(results: Sequence[Result]) -> tuple[Column, ...]:
    """The columns of a table of these rows: those that tell rows apart, as many as fit into 120 characters.

    A column goes in which no row has anything, in which all that is known is the same, or whose cells are those of the
    column before it (the best loss where it is the last). The heading of the gap says what it is measured against, the
    first one that all gaps rest on one seed, where they do (then there is no column of intervals), and how many runs of
    how many the table is made from, where some are still to come. Without a reference there is no gap.
    """
    leads = [result.difference.is_lead for result in results if result.difference is not None]
    measured = any(result.reference for result in results)
    left_out = ({PAIRED} if all(leads) else set()) | (set() if measured else {GAP})
    shown = [column for column in COLUMNS if column.heading not in left_out and _tells(column, results)]
    headings = {GAP: f"{GAP} to {reference_name(results)}", RUN: run_heading(results, lead=bool(leads) and all(leads))}
    widths = {c.heading: _width(headings.get(c.heading, c.heading), c, results) for c in shown}
    paired = PAIRED in widths
    for heading in FIRST_TO_GO:
        # one of the gap and its interval stays
        if line_width(widths.values()) > WIDEST and heading != (PAIRED if paired else GAP):
            widths.pop(heading, None)
    return tuple(replace(c, heading=headings.get(c.heading, c.heading)) for c in shown if c.heading in widths)


def _tells(column: Column, results: Sequence[Result]) -> bool:
    """Whether a column tells something: of one row all that it has, of several what is not the same in all of them."""
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
    """The characters of a line of a table whose columns are so wide.

    >>> line_width([3, 4]) == len("| run | loss |")
    True
    """
    known = list(widths)
    return sum(known) + 3 * len(known) + 1


def run_heading(results: Sequence[Result], *, lead: bool = False) -> str:
    """The heading of the rows' names, which says so where runs are missing, or where all gaps rest on one seed."""
    said = "; ".join(filter(None, (shortfall(result.row for result in results), LEAD if lead else "")))
    return f"{RUN} ({said})" if said else RUN


def format_figure(value: Figure | None, digits: int = 3) -> str:
    """Mean, with the spread over seeds behind it when there is one; a dash when unknown.

    >>> format_figure(Figure(1.5, 0.0125)), format_figure(Figure(1.5)), format_figure(None)
    ('1.500 ± 0.013', '1.500', '-')
    """
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + (f" ± {value.spread:.{digits}f}" if value.spread is not None else "")


def format_rates(result: Result) -> str:
    """The learning rate of the row's runs, in the unit of their optimizer; of a row that has several, each."""
    return ", ".join(f"{rate:g}" for rate in _rates(result)) or NOTHING


def _rates(result: Result) -> list[float]:
    return sorted({rate for run in result.row.runs if (rate := learning_rate(run)) is not None})


def format_tokens(value: Figure | None) -> str:
    """A number of tokens in at most three digits and a unit.

    >>> format_tokens(Figure(76800.0)), format_tokens(Figure(1.2e6)), format_tokens(None)
    ('76.8k', '1.2M', '-')
    """
    if value is None:
        return NOTHING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value.mean >= size:
            return f"{value.mean / size:.3g}{unit}"
    return f"{value.mean:.3g}"


def format_gap(result: Result) -> str:
    """The gap to the reference in nats and per cent; the reference itself has none."""
    if result.reference or result.gap is None:
        return "-"
    spread = f" ± {result.gap.spread:.3f}" if result.gap.spread is not None else ""
    share = f" ({result.gap_share:+z.1%})" if result.gap_share is not None else ""
    return f"{result.gap.mean:+z.3f}{spread}{share}"


def format_stall(result: Result) -> str:
    """The share of weights that a requested update left where they were; `code` marks code_unchanged."""
    if result.stall is None:
        return "-"
    mark = " code" if result.stall_metric == CODE_UNCHANGED.name else ""
    return f"{result.stall.mean:.1%}{mark}"


def to_csv(results: Sequence[Result]) -> str:
    """One line a row, numbers in full, empty where unknown, no text that a spreadsheet would take for a formula.

    Where documents were classified, F1 and R-precision follow, and the loss on another text where there was one. Where
    runs are missing, a last column says in every line how many there are of how many.
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
    "tokens_to_gap": _mean("tokens_to_gap"),
    "grad_cosine": _mean("cosine"),
    "grad_cosine_spread": _spread("cosine"),
    "alerts": lambda r: r.alerts_fired,
    "alert_kinds": lambda r: " ".join(f"{kind}:{count}" for kind, count in r.alerts.items()),
    "failures": lambda r: " ".join(dict.fromkeys(finding.kind for run in r.row.runs for finding in run.findings)),
    "tokens_per_s": _mean("tokens_per_s"),
    "verdict": lambda r: r.verdict.text,
}


def to_text(results: Sequence[Result]) -> str:
    """The table in plain text, columns lined up."""
    return _padded(results, one_line)


def to_markdown(results: Sequence[Result]) -> str:
    """A GitHub table, columns padded so that it reads as plain text too."""
    return _padded(results, _markdown_cell)


def _padded(results: Sequence[Result], cell: Callable[[str], str]) -> str:
    columns = shown_columns(results)
    lines = [[column.heading for column in columns]]
    lines += [[cell(column.cell(result)) for column in columns] for result in results]
    return padded(lines, [column.numeric for column in columns])


def padded(lines: Sequence[Sequence[str]], numeric: Sequence[bool] | None = None) -> str:
    """Return lines of cells, the heading first, as a GitHub table; all columns but the first are numeric unless said.

    >>> print(padded([["run", "loss"], ["fp32", "2.1"]]), end="")
    | run  | loss |
    | ---- | ---: |
    | fp32 |  2.1 |
    """
    numbers = [place > 0 for place in range(len(lines[0]))] if numeric is None else numeric
    widths = [max(len(line[i]) for line in lines) for i in range(len(numbers))]
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


LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
    }
)


def to_latex(results: Sequence[Result]) -> str:
    """A tabular for the package booktabs."""
    columns = shown_columns(results)
    align = "".join("r" if column.numeric else "l" for column in columns)
    head = " & ".join(_latex_cell(column.heading) for column in columns)
    body = [" & ".join(_latex_cell(column.cell(result)) for column in columns) for result in results]
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", head + r" \\", r"\midrule"]
    lines += [line + r" \\" for line in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(text: str) -> str:
    return " ".join(text.translate(LATEX_ESCAPES).split())
