"""Distributions of what the monitors watched, as recorded last, one line a row over all of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanogpt_bench.report.chart import SHARE, Chart, lines, quantity
from nanogpt_bench.report.loss_charts import shown
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row
from nanogpt_bench.report.series import Line
from nanogpt_bench.runs.watched import Distribution


@dataclass(frozen=True)
class Family:
    """A kind of distribution: the beginning of its names, the chart's title, its axis, and one sentence."""

    prefix: str
    title: str
    axis: str
    caption: str
    logarithmic: bool = True


FAMILIES = (
    Family("grad/magnitude/", "Gradient magnitudes", "|gradient|", "By binade; zeros left out."),
    Family("grad/dead_runs/", "How long gradients stay dead", "steps", "Elements by their steps next to zero."),
    Family(
        "stall/weight_residual/",
        "Master weights between grid values",
        "(w - Q(w)) / S",
        "Where in its step each master weight lies.",
        logarithmic=False,
    ),
    Family("bits/gap_lengths/weight/", "Gaps between used codes", "codes", "Runs of codes no weight uses, by length."),
)


def distribution_charts(rows: Sequence[Row], looks: Mapping[str, Look]) -> list[Chart]:
    """A chart for each family that some row's first run with distributions has recorded."""
    found = [_chart(family, rows, looks) for family in FAMILIES]
    return [chart for chart in found if chart is not None]


def _chart(family: Family, rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    drawn = [line for row in rows for line in _lines(family, row)]
    if not drawn:
        return None
    bent = {"log": True, "format": "~g", "tickCount": 5} if family.logarithmic else {}
    y = quantity("y", "share", zero=True, format=SHARE)
    spec = lines(drawn, looks, quantity("x", family.axis, **bent), y, step=True)
    name = family.prefix.strip("/").replace("/", "-")
    return Chart(f"spread-{name}", family.title, family.caption, spec, rows=shown(drawn))


def _lines(family: Family, row: Row) -> list[Line]:
    shares = merged([d for run in row.runs[:1] for n, d in run.distributions.items() if n.startswith(family.prefix)])
    xs = [x for x in shares if x > 0 or not family.logarithmic]
    return [Line(row.label, None, xs, [shares[x] for x in xs])] if xs else []


def merged(distributions: Sequence[Distribution]) -> dict[float, float]:
    """The share at each value, or in the bin that begins there, over all of them together, in increasing order.

    >>> merged([Distribution(1, (1, 1), edges=(0, 1, 2)), Distribution(1, (2,), edges=(1, 2))])
    {0: 0.25, 1: 0.75}
    """
    counts: Counter[float] = Counter()
    for distribution in distributions:
        places = distribution.values or (distribution.edges or ())[:-1]
        counts.update(dict(zip(places, distribution.counts, strict=True)))
    total = sum(counts.values())
    return {place: counts[place] / total for place in sorted(counts)} if total else {}
