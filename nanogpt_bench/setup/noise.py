"""Gaussian noise where a grid would round.

Float weights then move as rounded ones do, in mean and variance. It is for experiments
that ask whether these two moments are all that stochastic rounding does to a training:

    weight after a step = projx(weight + deviation * normal)

where the deviation is that of stochastic rounding after the same step. Its spacing is
the format's at the weight, its mean over the layer, or that at another weight.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import quantized_layers

#: keeps the draws of noise apart from those of other uses of the run's seed
_APART: Final = 1 << 40
#: bits of a random number
_BITS: Final = 24


class NoiseSpacing(StrEnum):
    """The values of `optimizer.noise`: the spacing that measures a weight's noise."""

    #: the format's at the weight
    ULP = "ulp"
    #: its mean over the layer
    MEAN = "mean"
    #: that at another weight of the layer, the same one throughout the run
    PERMUTED = "permuted"


def rounding_deviation(step: Tensor, spacing: Tensor) -> Tensor:
    """Return the standard deviation of stochastic rounding after a step.

    The step begins at a point of the grid. Of a step `d` shorter than the spacing `S`
    the variance is `|d| (S - |d|)`. A longer one counts by its part beyond whole
    spacings.

    >>> rounding_deviation(torch.tensor([0.25, -1.5, 2.0]), torch.tensor(1.0)).square().tolist()
    [0.1875, 0.25, 0.0]
    """
    part = (step.abs() / spacing) % 1
    return spacing * (part * (1 - part)).sqrt()


def gaussian(tensor: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """Return normal numbers that depend only on their key and position.

    >>> normal = gaussian(torch.zeros(10_000), seed=1, step=2, stream=3)
    >>> abs(normal.mean().item()) < 0.05, abs(normal.std().item() - 1) < 0.05
    (True, True)
    """
    bits = fm.random_bits(tensor.shape, seed=seed, step=step, stream=stream, device=tensor.device)
    uniform = (bits.double() + 0.5) * 2.0**-_BITS
    return torch.special.ndtri(uniform).to(tensor.dtype)


@dataclass
class NoisyLayer:
    """A layer whose weight moves on the continuous manifold of its format."""

    layer: Any
    #: of its random numbers
    stream: int
    #: indices of the weights from which each weight takes the spacing; None: itself
    permutation: Tensor | None
    #: the weight before the step
    weight_before: Tensor | None = None

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.layer.weight
        return weight


class WriteBackNoise:
    """Adds noise to the weights of a model after every step of its optimizer."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._seed = config.seed
        self._spacing_kind = NoiseSpacing(config.optimizer.noise or NoiseSpacing.ULP)
        self._layers: list[NoisyLayer] = []
        for number, layer in enumerate(quantized_layers(model).values()):
            if isinstance(layer.manifold, fm.StiffnessManifold):
                stream = _APART + number
                self._layers.append(NoisyLayer(layer, stream, self._permutation(layer, stream)))

    def _permutation(self, layer: Any, stream: int) -> Tensor | None:
        if self._spacing_kind != NoiseSpacing.PERMUTED:
            return None
        weight = layer.weight
        bits = fm.random_bits(weight.numel(), seed=self._seed, stream=stream)
        return bits.argsort(stable=True).to(weight.device)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Add noise after every step that `optimizer` takes from now on."""
        optimizer.register_step_pre_hook(self._copy_weights)
        optimizer.register_step_post_hook(self._add_noise)

    def _copy_weights(self, *_: Any) -> None:
        for noisy in self._layers:
            noisy.weight_before = noisy.weight.detach().clone()

    @torch.no_grad()
    def _add_noise(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for noisy in self._layers:
            weight = noisy.weight
            weight_before = noisy.weight_before
            noisy.weight_before = None
            assert weight_before is not None
            step = int(optimizer.state[weight].get("step", 0))
            moved = weight.detach() - weight_before
            deviation = rounding_deviation(moved, self._spacing(noisy, weight_before))
            normal = gaussian(weight_before, seed=self._seed, step=step, stream=noisy.stream)
            weight.copy_(noisy.layer.manifold.projx(weight.detach() + deviation * normal))

    def _spacing(self, noisy: NoisyLayer, weight: Tensor) -> Tensor:
        spacing: Tensor = noisy.layer.manifold.stiffness(weight)
        if self._spacing_kind == NoiseSpacing.MEAN:
            return spacing.mean()
        if noisy.permutation is None:
            return spacing
        return spacing.view(-1)[noisy.permutation].view_as(weight)
