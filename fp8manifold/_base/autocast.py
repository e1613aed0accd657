"""The dtype that autocast asks of a product, and products out of its reach."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

_NOTHING: Final = nullcontext()
"""A context that changes nothing, and may be entered again."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of a product of ``x`` under the autocast of its device, or None.

    Autocast leaves float64, and tensors without memory, as they are.
    """
    device = x.device.type
    if x.is_meta or x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def outside_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves products on the device of ``x`` alone.

    A product of codes sums numbers without their scales, which float16 could not hold.
    """
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
