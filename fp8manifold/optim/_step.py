"""One step of one parameter as a pure function: direction x stiffness x write-back."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold.optim._directions import Descent, adam, lion, madam, muon, sgd
from fp8manifold.optim._geometry import covector, move
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._injection import with_error
from fp8manifold.optim._moments import SCALES, load_averages, prepare, store_averages
from fp8manifold.optim._variant import BOUNDS, Variant
from fp8manifold.optim._weights import Weights, load_weights, store_weights

__all__ = ["Outcome", "step"]


class Outcome(NamedTuple):
    """The new values of what is stored, by name, and what the step asked for, in units of the scale."""

    stored: dict[str, Tensor]
    before: Weights
    target: Tensor
    direction: Tensor


def step(variant: Variant, arrays: dict[str, Tensor], numbers: Tensor, noise: dict[str, Tensor]) -> Outcome:
    """Take a step from ``arrays``, none of which is changed.

    Args:
        variant: what is stepped and how.
        arrays: the weight, its gradient, the state and the scale, all views that broadcast against each other; rows of
            them are whole blocks of 8-bit averages.
        numbers: one row of :data:`HYPER`, in the dtype that is computed in.
        noise: 32-bit random words: ``weight`` for the write-back, ``moments`` for the averages.
    """
    hyper = Hyper(numbers)
    weights = load_weights(variant, arrays, numbers.dtype)
    gradient = _gradient(variant, weights, arrays, numbers.dtype)
    bounds = {}
    if variant.moments == "8bit" and variant.stores:
        prepared = prepare(variant, arrays, gradient, hyper)
        bounds = {BOUNDS[name]: prepared[BOUNDS[name]] for name in variant.stores}
        arrays = arrays | {name: prepared[name] for name in SCALES if name in prepared}
    descent = _direction(variant, gradient, load_averages(variant, arrays, numbers.dtype), hyper)
    target = move(variant, weights, descent.direction, arrays, hyper)
    draws = (noise["weight"] >> 8) & 0xFFFFFF if variant.draws_for_weight else None
    stored, after = store_weights(variant, arrays, weights, target, draws)
    averages = descent.averages
    if variant.injects:
        averages = with_error(variant, descent, weights, target, after, arrays, hyper)
    kept = store_averages(variant, averages, arrays, noise.get("moments"), descent.root)
    return Outcome(stored | kept | bounds, weights, target, descent.direction)


def _gradient(variant: Variant, weights: Weights, arrays: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    gradient = arrays["gradient"].to(dtype)
    return covector(variant, weights, -gradient if variant.maximize else gradient, arrays)


def _direction(variant: Variant, gradient: Tensor, averages: dict[str, Tensor], hyper: Hyper) -> Descent:
    if variant.direction == "adam":
        return adam(gradient, averages, hyper)
    if variant.direction == "lion":
        return lion(gradient, averages, hyper)
    if variant.direction == "madam":
        return madam(gradient, averages, hyper)
    if variant.direction == "muon":
        return muon(gradient, averages, hyper, nesterov=variant.nesterov)
    return sgd(gradient, averages, hyper, nesterov=variant.nesterov)
