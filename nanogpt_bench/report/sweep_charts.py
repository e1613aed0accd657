"""The charts of what runs say together: which format works where, learning rates, and all runs across all axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanogpt_bench.report.chart import Chart, Look, Spec, category, curves, ink, names, of_row, over, quantity
from nanogpt_bench.report.parallel import NOTHING, Parallel, parallel
from nanogpt_bench.report.rates import RateCurve, rate_curves, rate_ticks
from nanogpt_bench.report.rows import Row, loss_unit, row_label
from nanogpt_bench.report.studies import LearningRateLimit, Sensitivity

LONGEST_MARK = 18


def sensitivity_charts(studies: Sequence[Sensitivity]) -> list[Chart]:
    """Which format works where: the loss gap when one layer pattern alone is quantised."""
    return [_sensitivity_chart(f"sensitivity-{i}", study) for i, study in enumerate(studies)]


def _sensitivity_chart(name: str, study: Sensitivity) -> Chart:
    reach = max((abs(gap) for line in study.gap for gap in line if gap is not None), default=0.0) or 1.0
    patterns, formats = (list(map(category, found)) for found in (study.patterns, study.formats))
    values = [
        {"pattern": pattern, "format": formats, "gap": line, "text": _cell_texts(study, i)}
        for i, (pattern, line) in enumerate(zip(patterns, study.gap, strict=True))
    ]
    places = {
        "x": names("format", formats, orient="top", labelAngle=0, ticks=False, domain=False, labelOverlap=True),
        "y": names("pattern", patterns, ticks=False, domain=False),
    }
    scale = {"domain": [-reach, 0, reach], "range": ink("diverging"), "interpolate": "rgb"}
    bar = {"title": None, "gradientThickness": 10, "tickCount": 5, "gradientLength": 34 * len(study.patterns)}
    colour = {"field": "gap", "type": "quantitative", "scale": scale, "legend": bar}
    # The ends of the scale are dark on a light page and light on a dark one.
    far = {"test": f"abs(datum.gap) > {0.6 * reach!r}", "value": ink("page")}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["format", "gap", "text"]}],
        "layer": [
            {"transform": [{"filter": "isValid(datum.gap)"}], "mark": "rect", "encoding": {**places, "color": colour}},
            {
                "mark": {"type": "text", "limit": 90},
                "encoding": {**places, "text": {"field": "text"}, "color": {"condition": far, "value": ink("ink")}},
            },
        ],
    }
    of = f"; the weights of {study.of}, rounded after the training" if study.of else ""
    loss = "Validation loss" if study.of else "Final validation loss"
    words = (
        f"{loss} above that of the unquantised model, in nats; one pattern at a time in a format"
        f"{f' ({study.operand}s)' if study.operand else ''}{f', under {study.rule}' if study.rule else ''}{of}."
    )
    height = 50 + 34 * len(study.patterns)
    return Chart(name, "Which format works where", words, spec, height, wide=True, drag="")


def _cell_texts(study: Sensitivity, pattern: int) -> list[str]:
    """The gaps of one pattern, and how the runs ended where they left no loss."""
    return [study.ending(pattern, j) if gap is None else f"{gap:+z.3f}" for j, gap in enumerate(study.gap[pattern])]


def rate_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Final validation loss over the learning rate; crosses along the top where no run came to its end."""
    found = rate_curves(rows)
    losses = [point.loss for curve in found for point in curve.points if point.loss is not None]
    if not losses:
        return None
    top = max(losses) + 0.12 * ((max(losses) - min(losses)) or 1.0)
    x = _rate_axis(point.rate for curve in found for point in curve.points)
    y = quantity("y", f"final val loss, {loss_unit(rows)}")
    spec = curves([_rate_curve(curve, i) for i, curve in enumerate(found)], looks, x, y)
    spec["layer"] += _crosses(found, looks, top, x, y)
    words = "Final validation loss, mean over seeds; a cross at the top is a learning rate at which runs failed."
    shown = tuple(dict.fromkeys(curve.row for curve in found))
    return Chart("rates", "Loss by learning rate", words, spec, 400, wide=True, rows=shown)


def _rate_axis(rates: Iterable[float]) -> Spec:
    known = list(rates)
    ends, ticks = (min(known) / 1.15, max(known) * 1.15), rate_ticks(known)
    return quantity("x", "learning rate", ends, log=True, values=ticks, format=".3~g", labelOverlap=False)


def _rate_curve(curve: RateCurve, place: int) -> dict[str, Any]:
    points = {"x": [point.rate for point in curve.points], "y": [point.loss for point in curve.points]}
    return {"row": curve.row, "name": curve.label, "line": place, "few": True, **points}


def _crosses(found: Sequence[RateCurve], looks: Mapping[str, Look], top: float, x: Spec, y: Spec) -> list[Spec]:
    values = [
        {
            "row": curve.row,
            "x": p.rate,
            "y": top,
            "text": f"{curve.label}, learning rate {p.rate:.3g}: {p.failed} failed",
        }
        for curve in found
        for p in curve.points
        if p.failed
    ]
    colour = of_row("color", looks)
    cross = {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True, "opacity": 1}
    return [over(values, cross, x=x, y=y, color=colour, tooltip={"field": "text"})] if values else []


def limit_chart(limits: Sequence[LearningRateLimit]) -> Chart | None:
    """Between which learning rates each format and rule becomes unstable."""
    shown = [limit for limit in limits if limit.stable or limit.unstable]
    if not shown:
        return None
    labels = [category(row_label(limit.rule, limit.format)) for limit in shown]
    x = _rate_axis(rate for limit in shown for rate in (limit.stable, limit.unstable) if rate)
    y = names("label", dict.fromkeys(labels), grid=True)
    ends = [
        {"label": label, "stable": limit.stable, "unstable": limit.unstable}
        for label, limit in zip(labels, shown, strict=True)
    ]
    dot = {"type": "point", "shape": "circle", "filled": True, "size": 100, "opacity": 1, "color": ink(2)}
    cross = dot | {"shape": "cross", "angle": 45, "color": ink(0)}
    spec = {
        "data": {"values": ends},
        "layer": [
            {
                "transform": [{"filter": "datum.stable && datum.unstable"}],
                "mark": {"type": "rule", "strokeWidth": 1.5, "color": ink("ink")},
                "encoding": {"x": x | {"field": "stable"}, "x2": {"field": "unstable"}, "y": y},
            },
            {"mark": dot, "encoding": {"x": x | {"field": "stable"}, "y": y, "tooltip": _rate_tip("stable")}},
            {"mark": cross, "encoding": {"x": x | {"field": "unstable"}, "y": y, "tooltip": _rate_tip("unstable")}},
        ],
    }
    words = "Found by bisection: the dot is the largest learning rate that held, the cross the smallest that did not."
    return Chart("limits", "Largest stable learning rate", words, spec, 50 + 26 * len(labels), wide=True, drag="")


def _rate_tip(field: str) -> list[Spec]:
    return [{"field": "label", "title": "row"}, {"field": field, "format": ".3~g"}]


def parallel_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Every run as a line across settings and outcomes."""
    found = parallel(rows)
    if found is None:
        return None
    count = len(found.axes)
    x = quantity("x", None, (-0.1, count - 0.4), labels=False, ticks=False, grid=False, domain=False)
    y = quantity("y", None, (-0.05, NOTHING + 0.16), labels=False, ticks=False, grid=False, domain=False)
    spec = curves([_run_line(found, i) for i in range(len(found.runs))], looks, x, y)
    axes = [{"x": place, "y": 0, "end": 1} for place in range(count)]
    heads = [{"x": place, "y": NOTHING + 0.11, "text": axis.name} for place, axis in enumerate(found.axes)]
    head = {"type": "text", "fontWeight": "bold", "align": "left", "limit": 140, "color": ink("ink")}
    # On a ground of the page's colour, so that lines do not run through the text.
    ground = {"type": "text", "align": "left", "dx": 5, "stroke": ink("page"), "strokeWidth": 4, "opacity": 0.85}
    text = {"x": x, "y": y, "text": {"field": "text"}}
    spec["layer"] = [
        over(axes, {"type": "rule", "color": ink("ink")}, x=x, y=y, y2={"field": "end"}),
        *spec["layer"],
        over(_axis_marks(found), ground, **text),
        over(_axis_marks(found), {"type": "text", "align": "left", "dx": 5, "color": ink("ink")}, **text),
        over(heads, head, **text),
    ]
    words = (
        "A line a run, coloured as its row. Above an axis passes what has no value there, such as a run that failed."
    )
    shown = tuple(dict.fromkeys(found.rows))
    return Chart("parallel", "All runs across all axes", words, spec, 440, wide=True, least=150 * count, rows=shown)


def _run_line(found: Parallel, index: int) -> dict[str, Any]:
    places = {"x": list(range(len(found.axes))), "y": [axis.places[index] for axis in found.axes]}
    return {"row": found.rows[index], "name": found.runs[index].name, "line": index, "few": False, **places}


def _axis_marks(found: Parallel) -> list[dict[str, Any]]:
    return [
        {"x": place, "y": height, "text": text if len(text) <= LONGEST_MARK else text[: LONGEST_MARK - 1] + "…"}
        for place, axis in enumerate(found.axes)
        for height, text in axis.marks
    ]
