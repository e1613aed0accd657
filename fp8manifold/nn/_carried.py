"""Layers and parameters that take the place of others, with their hooks, attributes and
registered entries.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold._base.replaced import MARK, note_replaced
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._parts import AT_OWN_SCALE, PARTS
from fp8manifold.nn._products import forbid_fused_operators, is_called
from fp8manifold.nn._savers import guard_savers
from fp8manifold.nn._selection import is_conv1d
from fp8manifold.parameter import FP8Parameter

_HOOKS: Final = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *(
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    ),
    *(
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ),
)
_LINEAR: Final = frozenset(
    {*vars(nn.Module()), "_compiled_call_impl", "in_features", "out_features", "weight", "bias"}
    | {f"weight{suffix}" for suffix in PARTS}  # of one that was in codes
)
_REGISTERED: Final = ("_parameters", "_buffers", "_modules")
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Turned:
    """A base put before a module's own class: it holds parameters transposed, as files
    do, except while it computes.
    """

    turned: tuple[str, ...]
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **options: Any) -> Any:
        own = self._parameters
        views = {name: own[name].transpose(-2, -1) for name in self.turned}
        for view in views.values():
            view.is_turned = True
        self._parameters = own | views
        try:
            return super().forward(*args, **options)  # type: ignore[misc]
        finally:
            self._parameters = own

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Name the module's own class: this one has no name that can be imported."""
        kind = type(self).__mro__[2]
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        return _turned_again, (kind, self.turned), *reduced[2:]


def _turned_again(kind: type[Any], turned: tuple[str, ...]) -> Any:
    return object.__new__(_turned_class(kind, turned))


def _turned_class(kind: type[Any], turned: tuple[str, ...]) -> type[Any]:
    facts: dict[str, Any] = {"turned": turned, "__module__": kind.__module__}
    return type(kind.__name__, (Turned, kind), facts)


def turn(model: nn.Module, names: Sequence[str]) -> None:
    """Make modules hold parameters transposed, which have no values yet."""
    for name in names:
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        turned, kind = getattr(module, "turned", ()), type(module)
        kind = kind.__mro__[2] if turned else kind
        _turn_parameter(module, entry)
        module.__class__ = _turned_class(kind, (*turned, entry))


def turned_names(model: nn.Module) -> list[str]:
    """Names of the parameters that a model holds transposed."""
    found = [
        (name, module.turned)
        for name, module in model.named_modules()
        if isinstance(module, Turned)
    ]
    return [f"{name}.{entry}".lstrip(".") for name, turned in found for entry in turned]


def turn_back(model: nn.Module) -> None:
    """Transpose parameters, which are floats by now, back for the modules' own classes."""
    for module in model.modules():
        if isinstance(module, Turned):
            for entry in module.turned:
                _turn_parameter(module, entry)
            module.__class__ = type(module).__mro__[2]


def _turn_parameter(module: Any, entry: str) -> None:
    own = module._parameters[entry]
    turned = nn.Parameter(own.detach().mT.contiguous(), requires_grad=own.requires_grad)
    module._parameters[entry] = turned
    note_replaced(own, turned, entry)


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its identity, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def in_place_parameters(model: nn.Module) -> dict[str, FP8Parameter]:
    """Parameters in codes that are the weight of no quantised layer, by the first name
    of each.
    """
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    named = model.named_parameters()
    return {name: p for name, p in named if isinstance(p, FP8Parameter) and id(p) not in weights}


def put_parameter(model: nn.Module, names: Sequence[str], parameter: Tensor) -> None:
    """Put a parameter in the place of another, under all its names, with its hooks,
    attributes and gradient.
    """
    before = model.get_parameter(names[0])
    _carry_weight(before, parameter, False)
    for name in names:
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, entry, parameter)
        setattr(module, AT_OWN_SCALE, True)
    note_replaced(before, parameter, names[0])


def _weight_attributes(weight: Tensor) -> list[str]:
    own = {"manifold", MARK, *vars(weight.detach())}
    hidden = [
        key for key in vars(weight) if inspect.isdatadescriptor(getattr(Tensor, key, None))
    ]  # as accelerate does
    return [key for key in vars(weight) if key not in own and key not in hidden]


def _carry_weight(before: Tensor, after: Tensor, transposed: bool) -> None:
    if before is after:
        return
    vars(after).update({key: vars(before)[key] for key in _weight_attributes(before)})
    for kind in _TENSOR_HOOKS:
        if hooks := getattr(before, kind, None):
            setattr(after, kind, hooks)
    if before.grad is not None:
        after.grad = before.grad.t().contiguous() if transposed else before.grad


def replace_layers(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """Put layers in the place of others, with their hooks, attributes and gradients;
    none if one of them can't be.
    """
    check_layers(model, layers)
    old = {name: model.get_submodule(name) for name in layers}
    done: set[nn.Module] = set()
    for name, layer in layers.items():
        if layer not in done:
            _carry_over(old[name], layer)
            done.add(layer)
        if not name:
            _note_weights(layer, old, layers)
            return layer
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    _note_weights(model, old, layers)
    guard_savers(model)
    return model


def _note_weights(model: nn.Module, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Note which weights were replaced; one that other modules share stays in the
    model.
    """
    left = set(map(id, model.parameters()))
    for name, layer in new.items():
        before = old[name].weight
        weight = f"{name}.weight".lstrip(".")
        note_replaced(before, layer.weight, weight, stays=id(before) in left)


def check_layers(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise ValueError where something on an old layer, or its weight, has no place on
    the new one.
    """
    for name, new in layers.items():
        old: Any = model.get_submodule(name)
        for extra in (
            *_attributes(old),
            *(key for entries in _registered(old).values() for key in entries),
        ):
            if hasattr(new, extra):
                raise ValueError(
                    f"layer {name!r} has the attribute {extra!r}, which a {type(new).__name__} "
                    f"needs: rename it, or leave the layer as it is with {{{name!r}: 'none'}}"
                )
        if old.weight is new.weight:
            continue
        for extra in _weight_attributes(old.weight):
            if hasattr(new.weight, extra):
                raise ValueError(
                    f"the weight of {name!r} has the attribute {extra!r}, which the quantised "
                    f"weight needs: rename it"
                )
        if _is_transposed(old, new) and any(
            getattr(old.weight, kind, None) for kind in _TENSOR_HOOKS
        ):
            raise ValueError(
                f"the weight of {name!r} has hooks (step_in_backward's?) for the untransposed "
                f"gradient: remove them"
            )


def _carry_over(old: Any, new: Any) -> None:
    """Give the new layer all that was added to the old one: the same dictionaries of
    hooks, so that handles work.
    """
    vars(new).update({kind: vars(old)[kind] for kind in _HOOKS if kind in vars(old)})
    vars(new)["_is_full_backward_hook"] = vars(old).get("_is_full_backward_hook")
    hooks = new._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is is_called]:
        del hooks[key]
    if isinstance(new, QuantizedLinear):
        forbid_fused_operators(new)
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    vars(new).update({key: vars(old)[key] for key in _attributes(old)})
    for place, entries in _registered(old).items():
        vars(new)[place].update(entries)
    given = (
        new._parameters
    )  # in their order, which optimizers' states, averages and communication go by
    new._parameters = {
        key: given[key] for key in dict.fromkeys([*old._parameters, *given]) if key in given
    }
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    _carry_weight(old.weight, new.weight, _is_transposed(old, new))


def _own(layer: nn.Module) -> frozenset[str]:
    if isinstance(layer, QuantizedLinear):
        return _LINEAR | layer._own_names
    return _LINEAR | {"nf", "nx"} if is_conv1d(layer) else _LINEAR


def _attributes(layer: nn.Module) -> list[str]:
    own = _own(layer)
    return [key for key in vars(layer) if key not in own]


def _registered(layer: nn.Module) -> dict[str, dict[str, Any]]:
    own = _own(layer)
    return {
        place: {key: x for key, x in vars(layer)[place].items() if key not in own}
        for place in _REGISTERED
    }


def _is_transposed(old: nn.Module, new: nn.Module) -> bool:
    """True if one of the weights is the other transposed."""
    return is_conv1d(old) or is_conv1d(new)
