"""Charts of curves over the steps: losses, stall and monitored figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanogpt_bench.config.metrics import ELAPSED, LOG, SHARE, TRAIN_LOSS, VAL_LOSS, Metric
from nanogpt_bench.report.chart import PERCENT, Chart, Line, Look, Spec, limit_line, lines, of_row, over, quantity
from nanogpt_bench.report.rows import Row, loss_unit
from nanogpt_bench.runs.load import MAX_POINTS, Run, decimate, smooth, smoothing_window

BY_STEP, BY_TIME = "step", ELAPSED.name
FEWEST_POINTS, MOST_POINTS = 60, 50 * MAX_POINTS  # of a curve, and of all curves of a chart
#: alerts of a loss that rises: as they are called, and were in earlier runs
EARLY_DIVERGENCE = ("divergence", "early_divergence")
#: titles of namespaces that differ from the capitalised name
TITLES = {"grad": "Gradients", "quant": "Ranges", "val": "Labels"}


@dataclass(frozen=True)
class Mark:
    """An event on a row's curve, and its text."""

    label: str
    x: float
    y: float
    text: str


def lines_of(
    rows: Sequence[Row], key: str, against: str = BY_STEP, *, smoothed: bool = False, points: int = MAX_POINTS
) -> list[Line]:
    """Return the thinned curve of `key` of every run that has it, `smoothed` if it is noisy step by step.

    With more than fifty runs each gets fewer than `points`, which bounds the whole.
    """
    limit = min(points, max(FEWEST_POINTS, MOST_POINTS // max(1, sum(len(row.runs) for row in rows))))
    drawn = [_line(row, run, key, against, smoothed, limit) for row in rows for run in row.runs]
    return [line for line in drawn if any(y is not None for y in line.ys)]


def _line(row: Row, run: Run, key: str, against: str, smoothed: bool, limit: int) -> Line:
    xs, ys = run.curve(key, against)
    if smoothed:
        ys = smooth(ys, smoothing_window(len(ys)))
    kept = decimate(len(xs), limit)
    return Line(row.label, run.seed, [xs[i] for i in kept], [ys[i] for i in kept])


def marks(rows: Sequence[Row], drawn: Sequence[Line], against: str = BY_STEP) -> list[Mark]:
    """Return the first alert of early divergence and the end of a failed run as marks on the runs' curves."""
    curves = {(line.label, line.seed): line for line in drawn}
    found = []
    for row in rows:
        for run in row.runs:
            line = curves.get((row.label, run.seed))
            found += [_mark(line, run, step, text, against) for step, text in _moments(run)] if line else []
    return [mark for mark in found if mark is not None]


def _moments(run: Run) -> list[tuple[int, str]]:
    """Return (step, text) of each event that a loss curve marks."""
    early = next((alert for alert in run.alerts if alert.kind in EARLY_DIVERGENCE), None)
    moments = [(early.step, f"divergence told at step {early.step}")] if early else []
    if run.status == "failed" and run.last_step is not None:
        moments.append((run.last_step, f"failed at step {run.last_step}"))
    return moments


def _mark(line: Line, run: Run, step: int, text: str, against: str) -> Mark | None:
    """Return a mark on the last known point at or before `step`, on the curve's own axis."""
    steps, places = run.curve(against)
    before = [place for at, place in zip(steps, places, strict=True) if at <= step and place is not None]
    end = before[-1] if before else None
    known = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None and end is not None and x <= end]
    return Mark(line.label, end, known[-1][1], text) if known and end is not None else None


def loss_range(drawn: Sequence[Line]) -> tuple[float, float] | None:
    """Return the ends of the loss axis: the lowest loss, and the highest after a sixth of the steps.

    All runs fall from ln(vocabulary) in the first steps; an axis up to there would compress the part that differs.
    """
    last = max((line.xs[-1] for line in drawn if line.xs), default=0.0)
    known = [(x, y) for line in drawn for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    late = [y for x, y in known if x >= last / 6]
    if not late:
        return None
    bottom, top = min(late), max(late)
    margin = 0.04 * (top - bottom) or 0.05
    return bottom - margin, top + margin


def loss_charts(rows: Sequence[Row], looks: Mapping[str, Look]) -> list[Chart]:
    """Return the charts of validation and training loss, by step and by wall-clock, that have data."""
    charts: list[Chart] = []
    for name, metric in (("val", VAL_LOSS), ("train", TRAIN_LOSS)):
        for against, axis, words in ((BY_STEP, "step", "by step"), (BY_TIME, "seconds", "by wall-clock")):
            smoothed = metric is TRAIN_LOSS
            drawn = lines_of(rows, metric.name, against, smoothed=smoothed)
            caption = "Exponential moving average over the steps." if smoothed else "On the same held-out batches."
            if drawn:
                x, y = quantity("x", axis), quantity("y", loss_unit(rows), loss_range(drawn))
                spec = lines(drawn, looks, x, y, marked=not smoothed)
                spec["layer"] += _marks(marks(rows, drawn, against), looks, x, y)
                charts.append(
                    Chart(f"{name}-{axis}", f"{metric.title} {words}", caption, spec, 380, rows=rows_of(drawn))
                )
    return charts


def rows_of(drawn: Sequence[Line]) -> tuple[str, ...]:
    """Return the rows of curves, each once."""
    return tuple(dict.fromkeys(line.label for line in drawn))


def _marks(marks: Sequence[Mark], looks: Mapping[str, Look], x: Spec, y: Spec) -> list[Spec]:
    if not marks:
        return []
    values = [{"row": mark.label, "x": mark.x, "y": mark.y, "text": f"{mark.label}: {mark.text}"} for mark in marks]
    diamond = {"type": "point", "shape": "diamond", "size": 150, "strokeWidth": 2.5, "filled": False}
    colour = of_row("color", looks)
    return [over(values, diamond, x=x, y=y, color=colour, tooltip={"field": "text"})]


def stall_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> list[Chart]:
    """Return the chart of the stall of each row in which it counts, by the measure of its storage; [] without any."""
    drawn = []
    for row in rows:
        metric = next((run.stall_metric for run in row.runs if run.stall_counts and run.stall_metric), None)
        drawn += lines_of([row], metric) if metric is not None else []
    spec = lines(drawn, looks, quantity("x", "step"), quantity("y", "share of weights", (-0.02, 1.04), format=".0%"))
    title = "Stall: weights a requested update did not move"
    return [Chart("stall", title, "", spec, 380, wide=True, rows=rows_of(drawn))] if drawn else []


def watched_charts(
    rows: Sequence[Row], looks: Mapping[str, Look], figures: Sequence[Metric], limits: Mapping[str, float]
) -> list[Chart]:
    """Return a chart for each of `figures` that some run recorded; `limits` are dotted lines, by name."""
    recorded = {key for row in rows for run in row.runs for key in run.metrics.names}
    found = [
        _watched_chart(rows, looks, figure, limits.get(figure.name)) for figure in figures if figure.name in recorded
    ]
    return [chart for chart in found if chart is not None]


def _watched_chart(rows: Sequence[Row], looks: Mapping[str, Look], figure: Metric, limit: float | None) -> Chart | None:
    drawn = lines_of(rows, figure.name)
    if not drawn:
        return None
    share = {"format": PERCENT, "zero": True} if figure.unit == SHARE else {}
    bent = {"log": True, "format": "~g", "tickCount": 5} if figure.chart == LOG and _spans_decades(drawn) else {}
    y = quantity("y", figure.unit, _flat_range(drawn, share=bool(share)), **(share | bent))
    spec = lines(drawn, looks, quantity("x", "step"), y)
    spec["layer"] += [] if limit is None else [limit_line(limit, y=y)]
    return Chart(f"watch-{figure.name.replace('/', '-')}", figure.title, figure.meaning, spec, rows=rows_of(drawn))


def _flat_range(drawn: Sequence[Line], *, share: bool) -> tuple[float, float] | None:
    """Return the ends of an axis for curves of one constant value, which span none; else None."""
    known = {y for line in drawn for y in line.ys if y is not None}
    if len(known) > 1 or (share and known != {0}):
        return None
    return (0.0, 1.0) if share else (min(known) - 1, max(known) + 1)


def _spans_decades(drawn: Sequence[Line]) -> bool:
    """True if positive values span a factor of thirty, where a linear axis would hide the small ones."""
    known = [y for line in drawn for y in line.ys if y is not None]
    return min(known) > 0 and max(known) / min(known) >= 30
