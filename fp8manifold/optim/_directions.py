"""Directions that a step descends along, and the numbers that a step is given."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8manifold._numerics.stiffness import sqrt_exact

NUMBERS: Final = (
    "beta1",  # decay of the first moment
    "gain1",  # what the gradient adds to it
    "beta2",
    "gain2",
    "eps",
    "rate",  # size of the step: the learning rate, bias corrections included
    "keep",  # what decay leaves of the weight
    "inverse_reference",  # 1 / S_ref
    "log_reference",  # log2 S_ref
    "low",  # bounds of S / S_ref
    "high",
    "log_low",  # and their log2
    "log_high",
    "power",  # the stiffness exponent k
    "inject",  # (1 - beta1) / beta1 / rate: how much of a rounding error goes into the first moment
    "per_unit",  # what gradients with respect to codes are multiplied by, a power of two
)
POSITIONS: Final = {name: i for i, name in enumerate(NUMBERS)}
Numbers = Mapping[str, Tensor]  #: The numbers of a step by name, each a 0-dim tensor.


def named(row: Tensor) -> Numbers:
    return dict(zip(NUMBERS, row.unbind(), strict=True))


def row_of(numbers: Mapping[str, float], dtype: torch.dtype) -> list[float]:
    """Numbers in the order of :data:`NUMBERS`, 0 where none is given; eps is above 0,
    so that 0 / eps is 0.
    """
    row = [0.0] * len(NUMBERS)
    for name, number in numbers.items():
        row[POSITIONS[name]] = number
    row[POSITIONS["eps"]] = max(row[POSITIONS["eps"]], torch.finfo(dtype).tiny)
    return row


class Descent(NamedTuple):
    """A direction, the moments after the step by name, and what divides the first
    moment to give the direction.
    """

    direction: Tensor
    moments: dict[str, Tensor]
    denominator: Tensor | None = None
    root: Tensor | None = None  # of the second moment, where it has been computed


def adam(gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers) -> Descent:
    """Adam's direction, short of the bias corrections, which are part of the rate and
    of eps.

    .. math:: m = \\beta_1 m + (1 - \\beta_1) g, \\quad v = \\beta_2 v + (1 - \\beta_2) g^2, \\quad
              d = \\frac{m}{\\sqrt{v} + \\epsilon \\sqrt{1 - \\beta_2^t}}, \\quad
              rate = \\eta \\frac{\\sqrt{1 - \\beta_2^t}}{1 - \\beta_1^t}

    With ``max_exp_avg_sq`` the largest ``v`` so far takes its place in ``d`` (AMSGrad).

    Source: Kingma and Ba 2015; Reddi, Kale, Kumar 2018.
    """
    first = moments["exp_avg"] * numbers["beta1"] + gradient * numbers["gain1"]
    second = moments["exp_avg_sq"] * numbers["beta2"] + (gradient * numbers["gain2"]) * gradient
    after = {"exp_avg": first, "exp_avg_sq": second}
    root = sqrt_exact(second)
    if "max_exp_avg_sq" in moments:
        after["max_exp_avg_sq"] = torch.maximum(moments["max_exp_avg_sq"], second)
        denominator = sqrt_exact(after["max_exp_avg_sq"]) + numbers["eps"]
    else:
        denominator = root + numbers["eps"]
    return Descent(first / denominator, after, denominator, root)


def sgd(
    gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers, *, nesterov: bool = False
) -> Descent:
    """The gradient, or its momentum.

    .. math:: b = \\mu b + (1 - \\tau) g, \\qquad d = b \\text{ or, with Nesterov, } g + \\mu b

    Source: Sutskever et al. 2013, in torch's convention.
    """
    if "momentum_buffer" not in moments:
        return Descent(gradient, {})
    buffer = moments["momentum_buffer"] * numbers["beta1"] + gradient * numbers["gain1"]
    direction = gradient + buffer * numbers["beta1"] if nesterov else buffer
    return Descent(direction, {"momentum_buffer": buffer})


def muon(
    gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers, *, nesterov: bool = False
) -> Descent:
    """The matrix that Muon takes the orthogonal factor of: the gradient, or its
    momentum.

    .. math:: m = \\mu m + (1 - \\mu) g, \\qquad u = m \\text{ or, with Nesterov, } (1 - \\mu) g + \\mu m

    Source: Jordan et al. 2024, in torch's convention.
    """
    if "momentum_buffer" not in moments:
        return Descent(gradient, {})
    moment = moments["momentum_buffer"] * numbers["beta1"] + gradient * numbers["gain1"]
    mixed = gradient * numbers["gain1"] + moment * numbers["beta1"] if nesterov else moment
    return Descent(mixed, {"momentum_buffer": moment})


def lion(gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers) -> Descent:
    """The sign of an interpolation between the moment and the gradient; 0 where the
    interpolation is 0.

    .. math:: d = \\operatorname{sign}(\\beta_1 m + (1 - \\beta_1) g), \\qquad m = \\beta_2 m + (1 - \\beta_2) g

    Source: Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms).
    """
    moment = moments["exp_avg"]
    mixed = moment * numbers["beta1"] + gradient * numbers["gain1"]
    return Descent(
        mixed.sign(), {"exp_avg": moment * numbers["beta2"] + gradient * numbers["gain2"]}
    )


class Direction(NamedTuple):
    """A direction: its pure function, the names of its moments in the state, and what
    it refuses.
    """

    descend: Callable[..., Descent]
    moments: tuple[str, ...]
    takes_no_error: str | None = (
        None  # the reason why no rounding error can go into its first moment
    )
    fitted: bool = False  # in 8 bits its moment is on a grid fitted to each block's largest value


DIRECTIONS: Final = {
    "adam": Direction(adam, ("exp_avg", "exp_avg_sq")),
    "sgd": Direction(sgd, ("momentum_buffer",)),
    "lion": Direction(lion, ("exp_avg",), "its step is a sign, to which no error can be added"),
    "muon": Direction(muon, ("momentum_buffer",), fitted=True),
}
MOMENT_NAMES: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""All moments that there are, AMSGrad's included."""
