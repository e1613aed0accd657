"""Charts of curves: losses by step and by time, the stall, and what monitors recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.metrics import ELAPSED, LOG, SHARE, TRAIN_LOSS, VAL_LOSS, Metric
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import Row, loss_unit, row_runs
from nanogpt_bench.report.vega_spec import (
    LOG_SPAN,
    PERCENT,
    Chart,
    Line,
    Spec,
    data_layer,
    limit_line,
    lines,
    quantity,
    row_channel,
)
from nanogpt_bench.runs.load import MAX_POINTS, Run, decimate, smooth, smoothing_window

BY_STEP = "step"
#: points of a curve, however many curves there are
FEWEST_POINTS = 60
#: points of all curves of a chart
MOST_POINTS = 50 * MAX_POINTS
#: share of the steps after which the loss axis looks for its highest loss
FALL_SHARE = 1 / 6
#: margin of the loss axis, as a share of it, and in nats where all losses are equal
AXIS_MARGIN = 0.04
LEAST_MARGIN = 0.05
#: kinds of alerts about a rising loss: today's name, and an earlier one
EARLY_DIVERGENCE = ("divergence", "early_divergence")
#: titles of namespaces that differ from the capitalised name
TITLES = {"grad": "Gradients", "quant": "Ranges", "val": "Labels"}
#: the mark of an alert, or of a failed run's end
DIAMOND = {
    "type": "point",
    "shape": "diamond",
    "size": 150,
    "strokeWidth": 2.5,
    "filled": False,
}


@dataclass(frozen=True)
class LossChart:
    """A kind of chart of losses."""

    name: str
    metric: Metric
    #: what the curves are drawn over
    against: str
    #: the title of that axis
    axis: str
    #: how the title of the chart goes on
    words: str
    caption: str
    smoothed: bool = False


BY_STEP_WORDS = "by step"
BY_TIME_WORDS = "by wall-clock"
HELD_OUT = "On the same held-out batches."
SMOOTHED = "Exponential moving average over the steps."
LOSS_CHARTS = (
    LossChart("val-step", VAL_LOSS, BY_STEP, "step", BY_STEP_WORDS, HELD_OUT),
    LossChart("val-seconds", VAL_LOSS, ELAPSED.name, "seconds", BY_TIME_WORDS, HELD_OUT),
    LossChart("train-step", TRAIN_LOSS, BY_STEP, "step", BY_STEP_WORDS, SMOOTHED, smoothed=True),
    LossChart(
        "train-seconds",
        TRAIN_LOSS,
        ELAPSED.name,
        "seconds",
        BY_TIME_WORDS,
        SMOOTHED,
        smoothed=True,
    ),
)


def lines_of(
    rows: Sequence[Row],
    key: str,
    against: str = BY_STEP,
    *,
    smoothed: bool = False,
    points: int = MAX_POINTS,
) -> list[Line]:
    """Return the thinned curve of `key` for every run that has it.

    `smoothed` is for a noisy curve. With more than fifty runs each gets fewer than
    `points`, so that the whole is bounded.
    """
    runs = sum(len(row.runs) for row in rows)
    limit = min(points, max(FEWEST_POINTS, MOST_POINTS // max(1, runs)))
    run_lines = []
    for row, run in row_runs(rows):
        xs, ys = run.curve(key, against)
        if smoothed:
            ys = smooth(ys, smoothing_window(len(ys)))
        places = decimate(len(xs), limit)
        line = Line(row.label, run.seed, [xs[i] for i in places], [ys[i] for i in places])
        if any(y is not None for y in line.ys):
            run_lines.append(line)
    return run_lines


def _event_marks(
    rows: Sequence[Row], run_lines: Sequence[Line], against: str
) -> list[dict[str, Any]]:
    """Return the first alert of divergence and the end of failed runs.

    They are points on the runs' curves.
    """
    lines_by_run = {(line.label, line.seed): line for line in run_lines}
    marks = []
    for row, run in row_runs(rows):
        line = lines_by_run.get((row.label, run.seed))
        if line is None:
            continue
        for event in _events(run):
            point = _point_at(line, run, event.step, against)
            if point is not None:
                text = f"{row.label}: {event.text}"
                marks.append({"row": row.label, "x": point.x, "y": point.y, "text": text})
    return marks


@dataclass(frozen=True)
class _Event:
    step: int
    text: str


def _events(run: Run) -> list[_Event]:
    """Return the first alert of divergence, and the end of a failed run."""
    events = []
    alerts = [alert for alert in run.alerts if alert.kind in EARLY_DIVERGENCE]
    if alerts:
        events.append(_Event(alerts[0].step, f"divergence found at step {alerts[0].step}"))
    if run.status == RunStatus.FAILED and run.last_step is not None:
        events.append(_Event(run.last_step, f"failed at step {run.last_step}"))
    return events


@dataclass(frozen=True)
class _Point:
    x: float
    y: float


def _point_at(line: Line, run: Run, step: int, against: str) -> _Point | None:
    """Return the place of a step on the curve's axis, and the last known value up to it."""
    steps, xs = run.curve(against)
    x_of_step = None
    for curve_step, x in zip(steps, xs, strict=True):
        if curve_step <= step and x is not None:
            x_of_step = x
    if x_of_step is None:
        return None
    points = zip(line.xs, line.ys, strict=True)
    ys_so_far = [y for x, y in points if y is not None and x <= x_of_step]
    return _Point(x_of_step, ys_so_far[-1]) if ys_so_far else None


def loss_range(run_lines: Sequence[Line]) -> tuple[float, float] | None:
    """Return the ends of the loss axis; None without a known loss.

    They are the lowest loss, and the highest after a sixth of the steps. All runs fall
    from ln(vocabulary) in the first steps; an axis up to there would compress the part
    that differs.
    """
    last = max((line.xs[-1] for line in run_lines if line.xs), default=0.0)
    late: list[float] = []
    for line in run_lines:
        points = zip(line.xs, line.ys, strict=True)
        late += [y for x, y in points if y is not None and x >= FALL_SHARE * last]
    if not late:
        return None
    bottom = min(late)
    top = max(late)
    margin = AXIS_MARGIN * (top - bottom) or LEAST_MARGIN
    return bottom - margin, top + margin


def loss_charts(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Chart]:
    """Return the charts of validation and training loss that have data.

    Each is drawn by step and by wall-clock.
    """
    charts: list[Chart] = []
    for kind in LOSS_CHARTS:
        run_lines = lines_of(rows, kind.metric.name, kind.against, smoothed=kind.smoothed)
        if run_lines:
            x = quantity("x", kind.axis)
            y = quantity("y", loss_unit(rows), loss_range(run_lines))
            spec = lines(run_lines, styles, x, y, marked=not kind.smoothed)
            marks = _event_marks(rows, run_lines, kind.against)
            if marks:
                colour = row_channel("color", styles)
                tip = {"field": "text"}
                spec["layer"].append(
                    data_layer(marks, DIAMOND, x=x, y=y, color=colour, tooltip=tip)
                )
            title = f"{kind.metric.title} {kind.words}"
            shown = rows_of(run_lines)
            charts.append(Chart(kind.name, title, kind.caption, spec, 380, rows=shown))
    return charts


def rows_of(run_lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the rows of curves, each once."""
    return tuple(dict.fromkeys(line.label for line in run_lines))


def stall_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Chart]:
    """Return the chart of the stall of the rows in which it is a failure; [] without any.

    Each row is drawn by its storage's metric.
    """
    run_lines: list[Line] = []
    for row in rows:
        metrics = [run.stall_metric for run in row.runs if run.stall_counts and run.stall_metric]
        if metrics:
            # All runs of a row have one storage, and so one metric.
            run_lines += lines_of([row], metrics[0])
    if not run_lines:
        return []
    x = quantity("x", "step")
    y = quantity("y", "share of weights", (-0.02, 1.04), format=".0%")
    title = "Stall: weights a requested update did not move"
    spec = lines(run_lines, styles, x, y)
    return [Chart("stall", title, "", spec, 380, wide=True, rows=rows_of(run_lines))]


def watched_charts(
    rows: Sequence[Row],
    styles: Mapping[str, Style],
    figures: Sequence[Metric],
    limits: Mapping[str, float],
) -> list[Chart]:
    """Return a chart for each of `figures` that some run recorded.

    `limits` are dotted lines, by name.
    """
    recorded: set[str] = set()
    for _, run in row_runs(rows):
        recorded.update(run.metrics.names)
    charts = []
    for metric in figures:
        run_lines = lines_of(rows, metric.name) if metric.name in recorded else []
        if run_lines:
            y = _watched_axis(metric, run_lines)
            spec = lines(run_lines, styles, quantity("x", "step"), y)
            if metric.name in limits:
                spec["layer"].append(limit_line(limits[metric.name], y=y))
            name = f"watch-{metric.name.replace('/', '-')}"
            shown = rows_of(run_lines)
            charts.append(Chart(name, metric.title, metric.meaning, spec, rows=shown))
    return charts


def _watched_axis(metric: Metric, run_lines: Sequence[Line]) -> Spec:
    values: set[float] = set()
    for line in run_lines:
        values.update(y for y in line.ys if y is not None)
    is_share = metric.unit == SHARE
    options: Spec = {}
    if is_share:
        options |= {"format": PERCENT, "zero": True}
    if metric.chart == LOG and min(values) > 0 and max(values) / min(values) >= LOG_SPAN:
        options |= {"log": True, "format": "~g", "tickCount": 5}
    return quantity("y", metric.unit, _constant_range(values, is_share=is_share), **options)


def _constant_range(values: set[float], *, is_share: bool) -> tuple[float, float] | None:
    """Return the ends of an axis for curves with one constant value; None for others."""
    if len(values) > 1 or (is_share and values != {0}):
        return None
    return (0.0, 1.0) if is_share else (min(values) - 1, max(values) + 1)
