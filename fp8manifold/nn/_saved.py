"""The recipe by which saved layers are made again, in the types of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from torch import nn

from fp8manifold._base.checks import check_int, check_keys
from fp8manifold._base.wrappers import plain_name
from fp8manifold._encoded.scaled import DRAWS
from fp8manifold._numerics.charts import RETRACTIONS
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.nn._carried import (
    in_place_parameters,
    parameter_names,
    put_parameter,
    replace_layers,
)
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._selection import computation, is_conv1d, obstacle
from fp8manifold.nn._spec import OPERANDS, LayerSpec, OperandSpec
from fp8manifold.nn._surgery import LayerRequest, made_layers
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

_DEFAULTS: Final = {"products": "decoded", "gradient_products": "bfloat16"}
"""Defaults of options that older versions do not know, which are written only if they
differ.
"""
_WEIGHT_OPTIONS: Final = {"draws": DRAWS[0], "retraction": RETRACTIONS[0]}
"""Options of stored weights with their defaults, likewise written only if they differ."""
_OPTIONS: Final = (
    "storage",
    "rounding",
    *_WEIGHT_OPTIONS,
    "headroom",
    "keep_remainder",
    "defer_weight_gradient",
)


def recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """The quantised layers of a model: those made alike together, each with its seed by
    its name.
    """
    groups: list[dict[str, Any]] = []
    for wrapped_name, layer in model.named_modules():
        name = plain_name(wrapped_name)
        if not isinstance(layer, QuantizedLinear):
            continue
        computed = computation(layer)
        if computed is not None:
            raise ValueError(f"layer {name!r} can't be saved: {computed}")
        if layer.manifold is not None and not isinstance(layer.manifold, FP8Manifold):
            raise ValueError(
                f"layer {name!r} is on a {type(layer.manifold).__name__}: only an FP8Manifold is "
                f"saved"
            )
        _add(groups, {"spec": spec_as_json(layer.spec), **_options_of(layer)}, name, layer._seed)
    return groups


def parameters_recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model that are in codes where they are: those made alike
    together, with their seeds.
    """
    groups: list[dict[str, Any]] = []
    for wrapped_name, own in in_place_parameters(model).items():
        name = plain_name(wrapped_name)
        made: dict[str, Any] = {
            "format": own.format.name,
            "granularity": own.granularity,
            "rounding": own.rounding,
        }
        made |= _weight_options(own)
        _add(groups, made, name, own.seed)
    return groups


def _add(groups: list[dict[str, Any]], made: dict[str, Any], name: str, seed: int) -> None:
    alike = next(
        (group for group in groups if {**group, "seeds": None} == {**made, "seeds": None}), None
    )
    if alike is None:
        groups.append(alike := {**made, "seeds": {}})
    alike["seeds"][name] = seed


def put_parameters(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put parameters as :func:`parameters_recipe_of` described them into a model; their
    values are loaded later.
    """
    known = {names[0]: names for names in parameter_names(model).values()}
    for group in recipe:
        options = ("granularity", "rounding", *_WEIGHT_OPTIONS)
        check_keys("parameters", group, ("format", *options, "seeds"))
        how = {key: group[key] for key in options if key in group}
        for name, seed in group["seeds"].items():
            check_int(f"seed of {name!r}", seed, 0, 2**63 - 1)
            if name not in known:
                raise ValueError(f"the model has no parameter {name!r}, which was saved in codes")
            old = model.get_parameter(name)
            made = FP8Parameter(
                old.detach(), group["format"], seed=seed, requires_grad=old.requires_grad, **how
            )
            put_parameter(model, known[name], made)


def put_layers(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put layers as :func:`recipe_of` described them into a model; their values are
    loaded later.
    """
    made: dict[str, Mapping[str, Any]] = {}
    for group in recipe:
        check_keys("layers", group, ("spec", "seeds", *_OPTIONS))
        made |= dict.fromkeys(group["seeds"], group)
    modules = dict(model.named_modules())
    for name in made:
        module = modules.get(name)
        if (
            module is None
            or not (type(module) is nn.Linear or is_conv1d(module))
            or obstacle(module) is not None
        ):
            raise ValueError(
                f"the model has no float layer {name!r} that the saved quantised layer could "
                f"replace"
            )
    requests: list[LayerRequest] = []
    for name in (name for name in modules if name in made):
        group, seed = made[name], made[name]["seeds"][name]
        check_int(f"seed of {name!r}", seed, 0, 2**63 - 1)
        options = {key: group[key] for key in _OPTIONS if key in group}
        options["seed"] = seed
        requests.append(LayerRequest(name, modules[name], LayerSpec(**group["spec"]), options))
    replace_layers(model, made_layers(requests))


def _options_of(layer: QuantizedLinear) -> dict[str, Any]:
    options: dict[str, Any] = {"storage": layer.storage}
    own = layer.weight if isinstance(layer.weight, FP8Tensor) else layer.manifold
    if own is not None:
        options["rounding"] = own.rounding
        options |= _weight_options(own)
    given = zip(_OPTIONS[-3:], (layer._headroom, layer._keep_remainder, layer._defers), strict=True)
    return options | {key: value for key, value in given if value}


def _weight_options(own: FP8Tensor | FP8Manifold) -> dict[str, Any]:
    """The options that are not the defaults, which older versions may not know."""
    options = {name: getattr(own, name) for name in _WEIGHT_OPTIONS}
    return {name: value for name, value in options.items() if value != _WEIGHT_OPTIONS[name]}


def spec_as_json(spec: LayerSpec) -> dict[str, Any]:
    """The arguments of a specification, in the types of JSON."""
    weight, activation, *both = (_operand_as_json(getattr(spec, name)) for name in OPERANDS)
    gradient = {
        kind: each
        for kind, each in zip(("activation", "weight"), both, strict=True)
        if each is not None
    }
    given: dict[str, Any] = {
        "weight": weight,
        "activation": activation,
        "gradient": gradient or None,
    }
    for name in (field.name for field in fields(spec) if field.name not in OPERANDS):
        value = getattr(spec, name)
        given[name] = None if _DEFAULTS.get(name) == value else value
    return {key: value for key, value in given.items() if value is not None}


def _operand_as_json(operand: OperandSpec | None) -> dict[str, Any] | None:
    if operand is None:
        return None
    values = {field.name: getattr(operand, field.name) for field in fields(operand)} | {
        "format": operand.format.name
    }
    return {key: value for key, value in values.items() if value is not None}
