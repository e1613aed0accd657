"""Observers: the points of a step at which they are called, layers in turn, and
collecting figures for the record.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import LARGEST, Metric


@dataclass(frozen=True)
class Anomaly:
    """Values of a step that are not finite."""

    step: int
    #: loss, gradient, weight, state
    kinds: tuple[str, ...]
    #: where it was first seen, such as `activation of blocks.0.mlp.fc`
    where: str

    @property
    def lasting(self) -> bool:
        """True if weights or optimizer state are not finite, so that skipping the step
        does not help.
        """
        return "weight" in self.kinds or "state" in self.kinds


@dataclass
class Step:
    """One step in progress. Observers read it and add their figures to `record`."""

    #: number of this step, from 1; 0 for the validation before the first step
    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: whether it is the last planned step
    last: bool = False
    #: number of micro-batches in the step, and index of the current one, from 0
    micro_steps: int = 1
    micro_step: int = 0
    #: the current micro-batch, int64 (batch, time) each; None before the first
    batch: tuple[Tensor, Tensor] | None = None
    #: factor by which this micro-batch's gradient was clipped before the weights'
    #: gradients were quantised
    clip_factor: float = 1.0
    #: set if values of this step are not finite
    anomaly: Anomaly | None = None
    #: the metrics of this step, written to metrics.jsonl after it
    record: dict[str, float | int | None] = field(default_factory=dict)

    @property
    def at_last_micro_step(self) -> bool:
        """True if the current micro-batch completes the gradient."""
        return self.micro_step == self.micro_steps - 1

    def due(self, interval: int) -> bool:
        """Return whether this is one of every `interval` steps, or the last."""
        return self.number % interval == 0 or self.last

    def add(
        self,
        metric: str,
        figures: Mapping[str, float | None],
        sizes: Mapping[str, int] | None = None,
        over: Callable[[Iterable[float]], float] | None = None,
        of_all: Mapping[str, float | None] | None = None,
    ) -> None:
        """Record a figure by layer, and over all layers: `over` of them, or their mean,
        weighted by `sizes`.

        A layer whose figure is None or not finite is recorded as null and left out of
        the mean. If this step measured only some layers, `of_all` has the latest figure
        of each.
        """
        self.record.update({f"{metric}/{layer}": value for layer, value in figures.items()})
        every = figures if of_all is None else of_all
        known = {
            layer: value
            for layer, value in every.items()
            if value is not None and math.isfinite(value)
        }
        if not known:
            return
        if over is not None:
            self.record[metric] = over(known.values())
            return
        weights = {layer: sizes[layer] if sizes else 1 for layer in known}
        self.record[metric] = sum(known[layer] * weights[layer] for layer in known) / max(
            sum(weights.values()), 1
        )


class Observer:
    """Base of all observers: override the points you need. Weights must be left as they
    are.
    """

    def before_forward(self, step: Step) -> None:
        """Called before every micro-step's forward pass."""

    def after_forward(self, step: Step) -> None:
        """Called after every micro-step's forward pass."""

    def after_backward(self, step: Step) -> None:
        """Called after every micro-step's backward pass; gradients accumulate."""

    def before_step(self, step: Step) -> None:
        """Called before the optimizer steps, with complete, clipped gradients (or
        before a pass that steps).
        """

    def after_step(self, step: Step) -> None:
        """Called once per step after the weights are updated, before the record is
        written; not in a skipped step.
        """

    def written(self, step: Step) -> None:
        """Called once per step with the finished record, validation included."""

    def close(self) -> None:
        """Called once, however the run ends."""

    def state(self) -> dict[str, Any]:
        """Return what later figures depend on, as `checkpoint.format.capture_tree`
        takes it; called between steps.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; called before any step. The observer may keep the
        tensors in it.
        """


class Turns(Observer):
    """Says which layers are measured, every `interval` steps: one in `count`, in turn;
    the first time all.

    The names in each of `lists` are divided in their order, neighbours together. If the
    first measured step is not finite, the next one measures all layers again. This
    observer has to come after those that use it.

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

    def __init__(
        self, count: int = 1, lists: Iterable[Iterable[str]] = (), interval: int = 1
    ) -> None:
        self.count, self.interval = count, interval
        self._part: dict[str, tuple[int, int]] = {}
        for names in map(list, lists):
            parts = min(count, len(names))
            self._part |= {
                name: (index * parts // len(names), parts) for index, name in enumerate(names)
            }
        self._begun = False

    @property
    def takes_all(self) -> bool:
        """True if this step measures all layers."""
        return self.count == 1 or not self._begun

    def takes(self, step: Step, name: str) -> bool:
        """Return whether this step measures this layer."""
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
        return (
            {"count": self.count, "begun": [self.interval] if self._begun else []}
            if self.count > 1
            else {}
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; after a change of `count` the next measurement takes all
        layers.
        """
        self._begun = bool(state["begun"]) and state["count"] == self.count


class Figures:
    """Figures by metric and layer with their sizes; with `turns`, those over all layers
    use the latest of each.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._now: dict[Metric, dict[str, tuple[float | None, int]]] = defaultdict(dict)
        self._latest: dict[str, dict[str, tuple[float | None, int]]] = defaultdict(dict)

    def __contains__(self, metric: Metric) -> bool:
        """Return whether a figure of a metric was added since the last record."""
        return metric in self._now

    def add(self, metric: Metric, layer: str, value: float | None, size: int) -> None:
        """Add a figure."""
        self._now[metric][layer] = value, size

    def write(self, step: Step) -> None:
        """Move all figures into the step's record."""
        if self._turns.takes_all:
            self._latest.clear()
        for metric, found in self._now.items():
            latest = self._latest[metric.name]
            latest |= found
            values, of_all = (
                {layer: value for layer, (value, _) in part.items()} for part in (found, latest)
            )
            sizes = {layer: size for layer, (_, size) in latest.items()}
            step.add(metric.name, values, sizes, max if metric.over == LARGEST else None, of_all)
        self._now.clear()

    def latest(self, metric: Metric) -> list[float]:
        """Return the latest figure of every layer that has one."""
        return [value for value, _ in self._latest[metric.name].values() if value is not None]

    def state(self) -> dict[str, Any]:
        """Return the latest figures, which later ones over all layers need; empty
        without turns.
        """
        return (
            {"latest": {metric: dict(found) for metric, found in self._latest.items()}}
            if self._turns.count > 1
            else {}
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may be empty."""
        self._latest = defaultdict(
            dict, {metric: dict(found) for metric, found in state.get("latest", {}).items()}
        )


class Monitor(Observer):
    """An observer that measures the layers whose turn it is, and writes the figures
    into the step's record.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns, self._figures = turns, Figures(turns)

    def looks(self, step: Step) -> bool:
        """Return whether this step is measured."""
        return step.due(self._turns.interval)

    def takes(self, step: Step, name: str) -> bool:
        """Return whether this step measures this layer."""
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
#: elements per piece on the CPU
BLOCK = 131_072


def fitting(scale: Scale, x: Tensor) -> Tensor:
    """Return a scale as a tensor that does not widen `x`."""
    return torch.as_tensor(scale, device=x.device).detach().to(_working(x))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape, in float32 or float64; empty tensors
    have one empty piece.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    numel = flat[0].numel()
    size = BLOCK if flat[0].device.type == "cpu" else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        yield tuple(part[start : start + size].to(_working(part)) for part in flat)


def scaled_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of a scale (flat, or one number) and of tensors."""
    fitted = fitting(scale, tensors[0])
    if fitted.numel() == 1:
        one = fitted.reshape(())
        for parts in blocks(*tensors):
            yield one, *parts
        return
    yield from blocks(fitted.expand(tensors[0].shape), *tensors)


def unit_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of a scale, and of tensors divided by it."""
    for scales, *parts in scaled_blocks(scale, *tensors):
        yield scales, *(part / scales for part in parts)


def inside(units: Tensor, fmt: fm.FloatFormat) -> Tensor:
    """Return values clamped to the range of a format; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def share(mask: Tensor) -> float:
    """Return the share of a mask that is set; 0 for an empty one."""
    return int(mask.sum()) / max(mask.numel(), 1)


def _working(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
