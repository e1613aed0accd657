"""Quantised linear layers, and the surgery that puts them into a model whose code stays as it is."""

import difflib
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

import geoopt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8manifold._checks import check_choice, check_int, check_number
from fp8manifold._layer_spec import NONE, Formats, LayerSpec, read_formats
from fp8manifold.fake_quant import fake_quantize
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import encode
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import Scale, StorageGranularity, storage_scale
from fp8manifold.tensor import FP8Tensor

__all__ = ["STORAGES", "LayerSpec", "QuantizedLinear", "Storage", "dequantize_model", "quantize_model"]

Storage = Literal["master", "grid", "fp8"]
STORAGES: Final = ("master", "grid", "fp8")


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight, and input if asked for, take values of a float format.

    With storage ``master`` the weight is an ordinary float parameter that is fake-quantised in the forward pass
    (quantisation-aware training); with ``grid`` it is a ``geoopt.ManifoldParameter`` on an :class:`FP8Manifold`, whose
    float32 values lie on the grid at a static power-of-two scale, and there is no master copy.  With ``fp8`` it is an
    :class:`FP8Parameter`, the same weights in one byte each.

    Loading a state dict takes the weight of another ``fp8`` layer exactly, scale, counter and seed included; a float
    weight is rounded, at a scale of its own.

    Args:
        linear: the layer to take over; its bias parameter is kept, its weight too with storage ``master``.
        spec: formats and options.
        storage: ``master``, ``grid`` or ``fp8``.
        headroom: of the stored weights' scale, as in :func:`fp8manifold.storage_scale`.
        rounding: of stored weights: what geoopt's own optimizers round with.
        seed: of stored weights; every parameter needs one of its own.
        keep_remainder: with ``fp8``, keep what rounding the weight left, for a residual to begin with.

    Raises:
        TypeError: ``linear`` is no ``nn.Linear``; with ``fp8`` a weight that is neither float32 nor bfloat16.
        ValueError: an unknown storage, weights that are not finite, or an option that the storage does not have.

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
        keep_remainder: bool = False,
    ) -> None:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, not {type(linear).__name__}")
        check_choice("storage", storage, STORAGES)
        _check_fp8_only(storage, spec, keep_remainder)
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
        self._headroom, self._keep_remainder = headroom, keep_remainder
        if spec.weight is not None and storage == "grid":
            self._store_on_grid(linear.weight, spec.weight, headroom, rounding, seed)
        elif spec.weight is not None and storage == "fp8":
            self.weight = self._in_codes(linear.weight, spec.weight, rounding, seed)
        elif spec.weight is not None and spec.granularity != "block":
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
        if isinstance(self.weight, FP8Tensor):
            return self.weight.expanded_scale()
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
        if isinstance(self.weight, FP8Tensor):
            return self.weight.codes.clone()
        return encode(self.weight.detach() / self.weight_scale(), self.spec.weight)

    def extra_repr(self) -> str:
        """nn.Linear's, with formats and storage."""
        names = [f.name if f else NONE for f in (self.spec.weight, self.spec.activation)]
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

    def _in_codes(
        self, weight: Tensor, fmt: FloatFormat, rounding: Literal["nearest", "stochastic"], seed: int
    ) -> FP8Parameter:
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"a weight has dtype {weight.dtype}: storage='fp8' takes float32 or bfloat16 layers")
        return FP8Parameter(
            weight.detach(),
            fmt,
            granularity=self.spec.granularity,
            headroom=self._headroom,
            rounding=rounding,
            seed=seed,
            keep_remainder=self._keep_remainder,
            requires_grad=weight.requires_grad,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse a dtype that stored codes can't appear as, before anything has changed."""
        if isinstance(self.weight, FP8Tensor):
            dtype = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)).dtype
            if dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(f"a layer with storage='fp8' can't be {dtype}: take float32 or bfloat16")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """What the first rounding left is no part of the state."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        saved = destination.get(prefix + "weight")
        if isinstance(saved, FP8Tensor) and not keep_vars:
            saved.remainder = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Codes are taken as they are, floats are rounded."""
        weight, saved = self.weight, state_dict.get(prefix + "weight")
        if isinstance(weight, FP8Tensor) and isinstance(saved, FP8Tensor):
            if saved.format != weight.format:
                args[-1].append(
                    f"{prefix}weight is of {saved.format.name}, but this layer's is of {weight.format.name}"
                )
                return
            weight.seed = saved.seed
        elif isinstance(weight, FP8Tensor) and isinstance(saved, Tensor):
            floats = saved.detach().to(weight.dtype)
            state_dict[prefix + "weight"] = self._in_codes(floats, weight.format, weight.rounding, weight.seed)
        super()._load_from_state_dict(state_dict, prefix, *args)


def quantize_model(
    model: nn.Module,
    formats: Formats = "E4M3",
    storage: Storage = "master",
    *,
    granularity: StorageGranularity = "channel",
    headroom: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
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
        seed: the seeds of stored weights derive from it, one a layer.

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
    specs = _matched_specs(model, read_formats(formats, granularity))
    _refuse_shared_weights(model, specs)
    layers = {
        name: QuantizedLinear(
            _linear_at(model, name),
            spec,
            storage,
            headroom=headroom,
            rounding=rounding,
            seed=(seed << 32) + index,
            keep_remainder=keep_remainder,
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
            values = _float_values(module.quantized_weight().detach())
            linear.weight = nn.Parameter(values, requires_grad=module.weight.requires_grad)
            linear.bias = module.bias
            layers[name] = linear.train(module.training)
    return _replace(model, layers)


def _float_values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, FP8Tensor) else weight.clone().as_subclass(Tensor)


def _check_fp8_only(storage: Storage, spec: LayerSpec, keep_remainder: bool) -> None:
    if storage == "fp8":
        return
    if spec.weight is not None and spec.granularity == "block":
        raise ValueError(f"granularity='block' needs storage='fp8', not storage={storage!r}")
    if keep_remainder:
        raise ValueError(f"keep_remainder=True needs storage='fp8', not storage={storage!r}")


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
