"""Columns of the results' tables: what each shows to people, writes to CSV and explains.

A column has one cell for people (Markdown, terminal, page) and any number of CSV fields
in full precision. It may have an axis in the chart of parallel coordinates and a note
below the page's table. `nanogpt_bench.report.tables` chooses the columns of a table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from nanogpt_bench.config.metrics import BESIDE_LOSS, Metric
from nanogpt_bench.failures.table import VERDICT_BOUNDS
from nanogpt_bench.monitors.stall import CODE_UNCHANGED
from nanogpt_bench.report.paired import difference_text
from nanogpt_bench.report.results import Figure, Result
from nanogpt_bench.report.rows import learning_rate

#: the text of a cell without a value
NOTHING = "-"
# headings of columns that a table treats in ways of their own
RUN = "run"
GAP = "gap"
PAIRED = "paired difference (95%)"
BEST = "best val loss"
VERDICT_COLUMN = "verdict"

#: what formats the cell of a result for people
CellFormat = Callable[[Result], str]
#: what reads the value of a CSV field, in full precision
FieldReader = Callable[[Result], object]


@dataclass(frozen=True)
class ParallelAxis:
    """The axis of a column in the chart of parallel coordinates."""

    #: from left to right
    place: int
    name: str
    #: key in `nanogpt_bench.report.results.FIGURES`
    figure: str


@dataclass(frozen=True)
class Column:
    """A column of all tables."""

    heading: str
    cell: CellFormat
    #: readers of the CSV fields, by the field's name
    csv: Mapping[str, FieldReader] = field(default_factory=dict)
    #: place in the order in which columns are dropped from a table that is too wide;
    #: None: never dropped
    drop_order: int | None = None
    axis: ParallelAxis | None = None
    #: sentences of the note below the page's table
    note: str = ""
    numeric: bool = True
    #: True if a table of one row drops the column where that row does not fill it
    optional: bool = False
    #: True if a dash means zero and counts as a value
    dash_counts: bool = False


def format_figure(value: Figure | None) -> str:
    """Format the mean, and the spread over seeds if there is one; a dash if unknown.

    >>> format_figure(Figure(1.5, 0.0125)), format_figure(Figure(1.5)), format_figure(None)
    ('1.500 ± 0.013', '1.500', '-')
    """
    if value is None:
        return NOTHING
    return f"{value.mean:.3f}{_spread_text(value)}"


def _spread_text(value: Figure) -> str:
    return "" if value.spread is None else f" ± {value.spread:.3f}"


def learning_rates(result: Result) -> list[float]:
    """Return the learning rates of the row's runs, in the unit of their optimizer."""
    rates = {learning_rate(run) for run in result.row.runs}
    return sorted(rate for rate in rates if rate is not None)


def format_rates(result: Result) -> str:
    """Format the learning rates of the row's runs, in the unit of their optimizer."""
    return ", ".join(f"{rate:g}" for rate in learning_rates(result)) or NOTHING


def format_gap(result: Result) -> str:
    """Format the gap to the reference in nats and per cent.

    The reference itself has a dash.
    """
    if result.reference or result.gap is None:
        return NOTHING
    share = "" if result.gap_share is None else f" ({result.gap_share:+z.1%})"
    return f"{result.gap.mean:+z.3f}{_spread_text(result.gap)}{share}"


def format_stall(result: Result) -> str:
    """Format the share of weights that a requested update left unmoved.

    The word `code` marks a share of unchanged codes.
    """
    if result.stall is None:
        return NOTHING
    mark = " code" if result.stall_metric == CODE_UNCHANGED.name else ""
    return f"{result.stall.mean:.1%}{mark}"


def _format_loss_error(result: Result) -> str:
    return NOTHING if result.val_loss_se is None else f"{result.val_loss_se:.4f}"


def _format_paired_difference(result: Result) -> str:
    return difference_text(result.difference)


def _format_difference_on_other_text(result: Result) -> str:
    return difference_text(result.also_difference)


def _format_bytes(result: Result) -> str:
    if result.bytes_per_parameter is None:
        return NOTHING
    return f"{result.bytes_per_parameter:.2f}"


def _format_arrived(result: Result) -> str:
    return NOTHING if result.arrived is None else f"{result.arrived.mean:.1%}"


def _format_speed(result: Result) -> str:
    return NOTHING if result.tokens_per_s is None else f"{result.tokens_per_s.mean:,.0f}"


def _format_alerts(result: Result) -> str:
    return str(result.alerts_fired or NOTHING)


def _figure_format(name: str) -> CellFormat:
    """Return the format of a figure of the result: mean and spread."""

    def format_named_figure(result: Result) -> str:
        return format_figure(getattr(result, name))

    return format_named_figure


def _part_reader(name: str, part: str) -> FieldReader:
    """Return a reader of a part of a value that a result may lack, such as its mean."""

    def read_part(result: Result) -> object:
        value = getattr(result, name)
        return None if value is None else getattr(value, part)

    return read_part


def _figure_fields(name: str, field_name: str | None = None) -> dict[str, FieldReader]:
    """Return the CSV fields of a figure: its mean, and its spread over the seeds."""
    field_name = field_name or name
    return {
        field_name: _part_reader(name, "mean"),
        f"{field_name}_spread": _part_reader(name, "spread"),
    }


def _read_rates(result: Result) -> str:
    return " ".join(f"{rate:g}" for rate in learning_rates(result))


def _count_runs(result: Result) -> int:
    return len(result.row.runs)


def _read_alert_kinds(result: Result) -> str:
    return " ".join(f"{kind}:{count}" for kind, count in result.alerts.items())


def _read_failure_kinds(result: Result) -> str:
    """Return the classes of failure in the row's runs, each once."""
    kinds: dict[str, None] = {}
    for run in result.row.runs:
        for failure in run.failures:
            kinds[failure.kind] = None
    return " ".join(kinds)


def _metric_column(metric: Metric) -> Column:
    """Return the column of another metric of the validation.

    Such are F1, R-precision, and the loss on another text.
    """

    def format_metric(result: Result) -> str:
        return format_figure(result.other_metrics.get(metric.figure))

    def read_mean(result: Result) -> float | None:
        value = result.other_metrics.get(metric.figure)
        return None if value is None else value.mean

    return Column(
        metric.title,
        format_metric,
        csv={metric.figure: read_mean},
        drop_order=10,
        optional=True,
    )


PAIRED_NOTE = (
    "Paired difference: mean difference of the final validation losses of runs with the same "
    "seed, with its 95% t-interval and the p-value of the paired t-test, adjusted for the rows of "
    "the table (Holm); with one seed it is only a hint."
)
BYTES_NOTE = (
    "Bytes per parameter: tensors in memory after the training (all weights, scales and optimizer "
    "state)."
)
STALL_NOTE = (
    "Stall, mean over the measurements: share of weights that a nonzero requested update left on "
    "the same grid value, if the update is lost; (code) marks a float32 master copy, which keeps "
    "the update although the code stays the same."
)
ARRIVED_NOTE = (
    "Arrived, mean over the measurements: share of the requested movement that the write-back "
    "made; about 100% if the write-back is unbiased."
)
VERDICT_NOTE = (
    f"Verdict: within {VERDICT_BOUNDS.outside.bound:.0%} of the reference's final val loss, or "
    "outside; too early if the reference's loss fell by less than that; ahead or behind if the "
    f"gap is {VERDICT_BOUNDS.behind.bound:g} nats or more, and more than two standard errors; "
    f"doubtful if the mean gradient cosine is {VERDICT_BOUNDS.cosine.bound:g} or less; stall if it "
    f"is {VERDICT_BOUNDS.stall.bound:.0%} or more."
)

#: all columns, from left to right
COLUMNS = (
    Column(
        RUN,
        attrgetter("row.label"),
        csv={
            "run": attrgetter("row.label"),
            "rule": attrgetter("row.rule"),
            "format": attrgetter("row.format"),
            "seeds": _count_runs,
        },
        numeric=False,
    ),
    Column(
        "lr",
        format_rates,
        csv={"lr": _read_rates},
        drop_order=8,
        optional=True,
    ),
    Column(
        "val loss",
        _figure_format("final_val_loss"),
        csv=_figure_fields("final_val_loss"),
        axis=ParallelAxis(6, "final val loss", "final_val_loss"),
    ),
    Column(
        "val s.e.",
        _format_loss_error,
        csv={"final_val_loss_se": attrgetter("val_loss_se")},
        drop_order=1,
        optional=True,
    ),
    Column(
        BEST,
        _figure_format("best_val_loss"),
        csv=_figure_fields("best_val_loss"),
        drop_order=4,
    ),
    *map(_metric_column, BESIDE_LOSS),
    Column(
        "its difference (95%)",
        _format_difference_on_other_text,
        drop_order=7,
        optional=True,
    ),
    Column(
        GAP,
        format_gap,
        csv={**_figure_fields("gap"), "gap_share": attrgetter("gap_share")},
        drop_order=12,
    ),
    Column(
        PAIRED,
        _format_paired_difference,
        csv={
            "difference": _part_reader("difference", "mean"),
            "difference_seeds": _part_reader("difference", "seeds"),
            "difference_low": _part_reader("difference", "low"),
            "difference_high": _part_reader("difference", "high"),
            "difference_p": _part_reader("difference", "p"),
            "difference_p_holm": _part_reader("difference", "holm"),
        },
        drop_order=13,
        note=PAIRED_NOTE,
        optional=True,
    ),
    Column(
        "bytes",
        _format_bytes,
        csv={"bytes_per_parameter": attrgetter("bytes_per_parameter")},
        drop_order=11,
        axis=ParallelAxis(1, "bytes/param", "bytes_per_parameter"),
        note=BYTES_NOTE,
    ),
    Column(
        "stall",
        format_stall,
        csv={**_figure_fields("stall"), "stall_metric": attrgetter("stall_metric")},
        drop_order=9,
        axis=ParallelAxis(3, "stall", "stall"),
        note=STALL_NOTE,
    ),
    Column(
        "arrived",
        _format_arrived,
        csv=_figure_fields("arrived"),
        drop_order=5,
        axis=ParallelAxis(4, "arrived", "arrived"),
        note=ARRIVED_NOTE,
        optional=True,
    ),
    Column(
        "grad cosine",
        _figure_format("cosine"),
        csv=_figure_fields("cosine", "grad_cosine"),
        drop_order=3,
        axis=ParallelAxis(5, "grad cosine", "cosine"),
        optional=True,
    ),
    Column(
        "alerts",
        _format_alerts,
        csv={
            "alerts": attrgetter("alerts_fired"),
            "alert_kinds": _read_alert_kinds,
            "failures": _read_failure_kinds,
        },
        drop_order=2,
        optional=True,
        dash_counts=True,
    ),
    Column(
        "tokens/s",
        _format_speed,
        csv={"tokens_per_s": _part_reader("tokens_per_s", "mean")},
        drop_order=6,
        axis=ParallelAxis(2, "tokens/s", "tokens_per_s"),
    ),
    Column(
        VERDICT_COLUMN,
        attrgetter("verdict.text"),
        csv={"verdict": attrgetter("verdict.text")},
        note=VERDICT_NOTE,
        numeric=False,
    ),
)
