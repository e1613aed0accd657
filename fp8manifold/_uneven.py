"""Processes that run out of batches at different times, as torch's ``Join`` has them: refused before anybody waits."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["refuse_uneven_inputs"]


def refuse_uneven_inputs(model: nn.Module) -> None:
    """Have a model raise, in every process, where it is run in a ``Join`` that would leave some of them behind."""
    if _check_inputs not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_inputs)


def _check_inputs(model: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or wrapper.process_group.size() == 1:
        return
    join = wrapper._join_config
    if join.enable and not join.throw_on_early_termination:
        raise RuntimeError(
            "torch's Join goes on with the processes that have batches left, and steps and scales of this model are "
            "agreed on by all of them: give every process as many batches, or Join throw_on_early_termination=True"
        )
