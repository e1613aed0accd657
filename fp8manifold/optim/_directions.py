"""Directions that a step descends along, and the numbers that a step needs.

A direction is a pure function of one parameter's gradient and moments::

    descend(gradient, moments, numbers) -> Descent(direction, moments after the step)

``numbers`` are the floats of this step by name (``beta1``, ``rate``, ...):
`_step_numbers.py` computes them in Python, so that no direction knows of options or
schedules. They travel to C and to a GPU's kernels as one row in the order of `NUMBERS`
(``_interface.py``).

These functions are the definition of the directions, and ``_eager_step.py``, which calls them
through `DIRECTIONS`, is that of the rest of a step. Whoever wants to know what a step
computes reads these two files, and for Muon's halves and their factor ``_matrices.py``. All
else is a twin, tested to the bit against them:

    _native/stages.c       the same stages in C, a tile at a time
    _native/in_one_loop.c  the usual steps over codes once more, in one loop: Adam's, and
                           those along a gradient or a factor (SGD, Adafactor, the second
                           half of Muon's)
    _triton/stages.py      the same stages on a GPU

Only + - * /, comparisons and ``sqrt_exact`` are used, which round alike everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8manifold._interface import NUMBERS, POSITIONS
from fp8manifold._numerics.stiffness import sqrt_exact

Numbers = Mapping[str, Tensor]
"""The numbers of a step by name, each a 0-dim tensor.

Floats, which a direction's operations round to the tensors' dtype, give the same bits.
"""


def numbers_by_name(row: Tensor) -> Numbers:
    """Return views of a row's entries, by the names in :data:`NUMBERS`."""
    return dict(zip(NUMBERS, row.unbind(), strict=True))


def row_from_numbers(numbers: Mapping[str, float], dtype: torch.dtype) -> list[float]:
    """Return numbers in the order of :data:`NUMBERS`, with 0 for those that are missing.

    ``eps`` becomes at least the dtype's smallest normal number, so that 0 / eps is 0.
    """
    row = [0.0] * len(NUMBERS)
    for name, number in numbers.items():
        row[POSITIONS[name]] = number
    row[POSITIONS["eps"]] = max(row[POSITIONS["eps"]], torch.finfo(dtype).tiny)
    return row


class Descent(NamedTuple):
    """A direction, and the moments after the step by name."""

    direction: Tensor
    moments: dict[str, Tensor]
    #: what divides the first moment to give the direction
    denominator: Tensor | None = None
    #: the square root of the second moment, where it has been computed
    root: Tensor | None = None


def adam(gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers) -> Descent:
    r"""Return Adam's direction, without the bias corrections.

    These are part of the numbers ``rate`` and ``eps``:

    .. math:: m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
              d = \frac{m}{\sqrt{v} + \epsilon \sqrt{1 - \beta_2^t}}, \quad
              rate = \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}

    With ``max_exp_avg_sq`` the largest ``v`` so far takes its place in ``d`` (AMSGrad).

    Source: Kingma and Ba 2015; Reddi, Kale, Kumar 2018.
    """
    first = moments["exp_avg"] * numbers["beta1"] + gradient * numbers["gain1"]
    second = moments["exp_avg_sq"] * numbers["beta2"] + (gradient * numbers["gain2"]) * gradient
    new_moments = {"exp_avg": first, "exp_avg_sq": second}
    root = sqrt_exact(second)
    if "max_exp_avg_sq" in moments:
        largest = torch.maximum(moments["max_exp_avg_sq"], second)
        new_moments["max_exp_avg_sq"] = largest
        denominator = sqrt_exact(largest) + numbers["eps"]
    else:
        denominator = root + numbers["eps"]
    return Descent(first / denominator, new_moments, denominator, root)


def sgd(
    gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers, *, nesterov: bool = False
) -> Descent:
    r"""Return the gradient, or its momentum.

    .. math:: b = \mu b + (1 - \tau) g, \qquad d = b \text{ or, with Nesterov, } g + \mu b

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
    r"""Return the matrix whose orthogonal factor Muon takes: the gradient, or its momentum.

    .. math:: m = \mu m + (1 - \mu) g, \qquad
              u = m \text{ or, with Nesterov, } (1 - \mu) g + \mu m

    Source: Jordan et al. 2024, in torch's convention.
    """
    if "momentum_buffer" not in moments:
        return Descent(gradient, {})
    moment = moments["momentum_buffer"] * numbers["beta1"] + gradient * numbers["gain1"]
    mixed = gradient * numbers["gain1"] + moment * numbers["beta1"] if nesterov else moment
    return Descent(mixed, {"momentum_buffer": moment})


def lion(gradient: Tensor, moments: dict[str, Tensor], numbers: Numbers) -> Descent:
    r"""Return the sign of an interpolation between the moment and the gradient.

    .. math:: d = \operatorname{sign}(\beta_1 m + (1 - \beta_1) g), \qquad
              m = \beta_2 m + (1 - \beta_2) g

    Where the interpolation is 0, so is the direction.

    Source: Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms).
    """
    moment = moments["exp_avg"]
    mixed = moment * numbers["beta1"] + gradient * numbers["gain1"]
    new_moment = moment * numbers["beta2"] + gradient * numbers["gain2"]
    return Descent(mixed.sign(), {"exp_avg": new_moment})


class Direction(NamedTuple):
    """A direction: its pure function, and what the state needs for it."""

    descend: Callable[..., Descent]
    #: names of its moments in the state
    moments: tuple[str, ...]
    #: why no rounding error can be added to its first moment; None where one can
    takes_no_error: str | None = None
    #: True where its moment in 8 bits is on a grid fitted to each block's largest value
    fitted: bool = False


DIRECTIONS: Final = {
    "adam": Direction(adam, ("exp_avg", "exp_avg_sq")),
    "sgd": Direction(sgd, ("momentum_buffer",)),
    "lion": Direction(lion, ("exp_avg",), "its step is a sign, to which no error can be added"),
    "muon": Direction(muon, ("momentum_buffer",), fitted=True),
}
"""The directions by name. An optimizer outside of this file adds its own."""
MOMENT_NAMES: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Names of all moments in states, AMSGrad's included."""
