"""From stored weights to numbers in units of their scale, and back with the one rounding of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._numerics.charts import chart_of
from fp8manifold._numerics.codec import decode_signed, decode_with_ulp, encode_finite
from fp8manifold._numerics.rounding import round_block
from fp8manifold.optim._halves import to_half
from fp8manifold.optim._variant import Variant
from fp8manifold.optim._writeback import joined_codes

__all__ = ["Weights", "load_weights", "reciprocal_scale", "store_weights"]


class Weights(NamedTuple):
    """Weights in units of the scale, and their spacing in the same units (None for an ordinary parameter)."""

    x: Tensor
    ulp: Tensor | None


def load_weights(variant: Variant, arrays: dict[str, Tensor], dtype: torch.dtype) -> Weights:
    """The weights, with the residual that is kept beside them."""
    weight, fmt = arrays["weight"], variant.fmt
    if variant.storage == "plain":
        return Weights(weight.to(dtype), None)
    assert fmt is not None
    if variant.storage == "free":
        x = weight.to(dtype) / arrays["scale"]
        return Weights(x, chart_of(fmt, "ulp").stiffness(x))
    if variant.storage == "grid":
        x = weight.to(dtype) / arrays["scale"]
        if not variant.scale_is_power_of_two:  # the division leaves a point of the grid a hair off it
            x = round_block(x, fmt, "nearest", "saturate", None)
        if not variant.residual_bits:
            return Weights(x, chart_of(fmt, "ulp").stiffness(x))
        codes = encode_finite(x.to(torch.float32), fmt)
    else:
        codes = weight.to(torch.int32)
    bits = variant.residual_bits
    if bits:
        x, ulp = decode_signed(joined_codes(codes, arrays["residual"].to(torch.int32), fmt, bits), fmt, bits)
    else:
        x, ulp = decode_with_ulp(codes, fmt)
    return Weights(x.to(dtype), (ulp * 2.0**bits).to(dtype))


def store_weights(
    variant: Variant, arrays: dict[str, Tensor], before: Weights, target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored, by name, and the weights it stands for, in units of the scale."""
    weight, fmt = arrays["weight"], variant.fmt
    if variant.storage == "plain":
        return {"weight": _as_stored(target, weight.dtype, draws)}, target
    assert fmt is not None
    if variant.storage == "free":
        after = target.clamp(-fmt.max, fmt.max)
        moved = torch.where(after == before.x, weight.to(after.dtype), after * arrays["scale"])
        return {"weight": _as_stored(moved, weight.dtype, draws)}, after
    return variant.rule.store(variant.storage, fmt, arrays, target, draws)


def _as_stored(x: Tensor, dtype: torch.dtype, draws: Tensor | None) -> Tensor:
    return x.to(dtype) if draws is None else to_half(x, dtype, draws)


def reciprocal_scale(variant: Variant, arrays: dict[str, Tensor]) -> Tensor:
    """``1 / scale``; of a power of two by its exponent, as a division costs as much as ten other operations."""
    scale = arrays["scale"]
    if variant.storage != "codes":
        return 1 / scale
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)
