"""Refuse optimizers whose parameters are no longer in the model.

Surgery on a model (``dequantize_model``, a loader, and ``quantize_model`` where it can't keep
the objects) puts new parameters in the places of old ones. An optimizer made before it would
go on stepping the old ones, and train nothing. So a replaced parameter carries a mark with its
successor, and a hook of every optimizer's step looks for parameters that have the mark.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8manifold._base.param_groups import parameters_of

_NAMES_IN_MESSAGE: Final = 3
MARK: Final = "replaced_in_model"
"""The attribute of a replaced parameter, which is not carried to another one."""


@dataclass(frozen=True)
class _Replacement:
    """The parameter that has taken another one's place."""

    #: its name in the model
    name: str
    parameter: Tensor
    #: True if the replaced one stays in other places of the model: a copy took this one
    stays: bool


class _StepHook:
    """The replaced parameters that are alive, and the hook of every optimizer's step.

    Replaced parameters are freed unless an optimizer or another model holds them, so a
    step usually has nothing to look for. The hook then returns at once. It is not
    removed, since torch may be going through its hooks when the last one is freed.
    """

    def __init__(self) -> None:
        self.parameters_alive = 0
        self._is_registered = False

    def watch_for(self, replaced: Tensor) -> None:
        """Count a parameter until it is freed."""
        self.parameters_alive += 1
        weakref.finalize(replaced, self._note_freed).atexit = False
        if not self._is_registered:
            register_optimizer_step_pre_hook(_refuse_before_step)
            self._is_registered = True

    def _note_freed(self) -> None:
        self.parameters_alive -= 1


_STEP_HOOK: Final = _StepHook()


def note_replaced(old: Tensor, new: Tensor, name: str, *, stays: bool = False) -> None:
    """Note on a parameter that a new one has taken its place ``name`` in a model.

    The gradient of the old one, which the new one has now, is dropped unless the old
    one ``stays`` elsewhere in the model.
    """
    if old is new:
        return
    vars(old)[MARK] = _Replacement(name, new, stays)
    if not stays:
        # A gradient would look as if the parameter were trained in another model.
        old.grad = None
    _STEP_HOOK.watch_for(old)


def refuse_replaced(optimizer: Optimizer) -> None:
    """Raise RuntimeError for an optimizer of replaced parameters without their successors.

    A replaced parameter that has a gradient is trained in another model, and passes.
    """
    parameters = parameters_of(optimizer)
    replaced = [p for p in parameters if MARK in vars(p) and p.requires_grad]
    if not replaced:
        return
    parameter_ids = {id(p) for p in parameters}
    names = [vars(p)[MARK].name for p in replaced if _is_lost(p, parameter_ids)]
    if not names:
        return
    listed = ", ".join(repr(name) for name in names[:_NAMES_IN_MESSAGE])
    if len(names) > _NAMES_IN_MESSAGE:
        listed += f" and {len(names) - _NAMES_IN_MESSAGE} more"
    raise RuntimeError(
        f"this {type(optimizer).__name__} was made before quantize_model, dequantize_model or a "
        f"loader replaced {listed} in the model, so it would train nothing there: make a new "
        "optimizer of model.parameters()"
    )


def _is_lost(parameter: Tensor, parameter_ids: set[int]) -> bool:
    """True if stepping a replaced parameter leaves a part of the model untrained.

    ``parameter_ids`` are those of the optimizer's parameters.
    """
    successors = list(_successors(parameter))
    if any(id(successor.parameter) in parameter_ids for successor in successors):
        return False
    # A gradient is of another model, unless the parameter stays in this one too.
    return successors[0].stays or parameter.grad is None


def _successors(parameter: Tensor) -> Iterator[_Replacement]:
    successor: _Replacement | None = vars(parameter).get(MARK)
    while successor is not None:
        yield successor
        successor = vars(successor.parameter).get(MARK)


def _refuse_before_step(optimizer: Optimizer, args: Iterable[Any], kwargs: Any) -> None:
    if _STEP_HOOK.parameters_alive:
        refuse_replaced(optimizer)
