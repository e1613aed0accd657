"""Parameters in one byte where they are: the module that reads one decodes it, and knows nothing of it."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold.nn._carried import carry_weight
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._parts import PARTS, gather_parts, parts_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_PLAIN: Final = "_fp8_plain_state"


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
        _keep_in_states(module)


def set_plain_state(module: nn.Module, plain: bool) -> None:
    """Let a module's state have parts of what it holds in codes, or the codes as parameters."""
    _keep_in_states(module)
    if hasattr(module, _PLAIN):
        setattr(module, _PLAIN, plain)


def _keep_in_states(module: nn.Module) -> None:
    """Let a module save and load what it holds in codes, if it does: others may have tied it to that."""
    if _own(module) and not hasattr(module, _PLAIN):
        setattr(module, _PLAIN, False)
        module.register_state_dict_post_hook(_write_parts)
        module.register_load_state_dict_pre_hook(_read_parts)


def _own(module: nn.Module) -> dict[str, FP8Parameter]:
    if isinstance(module, QuantizedLinear):
        return {}
    return {name: p for name, p in module._parameters.items() if isinstance(p, FP8Parameter)}


def _write_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of a module's state dict, which is a module's own function, so that copies and pickles keep it."""
    for name in _own(module) if getattr(module, _PLAIN, False) else ():
        if isinstance(saved := state.get(prefix + name), FP8Tensor):
            state.update(parts_of(prefix + name, saved))


def _read_parts(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """The way back, before a module loads: of parts, and of floats, which are rounded at a scale of their own."""
    for name, own in _own(module).items():
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
        if isinstance(saved, FP8Tensor) and saved.format != own.format:
            args[-1].append(f"{key} is of {saved.format.name}, but this parameter is of {own.format.name}")
        elif isinstance(saved, Tensor) and not isinstance(saved, FP8Tensor) and saved.shape == own.shape:
            state[key] = encoded_like(saved, own)


def encoded_like(values: Tensor, own: FP8Parameter) -> FP8Parameter:
    """Floats rounded to the nearest codes, at a scale of their own, as another parameter has its own."""
    how: dict[str, Any] = {"granularity": own.granularity, "rounding": own.rounding, "draws": own.draws}
    return FP8Parameter(values.detach().to(own.dtype), own.format, seed=own.seed, **how)
