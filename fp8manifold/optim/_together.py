"""The processes that an optimizer steps together with, also where this one has no parameters."""

import sys

import torch
from torch.optim import Optimizer

from fp8manifold._ranks import Ranks, ranks_of

__all__ = ["ranks_elsewhere", "ranks_together"]


def ranks_elsewhere() -> tuple[list[Ranks], torch.device] | None:
    """Those of all parameters of a ``ZeroRedundancyOptimizer`` that makes the optimizer of this process' part.

    A process may have none of them, and no other way to know who waits for its verdict.
    """
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None:
        return None
    code, frame = zero.ZeroRedundancyOptimizer._init_local_optimizer.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            optimizer = frame.f_locals["self"]
            return ranks_of(optimizer._all_params), optimizer._all_params[0].device
        frame = frame.f_back  # type: ignore[assignment]
    return None


def ranks_together(optimizer: Optimizer) -> tuple[list[Ranks], torch.device]:
    """The processes that step together with this one, and where they agree."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    if everyone:
        return ranks_of(everyone), everyone[0].device
    return getattr(optimizer, "_elsewhere", None) or ([], torch.device("cpu"))
