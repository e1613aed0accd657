"""README's pictures: GB that training one model takes, and the loss that one byte costs
compared with float32.

``python study/make.py --front`` draws them for light and dark pages, each narrow enough
for a phone. The memory is computed by ``docs/_cards.py``; the losses are the study's.
"""

import json
from math import atan2, degrees
from pathlib import Path
from typing import Any

from _cards import TOKENS, activations, named, peaks
from _compared import short
from _generated import digest
from _study import against_baseline

from nanogpt_bench.report.results import Result
from nanogpt_bench.report.row_styles import RULE_ORDER, THEMES, theme_colours
from nanogpt_bench.report.svg_figures import svg
from nanogpt_bench.report.vega_spec import CONFIG, coloured, ink, over, quantity

FOLDER = Path(__file__).parent.parent / "docs" / "_static"
#: GitHub's dark background, which differs from that of a report's dark theme
DARK_PAGE = "#0D1117"
WIDTH, HEIGHT, TALLER = 372, 236, 17
Spec = dict[str, Any]

FLOATS = "fp32"
MODEL, CARD = "Llama-3.1-8B", 24
#: of each bar: its name, its way of training in `_cards.peaks`, and the rule whose
#: colour it has
BARS = (
    ("bfloat16 + 8-bit AdamW", "bfloat16, 8-bit AdamW", FLOATS),
    ("the same, steps in backward", "bfloat16, 8-bit AdamW, steps in backward", FLOATS),
    ("one byte + AdamW", "one-byte AdamW", "stochastic"),
    ("the same, steps in backward", "one-byte AdamW, steps in backward", "stochastic"),
    ("one byte + Muon, steps in backward", "one-byte Muon, steps in backward", "muon-stochastic"),
)


def memory() -> Spec:
    """A bar for each way of training, its part of activations paler, and a line at the
    memory of a graphics card.
    """
    model = named(MODEL)
    sizes, more = peaks(model), activations(model)
    height = HEIGHT + TALLER  # as high as the other picture with its axis
    step = height / len(BARS)
    rows = [
        {
            "name": name,
            "rule": rule,
            "peak": sizes[way] / 1e9,
            "all": (sizes[way] + more) / 1e9,
            "y": i * step,
        }
        for i, (name, way, rule) in enumerate(BARS)
    ]
    for row in rows:
        row |= {
            "label": row["y"] + 6,
            "low": row["y"] + 18,
            "high": row["y"] + 37,
            "middle": row["y"] + 28,
        }
        row |= {"text": f"{row['all']:.1f}", "end": max(row["all"], CARD)}
    x = quantity("peak", None, (0, 58), grid=False, domain=False, ticks=False, labels=False)
    colour = {
        "field": "rule",
        "type": "nominal",
        "legend": None,
        "scale": _colours({bar[2] for bar in BARS}),
    }
    bar = {"y": _pixels("low"), "y2": {"field": "high"}, "color": colour}
    line = [{"peak": CARD, "low": -8, "high": height, "name": f"{CARD} GB card"}]
    across = {"x": x, "y": _pixels("low"), "y2": {"field": "high"}}
    head = {"x": x, "y": _pixels("low"), "text": {"field": "name"}}
    layers = [
        over(rows, {"type": "rect"}, x=x, x2={"datum": 0}, **bar),
        over(
            rows,
            {"type": "rect", "opacity": 0.4},
            x=x | {"field": "all"},
            x2={"field": "peak"},
            **bar,
        ),
        over(
            line,
            {"type": "rule", "strokeWidth": 2, "strokeDash": [5, 4], "color": ink("bad")},
            **across,
        ),
        *_words(rows, x={"value": 0}, y=_pixels("label"), text={"field": "name"}),
        *_words(
            rows,
            dx=6,
            bold=True,
            x=x | {"field": "end"},
            y=_pixels("middle"),
            text={"field": "text"},
        ),
        *_words(line, dx=6, bold=True, color=ink("bad"), **head),
    ]
    lines = (
        "GB at the peak, every weight trained, by arithmetic.",
        f"Pale: activations of {TOKENS:,} tokens.",
    )
    return _view(f"Memory to train {MODEL}", lines, layers) | {"height": height}


#: of each row: its results files, its baseline in float32, and the rule whose colour it
#: has
ROWS = {
    "E4M3 nearest": ("study_q16_adamw", "fp32", "nearest"),
    "E4M3 stochastic-8bit": ("study_q16_adamw", "fp32", "stochastic"),
    "E2M5 muon-stochastic": ("study_q16_adamw", "muon", "muon-stochastic"),
    "bf16-stochastic": ("study_q16_adamw", "fp32", FLOATS),
}
#: where the names are written, in units of the axes, and whether each text begins or
#: ends there
LABELS = (
    (8.7, 0.135, "AdamW in E4M3,", "nearest", "right"),
    (8.7, 0.115, "rounded to nearest", "nearest", "right"),
    (0.3, 0.037, "Muon in E2M5", "muon-stochastic", "left"),
    (0.3, -0.043, "AdamW in E4M3", "stochastic", "left"),
    (4.3, -0.026, "bfloat16", FLOATS, "left"),
    (9.9, 0.022, "Muon, float32", FLOATS, "right"),
    (12.9, -0.026, "AdamW, float32", FLOATS, "right"),
)
ENDS, TALL, WIDE = (0, 13), (-0.06, 0.18), 346
Points = dict[str, dict[str, list[float]]]
"""By text and row: bytes per parameter, those in float32, the loss minus float32's and
the ends of its interval.
"""


def points() -> Points:
    """The points of `loss`; the optimizer in float32 is at 0."""
    found: Points = {}
    for row, (stems, baseline, _) in ROWS.items():
        for text, results in against_baseline(stems, baseline):
            own, exact = (
                next(r for r in results if short(r) == wanted) for wanted in (row, baseline)
            )
            found.setdefault(text, {})[row] = _point(own, exact)
    return found


def _point(own: Result, exact: Result) -> list[float]:
    apart = own.difference
    assert apart is not None
    figures = (
        own.bytes_per_parameter,
        exact.bytes_per_parameter,
        apart.mean,
        apart.low,
        apart.high,
    )
    return [round(figure or 0.0, 3) for figure in figures]


def loss() -> Spec:
    """Arrows from float32 to one byte, one for each text, with 95% intervals at their
    ends; floats are marks.
    """
    found = points()
    x = quantity(
        "x",
        "bytes per parameter, weights and optimizer state",
        ENDS,
        values=[*range(0, 13, 2)],
        grid=False,
    )
    y = quantity("y", None, TALL, values=[0, 0.1, 0.2], format=".1~f")
    ends: list[Spec] = []
    for text, rows in found.items():
        for row, (size, exact, mean, low, high) in rows.items():
            slope = atan2(
                mean * HEIGHT / (TALL[1] - TALL[0]), (size - exact) * WIDE / (ENDS[1] - ENDS[0])
            )
            end = {"x": size, "y": mean, "low": low, "high": high, "begun": exact, "exact": 0}
            ends.append(end | {"rule": ROWS[row][2], "angle": 90 - degrees(slope), "text": text})
    marks, ends = (
        [end for end in ends if (end["rule"] == FLOATS) is plain] for plain in (True, False)
    )
    colour = {
        "field": "rule",
        "type": "nominal",
        "legend": None,
        "scale": _colours({FLOATS, *(e["rule"] for e in ends)}),
    }
    dashes = {
        "field": "text",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": [*found], "range": [[1, 0], [4, 3]]},
    }
    begun = [{"x": exact, "y": 0} for exact in sorted({end["begun"] for end in ends})]
    by, within = (
        {"x": x, "y": y, "color": colour},
        {"y": y | {"field": "low"}, "y2": {"field": "high"}},
    )
    arrows = {
        "x": x | {"field": "begun"},
        "y": y | {"field": "exact"},
        "x2": {"field": "x"},
        "y2": {"field": "y"},
    }
    point = {"type": "point", "filled": True, "opacity": 1}
    turned = {"angle": {"field": "angle", "type": "quantitative", "scale": None}}
    names = [
        {"x": x, "y": y, "words": words, "rule": rule, "side": side}
        for x, y, words, rule, side in LABELS
    ]
    layers = [
        over([{"y": 0}], {"type": "rule", "color": ink("muted")}, y=y),
        over(ends, {"type": "rule", "strokeWidth": 2}, color=colour, strokeDash=dashes, **arrows),
        over([*ends, *marks], {"type": "rule", "strokeWidth": 1.5}, x=x, color=colour, **within),
        over(ends, point | {"shape": "triangle-up", "size": 90}, **by, **turned),
        over(begun, point | {"size": 70, "color": ink("muted")}, x=x, y=y),
        over(marks, point | {"shape": "diamond", "size": 70, "color": ink("muted")}, x=x, y=y),
    ]
    for side in ("left", "right"):
        shown = [name for name in names if name["side"] == side]
        layers += _words(shown, align=side, bold=True, **by, text={"field": "words"})
    lines = (
        "Loss minus the same optimizer's in float32, nats per byte.",
        "In one byte. Solid: Python docstrings. Dashed: EU law.",
    )
    return _view("A quarter of the bytes, nearly the same loss", lines, layers) | {"width": WIDE}


def _colours(rules: set[str]) -> Spec:
    """A scale from rules to the colours that reports give them; floats are grey."""
    colours = [ink("muted" if rule == FLOATS else RULE_ORDER.index(rule)) for rule in sorted(rules)]
    return {"domain": sorted(rules), "range": colours}


def _pixels(field: str) -> Spec:
    return {"field": field, "type": "quantitative", "scale": None, "axis": None}


def _words(
    rows: list[Spec], *, align: str = "left", dx: int = 0, bold: bool = False, **encoding: Any
) -> list[Spec]:
    """Text with a wide outline in the colour of the page, so that lines behind the text
    end before it.
    """
    colour = encoding.pop("color", ink("ink"))
    kind = {"type": "text", "align": align, "baseline": "middle", "dx": dx, "fontSize": 13}
    kind |= {"fontWeight": "bold" if bold else "normal"}
    behind = over(
        rows,
        kind
        | {"stroke": ink("page"), "strokeWidth": 4, "strokeJoin": "round", "color": ink("page")},
        **encoding,
    )
    if "field" in colour:
        return [behind, over(rows, kind, **encoding, color=colour)]
    return [behind, over(rows, kind | {"color": colour}, **encoding)]


def _view(title: str, words: tuple[str, ...], layers: list[Spec]) -> Spec:
    """A chart's description: layers under a title and lines of text, so wide that two
    fit side by side in README.
    """
    head = {
        "text": title,
        "subtitle": list(words),
        "fontSize": 15,
        "subtitleFontSize": 12,
        "offset": 16,
    }
    head |= {"subtitleColor": ink("muted"), "subtitlePadding": 5, "frame": "bounds"}
    return {"title": head, "width": WIDTH, "height": HEIGHT, "layer": layers}


PICTURES = {"memory": memory, "frontier": loss}


def themed(name: str) -> dict[Path, Spec]:
    """The descriptions of a picture by file name, one for light and one for dark pages."""
    spec = {**PICTURES[name](), "config": CONFIG, "padding": 8}
    files = {"light": FOLDER / f"{name}.svg", "dark": FOLDER / f"{name}-dark.svg"}
    found = {}
    for theme, path in files.items():
        page = {"light": THEMES["light"]["page"], "dark": DARK_PAGE}[theme]
        found[path] = coloured(spec, theme_colours(theme) | {"page": page}) | {"background": page}
    return found


def mark(spec: Spec) -> str:
    """Comment in a picture's file with the digest of the description that it was drawn
    from.
    """
    return f"<!-- made from {digest(json.dumps(spec, sort_keys=True))} -->"


def write_pictures() -> None:
    """Draw every picture for light and for dark pages."""
    for name in PICTURES:
        for path, spec in themed(name).items():
            path.write_text(f"{svg(spec)}\n{mark(spec)}\n", encoding="utf-8")
