"""The floor of the loss that rounding to other formats would give this run.

At an equilibrium stochastic rounding costs ``1/4 sum |m| S`` (law 1 of docs/laws.md),
with the averaged gradient ``m`` and the spacing ``S`` at each weight, both in value. A
run in floats has the gradients and the weights, and lacks only the grid: one such run
gives the floor of every format.

`m` is averaged here, with the decay that the optimizer has, from the gradients by which
it steps. `S` is that of the weights as they are, under the scales that they would get in
one byte.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import FLOOR_FORMATS, NATS, SUM, Metric
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import dequantized, forward_weight, linear_layers
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Observer, Step

_MEANING: Final = (
    "A quarter of the averaged gradient's L1 norm in codes, for each kind of layer; recorded at "
    "the last step, mean over the last quarter of the steps."
)
FLOOR = Metric(
    "floor/loss",
    "Floor by rounding",
    NATS,
    _MEANING,
    monitor="floor",
    over=SUM,
    operands=FLOOR_FORMATS,
)
#: steps between two measurements; the averaged gradient is updated in every step
INTERVAL = 10


def layer_kind(name: str) -> str:
    """Return the name that a layer has in every block, and an expert in every layer.

    >>> layer_kind("blocks.3.attn.qkv"), layer_kind("lm_head")
    ('attn.qkv', 'lm_head')
    >>> layer_kind("model.layers.3.mlp.experts.5.w1")
    'mlp.experts.w1'
    """
    parts = name.split(".")
    block = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if block is None:
        return name
    names = [part for part in parts[block + 1 :] if not part.isdigit()]
    return ".".join(names) or name


@torch.no_grad()
def spacing_in_codes(weight: Tensor, fmt: str) -> Tensor:
    """Return the ulp at each weight of a matrix, in value.

    The scales, one for each row, are those of a new one-byte parameter with these weights.

    >>> spacing_in_codes(torch.tensor([[1.0, 1.5]]), "E1M6")
    tensor([[0.0156, 0.0156]])
    """
    scale = fm.FP8Parameter(weight, fmt).scale
    return fm.ulp(weight / scale, fmt) * scale


@torch.no_grad()
def rounding_floor(weight: Tensor, gradient: Tensor, fmt: str) -> float:
    """Return ``1/4 sum |m| S`` of a matrix, with the spacings of `spacing_in_codes`.

    >>> rounding_floor(torch.tensor([[1.0, 1.5]]), torch.tensor([[0.5, -0.5]]), "E1M6")
    0.00390625
    """
    spacing = spacing_in_codes(weight, fmt)
    return float((gradient.abs() * spacing).sum(dtype=torch.float64)) / 4


def average_decay(config: Config) -> float:
    """Return the decay of the average by which a run's optimizer steps."""
    optimizer = config.optimizer
    for decay in (optimizer.momentum, optimizer.beta1):
        if decay is not None:
            return decay
    return 0.0


class FloorObserver(Observer):
    """Records `floor/loss/FORMAT` and `floor/loss/FORMAT/KIND` at the last step."""

    def __init__(
        self, layers: Mapping[str, nn.Linear], formats: list[str], decay: float, steps: int
    ) -> None:
        self._layers = layers
        self._formats = formats
        self._decay = decay
        #: steps before the last quarter, in which nothing is measured
        self._steps_before = steps - max(1, steps // 4)
        #: the averaged gradient of each layer's weight, begun at zero and not yet
        #: divided by `_total_weight`, which corrects that
        self._averages: dict[str, Tensor] = {}
        #: the sum of the weights of gradients in the averages, 1 after many steps
        self._total_weight = 0.0
        self._sums: dict[str, float] = defaultdict(float)
        self._count = 0

    @torch.no_grad()
    def before_step(self, step: Step) -> None:
        self._total_weight = self._decay * self._total_weight + 1 - self._decay
        for name, layer in self._layers.items():
            if layer.weight.grad is None:
                continue
            gradient = dequantized(layer.weight.grad).float()
            average = self._averages.setdefault(name, torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - self._decay)
        if step.number > self._steps_before and step.due(INTERVAL):
            self._measure()

    def _measure(self) -> None:
        self._count += 1
        for name, average in self._averages.items():
            weight = forward_weight(self._layers[name])
            for fmt in self._formats:
                floor = rounding_floor(weight, average / self._total_weight, fmt)
                self._sums[f"{FLOOR.part(fmt).name}/{layer_kind(name)}"] += floor
                self._sums[FLOOR.part(fmt).name] += floor

    def complete_record(self, step: Step) -> None:
        if step.last and self._count:
            step.record |= {name: total / self._count for name, total in self._sums.items()}

    def state(self) -> dict[str, Any]:
        return {
            "averages": {name: average.clone() for name, average in self._averages.items()},
            "weight": self._total_weight,
            "sums": dict(self._sums),
            "count": self._count,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = dict(state["averages"])
        self._total_weight = state["weight"]
        self._sums = defaultdict(float, state["sums"])
        self._count = state["count"]


def build(watched: Watched) -> FloorObserver | None:
    """Return the observer of a run; None without formats."""
    config = watched.config
    if not config.monitor.floor_formats:
        return None
    layers = {
        name: layer
        for name, layer in linear_layers(watched.model).items()
        if layer.weight.requires_grad
    }
    return FloorObserver(
        layers, config.monitor.floor_formats, average_decay(config), config.train.max_steps
    )
