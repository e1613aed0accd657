"""A layer's weight on the grid: it stays there when it is assigned to, loaded, moved
with its module, or reset.
"""

import warnings
from typing import Any, Final, Literal

import geoopt
import torch
from torch import Tensor, nn

from fp8manifold._base.reading import has_values
from fp8manifold._encoded.stored_scale import are_powers_of_two, warn_if_saturated, warn_of_rounding
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import WeightGranularity, amax_of, refitted_scale, storage_scale
from fp8manifold.tensor import FP8Tensor

_BUFFERS: Final = ("format_fields", "seed_word", "counter")
_DATA: Final[Any] = Tensor.data
_HALF: Final = 16


class GridParameter(geoopt.ManifoldParameter):  # type: ignore[misc]  # geoopt is untyped
    """A ``geoopt.ManifoldParameter`` whose values stay points of its grid: what is
    assigned is rounded to the nearest.

    Where the values would saturate at its scale, or be lost, it gets a new one, as
    codes do.
    """

    @property
    def data(self) -> Tensor:
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        if isinstance(self.manifold, FP8Manifold):
            values = _on_grid(self, self.manifold, values)
        _DATA.__set__(self, values)


@torch.no_grad()
def _on_grid(weight: Tensor, manifold: FP8Manifold, values: Tensor) -> Tensor:
    """The nearest points; values that are points already, or of another dtype or device
    (the weight moves), stay.
    """
    moved = (values.dtype, values.device, values.shape) != (
        weight.dtype,
        weight.device,
        weight.shape,
    )
    scale = manifold.scale
    if moved or not (has_values(values) and has_values(scale)) or scale.device != values.device:
        return values
    points = manifold.projx(values)
    if torch.equal(points, values):
        return values
    warn_of_rounding(manifold.format)
    shared: Any = "channel" if scale.dim() else "tensor"
    amax = amax_of(values, shared)
    if not bool(amax.isfinite().all()):
        return points
    old = scale.float()
    fits = refitted_scale(amax.view_as(old), old, manifold.format) == old
    if bool(fits.all()):
        return points
    scale.copy_(torch.where(fits, old, storage_scale(values, manifold.format, shared).view_as(old)))
    return manifold.projx(values)


def grid_weight(
    weight: Tensor,
    fmt: FloatFormat,
    granularity: WeightGranularity,
    headroom: float | None,
    rounding: Literal["nearest", "stochastic"],
    seed: int,
    draws: Draws,
    retraction: Retraction,
) -> tuple[GridParameter, FP8Manifold]:
    """A weight's nearest points of a grid at a fresh scale, and their manifold."""
    if not (has_values(weight) or weight.is_meta):
        raise RuntimeError(
            "storage='grid' can't be made under a FakeTensorMode, as geoopt's parameters are no "
            "fake tensors: take storage='fp8', or quantise a model that has values"
        )
    values = weight.detach()
    manifold = FP8Manifold(
        fmt,
        storage_scale(values, fmt, granularity, headroom=headroom),
        rounding,
        seed,
        draws=draws,
        retraction=retraction,
    )
    check_dtype_holds(manifold, weight.dtype)
    projected = manifold.projx(values) if has_values(weight) else values.clone()
    return GridParameter(projected, manifold=manifold, requires_grad=weight.requires_grad), manifold


def check_dtype_holds(manifold: FP8Manifold, dtype: torch.dtype) -> None:
    """Raise TypeError unless every point of the grid, and its scale, is a number of the
    dtype.
    """
    if refusal := _lacks_points(manifold.format, manifold.scale, dtype):
        raise TypeError(f"a layer with storage='grid' can't be {refusal}")


def _lacks_points(fmt: FloatFormat, scale: Tensor, dtype: torch.dtype) -> str | None:
    """In words, which points of the grid a dtype lacks, or None."""
    if not has_values(scale) or dtype == scale.dtype:
        return None
    number = torch.finfo(dtype)
    low, high = (float(end) for end in torch.aminmax(scale))
    exact = number.bits > _HALF or are_powers_of_two(scale.float())
    if (
        exact
        and low * fmt.ulp_min >= number.smallest_normal * number.eps
        and high * fmt.max <= number.max
    ):
        return None
    return (
        f"{dtype}, which lacks points of its grid ({fmt.name} at scales of {low:g} to {high:g}): "
        f"take torch.float32 or "
        "torch.bfloat16"
    )


_LOST: Final = {
    "grid": "has lost its manifold: steps would take it off the grid",
    "fp8": "is no longer in codes: steps would be those of floats",
}


def check_kept(layer: Any) -> None:
    """Raise RuntimeError if other code has put a parameter without the layer's storage
    in the place of the weight.

    A plain tensor in its place belongs to a functional call, and pruning and
    parametrisations compute theirs from a parameter that still has the storage.
    Parameters in codes are on a manifold, too.
    """
    weight = layer._parameters.get("weight")
    if isinstance(weight, geoopt.ManifoldParameter):
        return
    if weight is None:
        kept = "parametrizations" in layer._modules or any(
            isinstance(p, geoopt.ManifoldParameter) for p in layer._parameters.values()
        )
    else:
        kept = not isinstance(weight, nn.Parameter)
    if not kept:
        raise RuntimeError(
            f"the weight of a layer with storage={layer.storage!r} {_LOST[layer.storage]}; "
            f"sharding (FSDP, tensor "
            "parallelism) takes it away: use DistributedDataParallel, or storage='fp8' or 'master' "
            "with fully_shard"
        )


def warn_off_grid(layer: Any) -> None:
    """Warn if values to be saved are off the grid: an operator wrote in place, not
    through ``data``.
    """
    weight, manifold = layer._parameters.get("weight"), layer.manifold
    if weight is None or not isinstance(
        manifold, FP8Manifold
    ):  # computed from another parameter, or on no grid
        return
    if not (has_values(weight) and has_values(manifold.scale)):
        return
    values = weight.detach()
    off = int((manifold.projx(values) != values).sum())
    if off:
        warnings.warn(
            f"{off} of {values.numel()} weights are off the grid of storage='grid', because "
            f"something wrote in place: "
            "loading rounds them; assign to weight.data, which rounds, or step with this library's "
            "optimizers",
            stacklevel=3,
        )


def keep_on_manifold(layer: Any) -> None:
    """Give a weight that torch has replaced its manifold back; the object stays the
    same.
    """
    if layer.manifold is not None and not isinstance(layer.weight, geoopt.ManifoldParameter):
        layer.weight.__class__ = GridParameter
        layer.weight.manifold = layer.manifold


def prepare_grid_state(layer: Any, state: dict[str, Any], prefix: str) -> str | None:
    """Put a saved weight on the grid, at the scale saved with it or a fresh one, or
    return why it can't be.
    """
    weight, manifold = layer.weight, layer.manifold
    key, scale_key = f"{prefix}weight", f"{prefix}manifold.scale"
    saved, scale = state.get(key), state.get(scale_key)
    if saved is None and scale is not None:
        for name in ("scale", *_BUFFERS):
            state.pop(f"{prefix}manifold.{name}", None)
        return f"{scale_key} comes without {key}, whose values are points of the grid at that scale: load both or none"
    if not isinstance(saved, Tensor) or saved.shape != weight.shape:
        return None  # torch says what is wrong with it
    values = (
        saved.dequantize() if isinstance(saved, FP8Tensor) else saved.detach().as_subclass(Tensor)
    )
    own, fresh = manifold.scale, scale is None
    if scale is None:  # that of codes in the same format, which are taken exactly, or a fresh one
        if (
            isinstance(saved, FP8Tensor)
            and saved.format == manifold.format
            and saved.scale.shape == own.shape
        ):
            scale = saved.scale
        else:
            scale = _fresh_scale(layer, values)
    elif scale.shape == own.shape:
        warn_if_saturated(values, scale, manifold.format)
    if refusal := _lacks_points(manifold.format, scale, weight.dtype):
        return f"{key} can't be loaded into {refusal}"
    if fresh:
        state[scale_key] = scale = scale.to(own.dtype)
        known = (
            manifold
            if not manifold.counter.is_meta
            else FP8Manifold(manifold.format, scale, seed=layer._seed)
        )
        for name in _BUFFERS:
            state.setdefault(f"{prefix}manifold.{name}", getattr(known, name).clone())
    if not (values.is_meta or scale.is_meta) and scale.shape == own.shape:
        points = FP8Manifold(manifold.format, scale.to(values.device)).projx(values)
        values = values if torch.equal(points, values) else points  # to the sign of a zero
    state[key] = GridParameter(values, manifold=manifold, requires_grad=weight.requires_grad)
    return None


def renew_grid_weight(layer: Any, values: Tensor) -> None:
    """Write values at a fresh scale, and reset the manifold's count of draws; in place.

    On the continuous manifold they are written as they are.
    """
    weight, manifold = layer.weight, layer.manifold
    scale = _fresh_scale(layer, values)
    if not isinstance(manifold, FP8Manifold):
        manifold.scale.copy_(scale)
        weight.copy_(values)
        return
    fresh = FP8Manifold(manifold.format, scale, manifold.rounding, layer._seed)
    check_dtype_holds(fresh, weight.dtype)
    for name in ("scale", *_BUFFERS):
        getattr(manifold, name).copy_(getattr(fresh, name))
    weight.copy_(fresh.projx(values))


def _fresh_scale(layer: Any, values: Tensor) -> Tensor:
    granularity, headroom = layer._placing
    return storage_scale(values, layer.manifold.format, granularity, headroom=headroom)
