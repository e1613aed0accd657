"""README's first picture: final losses of the study by the bytes that weights and optimizer state take.

``python study/make.py --front`` draws it, and a narrow one for phones; metadata have the figures of both.
"""

import json
from pathlib import Path

from _compared import short
from _looks import EXACT, NEAREST, STOCHASTIC, STYLE
from _study import against_baseline
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanogpt_bench.report.results import Result

PICTURE = Path(__file__).parent.parent / "docs" / "_static" / "frontier.png"
NARROW = PICTURE.with_stem("frontier-narrow")
MUON = "#009E73"
#: each row's files, what it is called in the picture, its colour, and where that stands beside the point
ROWS = {
    "fp32": ("study_q1", "AdamW, float32", EXACT, (8, 8), "right"),
    "muon": ("study_q1", "Muon, float32", EXACT, (0, -15), "center"),
    "E4M3 nearest": ("study_q1", "AdamW, E4M3,\nnearest rounding", NEAREST, (-9, -8), "right"),
    "E4M3 stochastic-8bit": ("study_q1", "AdamW, E4M3, stochastic,\n8-bit moments", STOCHASTIC, (9, -19), "left"),
    "E4M3 muon-stochastic draws=dither": ("study_q11_e4m3 study_q11_e4m3_law", "Muon, E4M3", MUON, (0, 11), "center"),
    "E4M3 muon-residual8": ("study_q1", "Muon, E4M3,\n8-bit residual", MUON, (9, -6), "left"),
    "E2M5 muon-stochastic": ("study_q12_e2m5 study_q12_law", "Muon, E2M5", MUON, (0, -21), "center"),
}
Points = dict[str, dict[str, list[float]]]
"""By text and row: bytes a parameter, and the final loss less float32 AdamW's with the ends of its interval."""


def points() -> Points:
    """Points of the drawing; float32 AdamW is at 0."""
    found: Points = {}
    for stems in dict.fromkeys(stems for stems, *_ in ROWS.values()):
        for text, results in against_baseline(stems, "fp32"):
            shown = [result for result in results if ROWS.get(short(result), ("",))[0] == stems]
            found.setdefault(text, {}).update((short(result), _point(result)) for result in shown)
    return found


def _point(result: Result) -> list[float]:
    apart = result.difference
    ends = [0.0] * 3 if apart is None or result.reference else [apart.mean, apart.low, apart.high]
    return [round(figure or 0.0, 3) for figure in (result.bytes_per_parameter, *ends)]


def drawn(found: Points, *, narrow: bool = False) -> Figure:
    """A panel a text: the fewer bytes, the further left; the lower the loss, the further down."""
    shape, size = ((len(found), 1), (4.8, 7.4)) if narrow else ((1, len(found)), (9.6, 3.9))
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    for axis, (text, rows) in zip(axes.flat, found.items(), strict=True):
        axis.set_title(text)
        _panel(axis, rows)
    axes[0][0].set_ylabel("final loss less that of float32 AdamW,\nnats a byte")
    break_ = "\n" if narrow else " "
    text = f"bytes a parameter of weights and optimizer state,{break_}embeddings in float32 included"
    figure.supxlabel(text, fontsize=10)
    return figure


def _panel(axis: Axes, rows: dict[str, list[float]]) -> None:
    axis.axhline(0, color="#999999", linewidth=1)
    for row, (size, mean, low, high) in rows.items():
        _, name, colour, offset, side = ROWS[row]
        axis.vlines(size, low, high, color=colour, linewidth=2.2)
        axis.plot(size, mean, "o", color=colour, markersize=6)
        axis.annotate(name, (size, mean), offset, textcoords="offset points", ha=side, size=9, color=colour)
    axis.set(xlim=(0, 13), xticks=range(0, 13, 2))
    axis.margins(y=0.12)
    axis.grid(color="#eeeeee", linewidth=0.8)


def write_pictures() -> None:
    """Draw both."""
    with plt.rc_context(STYLE):
        about = {"Description": json.dumps(found := points())}
        drawn(found).savefig(PICTURE, dpi=160, metadata=about)
        drawn(found, narrow=True).savefig(NARROW, dpi=160, metadata=about)
