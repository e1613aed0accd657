"""Layers and parameters that take the place of others.

What other code has added to the old one goes along: hooks, attributes, and registered
parameters, buffers and modules. `check_layers` refuses what has no place on the new one
before anything changes. `Turned` modules, of which transformers has some, hold their
parameters transposed until they compute. In the functions that carry weights,
*transposed* is said of the weight of a ``Conv1D`` only.

``quantize_model`` keeps the objects of parameters (`_becomes`), as ``Module.to`` does, so
that an optimizer that was made before goes on with them.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.replaced import MARK, note_replaced
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._meters import count_scales
from fp8manifold.nn._parts import AT_OWN_SCALE, PARTS
from fp8manifold.nn._products import forbid_fused_operators, is_called
from fp8manifold.nn._savers import guard_savers
from fp8manifold.nn._selection import is_conv1d
from fp8manifold.parameter import FP8Parameter

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: Names that a linear layer has by itself, and those of the parts of a weight in codes.
_LINEAR: Final = frozenset(
    {
        *vars(nn.Module()),
        "_compiled_call_impl",
        "in_features",
        "out_features",
        "weight",
        "bias",
        *(f"weight{suffix}" for suffix in PARTS),
    }
)
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Turned:
    """A base put before a module's own class, which holds parameters transposed.

    They are held as files have them, and turned while the module computes.
    """

    turned: tuple[str, ...]
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **options: Any) -> Any:
        parameters = self._parameters
        views = {name: parameters[name].transpose(-2, -1) for name in self.turned}
        for view in views.values():
            view.is_turned = True
        self._parameters = parameters | views
        try:
            return super().forward(*args, **options)  # type: ignore[misc]
        finally:
            self._parameters = parameters

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Name the module's own class: this one has no name that can be imported."""
        kind = _class_before_turning(type(self))
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        return _turned_again, (kind, self.turned), *reduced[2:]


def _turned_again(kind: type[Any], turned: tuple[str, ...]) -> Any:
    return object.__new__(_turned_class(kind, turned))


def _turned_class(kind: type[Any], turned: tuple[str, ...]) -> type[Any]:
    attributes: dict[str, Any] = {"turned": turned, "__module__": kind.__module__}
    return type(kind.__name__, (Turned, kind), attributes)


def _class_before_turning(turned_class: type[Any]) -> type[Any]:
    # after the class itself and `Turned`
    return turned_class.__mro__[2]


def turn(model: nn.Module, names: Sequence[str]) -> None:
    """Make modules hold parameters transposed, which have no values yet."""
    for name in names:
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        turned = getattr(module, "turned", ())
        kind = _class_before_turning(type(module)) if turned else type(module)
        _turn_parameter(module, entry)
        module.__class__ = _turned_class(kind, (*turned, entry))


def turned_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that a model holds transposed."""
    names = []
    for module_name, module in model.named_modules():
        if isinstance(module, Turned):
            for entry in module.turned:
                names.append(f"{module_name}.{entry}".lstrip("."))
    return names


def turn_back(model: nn.Module) -> None:
    """Transpose parameters, which are floats by now, back for the modules' classes."""
    for module in model.modules():
        if isinstance(module, Turned):
            for entry in module.turned:
                _turn_parameter(module, entry)
            module.__class__ = _class_before_turning(type(module))


def _turn_parameter(module: Any, entry: str) -> None:
    old = module._parameters[entry]
    turned = nn.Parameter(old.detach().mT.contiguous(), requires_grad=old.requires_grad)
    module._parameters[entry] = turned
    note_replaced(old, turned, entry)


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def in_place_parameters(model: nn.Module) -> dict[str, FP8Parameter]:
    """Return the parameters in codes that are the weight of no quantised layer.

    They are by their first names.
    """
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    parameters = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FP8Parameter) and id(parameter) not in weights:
            parameters[name] = parameter
    return parameters


def put_parameter(
    model: nn.Module, names: Sequence[str], parameter: Tensor, *, keep_object: bool = False
) -> None:
    """Put a parameter in the place of another, under all its names.

    It gets the hooks, attributes and gradient of the old one, and with ``keep_object``
    its object, if torch allows that.
    """
    old = model.get_parameter(names[0])
    _carry_weight(old, parameter, is_transposed=False)
    if keep_object and _becomes(old, parameter):
        parameter = old
    for name in names:
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, entry, parameter)
        setattr(module, AT_OWN_SCALE, True)
    note_replaced(old, parameter, names[0])


def _becomes(old: Tensor, new: Tensor) -> bool:
    """Let the object of a parameter become its successor, if that can be done.

    Optimizers that hold the object go on with the successor, in the state that they have.
    So shape and dtype have to be the same. Torch refuses objects that a graph, a weak
    reference or C++ code such as DistributedDataParallel's holds.
    """
    if type(old) is not nn.Parameter or (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return False
    return True


def _added_to_weight(weight: Tensor) -> list[str]:
    """Return the names of attributes that other code has added to a weight."""
    intrinsic = {"manifold", MARK, *vars(weight.detach())}
    # accelerate puts values into a tensor's dictionary under names of descriptors
    hidden = [key for key in vars(weight) if inspect.isdatadescriptor(getattr(Tensor, key, None))]
    return [key for key in vars(weight) if key not in intrinsic and key not in hidden]


def _carry_weight(old: Tensor, new: Tensor, is_transposed: bool) -> None:
    """Give a weight the attributes, hooks and gradient of the one it replaces."""
    if old is new:
        return
    for key in _added_to_weight(old):
        vars(new)[key] = vars(old)[key]
    for kind in _TENSOR_HOOKS:
        hooks = getattr(old, kind, None)
        if hooks:
            setattr(new, kind, hooks)
    if old.grad is not None:
        new.grad = old.grad.t().contiguous() if is_transposed else old.grad


def replace_layers(
    model: nn.Module, layers: dict[str, nn.Module], *, keep_objects: bool = False
) -> nn.Module:
    """Put layers in the place of others, with their hooks, attributes and gradients.

    Nothing changes if one of them can't be. With ``keep_objects`` the objects of weights
    become those of the new layers, if torch allows that; but where the model is a layer
    itself, the old layer stays as it is.
    """
    check_layers(model, layers)
    old_layers = {name: model.get_submodule(name) for name in layers}
    carried: set[nn.Module] = set()
    for name, layer in layers.items():
        if layer not in carried:
            _carry_over(old_layers[name], layer)
            carried.add(layer)
        if not name:
            _note_weights(layer, old_layers, layers)
            return layer
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    if keep_objects:
        _keep_weights(model, old_layers, layers)
    _note_weights(model, old_layers, layers)
    guard_savers(model)
    count_scales(model)
    return model


def _keep_weights(model: nn.Module, old_layers: dict[str, Any], new_layers: dict[str, Any]) -> None:
    """Let the objects of old weights be those of the new layers."""
    remaining = {id(parameter) for parameter in model.parameters()}
    for name, layer in new_layers.items():
        old = old_layers[name]
        # a weight that modules share stays as it is, and the layer has a copy
        if id(old.weight) in remaining or _is_weight_transposed(old, layer):
            continue
        if _becomes(old.weight, layer.weight):
            layer._parameters["weight"] = old.weight


def _note_weights(model: nn.Module, old_layers: dict[str, Any], new_layers: dict[str, Any]) -> None:
    """Note which weights were replaced; a weight that modules share may stay."""
    remaining = {id(parameter) for parameter in model.parameters()}
    for name, layer in new_layers.items():
        old_weight = old_layers[name].weight
        weight_name = f"{name}.weight".lstrip(".")
        stays = id(old_weight) in remaining
        note_replaced(old_weight, layer.weight, weight_name, stays=stays)


def check_layers(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Refuse layers that can't take over what other code has added to the old ones.

    Raises:
        ValueError: names the layer and what has no place on the new one or its weight.
    """
    for name, new in layers.items():
        old: Any = model.get_submodule(name)
        additions = _added_attributes(old)
        for entries in _added_entries(old).values():
            additions += entries
        for addition in additions:
            if hasattr(new, addition):
                raise ValueError(
                    f"layer {name!r} has the attribute {addition!r}, a name that "
                    f"{type(new).__name__} uses itself: rename it, or leave the layer as it is "
                    f"with {{{name!r}: 'none'}}"
                )
        if old.weight is new.weight:
            continue
        for addition in _added_to_weight(old.weight):
            if hasattr(new.weight, addition):
                raise ValueError(
                    f"the weight of {name!r} has the attribute {addition!r}, a name that the "
                    "quantised weight uses itself: rename it"
                )
        has_hooks = any(getattr(old.weight, kind, None) for kind in _TENSOR_HOOKS)
        if has_hooks and _is_weight_transposed(old, new):
            raise ValueError(
                f"the weight of {name!r} has hooks (step_in_backward's?) for the untransposed "
                f"gradient: remove them"
            )


def _carry_over(old: Any, new: Any) -> None:
    """Give a new layer all that was added to the old one.

    Both have the same dictionaries of hooks, so that handles of hooks work.
    """
    for kind in _HOOKS:
        if kind in vars(old):
            vars(new)[kind] = vars(old)[kind]
    vars(new)["_is_full_backward_hook"] = vars(old).get("_is_full_backward_hook")
    # a new layer that needs the empty hook against fused operators gets it again
    hooks = new._forward_pre_hooks
    empty_hooks = [key for key, hook in hooks.items() if hook is is_called]
    for key in empty_hooks:
        del hooks[key]
    if isinstance(new, QuantizedLinear):
        forbid_fused_operators(new)
    # hooks that are given their module get the new layer from now on
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)

    for key in _added_attributes(old):
        vars(new)[key] = vars(old)[key]
    for place, entries in _added_entries(old).items():
        vars(new)[place].update(entries)
    # in the old order, which optimizers' states, averages and communication go by
    parameters = new._parameters
    order = dict.fromkeys([*old._parameters, *parameters])
    new._parameters = {key: parameters[key] for key in order if key in parameters}
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    _carry_weight(old.weight, new.weight, _is_weight_transposed(old, new))


def _intrinsic_names(layer: nn.Module) -> frozenset[str]:
    """Return the names of what a layer has by itself, not by other code."""
    if isinstance(layer, QuantizedLinear):
        return _LINEAR | layer._own_names
    if is_conv1d(layer):
        return _LINEAR | {"nf", "nx"}
    return _LINEAR


def _added_attributes(layer: nn.Module) -> list[str]:
    intrinsic = _intrinsic_names(layer)
    return [key for key in vars(layer) if key not in intrinsic]


def _added_entries(layer: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the parameters, buffers and modules that were added to a layer."""
    intrinsic = _intrinsic_names(layer)
    added = {}
    for place in _REGISTRIES:
        entries = vars(layer)[place]
        added[place] = {key: value for key, value in entries.items() if key not in intrinsic}
    return added


def _is_weight_transposed(old: nn.Module, new: nn.Module) -> bool:
    """Return True if one of the weights is the other transposed."""
    return is_conv1d(old) or is_conv1d(new)
