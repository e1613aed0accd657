"""The numbers of one parameter's step as one row of a tensor, so that a new learning rate compiles nothing anew."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

__all__ = ["HYPER", "KEYS", "Hyper", "row"]

HYPER: Final = (
    "beta1",  # decay of the first average
    "gain1",  # what the gradient adds to it
    "beta2",
    "gain2",
    "eps",
    "rate",  # size of the step: the learning rate, bias corrections included
    "keep",  # what decay leaves of the weight
    "correction",  # sqrt(1 - beta2^t), where a direction needs its absolute size
    "largest",  # bound of a direction
    "inverse_reference",  # 1 / S_ref
    "log_reference",  # log2 S_ref
    "low",  # bounds of S / S_ref
    "high",
    "log_low",  # and their log2
    "log_high",
    "power",  # the stiffness exponent k
    "inject",  # (1 - beta1) / beta1 / rate: how much of a rounding error goes into the average
    "floor",  # magnitude below which a multiplicative step becomes additive
    "per_unit",  # what gradients with respect to codes are multiplied by, a power of two
)
_POSITION: Final = {name: i for i, name in enumerate(HYPER)}
_EPS: Final = _POSITION["eps"]

KEYS: Final = 8
"""int32 words a row of keys holds: three round keys and a phase for the weights' draws, as many for the averages'."""


class Hyper:
    """Names for the entries of a row; each is a 0-dim tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, name: str) -> Tensor:
        """The entry called ``name``."""
        return self._tensor[_POSITION[name]]


def row(values: Mapping[str, float], dtype: torch.dtype) -> list[float]:
    """The values in their order, 0 where none is given; eps is kept from 0.

    A weight that never had a gradient has the direction 0 / eps, which is 0 unless eps is.
    """
    numbers = [0.0] * len(HYPER)
    for name, value in values.items():
        numbers[_POSITION[name]] = value
    numbers[_EPS] = max(numbers[_EPS], torch.finfo(dtype).tiny)
    return numbers
