"""What is to be quantised in a model and how, said before it is: of a model without values, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold.nn._adapters import without_adapters
from fp8manifold.nn._in_place import Embeddings, InPlace, Parameters, planned_in_place, put_parameter
from fp8manifold.nn._linear import STORAGES, QuantizedConv1D, QuantizedLinear, linear_of
from fp8manifold.nn._products import byte_weight
from fp8manifold.nn._selection import is_conv1d, is_linear, literal, obstacle, patterns_chosen
from fp8manifold.nn._spec import Formats, LayerSpec, check_draws, check_storage, is_none, read_formats
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import WeightGranularity

Tied = Literal["refuse", "untie", "leave"]
TIED: Final = ("refuse", "untie", "leave")


@dataclass(frozen=True)
class Plan:
    """Every layer to replace, in the model's order, and the options that all of them take."""

    specs: Mapping[str, LayerSpec]
    shared: frozenset[str]
    """Those whose weight is another module's too, and which get a copy."""
    storage: Any
    seed: int
    options: Mapping[str, Any]
    in_place: Mapping[str, InPlace]
    """Parameters that become codes where they are, by their first names; their seeds follow those of the layers."""

    def takes(self, name: str) -> bool:
        """Whether the layer's weight will be codes."""
        return self.storage == "fp8" and name in self.specs and self.specs[name].weight is not None

    def needs_floats(self, names: Sequence[str]) -> bool:
        """Whether a layer gets a copy of the weight that is called so, of its floats."""
        return any(name.rpartition(".")[0] in self.shared and name.endswith("weight") for name in names)

    @torch.no_grad()
    def codes(self, name: str, layer: nn.Module, weight: Tensor) -> FP8Parameter:
        """The codes of a float weight, as the layer of that name is going to hold them; its seed is set later.

        Args:
            name, layer: of what the weight is for; without values.
            weight: as the float layer has it, of a ``Conv1D`` transposed.

        Raises:
            TypeError, ValueError: as :class:`QuantizedLinear`.
        """
        operand = self.specs[name].operands["weight"]
        assert operand.granularity is not None
        own: Any = layer.weight
        floats = weight.detach().t().contiguous() if is_conv1d(layer) else weight.detach()
        return byte_weight(
            floats.requires_grad_(own.requires_grad),
            operand.format,
            self.options["rounding"],
            0,
            self.options["draws"],
            granularity=operand.granularity,
            headroom=self.options["headroom"],
            keep_remainder=self.options["keep_remainder"],
        )

    @torch.no_grad()
    def encoded(self, name: str, weight: Tensor, *, requires_grad: bool) -> FP8Parameter:
        """The codes of a parameter that is called so and stays where it is.

        Raises:
            TypeError, ValueError: a dtype that codes can't appear as, or values that are not finite.
        """
        made = self.in_place[name]
        try:
            return byte_weight(
                weight.detach().requires_grad_(requires_grad),
                made.format,
                self.options["rounding"],
                (self.seed << 32) + len(self.specs) + list(self.in_place).index(name),
                self.options["draws"],
                granularity=made.granularity,
                headroom=self.options["headroom"],
                keep_remainder=self.options["keep_remainder"],
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"parameter {name!r}: {error}") from None

    def parameters(
        self, model: nn.Module, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
    ) -> dict[str, FP8Parameter]:
        """The new parameters by their first names; what is in codes already stays as it is, but for the seed."""
        made = {}
        for index, name in enumerate(self.in_place):
            old: Any = codes.get(name, model.get_parameter(name))
            if not isinstance(old, FP8Parameter):
                old = self.encoded(name, old, requires_grad=old.requires_grad)
            elif name in codes:
                old.seed = (self.seed << 32) + len(self.specs) + index
            made[name] = old
        return made

    def put(self, model: nn.Module, parameters: Mapping[str, FP8Parameter]) -> None:
        """Give the model new parameters, each under all its names."""
        for name, parameter in parameters.items():
            put_parameter(model, self.in_place[name].names, parameter)

    def layers(
        self, model: nn.Module, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
    ) -> dict[str, nn.Module]:
        """The new layers by name; of those that have ``codes`` already, the float weight is not looked at."""
        made: dict[str, nn.Module] = {}
        first_global: QuantizedLinear | None = None
        for index, (name, spec) in enumerate(self.specs.items()):
            old = model.get_submodule(name)
            kind = QuantizedConv1D if is_conv1d(old) else QuantizedLinear
            linear: Any = linear_of(old) if name in self.shared and not is_conv1d(old) else old
            options = {**self.options, "seed": (self.seed << 32) + index, "codes": codes.get(name)}
            layer = kind(linear, spec, self.storage, global_with=first_global, **options)
            if first_global is None and layer.shared_amax is not None:
                first_global = layer
            made[name] = layer
        return made


def plan(
    model: nn.Module,
    formats: Formats,
    storage: str,
    *,
    granularity: WeightGranularity = "channel",
    headroom: float | None = None,
    rounding: str = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: str = "refuse",
    draws: Draws = "independent",
    parameters: Parameters | None = None,
    embeddings: Embeddings | None = None,
) -> Plan:
    """What :func:`fp8manifold.quantize_model` is going to do.

    Raises:
        TypeError, ValueError: as that function, but for what the weights' values decide.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    check_choice("storage", storage, STORAGES)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    check_choice("tied", tied, TIED)
    check_int("seed", seed, 0, 2**31 - 1)
    check_draws(draws, storage)
    read = read_formats(formats, granularity)
    specs = _matched_specs(model, read)
    shared = _shared_weights(model, specs)
    left = set(shared) if tied == "leave" else set()
    asked = parameters is not None or not (embeddings is None or is_none(embeddings))
    if asked and storage != "fp8":
        raise ValueError(f"parameters and embeddings become codes with storage='fp8', not with storage={storage!r}")
    in_place: dict[str, InPlace] = {}
    if asked:
        own = [name for name in specs if name not in shared]
        in_place = planned_in_place(model, own, parameters, embeddings, read, granularity)
        if tied == "refuse":
            left = {name for name, names in shared.items() if _serves(in_place, names, specs[name])}
    if tied == "refuse":
        refuse_shared({name: names for name, names in shared.items() if name not in left})
    specs = {name: spec for name, spec in specs.items() if name not in left}
    shared = {name: names for name, names in shared.items() if name not in left}
    for spec in specs.values():
        check_storage(storage, spec, keep_remainder)
    options = {
        "headroom": headroom,
        "rounding": rounding,
        "draws": draws,
        "keep_remainder": keep_remainder,
        "defer_weight_gradient": defer_weight_gradients,
    }
    return Plan(specs, frozenset(shared), storage, seed, options, in_place)


def _serves(in_place: Mapping[str, InPlace], names: Sequence[str], spec: LayerSpec) -> bool:
    """Whether a shared weight becomes codes where it is, as a layer that has it asks for its own."""
    found = next((made for name, made in in_place.items() if name in names), None)
    weight = spec.operands.get("weight")
    return (
        found is not None
        and weight is not None
        and set(spec.operands) == {"weight"}
        and (weight.format, weight.granularity) == (found.format, found.granularity)
    )


def _matched_specs(model: nn.Module, specs: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
    """The spec of every layer to replace, by name, in the model's order."""
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    left = {
        name: found
        for name, module in linears.items()
        if not isinstance(module, QuantizedLinear) and (found := obstacle(module)) is not None
    }
    reasons = {name: found.reason for name, found in left.items()}
    chosen = patterns_chosen(specs, list(linears), reasons)
    chosen = {name: pattern for name, pattern in chosen.items() if not specs[pattern].quantizes_nothing}
    chosen = without_adapters(model, chosen)
    for name, pattern in chosen.items():
        if isinstance(linears[name], QuantizedLinear):
            raise ValueError(f"layer {name!r} is quantised already: call dequantize_model first")
        if name in left and left[name].is_done_to_it and literal(pattern):
            raise ValueError(
                f"layer {name!r}, which {pattern!r} names, can't be quantised: {left[name].reason}; or leave it alone "
                f"with {{{name!r}: 'none'}}"
            )
    return {name: specs[chosen[name]] for name in linears if name in chosen and name not in left}


def refuse_shared(shared: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError for the first layer whose weight is another module's too, given the names of the weight."""
    for layer, owners in shared.items():
        raise ValueError(
            f"the weight of {layer!r} is shared ({', '.join(owners)}): give tied='untie' for a copy of its own, "
            f"or leave it alone with tied='leave' or {{{layer!r}: 'none'}}"
        )


def _shared_weights(model: nn.Module, specs: Mapping[str, LayerSpec]) -> dict[str, list[str]]:
    """For every layer whose weight is another module's too, the names of the weight.

    Raises:
        ValueError: the layer itself is in two places: replacing it in one would untie it silently.
    """
    owners: dict[int, dict[str, nn.Module]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), {})[f"{module_name}.{name}".lstrip(".")] = module
    shared = {}
    for layer in specs:
        linear = model.get_submodule(layer)
        names = owners[id(linear.weight)]
        if sum(module is linear for module in names.values()) > 1:
            raise ValueError(f"the layer {layer!r} is shared ({', '.join(names)}): leave it alone, or give it a copy")
        if len(names) > 1:
            shared[layer] = list(names)
    return shared
