"""The recipe that makes saved layers again: what they are, in the types of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from torch import nn

from fp8manifold._base.checks import check_int, check_keys
from fp8manifold._encoded.scaled import DRAWS
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.nn._in_place import in_place_parameters, parameter_names, put_parameter
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._selection import is_conv1d, obstacle
from fp8manifold.nn._spec import LayerSpec, OperandSpec
from fp8manifold.nn._surgery import replace_layers
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_OPTIONS: Final = ("storage", "rounding", "draws", "headroom", "keep_remainder", "defer_weight_gradient")


def recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """The quantised layers of a model: those made alike together, each with its seed by its name."""
    groups: list[dict[str, Any]] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        if layer.manifold is not None and not isinstance(layer.manifold, FP8Manifold):
            raise ValueError(f"layer {name!r} is on a {type(layer.manifold).__name__}, which can't be saved so")
        made = {"spec": spec_as_json(layer.spec), **_options_of(layer)}
        alike = next((group for group in groups if {**group, "seeds": None} == {**made, "seeds": None}), None)
        if alike is None:
            groups.append(alike := {**made, "seeds": {}})
        alike["seeds"][name] = layer._seed
    return groups


def parameters_recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model that are in codes where they are: those made alike together, with their seeds."""
    groups: list[dict[str, Any]] = []
    for name, own in in_place_parameters(model).items():
        made: dict[str, Any] = {"format": own.format.name, "granularity": own.granularity, "rounding": own.rounding}
        made |= {"draws": own.draws} if own.draws != DRAWS[0] else {}
        alike = next((group for group in groups if {**group, "seeds": None} == {**made, "seeds": None}), None)
        if alike is None:
            groups.append(alike := {**made, "seeds": {}})
        alike["seeds"][name] = own.seed
    return groups


def put_parameters(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put parameters as :func:`parameters_recipe_of` described them into a model, at values that are to be loaded."""
    known = {names[0]: names for names in parameter_names(model).values()}
    for group in recipe:
        check_keys("parameters", group, ("format", "granularity", "rounding", "draws", "seeds"))
        how = {key: group[key] for key in ("granularity", "rounding", "draws") if key in group}
        for name, seed in group["seeds"].items():
            check_int(f"seed of {name!r}", seed, 0, 2**63 - 1)
            if name not in known:
                raise ValueError(f"the parameter in codes {name!r} is none of the model's")
            old = model.get_parameter(name)
            made = FP8Parameter(old.detach(), group["format"], seed=seed, requires_grad=old.requires_grad, **how)
            put_parameter(model, known[name], made)


def put_layers(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put layers as :func:`recipe_of` described them into a model, at values that are to be loaded."""
    made: dict[str, Mapping[str, Any]] = {}
    for group in recipe:
        check_keys("layers", group, ("spec", "seeds", *_OPTIONS))
        made |= dict.fromkeys(group["seeds"], group)
    modules = dict(model.named_modules())
    for name in made:
        module = modules.get(name)
        if module is None or isinstance(module, QuantizedLinear) or not _can_be_replaced(module):
            raise ValueError(f"the quantised layer {name!r} has no float layer in the model that it could replace")
    layers: dict[str, nn.Module] = {}
    first_global: QuantizedLinear | None = None
    for name in (name for name in modules if name in made):
        old, group = modules[name], made[name]
        check_int(f"seed of {name!r}", group["seeds"][name], 0, 2**63 - 1)
        kind: Any = QuantizedConv1D if is_conv1d(old) else QuantizedLinear
        options = {key: group[key] for key in _OPTIONS if key in group}
        layer = kind(old, LayerSpec(**group["spec"]), seed=group["seeds"][name], global_with=first_global, **options)
        if first_global is None and layer.shared_amax is not None:
            first_global = layer
        layers[name] = layer
    replace_layers(model, layers)


def _can_be_replaced(module: nn.Module) -> bool:
    return (type(module) is nn.Linear or is_conv1d(module)) and obstacle(module) is None


def _options_of(layer: QuantizedLinear) -> dict[str, Any]:
    options: dict[str, Any] = {"storage": layer.storage}
    own = layer.weight if isinstance(layer.weight, FP8Tensor) else layer.manifold
    if own is not None:
        options["rounding"] = own.rounding
        options |= {"draws": own.draws} if own.draws != DRAWS[0] else {}  # which older versions do not know
    given = {
        "headroom": layer._headroom,
        "keep_remainder": layer._keep_remainder,
        "defer_weight_gradient": layer._defers,
    }
    return options | {key: value for key, value in given.items() if value}


def spec_as_json(spec: LayerSpec) -> dict[str, Any]:
    """The arguments of a specification, in the types of JSON."""
    gradients = {"activation": spec.activation_gradient, "weight": spec.weight_gradient}
    given: dict[str, Any] = {
        "weight": _operand_as_json(spec.weight),
        "activation": _operand_as_json(spec.activation),
        "gradient": {key: _operand_as_json(each) for key, each in gradients.items() if each is not None} or None,
        "granularity": spec.granularity,
        "policy": spec.policy,
        "ste": spec.ste,
        "rounding": spec.rounding,
        "history": spec.history,
        # which older versions do not know
        "products": None if spec.products == "decoded" else spec.products,
        "gradient_products": None if spec.gradient_products == "bfloat16" else spec.gradient_products,
    }
    return {key: value for key, value in given.items() if value is not None}


def _operand_as_json(operand: OperandSpec | None) -> dict[str, Any] | None:
    if operand is None:
        return None
    values = {field.name: getattr(operand, field.name) for field in fields(operand)} | {"format": operand.format.name}
    return {key: value for key, value in values.items() if value is not None}
