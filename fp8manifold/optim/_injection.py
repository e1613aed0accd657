"""Error injection: what the rounding took from the weights is given to their momentum."""

from torch import Tensor

from fp8manifold.optim._directions import Descent
from fp8manifold.optim._geometry import chart_for, stiffness_factor
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._variant import Variant
from fp8manifold.optim._weights import Weights, reciprocal_scale

__all__ = ["with_error"]


def with_error(
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
