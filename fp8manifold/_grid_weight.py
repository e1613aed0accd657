"""A layer's weight on the grid: it stays there when a state is loaded, when the module moves, or is made anew."""

from typing import Any, Final

import geoopt
import torch
from torch import Tensor

from fp8manifold._stored_scale import fresh_scale, warn_if_saturated
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.scaling import Granularity
from fp8manifold.tensor import FP8Tensor

__all__ = ["check_dtype_holds", "keep_on_manifold", "prepare_grid_state", "renew_grid_weight"]

_BUFFERS: Final = ("format_fields", "seed_word", "counter")


def check_dtype_holds(manifold: FP8Manifold, dtype: torch.dtype) -> None:
    """Raise TypeError unless every point of the grid, and its scale, is a number of the dtype."""
    if manifold.scale.is_meta or dtype == manifold.scale.dtype:
        return
    number, fmt = torch.finfo(dtype), manifold.format
    low, high = (float(end) for end in torch.aminmax(manifold.scale))
    if low * fmt.ulp_min < number.smallest_normal * number.eps or high * fmt.max > number.max:
        raise TypeError(
            f"a layer with storage='grid' can't be {dtype}, which lacks points of its grid ({fmt.name} at scales of "
            f"{low:g} to {high:g}): take torch.float32 or torch.bfloat16"
        )


def keep_on_manifold(weight: Tensor, manifold: FP8Manifold) -> None:
    """Give a parameter that torch has made anew its manifold back; it stays the object that it is."""
    if not isinstance(weight, geoopt.ManifoldParameter):
        weight.__class__ = geoopt.ManifoldParameter
        weight.manifold = manifold  # type: ignore[attr-defined]


def prepare_grid_state(
    state: dict[str, Any],
    prefix: str,
    weight: Tensor,
    manifold: FP8Manifold,
    granularity: Granularity,
    headroom: float | None,
    seed: int,
) -> str | None:
    """Put what is saved of a weight on the grid: at the scale that is saved with it, or without one at its own.

    Args:
        state: of the module; the entries of weight and manifold are replaced.
        prefix: of the module's entries.
        weight, manifold: those of the layer.
        granularity, headroom: of a scale that has to be made.
        seed: of a manifold that has no values yet.

    Returns:
        Why the state is refused, or None.
    """
    key, scale_key = f"{prefix}weight", f"{prefix}manifold.scale"
    saved, scale = state.get(key), state.get(scale_key)
    if saved is None and scale is not None:
        for name in ("scale", *_BUFFERS):
            state.pop(f"{prefix}manifold.{name}", None)
        return f"{scale_key} comes without {key}, whose values are points of the grid at that scale: load both or none"
    if not isinstance(saved, Tensor) or saved.shape != weight.shape:
        return None  # torch says what is wrong with it
    values = saved.dequantize() if isinstance(saved, FP8Tensor) else saved.detach().as_subclass(Tensor)
    if scale is None:
        scale = _scale_of(saved, values, manifold, granularity, headroom)
        known = manifold if not manifold.counter.is_meta else FP8Manifold(manifold.format, scale, seed=seed)
        for name in _BUFFERS:
            state.setdefault(f"{prefix}manifold.{name}", getattr(known, name).clone())
        state[scale_key] = scale
    elif scale.shape == manifold.scale.shape:
        warn_if_saturated(values, scale, manifold.format)
    state[key] = geoopt.ManifoldParameter(
        _projected(values, scale, manifold), manifold=manifold, requires_grad=weight.requires_grad
    )
    return None


def renew_grid_weight(
    weight: Tensor, manifold: FP8Manifold, values: Tensor, granularity: Granularity, headroom: float | None, seed: int
) -> None:
    """Write values at a scale of their own, and begin the manifold's count of draws anew; in place."""
    scale = fresh_scale(values, manifold.format, granularity, headroom)
    fresh = FP8Manifold(manifold.format, scale, manifold.rounding, seed)
    for name in ("scale", *_BUFFERS):
        getattr(manifold, name).copy_(getattr(fresh, name))
    weight.copy_(fresh.projx(values))


def _scale_of(
    saved: Tensor, values: Tensor, manifold: FP8Manifold, granularity: Granularity, headroom: float | None
) -> Tensor:
    """That of codes in the same format, which are taken exactly, or a fresh one."""
    own = manifold.scale
    if isinstance(saved, FP8Tensor) and saved.format == manifold.format and saved.scale.shape == own.shape:
        return saved.scale.to(own.dtype)
    return fresh_scale(values, manifold.format, granularity, headroom).to(own.dtype)


def _projected(values: Tensor, scale: Tensor, manifold: FP8Manifold) -> Tensor:
    """The nearest points of the grid; what is on it stays as it is, to the sign of a zero."""
    if values.is_meta or scale.is_meta or scale.shape != manifold.scale.shape:
        return values
    points = FP8Manifold(manifold.format, scale.to(values.device)).projx(values)
    return values if torch.equal(points, values) else points
