"""Whether a module is loading a state just now: the one case in which a copy takes over how far a draw has come."""

import sys
from typing import Final

from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["is_averaging", "is_loading", "is_sent_as_floats"]

_LOADS: Final = (nn.Module.load_state_dict.__code__, nn.Module._load_from_state_dict.__code__)
_AVERAGES: Final = (AveragedModel.update_parameters.__code__,)


def is_loading() -> bool:
    """Whether the caller runs inside ``Module.load_state_dict``: to a tensor that is a ``copy_`` like any other."""
    return _runs_inside(_LOADS)


def is_averaging() -> bool:
    """Whether the caller runs inside ``AveragedModel.update_parameters``."""
    return _runs_inside(_AVERAGES)


def is_sent_as_floats() -> bool:
    """Whether torch's helpers send a full state from one process to others, who have made ready for floats."""
    helpers = sys.modules.get("torch.distributed._state_dict_utils")
    return helpers is not None and _runs_inside((helpers._broadcast_tensors.__code__,))


def _runs_inside(codes: tuple[object, ...]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
