"""Parameters whose place in a model another one has taken: an optimizer that was made
before and still has them is refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_NAMED: Final = 3
MARK: Final = "replaced_in_model"
"""The attribute of a replaced parameter, which is not carried to another one."""


@dataclass(frozen=True)
class _Replacement:
    """What has taken a parameter's place."""

    name: str  #: In the model.
    parameter: Tensor
    stays: bool  #: True if the model has the replaced one elsewhere: a copy took one place of it.


class _Watch:
    """The hook of every optimizer's step, registered once a parameter was replaced."""

    is_registered = False


def note_replaced(before: Tensor, after: Tensor, name: str, *, stays: bool = False) -> None:
    """Note on a parameter that another one has taken its place ``name`` in a model.

    Its gradient, which the other one has now, is dropped unless it ``stays`` elsewhere
    in the model.
    """
    if before is after:
        return
    vars(before)[MARK] = _Replacement(name, after, stays)
    if not stays:
        before.grad = None  # or it would look as if it were trained elsewhere
    if not _Watch.is_registered:
        register_optimizer_step_pre_hook(_refuse)
        _Watch.is_registered = True


def refuse_replaced(optimizer: Optimizer) -> None:
    """Raise RuntimeError if an optimizer has parameters that its model has no more, and
    not those in their places.

    One that has a gradient is trained in another model.
    """
    members = [p for group in optimizer.param_groups for p in group["params"]]
    replaced = [p for p in members if MARK in vars(p) and p.requires_grad]
    if not replaced:
        return
    known = set(map(id, members))
    names = [vars(p)[MARK].name for p in replaced if _is_lost(p, known)]
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise RuntimeError(
        f"this {type(optimizer).__name__} was made before quantize_model, dequantize_model or a "
        f"loader replaced {', '.join(map(repr, names[:_NAMED]))}{more} in the model, and would "
        "train nothing there: make the optimizer afterwards, of the model's parameters"
    )


def _is_lost(parameter: Tensor, known: set[int]) -> bool:
    """True if the parameter is in no model that trains, or a part of the model that
    shared it is not in the optimizer.
    """
    successors = list(_successors(parameter))
    if any(id(each.parameter) in known for each in successors):
        return False
    return successors[0].stays or parameter.grad is None


def _successors(parameter: Tensor) -> Iterator[_Replacement]:
    found: _Replacement | None = vars(parameter).get(MARK)
    while found is not None:
        yield found
        found = vars(found.parameter).get(MARK)


def _refuse(optimizer: Optimizer, args: Iterable[Any], kwargs: Any) -> None:
    refuse_replaced(optimizer)
