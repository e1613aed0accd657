"""Tensors that have a shape and a dtype but no values: those of the meta device, and those of a ``FakeTensorMode``."""

from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = ["has_values"]


def has_values(x: Tensor) -> bool:
    """Whether there is anything to check or to round in ``x``."""
    return not (x.is_meta or isinstance(x, FakeTensor))
