"""Distributions of what the monitors watched, as recorded last, one line a row over all of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nanogpt_bench.config.metrics import LOG, SPREADS, Metric, Spread
from nanogpt_bench.report.chart import SHARE, Chart, lines, quantity
from nanogpt_bench.report.loss_charts import shown
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row
from nanogpt_bench.report.series import Line
from nanogpt_bench.runs.load import Distribution


def distribution_charts(rows: Sequence[Row], looks: Mapping[str, Look]) -> list[Chart]:
    """A chart for each distribution that some row's first run with distributions has recorded."""
    found = [_chart(spread, rows, looks) for spread in SPREADS if spread.chart]
    return [chart for chart in found if chart is not None]


def _chart(spread: Spread, rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    drawn = [line for row in rows for line in _lines(spread, row)]
    if not drawn:
        return None
    bent = {"log": True, "format": "~g", "tickCount": 5} if spread.chart == LOG else {}
    y = quantity("y", "share", zero=True, format=SHARE)
    spec = lines(drawn, looks, quantity("x", spread.unit, **bent), y, step=True)
    name = _drawn(spread).name.replace("/", "-")
    return Chart(f"spread-{name}", spread.title, spread.meaning, spec, rows=shown(drawn))


def _drawn(spread: Spread) -> Metric:
    """Of several operands the weights."""
    return spread.by("weight") if spread.operands else spread


def _lines(spread: Spread, row: Row) -> list[Line]:
    prefix = _drawn(spread).of("")
    shares = merged([d for run in row.runs[:1] for n, d in run.distributions.items() if n.startswith(prefix)])
    xs = [x for x in shares if x > 0 or spread.chart != LOG]
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
