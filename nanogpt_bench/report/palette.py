"""How a row looks in every figure: colour by rule, dash by format, told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanogpt_bench.report.rows import Row

# Okabe and Ito's set, lightened for a dark page, and three more; (light page, dark page).
COLOURS = (
    ("#D55E00", "#F2853D"),
    ("#0072B2", "#56A9E0"),
    ("#009E73", "#33C79B"),
    ("#B8578F", "#E08BBB"),
    ("#E69F00", "#F0E442"),
    ("#1F9BC9", "#7FD0F0"),
    ("#6F4BB0", "#AE92E6"),
    ("#7A6A3A", "#C9B46E"),
    ("#882255", "#D9749F"),
)
INK = ("#1A1A1A", "#F0F0F0")
# Colour scales from little to much, and from below to above; their ends meet the page they lie on.
SCALES = {
    "sequential": (
        ("#F3F4F6", "#C3DCEF", "#6BAED6", "#2171B5", "#08306B"),
        ("#20242B", "#173A5E", "#2676B8", "#6DB9EE", "#E3F3FF"),
    ),
    "diverging": (
        ("#08519C", "#7FB3DA", "#F5F5F3", "#F2A07B", "#B2330B"),
        ("#8CCBF8", "#2C6794", "#252A32", "#A4532A", "#FFA46B"),
    ),
}
# Rules in the order in which they take colours, so that a rule keeps its colour from report to report.
RULE_ORDER = (
    "nearest",
    "stochastic",
    "riemannian",
    "stiffness-anneal",
    "master",
    "fp32",
    "muon-stochastic",
    "muon",
    "muon-residual8",
    "stiffness",
    "bf16-pure",
    "sgd",
)
DASHES = {"solid": [1, 0], "dash": [7, 4], "dot": [2, 3], "dashdot": [7, 3, 2, 3], "longdash": [11, 4]}
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross")
ORDER = tuple(DASHES)


@dataclass(frozen=True)
class Look:
    """A row's colour (an index into COLOURS, None for ink), dash, marker and line width in pixels."""

    colour: int | None
    dash: str
    marker: str
    width: float

    @property
    def variable(self) -> str:
        """The page's CSS variable that holds the colour in the theme shown."""
        return "--ink" if self.colour is None else f"--c{self.colour}"


def looks(rows: Sequence[Row], *references: Row | None) -> dict[str, Look]:
    """The look of every row by label: references in ink, the others by rule and format, no two alike."""
    inked = list(dict.fromkeys(row.label for row in references if row is not None))
    formats = list(dict.fromkeys(row.format for row in rows if row.format != "none"))
    chosen: dict[str, Look] = {}
    taken: set[tuple[int, int]] = set()
    for row in rows:
        width = 2.0 if len(row.runs) < 2 else 1.2  # several seeds lie close to each other
        if row.label in inked:
            dash = inked.index(row.label) % len(ORDER)
            chosen[row.label] = Look(None, ORDER[dash], MARKERS[dash], 0.9 * width)
            continue
        form = formats.index(row.format) if row.format != "none" else 0
        colour, dash = _free(_rule_place(row.rule), form % len(ORDER), taken)
        taken.add((colour, dash))
        chosen[row.label] = Look(colour, ORDER[dash], MARKERS[dash], width)
    return chosen


def _rule_place(rule: str) -> int:
    return RULE_ORDER.index(rule) % len(COLOURS) if rule in RULE_ORDER else len(COLOURS) - 1


def _free(colour: int, dash: int, taken: set[tuple[int, int]]) -> tuple[int, int]:
    """The pair wanted, else another dash of that colour, else another colour; with all taken, the pair again."""
    for c in range(len(COLOURS)):
        for d in range(len(ORDER)):
            pair = ((colour + c) % len(COLOURS), (dash + d) % len(ORDER))
            if pair not in taken:
                return pair
    return colour, dash
