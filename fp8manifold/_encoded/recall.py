"""Codes read anew for a backward pass, so that compiled code has nothing but codes to keep for it.

A compiler sees the whole of a forward and a backward pass, in which a weight is decoded twice from the same codes.  It
may find that once is enough, and keep the floats in between: four bytes a weight where autograd keeps one.  What the
backward pass decodes therefore comes out of an operator that also takes a gradient: it can't run any sooner.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_backward", "recall"]


@torch.library.custom_op("fp8manifold::recall", mutates_args=())
def recall(codes: Tensor, after: Tensor) -> Tensor:
    """A copy of the codes that can be made only once ``after`` is there."""
    return codes.clone()


@recall.register_fake
def _(codes: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(codes)


def is_backward() -> bool:
    """Whether autograd is in a backward pass, in this thread."""
    running: Any = torch._C._current_graph_task_id()
    return bool(running != -1)
