"""The plan of a surgery: a decision on every weight of a model before anything changes.

The model may have no values. Patterns are matched here only: surgery, loading and the
report read the decisions. A plan is made in five steps.

1. `_layer_facts` gathers the linear layers, each with what decides on it: all names of
   its weight, an obstacle, and the adapter or the router that it belongs to.
2. `_chosen_specs` matches the patterns of ``formats`` with these layers.
3. `_in_place_entries` matches the patterns of ``parameters`` and ``embeddings`` with
   the parameters that no layer of step 2 has for itself. These become codes in place.
4. `_resolve_shared` decides on layers that share their weight with other modules. Step
   3 may have encoded it; otherwise it is refused, copied or left.
5. `_kept_entries` says of every other module with a weight why it stays as it is.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._encoded.scaled import WriteRounding
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn import _spec
from fp8manifold.nn._carried import parameter_names
from fp8manifold.nn._linear import QuantizedLinear
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
ParameterFormats = str | Sequence[str] | Mapping[str, FormatLike | None]
Embeddings = FormatLike | Mapping[str, FormatLike | None]
#: Names that a warning lists.
_ADAPTERS_LISTED: Final = 3


@dataclass(frozen=True)
class PlanEntry:
    """The decision on one weight.

    Attributes:
        name: of the module; of a parameter that becomes codes where it is, its first
            name.
        module: the holder of the weight.
        parameters: all names that the weight has in the model; none if the module has
            no weight as a parameter.
        spec: of the quantised layer that takes the module's place.
        format: of the codes that the weight becomes.
        granularity: of the codes' scale.
        seed: of the codes.
        is_copied: True if the layer gets a copy of a weight that other modules share.
        reason_kept: why the module stays as it is; empty for one that is replaced or
            encoded.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...] = ()
    spec: _spec.LayerSpec | None = None
    format: FloatFormat | None = None
    granularity: StoredGranularity | None = None
    seed: int = 0
    is_copied: bool = False
    reason_kept: str = ""


@dataclass(frozen=True)
class SurgeryPlan:
    """The decisions on a model: the entries and the options of what becomes codes.

    There is an entry for every layer to replace, then for every parameter to encode in
    place, then for every module that stays, each in the model's order.
    """

    entries: tuple[PlanEntry, ...]
    storage: _spec.Storage
    options: Mapping[str, Any]

    @property
    def layers(self) -> list[PlanEntry]:
        """Layers to replace."""
        return [entry for entry in self.entries if entry.spec is not None]

    @property
    def in_place(self) -> list[PlanEntry]:
        """Parameters that become codes where they are."""
        return [entry for entry in self.entries if entry.spec is None and not entry.reason_kept]

    @property
    def code_entries(self) -> dict[str, PlanEntry]:
        """Weights that need not stay as floats, by their first names.

        They are those of layers, and those that become codes in place.
        """
        # a copy for a layer is made of the floats
        copied = {entry.parameters for entry in self.entries if entry.is_copied}
        code_entries = {}
        for entry in self.entries:
            if entry.format is not None and entry.parameters not in copied:
                code_entries[entry.parameters[0]] = entry
        return code_entries


def plan(
    model: nn.Module,
    formats: _spec.Formats | None,
    storage: _spec.Storage = "codes",
    *,
    granularity: WeightGranularity = "channel",
    headroom: float | None = None,
    rounding: WriteRounding = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: Tied = "refuse",
    draws: Draws = "independent",
    retraction: Retraction = "exponential",
    products: _spec.Products = "decoded",
    parameters: ParameterFormats | None = None,
    embeddings: Embeddings | None = None,
) -> SurgeryPlan:
    """Decide what :func:`fp8manifold.quantize_model` does.

    Without formats every layer stays as it is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    _spec.check_storage_name(storage)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    check_choice("tied", tied, TIED)
    check_int("seed", seed, 0, 2**31 - 1)
    _spec.check_stored_weight_options(draws, retraction, headroom, storage)
    pattern_specs = {}
    if formats is not None:
        pattern_specs = _spec.read_formats(formats, granularity, products)
    names_by_id = {key: tuple(names) for key, names in parameter_names(model).items()}
    facts = _layer_facts(model, names_by_id)
    specs = _chosen_specs(facts, pattern_specs)
    _check_in_one_place(model, specs, facts)

    in_place: list[PlanEntry] = []
    if parameters is not None or not _spec.is_none(embeddings):
        if storage != "codes":
            raise ValueError(
                f"parameters and embeddings become codes with storage='codes', not with "
                f"storage={storage!r}"
            )
        weights_of_layers = {facts[name].names for name in specs if not facts[name].is_shared}
        candidates = _in_place_candidates(model, names_by_id, weights_of_layers)
        candidate_names = {first: candidate.names for first, candidate in candidates.items()}
        chosen_formats = {
            **_chosen_parameters(candidate_names, parameters, pattern_specs),
            **_chosen_embeddings(model, candidate_names, embeddings),
        }
        in_place = _in_place_entries(candidates, chosen_formats, granularity)

    specs = _resolve_shared(specs, facts, storage, keep_remainder, tied, in_place)
    unseeded = [
        _layer_entry(name, model.get_submodule(name), spec, facts[name], storage)
        for name, spec in specs.items()
    ]
    unseeded += in_place
    entries = [replace(entry, seed=(seed << 32) + index) for index, entry in enumerate(unseeded)]
    entries += _kept_entries(model, names_by_id, entries)
    options = {
        "headroom": headroom,
        "rounding": rounding,
        "draws": draws,
        "retraction": retraction,
        "keep_remainder": keep_remainder,
        "defer_weight_gradient": defer_weight_gradients,
    }
    return SurgeryPlan(tuple(entries), storage, options)


def check_formats(
    formats: _spec.Formats,
    layers: Mapping[str, tuple[int, int]],
    storage: _spec.Storage = "codes",
    *,
    granularity: WeightGranularity = "channel",
    keep_remainder: bool = False,
    shared: Mapping[str, tuple[str, ...]] | None = None,
    tied: Tied = "refuse",
    products: _spec.Products = "decoded",
) -> dict[str, _spec.LayerSpec]:
    """Read formats as :func:`fp8manifold.quantize_model` does, without a model.

    Whatever :func:`fp8manifold.quantize_model` would refuse is refused.

    Args:
        formats: as in :func:`fp8manifold.quantize_model`.
        layers: ``(in_features, out_features)`` of every linear layer by its dotted
            name, in the model's order.
        storage: as in :func:`fp8manifold.quantize_model`.
        granularity: as in :func:`fp8manifold.quantize_model`.
        keep_remainder: as in :func:`fp8manifold.quantize_model`.
        shared: for layers that share their weight with another module, all names of the
            weight; None: there are none.
        tied: as in :func:`fp8manifold.quantize_model`.
        products: as in :func:`fp8manifold.quantize_model`.

    Returns:
        The specification of every layer that is quantised, by its name.

    Raises:
        TypeError, ValueError: a pattern that matches no layer; a format or option that
            is unknown or does not fit; a layer whose weight is shared under
            ``tied="refuse"``.

    Example:
        >>> layers = {"attn.qkv": (64, 192), "mlp.fc": (64, 256)}
        >>> specs = check_formats({"attn": "e4m3"}, layers)
        >>> {name: spec.weight.format.name for name, spec in specs.items()}
        {'attn.qkv': 'E4M3'}
        >>> check_formats({"atn": "E4M3"}, layers)
        Traceback (most recent call last):
        ValueError: pattern 'atn' matches none of the 2 linear layers; did you mean 'attn'?
    """
    _spec.check_storage_name(storage)
    check_choice("tied", tied, TIED)
    routers = routers_of(layers)
    names_of_shared = shared or {}
    facts = {
        name: _LayerFacts(names_of_shared.get(name, (f"{name}.weight",)), router=routers.get(name))
        for name in layers
    }
    specs = _chosen_specs(facts, _spec.read_formats(formats, granularity, products))
    specs = _resolve_shared(specs, facts, storage, keep_remainder, tied, [])
    for name, spec in specs.items():
        _spec.check_blocks(spec.operands, *layers[name])
        _spec.units_of(spec, *layers[name])
    return specs


@dataclass(frozen=True)
class _LayerFacts:
    """What decides on a linear layer.

    Attributes:
        names: all names of its weight.
        obstacle: what prevents its quantisation.
        adapter: the part of PEFT's adapters that it belongs to.
        router: the part that makes it a router, or part of one.
        is_quantized: True for a quantised layer.
    """

    names: tuple[str, ...]
    obstacle: Obstacle | None = None
    adapter: str | None = None
    router: str | None = None
    is_quantized: bool = False

    @property
    def is_shared(self) -> bool:
        return len(self.names) > 1


def _layer_facts(
    model: nn.Module, names_by_id: Mapping[int, tuple[str, ...]]
) -> dict[str, _LayerFacts]:
    """Return the facts of every linear layer, by its name, with all names of parameters."""
    adapters = adapters_of(model)
    routers = routers_of(name for name, _ in model.named_modules())
    facts = {}
    for name, module in model.named_modules():
        if not is_linear(module):
            continue
        is_quantized = isinstance(module, QuantizedLinear)
        facts[name] = _LayerFacts(
            names=names_by_id.get(id(module._parameters.get("weight")), ()),
            obstacle=None if is_quantized else obstacle(module),
            adapter=adapters.get(name),
            router=routers.get(name),
            is_quantized=is_quantized,
        )
    return facts


def _layer_entry(
    name: str, module: nn.Module, spec: _spec.LayerSpec, facts: _LayerFacts, storage: _spec.Storage
) -> PlanEntry:
    """Return the entry of a layer to replace; its weight becomes codes with ``codes``."""
    # of shared weights only those that get a copy come here
    entry = PlanEntry(name, module, facts.names, spec, is_copied=facts.is_shared)
    weight = spec.operands.get("weight")
    if storage != "codes" or weight is None:
        return entry
    granularity: Any = weight.granularity
    return replace(entry, format=weight.format, granularity=granularity)


def _chosen_specs(
    facts: Mapping[str, _LayerFacts], specs: Mapping[str, _spec.LayerSpec]
) -> dict[str, _spec.LayerSpec]:
    """Return the specification of every layer that a pattern quantises, by its name.

    Args:
        facts: of every linear layer, by its name.
        specs: by pattern.
    """

    def check(pattern: str, matched: list[str]) -> None:
        _check_match(pattern, matched, facts, specs[pattern])

    pattern_of = by_pattern(specs, {name: [name] for name in facts}, check)
    pattern_of = {
        name: pattern
        for name, pattern in pattern_of.items()
        if not specs[pattern].quantizes_nothing
    }
    pattern_of = _without_adapters(pattern_of, facts)
    routers = {name: facts[name].router for name in pattern_of}
    pattern_of = _without_routers("formats", pattern_of, routers)
    for name, pattern in pattern_of.items():
        if facts[name].is_quantized:
            raise ValueError(f"layer {name!r} is quantised already: call dequantize_model first")
        prevention = facts[name].obstacle
        if prevention is not None and prevention.is_undoable and literal(pattern):
            raise ValueError(
                f"layer {name!r}, which {pattern!r} names, can't be quantised: "
                f"{prevention.reason}; or leave the layer as it is with {{{name!r}: 'none'}}"
            )
    chosen = {}
    for name in facts:
        # a pattern of many layers passes over those that can't be quantised
        if name in pattern_of and facts[name].obstacle is None:
            chosen[name] = specs[pattern_of[name]]
    return chosen


def _check_match(
    pattern: str,
    matched: Sequence[str],
    facts: Mapping[str, _LayerFacts],
    spec: _spec.LayerSpec,
) -> None:
    """Refuse a pattern that matches no linear layer, or none that can be quantised."""
    obstacles = {
        name: layer.obstacle for name, layer in facts.items() if layer.obstacle is not None
    }
    if not facts:
        raise ValueError(
            "the model has no linear layer: give formats=None and name weights with parameters="
        )
    if not matched:
        raise ValueError(
            f"pattern {pattern!r} matches none of the {len(facts) - len(obstacles)} linear layers"
            f"{nearest(pattern, facts)}"
        )
    if obstacles.keys() >= set(matched) and not spec.quantizes_nothing:
        raise ValueError(
            f"pattern {pattern!r} matches only layers that can't be quantised, such as "
            f"{matched[0]!r}: {obstacles[matched[0]].reason}"
        )


def _without_adapters(
    pattern_of: Mapping[str, str], facts: Mapping[str, _LayerFacts]
) -> dict[str, str]:
    """Leave PEFT's adapters out of layers and their patterns, but those that one names.

    Warns of the adapters that are left out.
    """
    adapters: dict[str, str] = {}
    for name, pattern in pattern_of.items():
        part = facts[name].adapter
        if part is not None and not names_part(pattern, part):
            adapters[name] = part
    if adapters:
        names = list(adapters)
        shown = ", ".join(names[:_ADAPTERS_LISTED])
        if len(names) > _ADAPTERS_LISTED:
            shown += f" and {len(names) - _ADAPTERS_LISTED} more"
        warnings.warn(
            f"PEFT's adapters, small and trained, were not quantised: {shown}; a pattern that "
            f"names them, such as {adapters[names[0]]!r}, quantises them",
            UserWarning,
            # the line that calls quantize_model
            stacklevel=5,
        )
    return {name: pattern for name, pattern in pattern_of.items() if name not in adapters}


def _without_routers(
    option: str, pattern_of: Mapping[str, str], routers: Mapping[str, str | None]
) -> dict[str, str]:
    """Leave routers out of weights and their patterns, but those that one names.

    Training and serving keep routers in float: the choice among experts jumps.

    Args:
        option: the name of the option that has the patterns.
        pattern_of: the pattern of each layer or parameter, by its name.
        routers: the part that makes each of them a router, or None, by its name.
    """
    without: dict[str, str] = {}
    router_of_pattern: dict[str, str] = {}
    for name, pattern in pattern_of.items():
        router = routers[name]
        if router is None or names_part(pattern, router):
            without[name] = pattern
        else:
            router_of_pattern[pattern] = router
    for pattern, router in router_of_pattern.items():
        if pattern not in without.values():
            raise ValueError(
                f"{option}: pattern {pattern!r} matches only routers, which stay in float unless a "
                f"pattern names them, such as {router!r}"
            )
    return without


def _check_in_one_place(
    model: nn.Module, layers: Iterable[str], facts: Mapping[str, _LayerFacts]
) -> None:
    """Refuse a layer that is in two places.

    Replacing it in one of them would untie it silently.
    """
    for name in layers:
        if not facts[name].is_shared:
            continue
        layer = model.get_submodule(name)
        owners = {weight_name.rpartition(".")[0] for weight_name in facts[name].names}
        places = [owner for owner in owners if model.get_submodule(owner) is layer]
        if len(places) > 1:
            raise ValueError(
                f"layer {name!r} is shared ({', '.join(facts[name].names)}): copy it, or give "
                f"{{{name!r}: 'none'}}"
            )


def _resolve_shared(
    specs: Mapping[str, _spec.LayerSpec],
    facts: Mapping[str, _LayerFacts],
    storage: _spec.Storage,
    keep_remainder: bool,
    tied: Tied,
    in_place: Sequence[PlanEntry],
) -> dict[str, _spec.LayerSpec]:
    """Return the layers to replace, once it is decided on shared weights.

    A shared weight may be encoded in place, by an entry of ``in_place``.
    """
    shared = [name for name in specs if facts[name].is_shared]
    for name in shared:
        names = facts[name].names
        is_encoded = any(_is_weight_of(entry, names, specs[name]) for entry in in_place)
        if tied == "refuse" and not is_encoded:
            raise ValueError(
                f"the weight of {name!r} is shared ({', '.join(names)}): give embeddings= the "
                f"layer's format for codes that an embedding and its head share (storage='codes'), "
                f"tied='untie' for a copy of the weight, or leave the layer as it is with "
                f"tied='leave' or {{{name!r}: 'none'}}"
            )
    # The others keep the weight that they share, in codes or in float.
    resolved = {}
    for name, spec in specs.items():
        if tied == "untie" or name not in shared:
            resolved[name] = spec
    for spec in resolved.values():
        _spec.check_storage(storage, spec, keep_remainder)
    return resolved


def _is_weight_of(entry: PlanEntry, names: Sequence[str], spec: _spec.LayerSpec) -> bool:
    """Return True if a parameter becomes exactly the codes that a layer needs."""
    if entry.name not in names or spec.products != "decoded":
        return False
    weight = spec.operands.get("weight")
    if weight is None or len(spec.operands) > 1:
        return False
    return (weight.format, weight.granularity) == (entry.format, entry.granularity)


@dataclass(frozen=True)
class _Candidate:
    """A parameter that may become codes in place, with its names and its module."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    module: nn.Module


def _in_place_candidates(
    model: nn.Module,
    names_by_id: Mapping[int, tuple[str, ...]],
    weights_of_layers: Collection[tuple[str, ...]],
) -> dict[str, _Candidate]:
    """Return the parameters of two or more dimensions that no layer has for itself.

    They are by their first names; those of parametrisations are left out.
    """
    candidates = {}
    for parameter in model.parameters():
        all_names = names_by_id[id(parameter)]
        if parameter.dim() <= 1 or all_names in weights_of_layers:
            continue
        owner = all_names[0].rpartition(".")[0]
        module = model.get_submodule(owner)
        if not isinstance(module, ParametrizationList):
            candidates[all_names[0]] = _Candidate(all_names, parameter, module)
    return candidates


def _in_place_entries(
    candidates: Mapping[str, _Candidate],
    formats: Mapping[str, FloatFormat | None],
    granularity: WeightGranularity,
) -> list[PlanEntry]:
    """Return entries of the candidates that have a format, in the candidates' order."""
    entries = []
    for name, candidate in candidates.items():
        fmt = formats.get(name)
        if fmt is None:
            continue
        parameter = candidate.parameter
        if isinstance(parameter, FP8Tensor) and parameter.format != fmt:
            raise ValueError(
                f"parameter {name!r} is in {parameter.format.name} already: call dequantize_model "
                f"first"
            )
        entry = PlanEntry(
            name,
            candidate.module,
            candidate.names,
            format=fmt,
            granularity=_in_place_granularity(name, candidate, granularity),
        )
        entries.append(entry)
    return entries


def _chosen_parameters(
    names: Mapping[str, tuple[str, ...]],
    parameters: ParameterFormats | None,
    specs: Mapping[str, _spec.LayerSpec],
) -> dict[str, FloatFormat | None]:
    """Return the format of each parameter that ``parameters`` names.

    Patterns without formats take the weight's format of the pattern ``*`` in ``specs``.
    """
    if parameters is None:
        return {}
    if isinstance(parameters, Mapping):
        return _chosen_formats("parameters", parameters, names)
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    if not patterns:
        raise ValueError("parameters is empty: leave it out, or give a pattern")
    spec = specs.get("*")
    if spec is None or spec.weight is None:
        raise ValueError(
            f"parameters={patterns!r} takes the weight's format of the pattern '*', which "
            f"formats does not have: give parameters={{{patterns[0]!r}: 'E4M3'}}"
        )
    return _chosen_formats("parameters", dict.fromkeys(patterns, spec.weight.format), names)


def _chosen_embeddings(
    model: nn.Module, names: Mapping[str, tuple[str, ...]], embeddings: Embeddings | None
) -> dict[str, FloatFormat | None]:
    """Return the format of each embedding's weight that ``embeddings`` names."""
    if embeddings is None or _spec.is_none(embeddings):
        return {}
    embedding_weights = set()
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embedding_weights.add(f"{module_name}.weight".lstrip("."))
    names_in_embeddings = {}
    for first, all_names in names.items():
        of_embeddings = [name for name in all_names if name in embedding_weights]
        if of_embeddings:
            names_in_embeddings[first] = of_embeddings
    if not names_in_embeddings:
        raise ValueError(
            f"embeddings={embeddings!r}, and the model has no nn.Embedding: name weights with "
            f"parameters="
        )
    formats = embeddings if isinstance(embeddings, Mapping) else {"*": embeddings}
    return _chosen_formats("embeddings", formats, names_in_embeddings)


def _chosen_formats(
    option: str, formats: Mapping[str, FormatLike | None], names: Mapping[str, Sequence[str]]
) -> dict[str, FloatFormat | None]:
    """Return the format of each parameter that a pattern matches; None leaves it.

    Args:
        option: the name of the option that has the patterns.
        formats: by pattern.
        names: by which each parameter can be matched, by its first name.
    """
    for pattern in formats:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} has {pattern!r}: a pattern must be a string")

    def check(pattern: str, matched: list[str]) -> None:
        if not matched:
            raise ValueError(
                f"{option}: pattern {pattern!r} matches none of the {len(names)} parameters of two "
                f"or more dimensions that no pattern of formats has taken{nearest(pattern, names)}"
            )

    pattern_of = by_pattern(formats, names, check)
    format_of_pattern: dict[str, FloatFormat | None] = {}
    for pattern, fmt in formats.items():
        format_of_pattern[pattern] = None if fmt is None or _spec.is_none(fmt) else as_format(fmt)
    chosen: dict[str, FloatFormat | None] = {}
    quantizing: dict[str, str] = {}
    for name, pattern in pattern_of.items():
        if format_of_pattern[pattern] is None:
            chosen[name] = None
        else:
            quantizing[name] = pattern
    all_routers = routers_of(names)
    routers = {name: all_routers.get(name) for name in quantizing}
    for name, pattern in _without_routers(option, quantizing, routers).items():
        chosen[name] = format_of_pattern[pattern]
    return chosen


def _in_place_granularity(
    name: str, candidate: _Candidate, granularity: WeightGranularity
) -> StoredGranularity:
    """Return the granularity of a parameter that becomes codes where it is.

    With ``channel`` there is a scale for each filter of a convolution, and otherwise
    for each row of the last dimension.
    """
    is_kernel = isinstance(candidate.module, CONVOLUTIONS)
    if granularity == "square" and is_kernel:
        raise ValueError(
            f"parameter {name!r} is a convolution's; granularity='square' needs a matrix: take "
            f"'channel'"
        )
    if granularity != "channel":
        return granularity
    return "channel" if is_kernel or candidate.parameter.dim() == 2 else "row"


def _kept_entries(
    model: nn.Module,
    names_by_id: Mapping[int, tuple[str, ...]],
    entries: Sequence[PlanEntry],
) -> list[PlanEntry]:
    """Return entries of the modules with a weight that no other entry changes."""
    replaced = {entry.name for entry in entries if entry.spec is not None}
    encoded: set[str] = set()
    for entry in entries:
        if not entry.is_copied:
            encoded.update(entry.parameters)
    routers = routers_of(name for name, _ in model.named_modules())
    kept_entries = []
    for name, module in model.named_modules():
        # a parametrisation belongs to the layer that it computes a weight of
        if isinstance(module, ParametrizationList) or name in replaced:
            continue
        own_names: list[str] = []
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                own_names += names_by_id[id(parameter)]
        if own_names:
            stays = not encoded.issuperset(own_names)
        else:
            stays = is_linear(module) and isinstance(getattr(module, "weight", None), Tensor)
        if stays:
            reason = _reason_kept(name, module, names_by_id, routers.get(name))
            kept_entries.append(PlanEntry(name, module, tuple(own_names), reason_kept=reason))
    return kept_entries


def _reason_kept(
    name: str,
    module: nn.Module,
    names_by_id: Mapping[int, tuple[str, ...]],
    router: str | None,
) -> str:
    if isinstance(module, QuantizedLinear):
        return "it is quantised already"
    if not is_linear(module):
        return "not a linear layer"
    prevention = obstacle(module)
    if prevention is not None:
        return prevention.reason
    weight_name = f"{name}.weight".lstrip(".")
    aliases = [alias for alias in names_by_id[id(module.weight)] if alias != weight_name]
    if aliases:
        return f"its weight is also {aliases[0]}; tied='untie' gives it one of its own"
    if router is not None:
        return f"a router: only a pattern that names it takes it, such as {router!r}"
    return "no pattern names it, or one that says 'none'"
