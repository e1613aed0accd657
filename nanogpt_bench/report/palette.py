"""How a row looks in every figure: colour by rule, dash by format, told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanogpt_bench.report.results import Row
from nanogpt_bench.system.errors import printable

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
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MATPLOTLIB_DASHES = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1.2, 1.6)),
    "dashdot": (0, (6, 2, 1.2, 2)),
    "longdash": (0, (9, 3)),
}
LONGEST_LABEL = 36
MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
MATPLOTLIB_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}


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

    def hex(self, *, dark: bool = False) -> str:
        pair = INK if self.colour is None else COLOURS[self.colour]
        return pair[dark]


def looks(rows: Sequence[Row], *references: Row | None) -> dict[str, Look]:
    """The look of every row by label: references in ink, the others by rule and format, no two alike."""
    inked = list(dict.fromkeys(row.label for row in references if row is not None))
    formats = list(dict.fromkeys(row.format for row in rows if row.format != "none"))
    chosen: dict[str, Look] = {}
    taken: set[tuple[int, int]] = set()
    for row in rows:
        width = 2.0 if len(row.runs) < 2 else 1.2  # several seeds lie close to each other
        if row.label in inked:
            dash = inked.index(row.label) % len(DASHES)
            chosen[row.label] = Look(None, DASHES[dash], MARKERS[dash], 0.9 * width)
            continue
        form = formats.index(row.format) if row.format != "none" else 0
        colour, dash = _free(_rule_place(row.rule), form % len(DASHES), taken)
        taken.add((colour, dash))
        chosen[row.label] = Look(colour, DASHES[dash], MARKERS[dash], width)
    return chosen


def _rule_place(rule: str) -> int:
    return RULE_ORDER.index(rule) % len(COLOURS) if rule in RULE_ORDER else len(COLOURS) - 1


def _free(colour: int, dash: int, taken: set[tuple[int, int]]) -> tuple[int, int]:
    """The pair wanted, else another dash of that colour, else another colour; with all taken, the pair again."""
    for c in range(len(COLOURS)):
        for d in range(len(DASHES)):
            pair = ((colour + c) % len(COLOURS), (dash + d) % len(DASHES))
            if pair not in taken:
                return pair
    return colour, dash


def figure_label(label: str) -> str:
    """A label as matplotlib should show it: one line, not too long, no mathematics, no hidden legend entry."""
    text = printable(" ".join(label.split()))
    text = text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
