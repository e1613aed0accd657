"""A metric: a figure of a run's records, told once, with its name, title, unit, meaning and bad side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

#: what a layer multiplies, what comes back, and what the blocks add up; the last are measured for blocks
OPERANDS: Final = ("weight", "activation", "gradient", "weight_gradient", "residual")
OF_LAYERS: Final = OPERANDS[:-1]
#: the side on which a figure is bad
ABOVE, BELOW = "above", "below"
#: how the figures of all layers make one; TOGETHER: as one layer, which its observer sees to
MEAN, LARGEST, SMALLEST, TOGETHER = "mean", "largest", "smallest", "together"
#: scale of a chart
LINEAR, LOG = "linear", "log"
SHARE, NATS, ULPS, RATIO = "share", "nats", "ULPs", "ratio"


@dataclass(frozen=True)
class Alarm:
    """The alert that a figure raises: its kind, the setting of `alerts` that is its limit, and what is said."""

    kind: str
    setting: str
    #: with the `value`, and `where` it is of: a layer, or an operand of one
    text: str
    leaves_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A figure of a run's records.

    >>> UPDATE_LOST.of("lm_head"), OVERFLOW.by("weight").of("lm_head"), EXPONENT_BIT.number(3).name
    ('stall/update_lost/lm_head', 'quant/overflow/weight/lm_head', 'bits/exponent_bit_3')
    """

    name: str
    title: str
    unit: str
    #: one sentence; with the title it is the caption of its chart and its row in the documentation
    meaning: str
    #: the monitor that has to be on; none where it is always recorded
    monitor: str = ""
    #: how the figures of all layers make one; none where there is no figure of a layer
    over: str = ""
    operands: tuple[str, ...] = ()
    #: ABOVE or BELOW; neither where no side is
    bad: str = ""
    alarm: Alarm | None = None
    #: budget beyond which an alert is raised, unless `alerts.at_most` says otherwise
    at_most: float | None = None
    #: LINEAR or LOG where the report has a chart of it; none where it has not, or where it stands in another one
    chart: str = ""

    def of(self, layer: str) -> str:
        """Return the key of one layer's figure."""
        return f"{self.name}/{layer}"

    def by(self, operand: str) -> Metric:
        """Return the metric of one operand."""
        title = f"{self.title}, {operand.replace('_', ' ')}s"
        return replace(self, name=f"{self.name}/{operand}", title=title, operands=())

    def number(self, index: int) -> Metric:
        """Return the metric that the `I` at the end of the name counts."""
        return replace(self, name=f"{self.name.removesuffix('I')}{index}")

    @property
    def namespace(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def figure(self) -> str:
        """The second part of the name: what `fp8manifold.monitor` calls it."""
        return self.name.split("/")[1]

    @property
    def each(self) -> tuple[Metric, ...]:
        """The metric by operand, or itself where there is one only."""
        return tuple(map(self.by, self.operands)) or (self,)

    def in_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of one record that an alarm is about: of every layer, of operands as `OPERAND/LAYER`."""
        if not self.over:
            return {"": record[self.name]} if self.name in record else {}
        start, depth = f"{self.name}/", self.name.count("/") + 1 + bool(self.operands)
        found = {key: value for key, value in record.items() if key.startswith(start) and key.count("/") == depth}
        return {key.removeprefix(start): value for key, value in found.items()}


@dataclass(frozen=True)
class Spread(Metric):
    """A distribution of histograms.jsonl, by layer; the unit is its axis's."""


OVER: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {LARGEST: max, SMALLEST: min}
