"""Quantised linear layers, and the surgery that puts them into a model whose code stays as it is."""

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import geoopt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8manifold._checks import check_choice, check_int, check_number
from fp8manifold.fake_quant import STE, STES, fake_quantize
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.grid import encode
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.scaling import GRANULARITIES, POLICIES, Granularity, Policy, Scale, storage_scale

__all__ = ["STORAGES", "LayerSpec", "QuantizedLinear", "Storage", "dequantize_model", "quantize_model"]

Storage = Literal["master", "grid"]
STORAGES: Final = ("master", "grid")
_NONE: Final = "none"


@dataclass(frozen=True)
class LayerSpec:
    """What is quantised in a linear layer, and how.

    Args:
        weight: format of the weight; None (or ``"none"``) leaves it as it is.
        activation: format of the layer's input; None leaves it as it is.
        granularity: of the weight's scale: one for the ``tensor``, or one for each ``channel`` (row).  Activations
            have one scale a tensor.
        policy: of the amax scales (activations, and weights with a master copy): ``dynamic`` or ``static``, frozen
            after the first forward pass.  Stored weights always have a static power-of-two scale.
        ste: the straight-through gradient, as in :func:`fake_quantize`.

    Raises:
        TypeError, ValueError: a format or option that can't be read.

    Example:
        >>> LayerSpec("E4M3", activation="E5M2").weight.name
        'E4M3'
    """

    weight: FloatFormat | None
    activation: FloatFormat | None
    granularity: Granularity
    policy: Policy
    ste: STE

    def __init__(
        self,
        weight: FormatLike | None = None,
        activation: FormatLike | None = None,
        granularity: Granularity = "channel",
        policy: Policy = "dynamic",
        ste: STE = "identity",
    ) -> None:
        check_choice("granularity", granularity, GRANULARITIES)
        check_choice("policy", policy, POLICIES)
        check_choice("ste", ste, STES)
        values = (_format_or_none(weight), _format_or_none(activation), granularity, policy, ste)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def quantizes_nothing(self) -> bool:
        """Whether the layer stays as it is."""
        return self.weight is None and self.activation is None


Formats = FormatLike | LayerSpec | Mapping[str, FormatLike | LayerSpec | Mapping[str, Any] | None]


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight, and input if asked for, take values of a float format.

    With storage ``master`` the weight is an ordinary float parameter that is fake-quantised in the forward pass
    (quantisation-aware training); with ``grid`` it is a ``geoopt.ManifoldParameter`` on an :class:`FP8Manifold`, whose
    float32 values lie on the grid at a static power-of-two scale, and there is no master copy.

    Args:
        linear: the layer to take over; its bias parameter is kept, its weight too with storage ``master``.
        spec: formats and options.
        storage: ``master`` or ``grid``.
        headroom: of the grid's scale, as in :func:`fp8manifold.storage_scale`.
        rounding: of the grid's manifold: what geoopt's own optimizers round with.
        seed: of the grid's manifold; every parameter needs one of its own.

    Raises:
        TypeError: ``linear`` is no ``nn.Linear``.
        ValueError: an unknown storage, or weights that are not finite.

    Example:
        >>> layer = QuantizedLinear(nn.Linear(4, 2), LayerSpec("E4M3"), "grid")
        >>> layer(torch.zeros(1, 4)).shape, layer.weight_codes().dtype
        (torch.Size([1, 2]), torch.uint8)
    """

    def __init__(
        self,
        linear: nn.Linear,
        spec: LayerSpec,
        storage: Storage = "master",
        *,
        headroom: float | None = None,
        rounding: Literal["nearest", "stochastic"] = "stochastic",
        seed: int = 0,
    ) -> None:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, not {type(linear).__name__}")
        check_choice("storage", storage, STORAGES)
        if headroom is not None:
            check_number("headroom", headroom, 1.0)
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.spec, self.storage = spec, storage
        self.bias = linear.bias
        self.weight_scaler: Scale | None = None
        self.activation_scaler: Scale | None = None
        self.manifold: FP8Manifold | None = None
        self.weight = linear.weight
        if spec.weight is not None and not linear.weight.is_meta and not bool(linear.weight.isfinite().all()):
            raise ValueError(f"a weight of shape {tuple(linear.weight.shape)} holds NaN or Inf: it can't be quantised")
        if spec.weight is not None and storage == "grid":
            self._store_on_grid(linear.weight, spec.weight, headroom, rounding, seed)
        elif spec.weight is not None:
            self.weight_scaler = Scale(spec.weight, spec.granularity, spec.policy)
        if spec.activation is not None:
            self.activation_scaler = Scale(spec.activation, "tensor", spec.policy)
        self.train(linear.training)

    @property
    def weight_format(self) -> FloatFormat | None:
        """The weight's format, or None."""
        return self.spec.weight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """``Q_a(x) Q_w(W)^T + b``, in the dtype (or autocast dtype) of an ``nn.Linear``."""
        if self.activation_scaler is not None and self.spec.activation is not None:
            scale = self.activation_scaler(input)
            quantized = fake_quantize(input, self.spec.activation, scale, ste=self.spec.ste)
            return F.linear(quantized, self.quantized_weight(), self.bias)
        return F.linear(input, self.quantized_weight(), self.bias)

    def quantized_weight(self) -> Tensor:
        """The weight that the forward pass multiplies by; differentiable."""
        if self.weight_scaler is None or self.spec.weight is None:
            return self.weight
        return fake_quantize(self.weight, self.spec.weight, self.weight_scaler(self.weight), ste=self.spec.ste)

    def weight_scale(self) -> Tensor:
        """The scale of the weight, broadcasting against it; 1 for a weight that is not quantised."""
        if self.manifold is not None:
            return self.manifold.scale
        if self.weight_scaler is not None:
            scale: Tensor = self.weight_scaler(self.weight)
            return scale
        return torch.ones((), device=self.weight.device)

    def weight_codes(self) -> Tensor:
        """uint8 codes of the quantised weight.

        Raises:
            ValueError: the weight is not quantised, or holds a NaN that its format has no code for.
        """
        if self.spec.weight is None:
            raise ValueError("this layer's weight is not quantised: it has no codes")
        return encode(self.weight.detach() / self.weight_scale(), self.spec.weight)

    def extra_repr(self) -> str:
        """nn.Linear's, with formats and storage."""
        names = [f.name if f else _NONE for f in (self.spec.weight, self.spec.activation)]
        return f"{super().extra_repr()}, weight={names[0]}, activation={names[1]}, storage={self.storage}"

    def _store_on_grid(
        self,
        weight: Tensor,
        fmt: FloatFormat,
        headroom: float | None,
        rounding: Literal["nearest", "stochastic"],
        seed: int,
    ) -> None:
        scale = storage_scale(weight.detach(), fmt, self.spec.granularity, headroom=headroom)
        manifold = FP8Manifold(fmt, scale, rounding, seed)
        self.manifold = manifold
        projected = manifold.projx(weight.detach())
        self.weight = geoopt.ManifoldParameter(projected, manifold=manifold, requires_grad=weight.requires_grad)


def quantize_model(
    model: nn.Module,
    formats: Formats = "E4M3",
    storage: Storage = "master",
    *,
    granularity: Granularity = "channel",
    headroom: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "stochastic",
    seed: int = 0,
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
        storage: ``master`` (float copy, quantised forward) or ``grid`` (values on the grid, no master copy).
        granularity: of the weight scales, where a bare format is given.
        headroom, rounding: as in :class:`QuantizedLinear`.
        seed: the manifolds' seeds derive from it, one a layer.

    Returns:
        The model; a new layer if ``model`` is itself an ``nn.Linear``.

    Raises:
        TypeError: a model or formats of another type.
        ValueError: a pattern that matches no linear layer, an unknown format or option, a layer that is quantised
            already, weights that are not finite, or a weight shared with another module (untie it, or leave it
            alone with the pattern's value ``"none"``).

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
    check_int("seed", seed, 0, 2**31 - 1)
    specs = _matched_specs(model, _read_formats(formats, granularity))
    _refuse_shared_weights(model, specs)
    layers = {
        name: QuantizedLinear(
            _linear_at(model, name), spec, storage, headroom=headroom, rounding=rounding, seed=(seed << 32) + index
        )
        for index, (name, spec) in enumerate(specs.items())
    }
    return _replace(model, layers)


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
            values = module.quantized_weight().detach().clone().as_subclass(Tensor)
            linear.weight = nn.Parameter(values, requires_grad=module.weight.requires_grad)
            linear.bias = module.bias
            layers[name] = linear.train(module.training)
    return _replace(model, layers)


def _format_or_none(fmt: FormatLike | None) -> FloatFormat | None:
    return None if fmt is None or (isinstance(fmt, str) and fmt.lower() == _NONE) else as_format(fmt)


def _read_formats(formats: Formats, granularity: Granularity) -> dict[str, LayerSpec]:
    if not isinstance(formats, Mapping):
        formats = {"*": formats}
    if not formats:
        raise ValueError("formats is empty: give a format, or a mapping from layer pattern to format")
    for pattern in formats:
        if not isinstance(pattern, str):
            raise TypeError(f"formats has the key {pattern!r}: a layer pattern must be a string")
    return {pattern: _read_spec(pattern, value, granularity) for pattern, value in formats.items()}


def _read_spec(pattern: str, value: object, granularity: Granularity) -> LayerSpec:
    if isinstance(value, LayerSpec):
        return value
    if value is None or isinstance(value, str | FloatFormat):
        return LayerSpec(value, granularity=granularity)
    if not isinstance(value, Mapping):
        raise TypeError(f"formats[{pattern!r}] must be a format, a LayerSpec or a dict, not {type(value).__name__}")
    known = [field.name for field in fields(LayerSpec)]
    for key in value:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"formats[{pattern!r}] has an unknown key {key!r}: one of {', '.join(known)}; did you mean {nearest!r}?"
            )
    return LayerSpec(**{"granularity": granularity, **value})


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


def _refuse_shared_weights(model: nn.Module, specs: dict[str, LayerSpec]) -> None:
    owners: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{module_name}.{name}".lstrip("."))
    for layer in specs:
        shared = owners[id(_linear_at(model, layer).weight)]
        if len(shared) > 1:
            raise ValueError(
                f"the weight of {layer!r} is shared ({', '.join(shared)}): untie it before quantising, "
                f"or leave it alone with {{{layer!r}: 'none'}}"
            )


def _replace(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    for name, layer in layers.items():
        if not name:
            return layer
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model
