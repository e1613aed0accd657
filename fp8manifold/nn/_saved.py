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

#: Defaults of options that older versions do not know; written only if they differ.
_DEFAULTS: Final = {"products": "decoded", "gradient_products": "bfloat16"}
#: Options of stored weights with their defaults, likewise written only if they differ.
_WEIGHT_OPTIONS: Final = {"draws": DRAWS[0], "retraction": RETRACTIONS[0]}
#: Storages of today by the names that older versions wrote.
_RENAMED_STORAGES: Final = {"fp8": "codes"}
_OPTIONS: Final = (
    "storage",
    "rounding",
    *_WEIGHT_OPTIONS,
    "headroom",
    "keep_remainder",
    "defer_weight_gradient",
)


def recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the recipe of a model's quantised layers.

    Layers with equal options are one group, which has the seed of each by its name.
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
        _add(groups, {"spec": spec_as_json(layer.spec), **_layer_options(layer)}, name, layer._seed)
    return groups


def parameters_recipe_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the recipe of the parameters that are in codes in place.

    Parameters with equal options are one group, which has the seed of each by its name.
    """
    groups: list[dict[str, Any]] = []
    for wrapped_name, parameter in in_place_parameters(model).items():
        name = plain_name(wrapped_name)
        options: dict[str, Any] = {
            "format": parameter.format.name,
            "granularity": parameter.granularity,
            "rounding": parameter.rounding,
        }
        options |= _weight_options(parameter)
        _add(groups, options, name, parameter.seed)
    return groups


def _add(groups: list[dict[str, Any]], options: dict[str, Any], name: str, seed: int) -> None:
    """Add a seed to the group with these options, or to a new one."""
    for group in groups:
        group_options = {key: value for key, value in group.items() if key != "seeds"}
        if group_options == options:
            group["seeds"][name] = seed
            return
    groups.append({**options, "seeds": {name: seed}})


def put_parameters(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put parameters as :func:`parameters_recipe_of` described them into a model.

    Their values are loaded later.
    """
    known = {names[0]: names for names in parameter_names(model).values()}
    for group in recipe:
        names_of_options = ("granularity", "rounding", *_WEIGHT_OPTIONS)
        check_keys("parameters", group, ("format", *names_of_options, "seeds"))
        options = {key: group[key] for key in names_of_options if key in group}
        for name, seed in group["seeds"].items():
            check_int(f"seed of {name!r}", seed, 0, 2**63 - 1)
            if name not in known:
                raise ValueError(f"the model has no parameter {name!r}, which was saved in codes")
            old = model.get_parameter(name)
            parameter = FP8Parameter(
                old.detach(),
                group["format"],
                seed=seed,
                requires_grad=old.requires_grad,
                **options,
            )
            put_parameter(model, known[name], parameter)


def put_layers(model: nn.Module, recipe: Sequence[Mapping[str, Any]]) -> None:
    """Put layers as :func:`recipe_of` described them into a model.

    Their values are loaded later.
    """
    group_of: dict[str, Mapping[str, Any]] = {}
    for group in recipe:
        check_keys("layers", group, ("spec", "seeds", *_OPTIONS))
        group_of |= dict.fromkeys(group["seeds"], group)
    modules = dict(model.named_modules())
    for name in group_of:
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
    # in the model's order
    for name in (name for name in modules if name in group_of):
        group = group_of[name]
        seed = group["seeds"][name]
        check_int(f"seed of {name!r}", seed, 0, 2**63 - 1)
        options = {key: group[key] for key in _OPTIONS if key in group}
        options["seed"] = seed
        storage = options.get("storage")
        options["storage"] = _RENAMED_STORAGES.get(str(storage), storage)
        requests.append(LayerRequest(name, modules[name], LayerSpec(**group["spec"]), options))
    replace_layers(model, made_layers(requests))


def _layer_options(layer: QuantizedLinear) -> dict[str, Any]:
    options: dict[str, Any] = {"storage": layer.storage}
    holder = layer.weight if isinstance(layer.weight, FP8Tensor) else layer.manifold
    if holder is not None:
        options["rounding"] = holder.rounding
        options |= _weight_options(holder)
    optional = {
        "headroom": layer._headroom,
        "keep_remainder": layer._keep_remainder,
        "defer_weight_gradient": layer._defers_weight_gradient,
    }
    return options | {key: value for key, value in optional.items() if value}


def _weight_options(holder: FP8Tensor | FP8Manifold) -> dict[str, Any]:
    """Return the options that are no defaults; older versions may not know them."""
    options = {name: getattr(holder, name) for name in _WEIGHT_OPTIONS}
    return {name: value for name, value in options.items() if value != _WEIGHT_OPTIONS[name]}


def spec_as_json(spec: LayerSpec) -> dict[str, Any]:
    """Return the arguments of a specification, in the types of JSON."""
    gradients = {
        "activation": _operand_as_json(spec.activation_gradient),
        "weight": _operand_as_json(spec.weight_gradient),
    }
    quantized = {name: operand for name, operand in gradients.items() if operand is not None}
    arguments: dict[str, Any] = {
        "weight": _operand_as_json(spec.weight),
        "activation": _operand_as_json(spec.activation),
        "gradient": quantized or None,
    }
    for name in (field.name for field in fields(spec) if field.name not in OPERANDS):
        value = getattr(spec, name)
        arguments[name] = None if _DEFAULTS.get(name) == value else value
    return {key: value for key, value in arguments.items() if value is not None}


def _operand_as_json(operand: OperandSpec | None) -> dict[str, Any] | None:
    if operand is None:
        return None
    values = {field.name: getattr(operand, field.name) for field in fields(operand)}
    values["format"] = operand.format.name
    return {key: value for key, value in values.items() if value is not None}
