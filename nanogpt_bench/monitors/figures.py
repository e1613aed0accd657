"""The figures of a step by metric and layer until its record is written, layers in turn, tensors in passes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import LARGEST, Metric
from nanogpt_bench.monitors.points import Observer, Step


class Turns(Observer):
    """Says which layers a look takes, every `interval` steps: one in `count`, in turn; all at the first.

    The names of each of `lists` are shared out in their order, neighbours together. A first look that meets something
    not finite is followed by another one. It comes after the observers that ask it.

    >>> import torch
    >>> turns = Turns(2, [["a", "b", "c"]], 10)
    >>> steps = [Step(number, torch.nn.Identity(), None) for number in (10, 20, 30)]
    >>> for step in steps:
    ...     print([name for name in "abc" if turns.takes(step, name)])
    ...     turns.written(step)
    ['a', 'b', 'c']
    ['a', 'b']
    ['c']
    """

    def __init__(self, count: int = 1, lists: Iterable[Iterable[str]] = (), interval: int = 1) -> None:
        self.count, self.interval = count, interval
        self._part: dict[str, tuple[int, int]] = {}
        for names in map(list, lists):
            parts = min(count, len(names))
            self._part |= {name: (index * parts // len(names), parts) for index, name in enumerate(names)}
        self._begun = False

    @property
    def takes_all(self) -> bool:
        """Whether the look at hand takes all layers."""
        return self.count == 1 or not self._begun

    def takes(self, step: Step, name: str) -> bool:
        """Whether this step has a look, and that looks at this layer."""
        if not step.due(self.interval):
            return False
        if self.takes_all:
            return True
        part, parts = self._part[name]
        return step.number // self.interval % parts == part

    def written(self, step: Step) -> None:
        if step.number and step.anomaly is None and step.due(self.interval):
            self._begun = True

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "begun": [self.interval] if self._begun else []} if self.count > 1 else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on in turn; a run that took other turns begins with a look at all layers."""
        self._begun = bool(state["begun"]) and state["count"] == self.count


class Figures:
    """Figures by metric and layer with the sizes they are weighted by.

    Under `turns` the figure over all layers is that of the latest figure of each.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._metrics: dict[str, Metric] = {}
        self._values: dict[str, dict[str, float | None]] = defaultdict(dict)
        self._sizes: dict[str, int] = {}
        self._latest: dict[str, dict[str, tuple[float | None, int]]] = defaultdict(dict)

    def __contains__(self, metric: Metric) -> bool:
        """Whether a figure of that metric was taken in since the last record."""
        return metric.name in self._values

    def add(self, metric: Metric, layer: str, value: float | None, size: int) -> None:
        """Take a figure in."""
        self._metrics[metric.name] = metric
        self._values[metric.name][layer] = value
        self._sizes[metric.of(layer)] = size

    def write(self, step: Step) -> None:
        """Move everything into the step's record."""
        if self._turns.takes_all:
            self._latest.clear()
        for name, values in self._values.items():
            metric, latest = self._metrics[name], self._latest[name]
            latest |= {layer: (value, self._sizes[metric.of(layer)]) for layer, value in values.items()}
            of_all = {layer: value for layer, (value, _) in latest.items()}
            sizes = {layer: size for layer, (_, size) in latest.items()}
            step.add(name, values, sizes, max if metric.over == LARGEST else None, of_all)
        self._values.clear()
        self._sizes.clear()

    def latest(self, metric: Metric) -> list[float]:
        """Return the latest figure of every layer that has one."""
        return [value for value, _ in self._latest[metric.name].values() if value is not None]

    def state(self) -> dict[str, Any]:
        """Return what later figures over all layers are of; nothing where every look takes all layers."""
        return (
            {"latest": {metric: dict(found) for metric, found in self._latest.items()}} if self._turns.count > 1 else {}
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave, if it gave anything."""
        self._latest = defaultdict(dict, {metric: dict(found) for metric, found in state.get("latest", {}).items()})


class Monitor(Observer):
    """An observer with figures of the layers whose turn it is, which are written with the record of the look."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._figures = turns, Figures(turns)

    def looks(self, step: Step) -> bool:
        """Whether this step has a look."""
        return step.due(self._turns.interval)

    def takes(self, step: Step, name: str) -> bool:
        """Whether it is this layer's turn."""
        return self._turns.takes(step, name)

    def written(self, step: Step) -> None:
        if self.looks(step):
            self._figures.write(step)

    def state(self) -> dict[str, Any]:
        return self._figures.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._figures.load_state(state)


Scale = Tensor | float
"""Positive; a tensor broadcasts against what it scales."""
#: elements a piece, on the CPU
BLOCK = 131_072


def fitting(scale: Scale, x: Tensor) -> Tensor:
    """Return a scale as a tensor that does not widen `x`."""
    return torch.as_tensor(scale, device=x.device).detach().to(_working(x))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape, in float32 or float64; one empty piece of empty tensors."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    numel = flat[0].numel()
    size = BLOCK if flat[0].device.type == "cpu" else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        yield tuple(part[start : start + size].to(_working(part)) for part in flat)


def scaled_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the scale's piece (flat, or one number), and the pieces of the tensors."""
    fitted = fitting(scale, tensors[0])
    if fitted.numel() == 1:
        one = fitted.reshape(())
        for parts in blocks(*tensors):
            yield one, *parts
        return
    yield from blocks(fitted.expand(tensors[0].shape), *tensors)


def unit_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the scale's piece, and the pieces of the tensors in units of it."""
    for scales, *parts in scaled_blocks(scale, *tensors):
        yield scales, *(part / scales for part in parts)


def inside(units: Tensor, fmt: fm.FloatFormat) -> Tensor:
    """Return the nearest values within the range of a format; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def share(mask: Tensor) -> float:
    """Return the share of a mask that is set; 0 where there is nothing."""
    return int(mask.sum()) / max(mask.numel(), 1)


def _working(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
