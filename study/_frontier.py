"""README's pictures: the memory that training takes, and the loss that one byte costs.

``python study/make.py --front`` draws them for light and for dark pages, each narrow
enough for a phone. The memory is that of ``docs/_cards.py``, and the losses are the
study's. Both are descriptions in Vega-Lite: layers of marks, each with its own data.
"""

import json
from collections.abc import Callable, Iterable
from math import atan2, degrees
from pathlib import Path
from typing import Any, NamedTuple

from _cards import TOKENS, best_first, needed
from _compared import result_label
from _generated import digest
from _study import against_baseline

from nanogpt_bench.report.results import Result
from nanogpt_bench.report.row_styles import RULE_ORDER, THEMES, theme_colours
from nanogpt_bench.report.svg_figures import svg
from nanogpt_bench.report.vega_spec import (
    CHART_CONFIG,
    data_layer,
    named_colour,
    quantity,
    with_colours,
)

PICTURES_FOLDER = Path(__file__).parent.parent / "docs" / "_static"
#: GitHub's dark background, which differs from that of a report's dark theme
DARK_PAGE = "#0D1117"
WIDTH, HEIGHT = 372, 236
#: the picture of losses is narrower by its axis and the one of memory higher, so that
#: the two are of one size
LOSS_WIDTH, MEMORY_HEIGHT = 346, HEIGHT + 17
Spec = dict[str, Any]

#: the rule whose grey all float weights have
FLOATS = "fp32"
MODEL = "Llama-3.1-8B"
#: GB of a graphics card
CARD = 24


class Bar(NamedTuple):
    """A bar of the picture of memory."""

    name: str
    #: the rule whose colour it has
    rule: str


#: by the way of training in `_cards`
BARS = {
    "bfloat16, 8-bit AdamW": Bar("bfloat16 + 8-bit AdamW", FLOATS),
    "bfloat16, 8-bit AdamW, steps in backward": Bar(
        "bfloat16 + 8-bit AdamW, steps in backward", FLOATS
    ),
    "bfloat16 stochastic, Adafactor, steps in backward": Bar(
        "bfloat16 + Adafactor, steps in backward", FLOATS
    ),
    "one byte, AdamW, steps in backward": Bar("one byte + AdamW, steps in backward", "stochastic"),
    "one byte, Muon, steps in backward": Bar(
        "one byte + Muon, steps in backward", "muon-stochastic"
    ),
    "one byte, Lion, steps in backward": Bar("one byte + Lion, steps in backward", "stochastic"),
    "one byte, Adafactor, steps in backward": Bar(
        "one byte + Adafactor, steps in backward", "stochastic"
    ),
}


def memory() -> Spec:
    """Return bars of the memory by way of training, and a line at that of a card.

    The part of a bar that is activations is paler.
    """
    bars = _bars_of_memory()
    card_line = [{"peak": CARD, "low": -8, "high": MEMORY_HEIGHT, "name": f"{CARD} GB card"}]
    x = quantity("peak", None, (0, 58), grid=False, domain=False, ticks=False, labels=False)
    across = {"y": _pixels("low"), "y2": {"field": "high"}}
    colour = _colour_of_rule({bar["rule"] for bar in bars})
    dashed = {"type": "rule", "strokeWidth": 2, "strokeDash": [5, 4], "color": named_colour("bad")}
    layers = [
        data_layer(bars, {"type": "rect"}, x=x, x2={"datum": 0}, **across, color=colour),
        data_layer(
            bars,
            {"type": "rect", "opacity": 0.4},
            x=x | {"field": "all"},
            x2={"field": "peak"},
            **across,
            color=colour,
        ),
        data_layer(card_line, dashed, x=x, **across),
        *_words(bars, x={"value": 0}, y=_pixels("label"), text={"field": "name"}),
        *_words(
            bars,
            dx=6,
            bold=True,
            x=x | {"field": "end"},
            y=_pixels("middle"),
            text={"field": "text"},
        ),
        *_words(
            card_line,
            dx=6,
            bold=True,
            color=named_colour("bad"),
            x=x,
            y=_pixels("low"),
            text={"field": "name"},
        ),
    ]
    subtitle = [
        "GB at the peak, every weight trained, by arithmetic, best first.",
        f"Pale: activations and logits of {TOKENS:,} tokens.",
    ]
    return _picture(f"Memory to train {MODEL}", subtitle, layers, height=MEMORY_HEIGHT)


def _bars_of_memory() -> list[Spec]:
    """Return the bars with sizes in GB and places in pixels from the top, best first."""
    ways = [way for way in best_first(MODEL) if way in BARS]
    bars = []
    for place, way in enumerate(ways):
        sizes = needed(MODEL, way)
        total = sizes.peak / 1e9
        top = place * MEMORY_HEIGHT / len(ways)
        bars.append(
            {
                "name": BARS[way].name,
                "rule": BARS[way].rule,
                "peak": total - (sizes.activations + sizes.logits) / 1e9,
                "all": total,
                "y": top,
                "label": top + 6,
                "low": top + 16,
                "middle": top + 24,
                "high": top + 32,
                "text": f"{total:.1f}",
                "end": max(total, CARD) if total > CARD - 6 else total,
            }
        )
    return bars


#: the rule from whose loss, in float32, all losses are counted
REFERENCE = "fp32"


class LossRow(NamedTuple):
    """A row of the picture of losses."""

    #: its results files
    files: str
    #: the rule in float32 from which its arrow starts
    floats: str
    #: the rule whose colour it has
    rule: str


LOSS_ROWS = {
    "E4M3 nearest": LossRow("study_q16_adamw", "fp32", "nearest"),
    "E4M3 stochastic-8bit": LossRow("study_q16_adamw", "fp32", "stochastic"),
    "E2M5 muon-stochastic": LossRow("study_q16_adamw", "muon", "muon-stochastic"),
    "bf16-stochastic": LossRow("study_q16_adamw", "fp32", FLOATS),
}


class Label(NamedTuple):
    """Words in the picture of losses; they begin (left) or end (right) at a point."""

    x: float
    y: float
    words: str
    rule: str
    side: str


LABELS = (
    Label(8.7, 0.140, "AdamW in E4M3,", "nearest", "right"),
    Label(8.7, 0.105, "rounded to nearest", "nearest", "right"),
    Label(0.3, -0.240, "Muon in E2M5", "muon-stochastic", "left"),
    Label(0.3, -0.048, "AdamW in E4M3", "stochastic", "left"),
    Label(4.3, 0.032, "bfloat16", FLOATS, "left"),
    Label(12.9, -0.190, "Muon, float32", FLOATS, "right"),
    Label(12.9, -0.036, "AdamW, float32", FLOATS, "right"),
)
#: ends of the axes: bytes per parameter, and nats per byte
X_ENDS, Y_ENDS = (0, 13), (-0.26, 0.18)


class LossPoint(NamedTuple):
    """A row on a text; AdamW in float32 is at a loss of 0."""

    #: bytes per parameter, the row's and those of its optimizer in float32
    size: float
    float_size: float
    #: the loss of its optimizer in float32 minus AdamW's
    float_mean: float
    #: its loss minus that of AdamW in float32, and the ends of its interval
    mean: float
    low: float
    high: float


def loss_points() -> dict[str, dict[str, LossPoint]]:
    """Return the points of the picture of losses, by text and row."""
    points: dict[str, dict[str, LossPoint]] = {}
    for label, row in LOSS_ROWS.items():
        for text, results in against_baseline(row.files, REFERENCE):
            by_label = {result_label(result): result for result in results}
            point = _loss_point(by_label[label], by_label[row.floats])
            points.setdefault(text, {})[label] = point
    return points


def _loss_point(result: Result, floats: Result) -> LossPoint:
    difference = result.difference
    assert difference is not None
    figures = (
        result.bytes_per_parameter,
        floats.bytes_per_parameter,
        # None for AdamW itself
        floats.difference.mean if floats.difference else 0,
        difference.mean,
        difference.low,
        difference.high,
    )
    return LossPoint(*(round(figure or 0.0, 3) for figure in figures))


def loss() -> Spec:
    """Return arrows from float32 to one byte, one for each text.

    They have 95% intervals at their ends. Floats are marks without an arrow.
    """
    points = loss_points()
    arrows, marks = [], []
    for text, point_by_row in points.items():
        for label, point in point_by_row.items():
            end = _arrow_end(text, LOSS_ROWS[label].rule, point)
            if end["rule"] == FLOATS:
                marks.append(end)
            else:
                arrows.append(end)
    float_points = sorted({(end["begun"], end["from"]) for end in arrows})
    starts = [{"x": size, "y": mean} for size, mean in float_points]

    x = quantity(
        "x",
        "bytes per parameter, weights and optimizer state",
        X_ENDS,
        values=[*range(0, 13, 2)],
        grid=False,
    )
    y = quantity("y", None, Y_ENDS, values=[-0.2, -0.1, 0, 0.1], format=".1~f")
    interval = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    whole_arrow = {
        "x": x | {"field": "begun"},
        "y": y | {"field": "from"},
        "x2": {"field": "x"},
        "y2": {"field": "y"},
    }
    colour = _colour_of_rule({FLOATS, *(end["rule"] for end in arrows)})
    dashes = {
        "field": "text",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": [*points], "range": [[1, 0], [4, 3]]},
    }
    angle = {"field": "angle", "type": "quantitative", "scale": None}
    point_mark = {"type": "point", "filled": True, "opacity": 1}
    arrow_head = point_mark | {"shape": "triangle-up", "size": 90}
    circle = point_mark | {"size": 70, "color": named_colour("muted")}
    diamond = point_mark | {"shape": "diamond", "size": 70, "color": named_colour("muted")}
    layers = [
        data_layer([{"y": 0}], {"type": "rule", "color": named_colour("muted")}, y=y),
        data_layer(
            arrows,
            {"type": "rule", "strokeWidth": 2},
            color=colour,
            strokeDash=dashes,
            **whole_arrow,
        ),
        data_layer(
            [*arrows, *marks],
            {"type": "rule", "strokeWidth": 1.5},
            x=x,
            color=colour,
            **interval,
        ),
        data_layer(arrows, arrow_head, x=x, y=y, color=colour, angle=angle),
        data_layer(starts, circle, x=x, y=y),
        data_layer(marks, diamond, x=x, y=y),
    ]
    for side in ("left", "right"):
        labels = [label._asdict() for label in LABELS if label.side == side]
        layers += _words(
            labels, align=side, bold=True, x=x, y=y, color=colour, text={"field": "words"}
        )
    subtitle = [
        "Loss minus that of AdamW in float32, nats per byte.",
        "Arrows: to one byte. Solid: docstrings. Dashed: EU law.",
    ]
    title = "A quarter of the bytes, nearly the same loss"
    return _picture(title, subtitle, layers, width=LOSS_WIDTH)


def _arrow_end(text: str, rule: str, point: LossPoint) -> Spec:
    """Return the end of an arrow, with the angle of its head."""
    rise = (point.mean - point.float_mean) * HEIGHT / (Y_ENDS[1] - Y_ENDS[0])
    run = (point.size - point.float_size) * LOSS_WIDTH / (X_ENDS[1] - X_ENDS[0])
    return {
        "x": point.size,
        "y": point.mean,
        "low": point.low,
        "high": point.high,
        "begun": point.float_size,
        "from": point.float_mean,
        "rule": rule,
        "angle": 90 - degrees(atan2(rise, run)),
        "text": text,
    }


def _colour_of_rule(rules: Iterable[str]) -> Spec:
    """Return a scale from rules to the colours that reports give them; floats are grey."""
    domain = sorted(rules)
    colours = [
        named_colour("muted" if rule == FLOATS else RULE_ORDER.index(rule)) for rule in domain
    ]
    return {
        "field": "rule",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": domain, "range": colours},
    }


def _pixels(field: str) -> Spec:
    return {"field": field, "type": "quantitative", "scale": None, "axis": None}


def _words(
    rows: list[Spec], *, align: str = "left", dx: int = 0, bold: bool = False, **encoding: Any
) -> list[Spec]:
    """Return layers of text with a wide outline in the colour of the page.

    So lines behind the text end before it. The colour is a channel of `encoding`, or
    that of a mark.
    """
    colour = encoding.pop("color", named_colour("ink"))
    text = {
        "type": "text",
        "align": align,
        "baseline": "middle",
        "dx": dx,
        "fontSize": 13,
        "fontWeight": "bold" if bold else "normal",
    }
    outline = {
        "stroke": named_colour("page"),
        "strokeWidth": 4,
        "strokeJoin": "round",
        "color": named_colour("page"),
    }
    behind = data_layer(rows, text | outline, **encoding)
    if "field" in colour:
        return [behind, data_layer(rows, text, **encoding, color=colour)]
    return [behind, data_layer(rows, text | {"color": colour}, **encoding)]


def _picture(
    title: str, subtitle: list[str], layers: list[Spec], width: int = WIDTH, height: int = HEIGHT
) -> Spec:
    """Return a picture's description, so wide that two fit side by side in README."""
    head = {
        "text": title,
        "subtitle": subtitle,
        "fontSize": 15,
        "subtitleFontSize": 12,
        "offset": 16,
        "subtitleColor": named_colour("muted"),
        "subtitlePadding": 5,
        "frame": "bounds",
    }
    return {"title": head, "width": width, "height": height, "layer": layers}


PICTURES: dict[str, Callable[[], Spec]] = {"memory": memory, "frontier": loss}


def themed(name: str) -> dict[Path, Spec]:
    """Return a picture's descriptions by file, one for light and one for dark pages."""
    spec = {**PICTURES[name](), "config": CHART_CONFIG, "padding": 8}
    backgrounds = {"light": THEMES["light"]["page"], "dark": DARK_PAGE}
    paths = {"light": PICTURES_FOLDER / f"{name}.svg", "dark": PICTURES_FOLDER / f"{name}-dark.svg"}
    specs = {}
    for theme, path in paths.items():
        background = backgrounds[theme]
        colours = theme_colours(theme) | {"page": background}
        specs[path] = with_colours(spec, colours) | {"background": background}
    return specs


def mark(spec: Spec) -> str:
    """Return a comment with the digest of the description that a picture was drawn from."""
    return f"<!-- made from {digest(json.dumps(spec, sort_keys=True))} -->"


def write_pictures() -> None:
    """Draw every picture for light and for dark pages."""
    for name in PICTURES:
        for path, spec in themed(name).items():
            path.write_text(f"{svg(spec)}\n{mark(spec)}\n", encoding="utf-8")
