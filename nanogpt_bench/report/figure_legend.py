"""One legend under the axes of a figure, which grows by the height that the legend needs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure

LETTER, SAMPLE, LINE = 0.085, 0.8, 0.235  # inches: a letter's width, a line sample with its margins, a line's height
MOST_COLUMNS = 5


def legend_below(drawn: Figure, keys: Sequence[Artist], labels: Sequence[str]) -> None:
    """As many columns as fit the figure's width, the rest of the labels below each other."""
    widest = SAMPLE + LETTER * max((len(label) for label in labels), default=0)
    columns = max(1, min(MOST_COLUMNS, len(labels), int(drawn.get_figwidth() / widest)))
    drawn.set_figheight(drawn.get_figheight() + LINE * -(-len(labels) // columns))
    drawn.legend(keys, labels, loc="outside lower center", ncols=columns, handlelength=3.2)
