"""A layer's weight on the grid, with ``storage="grid"``.

The weight is a `GridParameter`, whose manifold has the format and the scale. It stays
on the grid when it is assigned to, loaded, moved with its module, or reset. Two things
can take it off the grid: an operator that writes in place (`warn_off_grid` says so when
it is saved), and code that puts another parameter in its place (`check_kept` refuses
that).
"""

import warnings
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold import _geoopt_import
from fp8manifold._base.reading import has_values
from fp8manifold._encoded.stored_scale import are_powers_of_two, warn_if_saturated, warn_of_rounding
from fp8manifold._geoopt_import import ManifoldParameter
from fp8manifold._numerics.charts import Retraction
from fp8manifold.formats import FloatFormat
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import WeightGranularity, amax_of, refitted_scale, storage_scale
from fp8manifold.tensor import FP8Tensor

_BUFFERS: Final = ("format_fields", "seed_word", "counter")
#: Torch's own property, which `GridParameter` puts a setter before.
_DATA: Final[Any] = Tensor.data
#: Bits of a half-precision dtype.
_HALF_PRECISION_BITS: Final = 16


class GridParameter(ManifoldParameter):  # type: ignore[misc]  # geoopt is untyped
    """A ``geoopt.ManifoldParameter`` whose values stay points of its grid.

    What is assigned is rounded to the nearest. Where the values would saturate at its
    scale, or be lost, it gets a new one, as codes do.
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
    """Return the nearest points of the manifold's grid.

    Values that are points already are returned as they are. So are values of another
    dtype or device: the weight is being moved then.
    """
    is_moved = (
        values.dtype != weight.dtype
        or values.device != weight.device
        or values.shape != weight.shape
    )
    scale = manifold.scale
    has_all_values = has_values(values) and has_values(scale)
    if is_moved or not has_all_values or scale.device != values.device:
        return values
    points = manifold.projx(values)
    if torch.equal(points, values):
        return values
    warn_of_rounding(manifold.format)
    granularity: Any = "channel" if scale.dim() else "tensor"
    amax = amax_of(values, granularity)
    if not bool(amax.isfinite().all()):
        return points
    old_scale = scale.float()
    fits = refitted_scale(amax.view_as(old_scale), old_scale, manifold.format) == old_scale
    if bool(fits.all()):
        return points
    new_scale = storage_scale(values, manifold.format, granularity).view_as(old_scale)
    scale.copy_(torch.where(fits, old_scale, new_scale))
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
    """Return a weight's nearest points of a grid at a fresh scale, and the manifold."""
    if not (has_values(weight) or weight.is_meta):
        raise RuntimeError(
            "storage='grid' can't be made under a FakeTensorMode, since geoopt's parameters can't "
            "be fake tensors: take storage='codes', or quantise a model that has values"
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
    """Raise TypeError unless a dtype has every point of the grid, and its scale."""
    refusal = _missing_points(manifold.format, manifold.scale, dtype)
    if refusal is not None:
        raise TypeError(f"a layer with storage='grid' can't be {refusal}")


def _missing_points(fmt: FloatFormat, scale: Tensor, dtype: torch.dtype) -> str | None:
    """Return a message's end on the points of the grid that a dtype lacks, or None."""
    if not has_values(scale) or dtype == scale.dtype:
        return None
    limits = torch.finfo(dtype)
    low, high = (float(end) for end in torch.aminmax(scale))
    is_exact = limits.bits > _HALF_PRECISION_BITS or are_powers_of_two(scale.float())
    has_smallest = low * fmt.ulp_min >= limits.smallest_normal * limits.eps
    has_largest = high * fmt.max <= limits.max
    if is_exact and has_smallest and has_largest:
        return None
    return (
        f"{dtype}, which lacks points of its grid ({fmt.name} at scales of {low:g} to {high:g}): "
        "take torch.float32 or torch.bfloat16"
    )


#: What a parameter without the layer's storage means, by storage.
_LOST: Final = {
    "grid": "has lost its manifold: steps would take it off the grid",
    "codes": "is no longer in codes: steps would be those of floats",
}


def check_kept(layer: Any) -> None:
    """Raise RuntimeError if a parameter without the layer's storage is its weight.

    Other code has put it there. A plain tensor in its place belongs to a functional
    call, and pruning and parametrisations compute theirs from a parameter that still
    has the storage. Parameters in codes are on a manifold, too.
    """
    weight = layer._parameters.get("weight")
    kind = _geoopt_import.tensor_kind
    if isinstance(weight, kind):
        return
    if weight is None:
        # pruned or parametrised: computed from a parameter that has the storage
        is_computed = "parametrizations" in layer._modules or any(
            isinstance(parameter, kind) for parameter in layer._parameters.values()
        )
        keeps_storage = is_computed
    else:
        # a plain tensor is that of a functional call
        keeps_storage = not isinstance(weight, nn.Parameter)
    if not keeps_storage:
        raise RuntimeError(
            f"the weight of a layer with storage={layer.storage!r} {_LOST[layer.storage]}; "
            "sharding (FSDP, tensor parallelism) takes it away: use DistributedDataParallel, or "
            "storage='codes' or 'master' with fully_shard"
        )


def warn_off_grid(layer: Any) -> None:
    """Warn if values to be saved are off the grid.

    Then an operator wrote in place, and not through ``data``.
    """
    weight = layer._parameters.get("weight")
    manifold = layer.manifold
    # computed from another parameter, or on no grid
    if weight is None or not isinstance(manifold, FP8Manifold):
        return
    if not (has_values(weight) and has_values(manifold.scale)):
        return
    values = weight.detach()
    count = int((manifold.projx(values) != values).sum())
    if count:
        warnings.warn(
            f"{count} of {values.numel()} weights are off the grid of storage='grid', because "
            "something wrote in place: loading rounds them; assign to weight.data, which rounds, "
            "or step with this library's optimizers",
            stacklevel=3,
        )


def keep_on_manifold(layer: Any) -> None:
    """Make what torch has put in the weight's place a parameter on the manifold again.

    Its class is changed, and the object stays.
    """
    is_on_manifold = isinstance(layer.weight, _geoopt_import.tensor_kind)
    if layer.manifold is not None and not is_on_manifold:
        layer.weight.__class__ = GridParameter
        layer.weight.manifold = layer.manifold


def prepare_grid_state(layer: Any, state: dict[str, Any], prefix: str) -> str | None:
    """Put a saved weight on the grid, at the scale saved with it or a fresh one.

    Returns:
        Why that can't be done, or None.
    """
    weight: Tensor = layer.weight
    manifold: FP8Manifold = layer.manifold
    key = f"{prefix}weight"
    scale_key = f"{prefix}manifold.scale"
    saved = state.get(key)
    saved_scale = state.get(scale_key)
    if saved is None and saved_scale is not None:
        for name in ("scale", *_BUFFERS):
            state.pop(f"{prefix}manifold.{name}", None)
        return (
            f"{scale_key} comes without {key}, whose values are points of the grid at that scale: "
            "load both or neither"
        )
    # torch says what is wrong with another shape
    if not isinstance(saved, Tensor) or saved.shape != weight.shape:
        return None
    values = _values_of(saved)
    scale = saved_scale
    if scale is None:
        scale = _scale_for(layer, saved, values)
    elif scale.shape == manifold.scale.shape:
        warn_if_saturated(values, scale, manifold.format)
    refusal = _missing_points(manifold.format, scale, weight.dtype)
    if refusal is not None:
        return f"{key} can't be loaded into {refusal}"
    if saved_scale is None:
        scale = scale.to(manifold.scale.dtype)
        _add_manifold(state, prefix, layer, scale)
    if not (values.is_meta or scale.is_meta) and scale.shape == manifold.scale.shape:
        values = _points_at(scale, manifold.format, values)
    state[key] = GridParameter(values, manifold=manifold, requires_grad=weight.requires_grad)
    return None


def _values_of(saved: Tensor) -> Tensor:
    if isinstance(saved, FP8Tensor):
        return saved.dequantize()
    return saved.detach().as_subclass(Tensor)


def _points_at(scale: Tensor, fmt: FloatFormat, values: Tensor) -> Tensor:
    """Return the nearest points; values that are points keep the sign of a zero."""
    points = FP8Manifold(fmt, scale.to(values.device)).projx(values)
    return values if torch.equal(points, values) else points


def _scale_for(layer: Any, saved: Tensor, values: Tensor) -> Tensor:
    """Return the scale for a weight that was saved without one of a grid.

    Codes in the grid's format are taken exactly, at their own scale.
    """
    manifold = layer.manifold
    if (
        isinstance(saved, FP8Tensor)
        and saved.format == manifold.format
        and saved.scale.shape == manifold.scale.shape
    ):
        return saved.scale
    return _fresh_scale(layer, values)


def _add_manifold(state: dict[str, Any], prefix: str, layer: Any, scale: Tensor) -> None:
    """Add the buffers of a manifold that a state lacks, with this scale."""
    state[f"{prefix}manifold.scale"] = scale
    manifold = layer.manifold
    if manifold.counter.is_meta:
        manifold = FP8Manifold(manifold.format, scale, seed=layer._seed)
    for name in _BUFFERS:
        state.setdefault(f"{prefix}manifold.{name}", getattr(manifold, name).clone())


def renew_grid_weight(layer: Any, values: Tensor) -> None:
    """Write values in place, at a fresh scale, and reset the manifold's count of draws.

    On the continuous manifold they are written as they are.
    """
    weight = layer.weight
    manifold = layer.manifold
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
    return storage_scale(
        values, layer.manifold.format, layer._weight_granularity, headroom=layer._headroom
    )
