"""What each quantised layer of a model was made as, in the types of JSON, and such layers put into a float model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from torch import nn

from fp8manifold._encoded.traits import DRAWS
from fp8manifold._numerics.checks import check_int, check_keys
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.nn._candidates import is_conv1d, obstacle
from fp8manifold.nn._conv1d import QuantizedConv1D
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._operands import OperandSpec
from fp8manifold.nn._spec import LayerSpec
from fp8manifold.nn._surgery import replace_layers
from fp8manifold.tensor import FP8Tensor

__all__ = ["put_layers", "recipe_of", "spec_as_json"]

_OPTIONS: Final = ("storage", "rounding", "draws", "headroom", "keep_remainder", "defer_weight_gradient")


def recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """The quantised layers of a model: those made alike together, each with its seed by its name.

    Raises:
        ValueError: a layer whose weight was put on another manifold.
    """
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


def put_layers(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put layers as :func:`recipe_of` described them into a model, at values that are to be loaded.

    Raises:
        TypeError, ValueError: a recipe that can't be read, or one of another model.
    """
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
    }
    return {key: value for key, value in given.items() if value is not None}


def _operand_as_json(operand: OperandSpec | None) -> dict[str, Any] | None:
    if operand is None:
        return None
    values = {field.name: getattr(operand, field.name) for field in fields(operand)} | {"format": operand.format.name}
    return {key: value for key, value in values.items() if value is not None}
