"""Parameters in one byte where they are: the module that reads one decodes it, and knows nothing of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn._carried import carry_weight
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._parts import PARTS, gather_parts, is_in_codes, name_parts, write_parts
from fp8manifold.nn._selection import check_matched, literal, matches, parts_of_name
from fp8manifold.nn._spec import LayerSpec, is_none
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import StoredGranularity
from fp8manifold.tensor import FP8Tensor

Parameters = str | Sequence[str] | Mapping[str, FormatLike | None]
Embeddings = FormatLike | Mapping[str, FormatLike | None]
_KEPT: Final = "_fp8_in_states"
_AT_OWN_SCALE: Final = "_fp8_at_own_scale"


@dataclass(frozen=True)
class InPlace:
    """One parameter that becomes codes: all its names in the model, and how."""

    names: tuple[str, ...]
    format: FloatFormat
    granularity: StoredGranularity


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


def planned_in_place(
    model: nn.Module,
    layers: Sequence[str],
    parameters: Parameters | None,
    embeddings: Embeddings | None,
    formats: Mapping[str, LayerSpec],
    granularity: str,
) -> dict[str, InPlace]:
    """Every parameter that is to become codes where it is, by its first name, in the model's order.

    Args:
        model: as it is before.
        layers: those that get a weight of their own in codes.
        parameters, embeddings, granularity: of :func:`fp8manifold.quantize_model`.
        formats: what its formats were read as.

    Raises:
        TypeError, ValueError: as that function.
    """
    if parameters is None and (embeddings is None or is_none(embeddings)):
        return {}
    taken = {f"{name}.weight".lstrip(".") for name in layers}
    found = {
        names[0]: (tuple(names), parameter)
        for names, parameter in _matrices(model)
        if not taken.intersection(names) and not _is_computed(model, names[0])
    }
    chosen = _chosen_parameters(found, parameters, formats) | _chosen_embeddings(model, found, embeddings)
    planned = {}
    for name, (names, parameter) in found.items():
        if (fmt := chosen.get(name)) is not None:
            if isinstance(parameter, FP8Tensor) and parameter.format != fmt:
                raise ValueError(
                    f"parameter {name!r} is in {parameter.format.name} already: call dequantize_model first"
                )
            planned[name] = InPlace(names, fmt, _shares(model, name, parameter, granularity))
    return planned


def _matrices(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters of two or more dimensions with their names."""
    names = parameter_names(model)
    return [(names[id(p)], p) for p in model.parameters() if p.dim() > 1]


def _is_computed(model: nn.Module, name: str) -> bool:
    """Whether a parametrisation makes another tensor of it."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), ParametrizationList)


def _chosen_parameters(
    found: Mapping[str, tuple[tuple[str, ...], Tensor]], parameters: Parameters | None, formats: Mapping[str, LayerSpec]
) -> dict[str, FloatFormat | None]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        parameters = dict.fromkeys(patterns, _default_format(patterns, formats))
    return _by_pattern("parameters", parameters, {name: names for name, (names, _) in found.items()})


def _default_format(patterns: Sequence[str], formats: Mapping[str, LayerSpec]) -> FloatFormat:
    spec = formats.get("*")
    if spec is None or spec.weight is None:
        raise ValueError(
            f"parameters={patterns!r} takes the weight's format of the pattern '*', and formats has none: give "
            f"parameters={{{patterns[0]!r}: 'E4M3'}}"
        )
    return spec.weight.format


def _chosen_embeddings(
    model: nn.Module, found: Mapping[str, tuple[tuple[str, ...], Tensor]], embeddings: Embeddings | None
) -> dict[str, FloatFormat | None]:
    if embeddings is None or is_none(embeddings):
        return {}
    tables = {f"{name}.weight".lstrip(".") for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    own = {name: tuple(each for each in names if each in tables) for name, (names, _) in found.items()}
    own = {name: names for name, names in own.items() if names}
    if not own:
        raise ValueError(f"embeddings={embeddings!r}, and the model has no nn.Embedding: parameters= names what it has")
    given = embeddings if isinstance(embeddings, Mapping) else {"*": embeddings}
    return _by_pattern("embeddings", given, own)


def _by_pattern(
    what: str, given: Mapping[str, FormatLike | None], names: Mapping[str, tuple[str, ...]]
) -> dict[str, FloatFormat | None]:
    """The format of each name by the most literal pattern that one of its names matches; None leaves it."""
    chosen: dict[str, FloatFormat | None] = {}
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} has {pattern!r}: a pattern must be a string")
    parts = {name: [part for each in its for part in parts_of_name(each)] for name, its in names.items()}
    for pattern in sorted(given, key=lambda p: len(literal(p))):
        matched = [name for name in names if matches(pattern, parts[name])]
        check_matched(what, pattern, matched, list(names))
        fmt = None if is_none(given[pattern]) else as_format(given[pattern])  # type: ignore[arg-type]
        chosen.update(dict.fromkeys(matched, fmt))
    return chosen


def _shares(model: nn.Module, name: str, parameter: Tensor, granularity: str) -> StoredGranularity:
    """What shares a scale: a filter of a convolution, otherwise a row of the last dimension."""
    kernel = isinstance(model.get_submodule(name.rpartition(".")[0]), _ConvNd)
    if granularity == "square" and kernel:
        raise ValueError(
            f"parameter {name!r} is that of a convolution, of which granularity='square' has no matrix: take 'channel'"
        )
    if granularity != "channel":
        return granularity  # type: ignore[return-value]
    return "channel" if kernel or parameter.dim() == 2 else "row"


# Putting a parameter in its place


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
            state[key] = encoded_like(saved, own)


def _fits(saved: Any, own: Tensor) -> bool:
    return isinstance(saved, Tensor) and not isinstance(saved, FP8Tensor) and saved.shape == own.shape


def encoded_like(values: Tensor, own: FP8Parameter) -> FP8Parameter:
    """Floats rounded to the nearest codes, at a scale of their own, as another parameter has its own."""
    how: dict[str, Any] = {"granularity": own.granularity, "rounding": own.rounding, "draws": own.draws}
    return FP8Parameter(values.detach().to(own.dtype), own.format, seed=own.seed, **how)
