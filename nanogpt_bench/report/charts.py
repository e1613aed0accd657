"""All charts: curves over the steps, learning rates, formats by layer, and parallel
coordinates.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanogpt_bench.config.metrics import ELAPSED, LOG, SHARE, TRAIN_LOSS, VAL_LOSS, Metric
from nanogpt_bench.report.chart import (
    PERCENT,
    Chart,
    Line,
    Spec,
    Style,
    category,
    curves,
    ink,
    limit_line,
    lines,
    names,
    of_row,
    over,
    quantity,
)
from nanogpt_bench.report.columns import COLUMNS
from nanogpt_bench.report.results import FIGURES
from nanogpt_bench.report.rows import (
    Row,
    flat,
    learning_rate,
    loss_unit,
    row_label,
    row_runs,
    setting_without,
)
from nanogpt_bench.report.studies import SensitivityMap
from nanogpt_bench.runs.load import MAX_POINTS, Run, decimate, smooth, smoothing_window
from nanogpt_bench.runs.read import finite

BY_STEP, BY_TIME = "step", ELAPSED.name
FEWEST_POINTS, MOST_POINTS = 60, 50 * MAX_POINTS  # of a curve, and of all curves of a chart
#: kinds of alerts about a rising loss: today's name, and an earlier one
EARLY_DIVERGENCE = ("divergence", "early_divergence")
#: titles of namespaces that differ from the capitalised name
TITLES = {"grad": "Gradients", "quant": "Ranges", "val": "Labels"}
LONGEST_MARK = 18
RATE_KEYS = frozenset({"optimizer.lr", "optimizer.float_lr"})
MOST_SETTINGS = 5
# Settings without an axis of their own: format, rule, rate and seed are shown
# otherwise, or the setting names a place.
LEFT_OUT = frozenset(
    {
        "rule",
        "seed",
        "data.seed",
        "model.seed",
        "data.dir",
        "optimizer.lr",
        "optimizer.float_lr",
        "runtime.threads",
    }
)
ABOVE = 1.08  # the place of a missing value, above the axis


def lines_of(
    rows: Sequence[Row],
    key: str,
    against: str = BY_STEP,
    *,
    smoothed: bool = False,
    points: int = MAX_POINTS,
) -> list[Line]:
    """Return the thinned curve of `key` for every run that has it, `smoothed` if the
    curve is noisy.

    With more than fifty runs each gets fewer than `points`, so that the whole is
    bounded.
    """
    limit = min(
        points, max(FEWEST_POINTS, MOST_POINTS // max(1, sum(len(row.runs) for row in rows)))
    )
    drawn = []
    for row, run in row_runs(rows):
        xs, ys = run.curve(key, against)
        if smoothed:
            ys = smooth(ys, smoothing_window(len(ys)))
        places = decimate(len(xs), limit)
        drawn.append(Line(row.label, run.seed, [xs[i] for i in places], [ys[i] for i in places]))
    return [line for line in drawn if any(y is not None for y in line.ys)]


def _marks(rows: Sequence[Row], drawn: Sequence[Line], against: str) -> list[dict[str, Any]]:
    """The first alert of divergence and the end of a failed run, as points on the runs'
    curves.
    """
    by_run = {(line.label, line.seed): line for line in drawn}
    found = []
    for row, run in row_runs(rows):
        if (line := by_run.get((row.label, run.seed))) is None:
            continue
        early = next((alert for alert in run.alerts if alert.kind in EARLY_DIVERGENCE), None)
        moments = [(early.step, f"divergence found at step {early.step}")] if early else []
        if run.status == "failed" and run.last_step is not None:
            moments.append((run.last_step, f"failed at step {run.last_step}"))
        for step, text in moments:
            if place := _place(line, run, step, against):
                found.append(
                    {"row": row.label, "x": place[0], "y": place[1], "text": f"{row.label}: {text}"}
                )
    return found


def _place(line: Line, run: Run, step: int, against: str) -> tuple[float, float] | None:
    """The place of a step on the curve's axis, and the last known value up to there."""
    before = [x for at, x in zip(*run.curve(against), strict=True) if at <= step and x is not None]
    known = [
        y
        for x, y in zip(line.xs, line.ys, strict=True)
        if before and y is not None and x <= before[-1]
    ]
    return (before[-1], known[-1]) if known else None


def loss_range(drawn: Sequence[Line]) -> tuple[float, float] | None:
    """Return the ends of the loss axis: the lowest loss, and the highest after a sixth
    of the steps.

    All runs fall from ln(vocabulary) in the first steps; an axis up to there would
    compress the part that differs.
    """
    last = max((line.xs[-1] for line in drawn if line.xs), default=0.0)
    known = [
        (x, y) for line in drawn for x, y in zip(line.xs, line.ys, strict=True) if y is not None
    ]
    late = [y for x, y in known if x >= last / 6]
    if not late:
        return None
    bottom, top = min(late), max(late)
    margin = 0.04 * (top - bottom) or 0.05
    return bottom - margin, top + margin


def loss_charts(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Chart]:
    """Return the charts of validation and training loss, by step and by wall-clock,
    that have data.
    """
    charts: list[Chart] = []
    for name, metric in (("val", VAL_LOSS), ("train", TRAIN_LOSS)):
        for against, axis, words in (
            (BY_STEP, "step", "by step"),
            (BY_TIME, "seconds", "by wall-clock"),
        ):
            smoothed = metric is TRAIN_LOSS
            drawn = lines_of(rows, metric.name, against, smoothed=smoothed)
            caption = (
                "Exponential moving average over the steps."
                if smoothed
                else "On the same held-out batches."
            )
            if drawn:
                x, y = quantity("x", axis), quantity("y", loss_unit(rows), loss_range(drawn))
                spec = lines(drawn, styles, x, y, marked=not smoothed)
                if marks := _marks(rows, drawn, against):
                    diamond = {
                        "type": "point",
                        "shape": "diamond",
                        "size": 150,
                        "strokeWidth": 2.5,
                        "filled": False,
                    }
                    events = {"color": of_row("color", styles), "tooltip": {"field": "text"}}
                    spec["layer"].append(over(marks, diamond, x=x, y=y, **events))
                title = f"{metric.title} {words}"
                charts.append(
                    Chart(f"{name}-{axis}", title, caption, spec, 380, rows=rows_of(drawn))
                )
    return charts


def rows_of(drawn: Sequence[Line]) -> tuple[str, ...]:
    """Return the rows of curves, each once."""
    return tuple(dict.fromkeys(line.label for line in drawn))


def stall_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Chart]:
    """Return the chart of the stall of the rows in which it is a failure, by each
    storage's metric; [] without any.
    """
    drawn = []
    for row in rows:
        metric = next(
            (run.stall_metric for run in row.runs if run.stall_counts and run.stall_metric), None
        )
        drawn += lines_of([row], metric) if metric is not None else []
    spec = lines(
        drawn,
        styles,
        quantity("x", "step"),
        quantity("y", "share of weights", (-0.02, 1.04), format=".0%"),
    )
    title = "Stall: weights a requested update did not move"
    return [Chart("stall", title, "", spec, 380, wide=True, rows=rows_of(drawn))] if drawn else []


def watched_charts(
    rows: Sequence[Row],
    styles: Mapping[str, Style],
    figures: Sequence[Metric],
    limits: Mapping[str, float],
) -> list[Chart]:
    """Return a chart for each of `figures` that some run recorded; `limits` are dotted
    lines, by name.
    """
    recorded = {key for row in rows for run in row.runs for key in run.metrics.names}
    charts = []
    for metric in figures:
        if metric.name not in recorded or not (drawn := lines_of(rows, metric.name)):
            continue
        known = [y for line in drawn for y in line.ys if y is not None]
        # If positive values span a factor of thirty, a linear axis would hide the small
        # ones.
        bent = metric.chart == LOG and min(known) > 0 and max(known) / min(known) >= 30
        share = metric.unit == SHARE
        axis: Spec = {"format": PERCENT, "zero": True} if share else {}
        axis |= {"log": True, "format": "~g", "tickCount": 5} if bent else {}
        y = quantity("y", metric.unit, _flat_range(set(known), share=share), **axis)
        spec = lines(drawn, styles, quantity("x", "step"), y)
        spec["layer"] += [limit_line(limits[metric.name], y=y)] if metric.name in limits else []
        name = f"watch-{metric.name.replace('/', '-')}"
        charts.append(Chart(name, metric.title, metric.meaning, spec, rows=rows_of(drawn)))
    return charts


def _flat_range(known: set[float], *, share: bool) -> tuple[float, float] | None:
    """The ends of an axis for curves that all have the same constant value; else None."""
    if len(known) > 1 or (share and known != {0}):
        return None
    return (0.0, 1.0) if share else (min(known) - 1, max(known) + 1)


def sensitivity_charts(studies: Sequence[SensitivityMap]) -> list[Chart]:
    """Return a heat map for each table: the loss gap with one layer pattern alone
    quantised.
    """
    return [_sensitivity_chart(f"sensitivity-{i}", study) for i, study in enumerate(studies)]


def _sensitivity_chart(name: str, study: SensitivityMap) -> Chart:
    reach = (
        max((abs(gap) for line in study.gap for gap in line if gap is not None), default=0.0) or 1.0
    )
    patterns, formats = (list(map(category, found)) for found in (study.patterns, study.formats))
    texts = [
        [study.ending(i, j) if gap is None else f"{gap:+z.3f}" for j, gap in enumerate(line)]
        for i, line in enumerate(study.gap)
    ]
    values = [
        {"pattern": pattern, "format": formats, "gap": line, "text": texts[i]}
        for i, (pattern, line) in enumerate(zip(patterns, study.gap, strict=True))
    ]
    places = {
        "x": names(
            "format",
            formats,
            orient="top",
            labelAngle=0,
            ticks=False,
            domain=False,
            labelOverlap=True,
        ),
        "y": names("pattern", patterns, ticks=False, domain=False),
    }
    scale = {"domain": [-reach, 0, reach], "range": ink("diverging"), "interpolate": "rgb"}
    bar = {
        "title": None,
        "gradientThickness": 10,
        "tickCount": 5,
        "gradientLength": 34 * len(study.patterns),
    }
    colour = {"field": "gap", "type": "quantitative", "scale": scale, "legend": bar}
    # The ends of the scale are dark in the light theme and light in the dark one.
    far = {"test": f"abs(datum.gap) > {0.6 * reach!r}", "value": ink("page")}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["format", "gap", "text"]}],
        "layer": [
            {
                "transform": [{"filter": "isValid(datum.gap)"}],
                "mark": "rect",
                "encoding": {**places, "color": colour},
            },
            {
                "mark": {"type": "text", "limit": 90},
                "encoding": {
                    **places,
                    "text": {"field": "text"},
                    "color": {"condition": far, "value": ink("ink")},
                },
            },
        ],
    }
    of = f"; the weights of {study.of}, rounded after the training" if study.of else ""
    loss = "Validation loss" if study.of else "Final validation loss"
    words = (
        f"{loss} above that of the unquantised model, in nats; one pattern at a time in a "
        f"format{f' ({study.operand}s)' if study.operand else ''}{f', under {study.rule}' if study.rule else ''}{of}."
    )
    height = 50 + 34 * len(study.patterns)
    return Chart(name, "Which format works where", words, spec, height, wide=True, drag="")


def rate_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> Chart | None:
    """Return final validation loss by learning rate, with crosses along the top for
    failed runs.

    A curve joins the runs of one setting that has two learning rates or more, in the
    style of its first row; losses are means over the seeds.
    """
    values: list[dict[str, Any]] = []
    crosses: list[dict[str, Any]] = []
    for i, (label, group) in enumerate(_by_rate(rows)):
        row, points = group[0][0].label, dict[str, list[Any]](x=[], y=[])
        for rate in sorted({rate for _, _, rate in group}):
            losses = [FIGURES["final_val_loss"](run) for _, run, at in group if at == rate]
            known = [loss for loss in losses if loss is not None]
            points["x"].append(rate)
            points["y"].append(statistics.fmean(known) if known else None)
            if failed := len(losses) - len(known):
                text = f"{label}, learning rate {rate:.3g}: {failed} failed"
                crosses.append({"row": row, "x": rate, "text": text})
        values.append({"row": row, "name": label, "line": i, "few": True, **points})
    known = [y for value in values for y in value["y"] if y is not None]
    if not known:
        return None
    top = max(known) + 0.12 * ((max(known) - min(known)) or 1.0)
    x = quantity("x", "learning rate", log=True, format=".3~g")
    y = quantity("y", f"final val loss, {loss_unit(rows)}")
    spec = curves(values, styles, x, y)
    if crosses:
        cross = {
            "type": "point",
            "shape": "cross",
            "angle": 45,
            "size": 90,
            "filled": True,
            "opacity": 1,
        }
        places = [
            {"row": each["row"], "x": each["x"], "y": top, "text": each["text"]} for each in crosses
        ]
        colour = of_row("color", styles)
        spec["layer"].append(over(places, cross, x=x, y=y, color=colour, tooltip={"field": "text"}))
    words = "Final validation loss, mean over seeds; a cross at the top is a learning rate at which runs failed."
    shown = tuple(dict.fromkeys(value["row"] for value in values))
    return Chart("rates", "Loss by learning rate", words, spec, 400, wide=True, rows=shown)


def _by_rate(rows: Sequence[Row]) -> list[tuple[str, list[tuple[Row, Run, float]]]]:
    """The runs of each setting with several learning rates, under labels, numbered
    where several settings share one.
    """
    groups: dict[str, list[tuple[Row, Run, float]]] = {}
    for row, run in row_runs(rows):
        if run.config and (rate := learning_rate(run)) is not None:
            groups.setdefault(setting_without(run, RATE_KEYS), []).append((row, run, rate))
    several = [group for group in groups.values() if len({rate for _, _, rate in group}) > 1]
    plain = [row_label(group[0][0].rule, group[0][0].format) for group in several]
    counts = [
        f" ({plain[: i + 1].count(label)})" if plain.count(label) > 1 else ""
        for i, label in enumerate(plain)
    ]
    return [
        (label + count, group) for label, count, group in zip(plain, counts, several, strict=True)
    ]


#: an axis: its name, its marks at places from 0 to 1, and the place of each run
Axis = tuple[str, list[tuple[float, str]], list[float]]


def parallel_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> Chart | None:
    """Return parallel coordinates, one line per run across settings and results; None
    below two runs or three axes.
    """
    drawn = row_runs(rows)
    axes = _axes([run for _, run in drawn])
    if len(drawn) < 2 or len(axes) < 3:
        return None
    x = quantity(
        "x", None, (-0.1, len(axes) - 0.4), labels=False, ticks=False, grid=False, domain=False
    )
    y = quantity(
        "y", None, (-0.05, ABOVE + 0.16), labels=False, ticks=False, grid=False, domain=False
    )
    values = []
    for i, (row, run) in enumerate(drawn):
        points = {"x": list(range(len(axes))), "y": [places[i] for _, _, places in axes]}
        values.append({"row": row.label, "name": run.name, "line": i, "few": False, **points})
    spec = curves(values, styles, x, y)
    lines = [{"x": place, "y": 0, "end": 1} for place in range(len(axes))]
    heads = [
        {"x": place, "y": ABOVE + 0.11, "text": name} for place, (name, _, _) in enumerate(axes)
    ]
    marks = [
        {
            "x": place,
            "y": height,
            "text": text if len(text) <= LONGEST_MARK else text[: LONGEST_MARK - 1] + "…",
        }
        for place, (_, found, _) in enumerate(axes)
        for height, text in found
    ]
    head = {
        "type": "text",
        "fontWeight": "bold",
        "align": "left",
        "limit": 140,
        "color": ink("ink"),
    }
    # An outline in the page's colour, so that no line crosses the text.
    ground = {
        "type": "text",
        "align": "left",
        "dx": 5,
        "stroke": ink("page"),
        "strokeWidth": 4,
        "opacity": 0.85,
    }
    text = {"x": x, "y": y, "text": {"field": "text"}}
    spec["layer"] = [
        over(lines, {"type": "rule", "color": ink("ink")}, x=x, y=y, y2={"field": "end"}),
        *spec["layer"],
        over(marks, ground, **text),
        over(marks, {"type": "text", "align": "left", "dx": 5, "color": ink("ink")}, **text),
        over(heads, head, **text),
    ]
    words = "One line per run, in its row's colour. Above an axis pass runs without a value on it, such as failed ones."
    shown, least = tuple(dict.fromkeys(row.label for row, _ in drawn)), 150 * len(axes)
    return Chart(
        "parallel", "All runs across all axes", words, spec, 440, wide=True, least=least, rows=shown
    )


def _axes(runs: Sequence[Run]) -> list[Axis]:
    """The axes in which runs differ: format, rule, rate, settings that vary within a
    rule and format, results.
    """
    configs = [flat(run.config) for run in runs]
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run, config in zip(runs, configs, strict=True):
        by_kind.setdefault((run.rule, run.format), []).append(config)
    keys = dict.fromkeys(key for config in configs for key in config if key not in LEFT_OUT)
    varying = [
        k
        for k in keys
        if any(len({str(c.get(k)) for c in group}) > 1 for group in by_kind.values())
    ]
    columns: dict[str, list[Any]] = {
        "format": [run.format for run in runs],
        "rule": [run.rule for run in runs],
        "learning rate": [run.summary.get("lr") for run in runs],
        **{
            key.rsplit(".", 1)[-1]: [c.get(key) for c in configs] for key in varying[:MOST_SETTINGS]
        },
        **{
            name: [FIGURES[of](run) for run in runs]
            for _, name, of in sorted(
                (c.axis.place, c.axis.name, c.axis.figure) for c in COLUMNS if c.axis
            )
        },
    }
    return [axis for name, values in columns.items() if (axis := _axis(name, values)) is not None]


def _axis(name: str, values: Sequence[Any]) -> Axis | None:
    """An axis of numbers if all values are numbers, else of words; None if all are
    equal.
    """
    known = [value for value in values if value is not None]
    if len({str(value) for value in known}) < 2:
        return None
    if any(finite(value) is None for value in known):
        words = list(dict.fromkeys(str(value) for value in known))
        place = {word: i / (len(words) - 1) for i, word in enumerate(words)}
        marks = [(place[word], word) for word in words]
        return name, marks, [ABOVE if value is None else place[str(value)] for value in values]
    low, high = float(min(known)), float(max(known))
    logarithmic = low > 0 and high / low >= 30
    bend: Callable[[float], float] = math.log if logarithmic else float
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2

    def place_of(value: float) -> float:
        return (bend(value) - bend(low)) / (bend(high) - bend(low))

    marks = [
        (place_of(v), f"{v:,.0f}" if 1000 <= abs(v) < 1e6 else f"{v:.3g}")
        for v in (low, middle, high)
    ]
    return name, marks, [ABOVE if value is None else place_of(float(value)) for value in values]
