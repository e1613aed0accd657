"""Gaussian noise where a grid would round: float weights that move as rounded ones do,
in mean and variance.

It is for experiments that ask whether these two moments are all that stochastic
rounding does to a training.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import quantized_layers

#: keeps the draws of noise apart from those of other uses of the run's seed
_APART: Final = 1 << 40
_BITS: Final = 24


def rounding_deviation(step: Tensor, spacing: Tensor) -> Tensor:
    """Return the standard deviation of stochastic rounding after a step from a point of
    a grid.

    Of a step `d` shorter than the spacing `S` the variance is `|d| (S - |d|)`; a longer
    one counts by its part beyond whole spacings.

    >>> rounding_deviation(torch.tensor([0.25, -1.5, 2.0]), torch.tensor(1.0)).square().tolist()
    [0.1875, 0.25, 0.0]
    """
    part = (step.abs() / spacing) % 1
    return spacing * (part * (1 - part)).sqrt()


def gaussian(like: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """Return normal numbers that depend only on their key and position.

    >>> normal = gaussian(torch.zeros(10_000), seed=1, step=2, stream=3)
    >>> abs(normal.mean().item()) < 0.05, abs(normal.std().item() - 1) < 0.05
    (True, True)
    """
    bits = fm.random_bits(like.shape, seed=seed, step=step, stream=stream, device=like.device)
    uniform = (bits.double() + 0.5) * 2.0**-_BITS
    return torch.special.ndtri(uniform).to(like.dtype)


@dataclass
class NoisyLayer:
    """A layer whose weight moves on the continuous manifold of its format."""

    layer: Any
    stream: int
    #: places from which each weight takes the spacing; None: its own
    places: Tensor | None
    #: the weight before the step
    before: Tensor | None = None

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.layer.weight
        return weight


class WriteBackNoise:
    """Adds noise to the weights of a model after every step of its optimizer.

    The spacing by which a weight's noise is measured is `optimizer.noise`: the format's
    at the weight (`ulp`), its mean over the layer (`mean`), or that at another weight of
    the layer (`permuted`), the same one throughout the run.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._seed, self._kind = config.seed, config.optimizer.noise
        self._layers = [
            NoisyLayer(layer, _APART + number, self._places(layer, number))
            for number, layer in enumerate(quantized_layers(model).values())
            if isinstance(layer.manifold, fm.StiffnessManifold)
        ]

    def _places(self, layer: Any, number: int) -> Tensor | None:
        if self._kind != "permuted":
            return None
        weight = layer.weight
        bits = fm.random_bits(weight.numel(), seed=self._seed, stream=_APART + number)
        return bits.argsort(stable=True).to(weight.device)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Add noise after every step that `optimizer` takes from now on."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        for noisy in self._layers:
            noisy.before = noisy.weight.detach().clone()

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for noisy in self._layers:
            weight, before, noisy.before = noisy.weight, noisy.before, None
            assert before is not None
            step = int(optimizer.state[weight].get("step", 0))
            deviation = rounding_deviation(weight.detach() - before, self._spacing(noisy, before))
            normal = gaussian(before, seed=self._seed, step=step, stream=noisy.stream)
            weight.copy_(noisy.layer.manifold.projx(weight.detach() + deviation * normal))

    def _spacing(self, noisy: NoisyLayer, weight: Tensor) -> Tensor:
        spacing: Tensor = noisy.layer.manifold.stiffness(weight)
        if self._kind == "mean":
            return spacing.mean()
        return spacing if noisy.places is None else spacing.view(-1)[noisy.places].view_as(weight)
