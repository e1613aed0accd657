"""One step of one parameter as a pure function: direction x stiffness x write-back."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold.optim._directions import DIRECTIONS, Descent
from fp8manifold.optim._geometry import chart_for, covector, move, stiffness_factor
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._moments import SCALES, load_averages, prepare, store_averages
from fp8manifold.optim._variant import BOUNDS, Variant
from fp8manifold.optim._weights import Weights, load_weights, reciprocal_scale, store_weights

__all__ = ["Outcome", "step"]


class Outcome(NamedTuple):
    """The new values of what is stored, by name, and what the step asked for, in units of the scale."""

    stored: dict[str, Tensor]
    before: Weights
    target: Tensor


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
    gradient = _gradient(variant, weights, arrays, hyper, numbers.dtype)
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
        averages = _with_error(variant, descent, weights, target, after, arrays, hyper)
    kept = store_averages(variant, averages, arrays, noise.get("moments"), descent.root)
    return Outcome(stored | kept | bounds, weights, target)


def _gradient(
    variant: Variant, weights: Weights, arrays: dict[str, Tensor], hyper: Hyper, dtype: torch.dtype
) -> Tensor:
    gradient = arrays["gradient"].to(dtype)
    return covector(variant, weights, -gradient if variant.maximize else gradient, arrays, hyper)


def _direction(variant: Variant, gradient: Tensor, averages: dict[str, Tensor], hyper: Hyper) -> Descent:
    descend = DIRECTIONS[variant.direction].descend
    return descend(gradient, averages, hyper, nesterov=True) if variant.nesterov else descend(gradient, averages, hyper)


def _with_error(
    variant: Variant,
    descent: Descent,
    weights: Weights,
    target: Tensor,
    after: Tensor,
    arrays: dict[str, Tensor],
    hyper: Hyper,
) -> dict[str, Tensor]:
    """The averages with the rounding error in the first one.

    .. math:: m \\leftarrow m + \\frac{1}{\\eta} \\left( 1 - \\frac{1}{\\beta_1} \\right) (target - after)

    where ``eta`` is what ``m`` is multiplied by in this step, element by element.  A weight and its momentum then move
    together as an unrounded weight would: ``w - eta beta_1 / (1 - beta_1) m`` is as if nothing had been rounded.

    Source: ECO (arXiv 2601.22101), for momentum and Adam.
    """
    if variant.geometry == "linear":
        error = (target - after) / reciprocal_scale(variant, arrays)
        if variant.stiffness != "none":
            error = error / stiffness_factor(variant, weights, arrays, hyper)
    else:
        chart = chart_for(variant, arrays)
        error = chart.forward(target) - chart.forward(after)
    if descent.denominator is not None:
        error = error * descent.denominator
    name = variant.stores[0]
    return descent.averages | {name: descent.averages[name] - error * hyper["inject"]}
