"""Parameters in one byte where they are: the module that reads one decodes it, and knows nothing of it."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8manifold.nn._carried import carry_weight
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._parts import PARTS, gather_parts, is_in_codes, name_parts, write_parts
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_KEPT: Final = "_fp8_in_states"
_AT_OWN_SCALE: Final = "_fp8_at_own_scale"


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its identity, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def in_place_parameters(model: nn.Module) -> dict[str, FP8Parameter]:
    """Parameters in codes that no quantised layer has for its weight, by the first name of each."""
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, FP8Parameter) and id(parameter) not in weights
    }


def put_parameter(model: nn.Module, names: Sequence[str], parameter: Tensor) -> None:
    """Put a parameter in the place of another, under all its names, with what hangs on that one."""
    before = model.get_parameter(names[0])
    carry_weight(before, parameter, False)
    for name in names:
        owner, _, entry = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, entry, parameter)
        setattr(module, _AT_OWN_SCALE, True)


# Every module writes what it holds in codes as parts


def _keep_in_states(module: nn.Module, name: str, parameter: Any) -> None:
    """Let a module that is given a parameter in codes save and load it as parts; quantised layers do it themselves."""
    if isinstance(parameter, FP8Parameter) and not isinstance(module, QuantizedLinear):
        name_parts(module, name)
        if not hasattr(module, _KEPT):
            setattr(module, _KEPT, True)
            module.register_state_dict_post_hook(_write_parts)
            module.register_load_state_dict_pre_hook(_read_parts)


register_module_parameter_registration_hook(_keep_in_states)


def _write_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of a module's state dict, which is a module's own function, so that copies and pickles keep it."""
    if not isinstance(module, QuantizedLinear):  # which has taken the hooks over from the layer in its place
        write_parts(module, state, prefix)


def _read_parts(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """The way back, before a module loads: of parts, and of floats, for a scale of their own where we quantised it."""
    for name, own in module._parameters.items():
        if own is None or not is_in_codes(own) or isinstance(module, QuantizedLinear):
            continue
        key = prefix + name
        try:
            gather_parts(state, key, own)
        except ValueError as error:
            args[-1].append(str(error))
            state.pop(key, None)
            for suffix in PARTS:
                state.pop(key + suffix, None)
            continue
        saved = state.get(key)
        if isinstance(saved, FP8Tensor) and isinstance(own, FP8Parameter) and saved.format != own.format:
            args[-1].append(f"{key} is of {saved.format.name}, but this parameter is of {own.format.name}")
        elif isinstance(own, FP8Parameter) and hasattr(module, _AT_OWN_SCALE) and _fits(saved, own):
            state[key] = encoded_like(state[key], own)


def _fits(saved: Any, own: Tensor) -> bool:
    return isinstance(saved, Tensor) and not isinstance(saved, FP8Tensor) and saved.shape == own.shape


def encoded_like(values: Tensor, own: FP8Parameter) -> FP8Parameter:
    """Floats rounded to the nearest codes, at a scale of their own, as another parameter has its own."""
    how: dict[str, Any] = {"granularity": own.granularity, "rounding": own.rounding, "draws": own.draws}
    return FP8Parameter(values.detach().to(own.dtype), own.format, seed=own.seed, **how)
