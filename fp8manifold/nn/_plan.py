"""The plan of a surgery: a decision on every weight before anything changes, for a
model without values too.

Patterns are matched here only: surgery, loading and the report read the decisions.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn import _spec
from fp8manifold.nn._carried import parameter_names
from fp8manifold.nn._linear import STORAGES, QuantizedLinear, Storage
from fp8manifold.nn._selection import (
    CONVOLUTIONS,
    Obstacle,
    adapters_of,
    by_pattern,
    is_linear,
    literal,
    names_part,
    nearest,
    obstacle,
    routers_of,
)
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import StoredGranularity, WeightGranularity
from fp8manifold.tensor import FP8Tensor

Tied = Literal["refuse", "untie", "leave"]
TIED: Final = get_args(Tied)
Parameters = str | Sequence[str] | Mapping[str, FormatLike | None]
Embeddings = FormatLike | Mapping[str, FormatLike | None]
_SHOWN: Final = 3


@dataclass(frozen=True)
class Entry:
    """The decision on one weight."""

    name: str  #: The module's name; for a parameter that becomes codes where it is, its first name.
    module: nn.Module  #: The holder of the weight.
    parameters: tuple[str, ...] = ()
    """All names that the weight has in the model; none if the module has no weight as a
    parameter.
    """
    spec: _spec.LayerSpec | None = (
        None  #: The specification of the quantised layer that takes the module's place.
    )
    format: FloatFormat | None = None  #: The format of the codes that the weight becomes.
    granularity: StoredGranularity | None = None  #: The granularity of their scale.
    seed: int = 0
    is_copied: bool = False  #: True if the layer gets a copy of a weight that other modules share.
    left: str = ""  #: Why the module stays as it is.


@dataclass(frozen=True)
class Plan:
    """An entry for every layer to replace, parameter to encode and module left, each in
    the model's order.
    """

    entries: tuple[Entry, ...]
    storage: Any
    options: Mapping[str, Any]

    @property
    def layers(self) -> list[Entry]:
        """Layers to replace."""
        return [entry for entry in self.entries if entry.spec is not None]

    @property
    def in_place(self) -> list[Entry]:
        """Parameters that become codes where they are."""
        return [entry for entry in self.entries if entry.spec is None and not entry.left]

    @property
    def encoded(self) -> dict[str, Entry]:
        """Parameters of which only codes are needed, by their first names."""
        copied = {entry.parameters for entry in self.entries if entry.is_copied}
        made = [
            entry
            for entry in self.entries
            if entry.format is not None and entry.parameters not in copied
        ]
        return {entry.parameters[0]: entry for entry in made}


def plan(
    model: nn.Module,
    formats: _spec.Formats | None,
    storage: str = "fp8",
    *,
    granularity: WeightGranularity = "channel",
    headroom: float | None = None,
    rounding: str = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: str = "refuse",
    draws: Draws = "independent",
    retraction: Retraction = "exponential",
    products: _spec.Products = "decoded",
    parameters: Parameters | None = None,
    embeddings: Embeddings | None = None,
) -> Plan:
    """Decide what :func:`fp8manifold.quantize_model` does; without formats all is left."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    check_choice("storage", storage, STORAGES)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    check_choice("tied", tied, TIED)
    check_int("seed", seed, 0, 2**31 - 1)
    _spec.check_stored(draws, retraction, headroom, storage)
    read = {} if formats is None else _spec.read_formats(formats, granularity, products)
    names = {key: tuple(its) for key, its in parameter_names(model).items()}
    linears = _linears(model, names)
    specs = _chosen_specs(linears, read)
    _check_in_one_place(model, specs, linears)
    placed: list[Entry] = []
    if parameters is not None or not (embeddings is None or _spec.is_none(embeddings)):
        if storage != "fp8":
            raise ValueError(
                f"parameters and embeddings become codes with storage='fp8', not with "
                f"storage={storage!r}"
            )
        taken = {linears[name].names for name in specs if not linears[name].is_shared}
        placed = _placed(model, names, taken, parameters, embeddings, read, granularity)
    specs = _settled(specs, linears, storage, keep_remainder, tied, placed)
    entries = []
    for name, spec in specs.items():
        weight, linear = spec.operands.get("weight") if storage == "fp8" else None, linears[name]
        codes: Any = (
            {} if weight is None else {"format": weight.format, "granularity": weight.granularity}
        )
        module = model.get_submodule(name)
        entries.append(Entry(name, module, linear.names, spec, is_copied=linear.is_shared, **codes))
    entries = [
        replace(entry, seed=(seed << 32) + index) for index, entry in enumerate(entries + placed)
    ]
    options = {
        "headroom": headroom,
        "rounding": rounding,
        "draws": draws,
        "retraction": retraction,
        "keep_remainder": keep_remainder,
        "defer_weight_gradient": defer_weight_gradients,
    }
    return Plan((*entries, *_left(model, names, entries)), storage, options)


def check_formats(
    formats: _spec.Formats,
    layers: Mapping[str, tuple[int, int]],
    storage: Storage = "fp8",
    *,
    granularity: WeightGranularity = "channel",
    keep_remainder: bool = False,
    shared: Mapping[str, tuple[str, ...]] | None = None,
    tied: Tied = "refuse",
    products: _spec.Products = "decoded",
) -> dict[str, _spec.LayerSpec]:
    """Read formats as :func:`quantize_model` does, and refuse those that it would
    refuse; no model is needed.

    Args:
        formats, storage, granularity, keep_remainder, tied, products: as in
            :func:`quantize_model`.
        layers: ``(in_features, out_features)`` of every linear layer by its dotted
            name, in the model's order.
        shared: for layers that share their weight with another module, all names of the
            weight; None: there are none.

    Returns:
        The specification of every layer that is quantised, by its name.

    Raises:
        TypeError, ValueError: a pattern that matches no layer; a format or option that
            is unknown or does not fit; a layer whose weight is shared under
            ``tied="refuse"``.

    Example:
        >>> layers = {"attn.qkv": (64, 192), "mlp.fc": (64, 256)}
        >>> {name: spec.weight.format.name for name, spec in check_formats({"attn": "e4m3"}, layers).items()}
        {'attn.qkv': 'E4M3'}
        >>> check_formats({"atn": "E4M3"}, layers)
        Traceback (most recent call last):
        ValueError: pattern 'atn' matches none of the 2 linear layers; did you mean 'attn'?
    """
    check_choice("storage", storage, STORAGES)
    check_choice("tied", tied, TIED)
    routers = routers_of(layers)
    linears = {
        name: _Linear((shared or {}).get(name, (f"{name}.weight",)), router=routers.get(name))
        for name in layers
    }
    specs = _chosen_specs(linears, _spec.read_formats(formats, granularity, products))
    specs = _settled(specs, linears, storage, keep_remainder, tied, [])
    for name, spec in specs.items():
        _spec.check_blocks(spec.operands, *layers[name])
        _spec.units_of(spec, *layers[name])
    return specs


class _Linear(NamedTuple):
    """The facts that decide on a linear layer: all names of its weight, and what
    prevents its quantisation.
    """

    names: tuple[str, ...]
    obstacle: Obstacle | None = None
    adapter: str | None = None
    router: str | None = None
    is_quantized: bool = False

    @property
    def is_shared(self) -> bool:
        return len(self.names) > 1


def _linears(model: nn.Module, names: Mapping[int, tuple[str, ...]]) -> dict[str, _Linear]:
    adapters = adapters_of(model)
    routers = routers_of(name for name, _ in model.named_modules())
    found = {}
    for name, module in model.named_modules():
        if is_linear(module):
            own = names.get(id(module._parameters.get("weight")), ())
            done = isinstance(module, QuantizedLinear)
            why = None if done else obstacle(module)
            found[name] = _Linear(own, why, adapters.get(name), routers.get(name), done)
    return found


def _chosen_specs(
    linears: Mapping[str, _Linear], specs: Mapping[str, _spec.LayerSpec]
) -> dict[str, _spec.LayerSpec]:
    left = {
        name: linear.obstacle for name, linear in linears.items() if linear.obstacle is not None
    }

    def check(pattern: str, matched: list[str]) -> None:
        if not linears:
            raise ValueError(
                "the model has no linear layer: give formats=None and name weights with parameters="
            )
        if not matched:
            which = f"matches none of the {len(linears) - len(left)} linear layers"
            raise ValueError(f"pattern {pattern!r} {which}{nearest(pattern, linears)}")
        if left.keys() >= {*matched} and not specs[pattern].quantizes_nothing:
            why = f"{matched[0]!r}: {left[matched[0]].reason}"
            raise ValueError(
                f"pattern {pattern!r} matches only layers that can't be quantised, such as {why}"
            )

    chosen = by_pattern(specs, {name: [name] for name in linears}, check)
    chosen = {
        name: pattern for name, pattern in chosen.items() if not specs[pattern].quantizes_nothing
    }
    chosen = _without_adapters(chosen, linears)
    chosen = _without_routers("formats", chosen, {name: linears[name].router for name in chosen})
    for name, pattern in chosen.items():
        if linears[name].is_quantized:
            raise ValueError(f"layer {name!r} is quantised already: call dequantize_model first")
        if name in left and left[name].is_done_to_it and literal(pattern):
            raise ValueError(
                f"layer {name!r}, which {pattern!r} names, can't be quantised: "
                f"{left[name].reason}; or leave the layer as it is with {{{name!r}: 'none'}}"
            )
    return {name: specs[chosen[name]] for name in linears if name in chosen and name not in left}


def _without_adapters(chosen: dict[str, str], linears: Mapping[str, _Linear]) -> dict[str, str]:
    adapters = {name: linears[name].adapter for name in chosen}
    left = [
        name
        for name, part in adapters.items()
        if part is not None and not names_part(chosen[name], part)
    ]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        warnings.warn(
            f"PEFT's adapters, small and trained, were not quantised: "
            f"{', '.join(left[:_SHOWN])}{more}; a pattern that names them, such as "
            f"{adapters[left[0]]!r}, quantises them",
            UserWarning,
            stacklevel=5,
        )
    return {name: pattern for name, pattern in chosen.items() if name not in left}


def _without_routers(
    what: str, chosen: dict[str, str], routers: Mapping[str, str | None]
) -> dict[str, str]:
    """What patterns of an option called ``what`` chose, without the routers that none names.

    Training and serving keep routers in float: the choice among experts jumps.
    """
    kept: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, pattern in chosen.items():
        router = routers[name]
        if router is None or names_part(pattern, router):
            kept[name] = pattern
        else:
            left[pattern] = router
    for pattern, router in left.items():
        if pattern not in kept.values():
            raise ValueError(
                f"{what}: pattern {pattern!r} matches only routers, which stay in float unless a "
                f"pattern names them, such as {router!r}"
            )
    return kept


def _check_in_one_place(
    model: nn.Module, layers: Iterable[str], linears: Mapping[str, _Linear]
) -> None:
    """Refuse a layer that is in two places: replacing it in one would untie it
    silently.
    """
    for name in (name for name in layers if linears[name].is_shared):
        names, layer = linears[name].names, model.get_submodule(name)
        if (
            sum(
                model.get_submodule(owner) is layer
                for owner in {each.rpartition(".")[0] for each in names}
            )
            > 1
        ):
            raise ValueError(
                f"layer {name!r} is shared ({', '.join(names)}): copy it, or give "
                f"{{{name!r}: 'none'}}"
            )


def _settled(
    specs: Mapping[str, _spec.LayerSpec],
    linears: Mapping[str, _Linear],
    storage: str,
    keep_remainder: bool,
    tied: str,
    placed: Sequence[Entry],
) -> dict[str, _spec.LayerSpec]:
    """The layers to replace, shared weights decided on, which may be encoded in place
    (``placed``).
    """
    shared = [name for name in specs if linears[name].is_shared]
    for name in shared:
        names = linears[name].names
        if tied == "refuse" and not any(_serves(entry, names, specs[name]) for entry in placed):
            raise ValueError(
                f"the weight of {name!r} is shared ({', '.join(names)}): give embeddings= the "
                f"layer's format for codes that an embedding and its head share (storage='fp8'), "
                f"tied='untie' for a copy of the weight, or leave the layer as it is with "
                f"tied='leave' or {{{name!r}: 'none'}}"
            )
    kept = {name: spec for name, spec in specs.items() if tied == "untie" or name not in shared}
    for spec in kept.values():
        _spec.check_storage(storage, spec, keep_remainder)
    return kept


def _serves(entry: Entry, names: Sequence[str], spec: _spec.LayerSpec) -> bool:
    """True if a parameter becomes exactly the codes that a layer of this specification
    needs for its weight.
    """
    weight = spec.operands.get("weight")
    if (
        weight is None
        or len(spec.operands) > 1
        or spec.products != "decoded"
        or entry.name not in names
    ):
        return False
    return (weight.format, weight.granularity) == (entry.format, entry.granularity)


def _placed(
    model: nn.Module,
    names: Mapping[int, tuple[str, ...]],
    taken: Collection[tuple[str, ...]],
    parameters: Parameters | None,
    embeddings: Embeddings | None,
    formats: Mapping[str, _spec.LayerSpec],
    granularity: str,
) -> list[Entry]:
    found = {
        its[0]: (its, parameter, module)
        for parameter in model.parameters()
        if parameter.dim() > 1 and (its := names[id(parameter)]) not in taken
        if not isinstance(
            module := model.get_submodule(its[0].rpartition(".")[0]), ParametrizationList
        )
    }
    by_first = {first: its for first, (its, _, _) in found.items()}
    chosen = _chosen_parameters(by_first, parameters, formats) | _chosen_embeddings(
        model, by_first, embeddings
    )
    entries = []
    for first, (its, parameter, module) in found.items():
        if (fmt := chosen.get(first)) is None:
            continue
        if isinstance(parameter, FP8Tensor) and parameter.format != fmt:
            raise ValueError(
                f"parameter {first!r} is in {parameter.format.name} already: call dequantize_model "
                f"first"
            )
        shares = _shares(first, module, parameter, granularity)
        entries.append(Entry(first, module, its, format=fmt, granularity=shares))
    return entries


def _chosen_parameters(
    names: Mapping[str, tuple[str, ...]],
    parameters: Parameters | None,
    formats: Mapping[str, _spec.LayerSpec],
) -> dict[str, FloatFormat | None]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        spec = formats.get("*")
        if not patterns:
            raise ValueError("parameters is empty: leave it out, or give a pattern")
        if spec is None or spec.weight is None:
            raise ValueError(
                f"parameters={patterns!r} takes the weight's format of the pattern '*', which "
                f"formats does not have: give parameters={{{patterns[0]!r}: 'E4M3'}}"
            )
        parameters = dict.fromkeys(patterns, spec.weight.format)
    return _formats_chosen("parameters", parameters, names)


def _chosen_embeddings(
    model: nn.Module, names: Mapping[str, tuple[str, ...]], embeddings: Embeddings | None
) -> dict[str, FloatFormat | None]:
    if embeddings is None or _spec.is_none(embeddings):
        return {}
    tables = {
        f"{name}.weight".lstrip(".")
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding)
    }
    own = {
        first: found
        for first, its in names.items()
        if (found := [each for each in its if each in tables])
    }
    if not own:
        raise ValueError(
            f"embeddings={embeddings!r}, and the model has no nn.Embedding: name weights with "
            f"parameters="
        )
    return _formats_chosen(
        "embeddings", embeddings if isinstance(embeddings, Mapping) else {"*": embeddings}, own
    )


def _formats_chosen(
    what: str, given: Mapping[str, FormatLike | None], names: Mapping[str, Sequence[str]]
) -> dict[str, FloatFormat | None]:
    """The format of each parameter that a pattern of an option called ``what`` matches;
    None leaves it.
    """
    if odd := [pattern for pattern in given if not isinstance(pattern, str)]:
        raise TypeError(f"{what} has {odd[0]!r}: a pattern must be a string")

    def check(pattern: str, matched: list[str]) -> None:
        if not matched:
            raise ValueError(
                f"{what}: pattern {pattern!r} matches none of the {len(names)} parameters of two "
                f"or more dimensions that no pattern of formats has taken{nearest(pattern, names)}"
            )

    chosen = by_pattern(given, names, check)
    formats = {key: None if _spec.is_none(fmt) else as_format(fmt) for key, fmt in given.items()}  # type: ignore[arg-type]
    left = {first: pattern for first, pattern in chosen.items() if formats[pattern] is None}
    taken = {first: pattern for first, pattern in chosen.items() if first not in left}
    routers = routers_of(names)
    taken = _without_routers(what, taken, {first: routers.get(first) for first in taken})
    return {first: formats[pattern] for first, pattern in (left | taken).items()}


def _shares(name: str, module: nn.Module, parameter: Tensor, granularity: str) -> StoredGranularity:
    """The granularity: a filter of a convolution shares a scale, otherwise a row of the
    last dimension.
    """
    kernel = isinstance(module, CONVOLUTIONS)
    if granularity == "square" and kernel:
        raise ValueError(
            f"parameter {name!r} is a convolution's; granularity='square' needs a matrix: take "
            f"'channel'"
        )
    if granularity != "channel":
        return granularity  # type: ignore[return-value]
    return "channel" if kernel or parameter.dim() == 2 else "row"


def _left(
    model: nn.Module, names: Mapping[int, tuple[str, ...]], entries: Sequence[Entry]
) -> Iterator[Entry]:
    replaced = {entry.name for entry in entries if entry.spec is not None}
    done = {name for entry in entries if not entry.is_copied for name in entry.parameters}
    routers = routers_of(name for name, _ in model.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):  # the layer that it belongs to is what counts
            continue
        held = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        own = tuple(each for p in held for each in names[id(p)])
        computed = (
            not held and is_linear(module) and isinstance(getattr(module, "weight", None), Tensor)
        )
        if (held or computed) and name not in replaced and not (held and done.issuperset(own)):
            why = _why_left(name, module, names, routers.get(name))
            yield Entry(name, module, own, left=why)


def _why_left(
    name: str, module: nn.Module, names: Mapping[int, tuple[str, ...]], router: str | None
) -> str:
    if isinstance(module, QuantizedLinear):
        return "it is quantised already"
    if not is_linear(module):
        return "not a linear layer"
    if found := obstacle(module):
        return found.reason
    weight = f"{name}.weight".lstrip(".")
    others = [other for other in names[id(module.weight)] if other != weight]
    if others:
        return f"its weight is also {others[0]}; tied='untie' gives it one of its own"
    if router is not None:
        return f"a router: only a pattern that names it takes it, such as {router!r}"
    return "no pattern names it, or one that says 'none'"
