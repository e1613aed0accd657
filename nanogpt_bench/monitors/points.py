"""Observers: the points of a step at which they are called, and figures for the record.

A run calls every observer at every point of every step: `before_forward`,
`after_forward` and `after_backward` in each micro-step, then `before_step`,
`after_step`, `complete_record` and `take_record` once per step. Observers read the
`Step` and add figures to its record, which is complete from `take_record` on.

A `Monitor` is an observer that measures layers every `monitor.interval` steps. `Turns`
decides which layers a measurement includes, `LayerFigures` collects what was measured.
Figures over all layers use the latest figure of each layer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
        """True if weights or optimizer state are not finite.

        Skipping the step does not help then.
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
        """Return whether this is one of every `interval` steps, or the last.

        So is step 0, the validation before the first step.
        """
        return self.number % interval == 0 or self.last

    def add(
        self,
        metric: str,
        figures: Mapping[str, float | None],
        sizes: Mapping[str, int] | None = None,
        combine: Callable[[Iterable[float]], float] | None = None,
        latest: Mapping[str, float | None] | None = None,
    ) -> None:
        """Record a figure by layer, and over all layers.

        The figure over all layers is what `combine` makes of them, or their mean,
        weighted by `sizes`. A layer whose figure is None or not finite is recorded as null and left
        out of the mean. If this step measured only some layers, `latest` has the latest
        figure of each.
        """
        for layer, value in figures.items():
            self.record[f"{metric}/{layer}"] = value
        finite: dict[str, float] = {}
        for layer, value in (figures if latest is None else latest).items():
            if value is not None and math.isfinite(value):
                finite[layer] = value
        if not finite:
            return
        if combine is not None:
            self.record[metric] = combine(finite.values())
            return
        weights = {layer: sizes[layer] if sizes else 1 for layer in finite}
        weighted_sum = sum(finite[layer] * weights[layer] for layer in finite)
        self.record[metric] = weighted_sum / max(sum(weights.values()), 1)


class Observer:
    """Base of all observers: override the points you need.

    Weights must be left as they are.
    """

    def before_forward(self, step: Step) -> None:
        """Called before every micro-step's forward pass."""

    def after_forward(self, step: Step) -> None:
        """Called after every micro-step's forward pass."""

    def after_backward(self, step: Step) -> None:
        """Called after every micro-step's backward pass; gradients accumulate."""

    def before_step(self, step: Step) -> None:
        """Called before the optimizer steps, with complete, clipped gradients.

        If the optimizer steps in the backward pass, it is called before that pass.
        """

    def after_step(self, step: Step) -> None:
        """Called once per step after the weights are updated; not in a skipped step.

        The record is completed later.
        """

    def complete_record(self, step: Step) -> None:
        """Called once per step, after a validation if there is one.

        It is the last time at which figures may be added to the record.
        """

    def take_record(self, step: Step) -> None:
        """Called once per step, when all observers have completed the record.

        An observer writes it, sends it or judges it, and leaves it as it is.
        """

    def close(self) -> None:
        """Called once, however the run ends."""

    def state(self) -> dict[str, Any]:
        """Return what later figures depend on; called between steps.

        It has to be a tree that `checkpoint.format.capture_tree` takes.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; called before any step.

        The observer may keep the tensors in it.
        """


class Turns(Observer):
    """Decides which layers are measured: one in `count`, in turn.

    There is a measurement every `interval` steps. The first one takes all layers. The
    names in each of `lists` are divided in their order, neighbours together. If the
    first measured step is not finite, the next one measures all layers again. This
    observer has to come after those that use it.

    >>> import torch
    >>> turns = Turns(2, [["a", "b", "c"]], 10)
    >>> steps = [Step(number, torch.nn.Identity(), None) for number in (10, 20, 30)]
    >>> for step in steps:
    ...     print([name for name in "abc" if turns.takes(step, name)])
    ...     turns.complete_record(step)
    ['a', 'b', 'c']
    ['a', 'b']
    ['c']
    """

    def __init__(
        self, count: int = 1, lists: Iterable[Iterable[str]] = (), interval: int = 1
    ) -> None:
        self.count = count
        self.interval = interval
        #: by layer, the turn in which it is measured, and the turns of its list
        self._turns: dict[str, tuple[int, int]] = {}
        for layers in lists:
            names = list(layers)
            turns = min(count, len(names))
            for index, name in enumerate(names):
                self._turns[name] = (index * turns // len(names), turns)
        #: whether all layers have been measured once
        self._has_measured_all = False

    @property
    def takes_all(self) -> bool:
        """True if this step measures all layers."""
        return self.count == 1 or not self._has_measured_all

    def takes(self, step: Step, name: str) -> bool:
        """Return whether this step measures this layer."""
        if not step.due(self.interval):
            return False
        if self.takes_all:
            return True
        turn, turns = self._turns[name]
        return step.number // self.interval % turns == turn

    def complete_record(self, step: Step) -> None:
        if step.number and step.anomaly is None and step.due(self.interval):
            self._has_measured_all = True

    def state(self) -> dict[str, Any]:
        if self.count == 1:
            return {}
        # A list, as in earlier versions; all that counts is whether it is empty.
        return {"count": self.count, "begun": [self.interval] if self._has_measured_all else []}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        After a change of `count` the next measurement takes all layers.
        """
        self._has_measured_all = bool(state["begun"]) and state["count"] == self.count


class SizedFigure(NamedTuple):
    """The figure of a layer, and its weight in a mean over layers."""

    value: float | None
    size: int


class LayerFigures:
    """Figures by metric and layer with their sizes.

    With `turns`, figures over all layers use the latest one of each layer.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._new: dict[Metric, dict[str, SizedFigure]] = defaultdict(dict)
        self._latest: dict[str, dict[str, SizedFigure]] = defaultdict(dict)

    def __contains__(self, metric: Metric) -> bool:
        """Return whether a figure of a metric was added since the last record."""
        return metric in self._new

    def add(self, metric: Metric, layer: str, value: float | None, size: int) -> None:
        """Add a figure."""
        self._new[metric][layer] = SizedFigure(value, size)

    def write(self, step: Step) -> None:
        """Move all figures into the step's record."""
        if self._turns.takes_all:
            self._latest.clear()
        for metric, new in self._new.items():
            latest = self._latest[metric.name]
            latest |= new
            step.add(
                metric.name,
                figures={layer: figure.value for layer, figure in new.items()},
                sizes={layer: figure.size for layer, figure in latest.items()},
                combine=max if metric.over == LARGEST else None,
                latest={layer: figure.value for layer, figure in latest.items()},
            )
        self._new.clear()

    def latest(self, metric: Metric) -> list[float]:
        """Return the latest figure of every layer that has one."""
        values = []
        for figure in self._latest[metric.name].values():
            if figure.value is not None:
                values.append(figure.value)
        return values

    def state(self) -> dict[str, Any]:
        """Return the latest figures, which later ones over all layers need.

        The state is empty without turns.
        """
        if self._turns.count == 1:
            return {}
        latest = {}
        for metric, figures in self._latest.items():
            latest[metric] = {layer: tuple(figure) for layer, figure in figures.items()}
        return {"latest": latest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may be empty."""
        self._latest = defaultdict(dict)
        for metric, figures in state.get("latest", {}).items():
            for layer, (value, size) in figures.items():
                self._latest[metric][layer] = SizedFigure(value, size)


class Monitor(Observer):
    """An observer that measures the layers whose turn it is.

    Figures added to `_figures` are written into the step's record.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._figures = LayerFigures(turns)

    def is_measured(self, step: Step) -> bool:
        """Return whether this step is measured."""
        return step.due(self._turns.interval)

    def takes(self, step: Step, name: str) -> bool:
        """Return whether this step measures this layer."""
        return self._turns.takes(step, name)

    def complete_record(self, step: Step) -> None:
        if self.is_measured(step):
            self._figures.write(step)

    def state(self) -> dict[str, Any]:
        return self._figures.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._figures.load_state(state)


#: positive; a tensor broadcasts against what it scales
Scale = Tensor | float
#: elements per piece on the CPU, so that a piece and what is computed of it fit into the
#: processor's cache
PIECE_ELEMENTS = 131_072


def scale_like(scale: Scale, x: Tensor) -> Tensor:
    """Return a scale as a tensor on the device and in the working dtype of `x`."""
    return torch.as_tensor(scale, device=x.device).detach().to(_working_dtype(x))


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape, in float32 or float64.

    Empty tensors have one empty piece.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    numel = flat[0].numel()
    size = PIECE_ELEMENTS if flat[0].device.type == "cpu" else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        yield tuple(part[start : start + size].to(_working_dtype(part)) for part in flat)


def scaled_pieces(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of a scale (flat, or one number) and of tensors."""
    scales = scale_like(scale, tensors[0])
    if scales.numel() == 1:
        scalar = scales.reshape(())
        for parts in pieces(*tensors):
            yield scalar, *parts
        return
    yield from pieces(scales.expand(tensors[0].shape), *tensors)


def unit_pieces(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of a scale, and of tensors divided by it."""
    for scales, *parts in scaled_pieces(scale, *tensors):
        yield scales, *(part / scales for part in parts)


def clamp_to_format(units: Tensor, fmt: fm.FloatFormat) -> Tensor:
    """Return values clamped to the range of a format; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def share(mask: Tensor) -> float:
    """Return the share of a mask that is set; 0 for an empty one."""
    return int(mask.sum()) / max(mask.numel(), 1)


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
