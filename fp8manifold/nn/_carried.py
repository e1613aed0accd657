"""What was hung on a layer goes with it when another takes its place: hooks, attributes, what is registered in it."""

import inspect
import weakref
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._parts import PARTS
from fp8manifold.nn._products import forbid_fused_operators, is_our_hook
from fp8manifold.nn._selection import is_conv1d

_HOOKS: Final = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_LINEAR: Final = frozenset(
    {*vars(nn.Module()), "_compiled_call_impl", "in_features", "out_features", "weight", "bias"}
    | {f"weight{suffix}" for suffix in PARTS}  # of one that was in codes
)
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_can_be_carried(name: str, old: nn.Module, new: nn.Module) -> None:
    """Raise ValueError where something on the old layer, or its weight, has no place on the new one."""
    attributes, registered = _attributes(old), _registered(old)
    for extra in (*attributes, *(key for entries in registered.values() for key in entries)):
        if hasattr(new, extra):
            raise ValueError(
                f"the layer {name!r} holds {extra!r}, which a {type(new).__name__} has as its own: rename it, or leave "
                f"the layer alone with {{{name!r}: 'none'}}"
            )
    before, after = _weights(old, new)
    if before is after:
        return
    for extra in _weight_attributes(before):
        if hasattr(after, extra):
            raise ValueError(f"the weight of {name!r} has the attribute {extra!r}, which the new one has as its own")
    if _is_transposed(old, new) and any(getattr(before, kind, None) for kind in _TENSOR_HOOKS):
        raise ValueError(
            f"the weight of {name!r} has hooks, which would be given the transposed gradient: remove them first"
        )


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give the new layer what hangs on the old one, which is not to be used any more.

    The hooks' own dictionaries go over, so that a handle still removes its hook.
    """
    for kind in _HOOKS:
        if kind in vars(old):
            vars(new)[kind] = vars(old)[kind]
    vars(new)["_is_full_backward_hook"] = vars(old).get("_is_full_backward_hook")
    _set_our_hook(new)
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # type: ignore[attr-defined]
    vars(new).update({key: vars(old)[key] for key in _attributes(old)})
    for place, entries in _registered(old).items():
        vars(new)[place].update(entries)
    _set_order(new, list(old._parameters))
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    carry_weight(*_weights(old, new), _is_transposed(old, new))


def _set_order(new: nn.Module, names: list[str]) -> None:
    """Keep parameters in their order, which optimizers' states, averages and communication go by."""
    given = new._parameters
    new._parameters = {key: given[key] for key in dict.fromkeys([*names, *given]) if key in given}


def _set_our_hook(new: nn.Module) -> None:
    hooks = new._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if is_our_hook(hook)]:
        del hooks[key]
    if isinstance(new, QuantizedLinear):
        forbid_fused_operators(new)


def _own(layer: nn.Module) -> frozenset[str]:
    if isinstance(layer, QuantizedLinear):
        return _LINEAR | layer._own_names
    return _LINEAR | {"nf", "nx"} if is_conv1d(layer) else _LINEAR


def _attributes(layer: nn.Module) -> list[str]:
    """Names of what somebody set on the layer."""
    own = _own(layer)
    return [key for key in vars(layer) if key not in own]


def _registered(layer: nn.Module) -> dict[str, dict[str, Any]]:
    """Parameters, buffers and modules that somebody registered in the layer."""
    own = _own(layer)
    places = ("_parameters", "_buffers", "_modules")
    return {place: {key: x for key, x in vars(layer)[place].items() if key not in own} for place in places}


def _weights(old: nn.Module, new: nn.Module) -> tuple[Tensor, Tensor]:
    before, after = old.weight, new.weight
    assert isinstance(before, Tensor)
    assert isinstance(after, Tensor)
    return before, after


def _weight_attributes(weight: Tensor) -> list[str]:
    own = {"manifold", *vars(weight.detach())}
    hidden = [key for key in vars(weight) if inspect.isdatadescriptor(getattr(Tensor, key, None))]  # as accelerate does
    return [key for key in vars(weight) if key not in own and key not in hidden]


def _is_transposed(old: nn.Module, new: nn.Module) -> bool:
    """Whether one of the weights is the other transposed."""
    return is_conv1d(old) or is_conv1d(new)


def carry_weight(before: Tensor, after: Tensor, transposed: bool) -> None:
    """Give a parameter what hangs on the one whose place it takes."""
    if before is after:
        return
    vars(after).update({key: vars(before)[key] for key in _weight_attributes(before)})
    for kind in _TENSOR_HOOKS:
        if hooks := getattr(before, kind, None):
            setattr(after, kind, hooks)
    if before.grad is not None:
        after.grad = before.grad.t().contiguous() if transposed else before.grad
