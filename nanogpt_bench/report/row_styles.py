"""Styles of rows: colour, dash, marker and width, and the palettes of both themes.

A rule has a colour and a format has a dash, so that rows look alike in every report. A
colour goes by its name; the page and the pictures insert that of a light or dark theme.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.report.rows import Row

# Okabe and Ito's set, lightened for a dark page, and three more; (light page, dark
# page).
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
# A colour scale from below to above, for the light and the dark page.
COLOUR_SCALES = {
    "diverging": (
        ("#08519C", "#7FB3DA", "#F5F5F3", "#F2A07B", "#B2330B"),
        ("#8CCBF8", "#2C6794", "#252A32", "#A4532A", "#FFA46B"),
    )
}
STATE_COLOURS = {
    "good": ("#00694B", "#4CD1A5"),
    "bad": ("#B03A00", "#FF9A5C"),
    "doubt": ("#7A5B00", "#E8C54A"),
}
THEMES = {
    "light": {"page": "#FFFFFF", "shade": "#F3F4F6", "rule": "#D9DCE1", "muted": "#5B616B"},
    "dark": {"page": "#15181D", "shade": "#20242B", "rule": "#3A404A", "muted": "#A3AAB5"},
}
# The order in which rules take colours, so that a rule has the same colour in every
# report.
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
DASHES = {
    "solid": [1, 0],
    "dash": [7, 4],
    "dot": [2, 3],
    "dashdot": [7, 3, 2, 3],
    "longdash": [11, 4],
}
DASH_ORDER = tuple(DASHES)
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross")
#: pixels of a curve, and of each of several curves, which are close to each other
WIDTH = 2.0
WIDTH_OF_SEVERAL = 1.2
#: factor of a reference's width: ink looks heavier than a colour
INK_WIDTH = 0.9


@dataclass(frozen=True)
class Style:
    """The looks of a row's lines."""

    #: an index into COLOURS; None for ink
    colour: int | None
    dash: str
    marker: str
    #: of the line, in pixels
    width: float

    @property
    def variable(self) -> str:
        """The CSS variable of the colour on the page."""
        return "--ink" if self.colour is None else f"--c{self.colour}"


def styles(rows: Sequence[Row], *references: Row | None) -> dict[str, Style]:
    """Return each row's style by label.

    References are in ink, other rows differ by rule and format, if possible.
    """
    ink_labels = list(dict.fromkeys(row.label for row in references if row is not None))
    formats = list(dict.fromkeys(row.format for row in rows if row.format != NO_FORMAT))
    by_label: dict[str, Style] = {}
    used_pairs: set[tuple[int, int]] = set()
    for row in rows:
        width = WIDTH if len(row.runs) < 2 else WIDTH_OF_SEVERAL
        if row.label in ink_labels:
            # as many markers as dashes
            place = ink_labels.index(row.label) % len(DASH_ORDER)
            by_label[row.label] = Style(None, DASH_ORDER[place], MARKERS[place], INK_WIDTH * width)
            continue
        wanted_dash = formats.index(row.format) if row.format != NO_FORMAT else 0
        colour, dash = _free_pair(_rule_colour(row.rule), wanted_dash % len(DASH_ORDER), used_pairs)
        used_pairs.add((colour, dash))
        by_label[row.label] = Style(colour, DASH_ORDER[dash], MARKERS[dash], width)
    return by_label


def _rule_colour(rule: str) -> int:
    """Return the index of a rule's colour; rules without one have the last."""
    if rule in RULE_ORDER:
        return RULE_ORDER.index(rule) % len(COLOURS)
    return len(COLOURS) - 1


def _free_pair(colour: int, dash: int, used_pairs: set[tuple[int, int]]) -> tuple[int, int]:
    """Return colour and dash if the pair is free, else another dash, else another colour.

    The pair itself comes back if all are taken.
    """
    for colour_step, dash_step in itertools.product(range(len(COLOURS)), range(len(DASH_ORDER))):
        pair = ((colour + colour_step) % len(COLOURS), (dash + dash_step) % len(DASH_ORDER))
        if pair not in used_pairs:
            return pair
    return colour, dash


def theme_colours(theme: str) -> dict[str, Any]:
    """Return all colours that a description may name, in one theme.

    A scale is a tuple of them.
    """
    place = list(THEMES).index(theme)
    pairs: dict[str, Sequence[Any]] = {f"c{i}": pair for i, pair in enumerate(COLOURS)}
    pairs["ink"] = INK
    pairs |= STATE_COLOURS
    pairs |= COLOUR_SCALES
    colours: dict[str, Any] = dict(THEMES[theme])
    for name, pair in pairs.items():
        colours[name] = pair[place]
    return colours
