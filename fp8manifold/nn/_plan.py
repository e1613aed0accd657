"""What is to be quantised in a model and how, said before it is: of a model without values, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold._numerics.checks import check_choice, check_int
from fp8manifold.nn._candidates import is_conv1d, is_linear, obstacle
from fp8manifold.nn._checks import check_draws, check_storage
from fp8manifold.nn._codes_linear import byte_weight
from fp8manifold.nn._conv1d import QuantizedConv1D, linear_of
from fp8manifold.nn._linear import STORAGES, QuantizedLinear
from fp8manifold.nn._patterns import literal, patterns_chosen
from fp8manifold.nn._spec import Formats, LayerSpec, read_formats
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import Granularity

__all__ = ["TIED", "Plan", "Tied", "plan", "refuse_shared"]

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

    def takes(self, name: str) -> bool:
        """Whether the layer's weight will be codes."""
        return self.storage == "fp8" and name in self.specs and self.specs[name].weight is not None

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
    granularity: Granularity = "channel",
    headroom: float | None = None,
    rounding: str = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: str = "refuse",
    draws: Draws = "independent",
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
    specs = _matched_specs(model, read_formats(formats, granularity))
    shared = _shared_weights(model, specs)
    if tied == "refuse":
        refuse_shared(shared)
    if tied == "leave":
        specs = {name: spec for name, spec in specs.items() if name not in shared}
    for spec in specs.values():
        check_storage(storage, spec, keep_remainder)
    options = {
        "headroom": headroom,
        "rounding": rounding,
        "draws": draws,
        "keep_remainder": keep_remainder,
        "defer_weight_gradient": defer_weight_gradients,
    }
    return Plan(specs, frozenset(shared), storage, seed, options)


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
