"""How a row looks in every figure: colour by rule, dash by format, told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanogpt_bench.report.results import Row

# Okabe and Ito's set without yellow and black, then three of Tol's muted set; (light page, dark page).
COLOURS = (
    ("#D55E00", "#F2853D"),
    ("#0072B2", "#56A9E0"),
    ("#009E73", "#33C79B"),
    ("#B8578F", "#E08BBB"),
    ("#B07700", "#E6A82E"),
    ("#1F9BC9", "#7FD0F0"),
    ("#6F4BB0", "#AE92E6"),
    ("#7A6A3A", "#C9B46E"),
    ("#882255", "#D9749F"),
)
INK = ("#1A1A1A", "#F0F0F0")
# Rules in the order in which they take colours, so that a rule keeps its colour from report to report.
RULE_ORDER = (
    "nearest",
    "stochastic",
    "riemannian",
    "stiffness-anneal",
    "master",
    "fp32",
    "stiffness",
    "bf16-pure",
    "sgd",
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MATPLOTLIB_DASHES = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1.2, 1.6)),
    "dashdot": (0, (6, 2, 1.2, 2)),
    "longdash": (0, (9, 3)),
}
MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
MATPLOTLIB_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}


@dataclass(frozen=True)
class Look:
    """A row's colour (an index into COLOURS, None for ink), dash, marker and line width in pixels."""

    colour: int | None
    dash: str
    marker: str
    width: float

    def hex(self, *, dark: bool = False) -> str:
        pair = INK if self.colour is None else COLOURS[self.colour]
        return pair[dark]


def looks(rows: Sequence[Row], reference: Row | None) -> dict[str, Look]:
    """The look of every row by label: the reference in ink, the others by rule and format."""
    formats = list(dict.fromkeys(row.format for row in rows if row.format != "none"))
    rules = sorted({row.rule for row in rows}, key=_rule_place)
    spare = [rule for rule in rules if rule not in RULE_ORDER]
    chosen: dict[str, Look] = {}
    for row in rows:
        place = _rule_place(row.rule)[0] + (spare.index(row.rule) if row.rule in spare else 0)
        form = formats.index(row.format) if row.format != "none" else 0
        look = Look(place % len(COLOURS), DASHES[form % len(DASHES)], MARKERS[form % len(MARKERS)], 2.0)
        chosen[row.label] = Look(None, "solid", "circle", 1.8) if row is reference else look
    return chosen


def _rule_place(rule: str) -> tuple[int, str]:
    return (RULE_ORDER.index(rule) if rule in RULE_ORDER else len(RULE_ORDER), rule)
