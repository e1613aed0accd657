"""The surgery that puts quantised layers into a model whose code stays as it is."""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any, Final, Literal

from torch import Tensor, nn

from fp8manifold._checks import check_choice, check_int
from fp8manifold._layer_spec import Formats, LayerSpec, read_formats
from fp8manifold.nn import STORAGES, QuantizedLinear, Storage
from fp8manifold.scaling import Granularity
from fp8manifold.tensor import FP8Tensor

__all__ = ["TIED", "Tied", "dequantize_model", "quantize_model", "quantize_weight_gradients"]

Tied = Literal["refuse", "untie", "leave"]
TIED: Final = ("refuse", "untie", "leave")


def quantize_model(
    model: nn.Module,
    formats: Formats = "E4M3",
    storage: Storage = "master",
    *,
    granularity: Granularity = "channel",
    headroom: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: Tied = "refuse",
) -> nn.Module:
    """Replace a model's linear layers by :class:`QuantizedLinear`, without touching the model's own code.

    A pattern is a glob over whole dotted parts of a layer's name: ``mlp`` and ``mlp.fc`` both match
    ``blocks.0.mlp.fc``, ``blocks.0`` matches everything in that block, ``*`` everything.  Where several match, the one
    with the most literal characters wins, and of two as specific the later one.  Only layers whose class is
    ``nn.Linear`` itself are replaced; embeddings, norms and attention products stay in their own precision.

    Args:
        model: changed in place.
        formats: one format or :class:`LayerSpec` for every linear layer, or a mapping from pattern to format, spec,
            dict of :class:`LayerSpec`'s arguments, or ``"none"`` (leave as it is).
        storage: ``master`` (float copy, quantised forward), ``grid`` (float values on the grid, no master copy) or
            ``fp8`` (the same in one byte a weight).
        granularity: of the weight scales, where a bare format is given.
        headroom, rounding, keep_remainder: as in :class:`QuantizedLinear`.
        seed: the seeds of stored weights and of stochastic rounding derive from it, one a layer.
        defer_weight_gradients: leave the weights' gradients in float in the backward pass, for
            :func:`quantize_weight_gradients` to quantise once they have been clipped.
        tied: what to do with a layer whose weight is another module's too, such as an output layer that shares the
            embedding's: ``refuse``, ``untie`` it (it gets a copy, and the embedding stays float) or ``leave`` it as it
            is.  The embedding is never quantised.

    Returns:
        The model; a new layer if ``model`` is itself an ``nn.Linear``.

    Raises:
        TypeError: a model or formats of another type.
        ValueError: a pattern that matches no linear layer, an unknown format or option, a layer that is quantised
            already, weights that are not finite, a weight shared with another module under ``tied="refuse"``, or a
            layer that the model has in two places.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = quantize_model(model, {"*": "E4M3", "2": "none"}, storage="grid")
        >>> [type(layer).__name__ for layer in model]
        ['QuantizedLinear', 'ReLU', 'Linear']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    check_choice("storage", storage, STORAGES)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    check_choice("tied", tied, TIED)
    check_int("seed", seed, 0, 2**31 - 1)
    specs = _matched_specs(model, read_formats(formats, granularity))
    shared = _shared_weights(model, specs)
    if shared and tied == "refuse":
        tied_layer, owners = next(iter(shared.items()))
        raise ValueError(
            f"the weight of {tied_layer!r} is shared ({', '.join(owners)}): give tied='untie' for a copy of its own, "
            f"or leave it alone with tied='leave' or {{{tied_layer!r}: 'none'}}"
        )
    if tied == "leave":
        specs = {name: spec for name, spec in specs.items() if name not in shared}
    options: dict[str, Any] = {
        "headroom": headroom,
        "rounding": rounding,
        "keep_remainder": keep_remainder,
        "defer_weight_gradient": defer_weight_gradients,
    }
    layers: dict[str, nn.Module] = {}
    first_global: QuantizedLinear | None = None
    for index, (name, spec) in enumerate(specs.items()):
        linear = _linear_at(model, name)
        if name in shared:
            linear = _untied(linear)
        layer = QuantizedLinear(linear, spec, storage, seed=(seed << 32) + index, global_with=first_global, **options)
        if first_global is None and layer.shared_amax is not None:
            first_global = layer
        layers[name] = layer
    return _replace(model, layers)


def quantize_weight_gradients(model: nn.Module) -> None:
    """Quantise the weight gradients of one backward pass, in a model of ``defer_weight_gradients=True``.

    The order is: backward pass, clipping, this function; with several micro-batches in a step, once for each, and
    their sum is float32.  A gradient is replaced by its quantised values, in its own dtype, at the scale that the
    layer's specification gives it; one that holds Inf or NaN becomes NaN as a whole.  Layers that do not defer, whose
    weights' gradients have no format, or that hold no gradient are left alone.

    Args:
        model: of :func:`quantize_model`.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> import torch
        >>> spec = LayerSpec(gradient={"weight": {"format": "E4M3", "scale": 1.0}})
        >>> model = quantize_model(nn.Sequential(nn.Linear(2, 1)), spec, defer_weight_gradients=True)
        >>> model(torch.tensor([[900.0, 1.0]])).sum().backward()
        >>> _ = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> quantize_weight_gradients(model)
        >>> model[0].weight.grad.tolist()  # 448 at most, had it been quantised before it was clipped
        [[1.0, 0.001953125]]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.quantize_weight_gradient()


def dequantize_model(model: nn.Module) -> nn.Module:
    """Put ordinary ``nn.Linear`` layers back, holding the quantised values of the weights as float parameters.

    Args:
        model: changed in place.

    Returns:
        The model; a new layer if ``model`` is itself a :class:`QuantizedLinear`.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> model = quantize_model(nn.Sequential(nn.Linear(2, 2)), "E4M3")
        >>> type(dequantize_model(model)[0]).__name__
        'Linear'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            values = _float_values(module.quantized_weight().detach())
            linear.weight = nn.Parameter(values, requires_grad=module.weight.requires_grad)
            linear.bias = module.bias
            layers[name] = linear.train(module.training)
    return _replace(model, layers)


def _float_values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, FP8Tensor) else weight.clone().as_subclass(Tensor)


def _matched_specs(model: nn.Module, specs: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
    """The spec of every layer to replace, by name, in the model's order."""
    names = [name for name, module in model.named_modules() if type(module) in (nn.Linear, QuantizedLinear)]
    chosen: dict[str, str] = {}
    for pattern in sorted(specs, key=lambda p: len(p.replace("*", "").replace("?", ""))):
        matched = [name for name in names if _matches(pattern, name)]
        if not matched:
            parts = sorted({part for name in names for part in _parts(name)})
            nearest = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"pattern {pattern!r} matches none of the {len(names)} linear layers{hint}")
        chosen.update(dict.fromkeys(matched, pattern))
    for name in chosen:
        if isinstance(_linear_at(model, name), QuantizedLinear) and not specs[chosen[name]].quantizes_nothing:
            raise ValueError(f"layer {name!r} is quantised already: call dequantize_model first")
    return {name: specs[chosen[name]] for name in names if name in chosen and not specs[chosen[name]].quantizes_nothing}


def _parts(name: str) -> list[str]:
    """Every run of whole dotted parts of a name."""
    words = name.split(".")
    return [".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]


def _matches(pattern: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in _parts(name))


def _linear_at(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module


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
        names = owners[id(_linear_at(model, layer).weight)]
        if sum(module is _linear_at(model, layer) for module in names.values()) > 1:
            raise ValueError(f"the layer {layer!r} is shared ({', '.join(names)}): leave it alone, or give it a copy")
        if len(names) > 1:
            shared[layer] = list(names)
    return shared


def _untied(linear: nn.Linear) -> nn.Linear:
    """The layer with a weight of its own; the one it had stays where else it is."""
    own = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    own.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=linear.weight.requires_grad)
    own.bias = linear.bias
    return own.train(linear.training)


def _replace(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    for name, layer in layers.items():
        if not name:
            return layer
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model
