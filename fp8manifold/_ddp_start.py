"""DDP's own start of a model with one-byte weights: they are sent as they are, in place of floats.

``DistributedDataParallel`` detaches every parameter of its module and broadcasts what it gets.  Floats would be rounded
into other scales, so that the first of these calls runs ``sync`` in their place, and DDP sends nothing of the weights.
Libraries that wrap a model by themselves (accelerate, transformers' ``Trainer``) start with it.
"""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import implements
from fp8manifold._encoded.operators import alias

__all__ = ["start_ddp_with"]


def start_ddp_with(sync: Callable[..., None]) -> None:
    """Register what DDP's start does to a model: ``sync(module, group)``."""

    @implements(torch.ops.aten.detach.default)
    def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        utils = sys.modules.get("torch.distributed.utils")
        start = None if utils is None else _call_of(utils._sync_module_states.__code__, sync.__code__)
        if start is None:
            return alias(func, args, kwargs)
        held = start.f_locals
        if not any(isinstance(x, _Sent) for x in held["module_states"]):
            sync(held["module"], held["process_group"])
        return torch.empty(0, dtype=args[0].dtype, device=args[0].device).as_subclass(_Sent)


class _Sent(Tensor):
    """Nothing, in the place of a weight that all processes have by now."""


def _call_of(start: CodeType, instead: CodeType) -> FrameType | None:
    """The call of DDP's start that detaches a parameter just now, and not within what takes its place."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not start:
        frame = None if frame.f_code is instead else frame.f_back
    return frame
