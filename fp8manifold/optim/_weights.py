"""From stored weights to numbers in units of their scale, and back with the one rounding of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._charts import chart_of
from fp8manifold._codec import decode_signed, decode_with_ulp, encode_finite, encode_signed
from fp8manifold._rounding import round_block
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._variant import Variant

__all__ = ["Weights", "load_weights", "reciprocal_scale", "split_codes", "store_weights", "unless_special"]


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
        x, ulp = decode_signed(_joined(codes, arrays["residual"].to(torch.int32), fmt, bits), fmt, bits)
    else:
        x, ulp = decode_with_ulp(codes, fmt)
    return Weights(x.to(dtype), (ulp * 2.0**bits).to(dtype))


def store_weights(
    variant: Variant, arrays: dict[str, Tensor], before: Weights, target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored, by name, and the weights it stands for, in units of the scale."""
    weight, fmt = arrays["weight"], variant.fmt
    if variant.storage == "plain":
        return {"weight": target.to(weight.dtype)}, target
    assert fmt is not None
    if variant.storage == "free":
        after = target.clamp(-fmt.max, fmt.max)
        moved = torch.where(after == before.x, weight.to(after.dtype), after * arrays["scale"])
        return {"weight": moved.to(weight.dtype)}, after
    if variant.residual_bits:
        return _store_with_residual(variant, fmt, arrays, target, draws)
    if variant.storage == "grid":
        after = round_block(target, fmt, "nearest" if draws is None else "stochastic", "saturate", draws)
        return {"weight": (after * arrays["scale"]).to(weight.dtype)}, after
    codes = encode_finite(target, fmt, draws)
    after = decode_with_ulp(codes, fmt)[0] if variant.writeback == "momentum" else target
    return {"weight": unless_special(codes, weight, fmt)}, after


def reciprocal_scale(variant: Variant, arrays: dict[str, Tensor]) -> Tensor:
    """``1 / scale``; of a power of two by its exponent, as a division costs as much as ten other operations."""
    scale = arrays["scale"]
    if variant.storage != "codes":
        return 1 / scale
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)


def _store_with_residual(
    variant: Variant, fmt: FloatFormat, arrays: dict[str, Tensor], target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    bits = variant.residual_bits
    codes, residual = split_codes(encode_signed(target.to(torch.float32), fmt, draws, bits), fmt, bits)
    stored = {"residual": residual.to(torch.int8)}
    if variant.storage == "codes":
        return stored | {"weight": unless_special(codes, arrays["weight"], fmt)}, target
    value = decode_with_ulp(codes, fmt)[0].to(target.dtype) * arrays["scale"]
    weight = arrays["weight"]
    return stored | {"weight": torch.where(weight.isnan(), weight, value.to(weight.dtype))}, target


def _joined(codes: Tensor, residual: Tensor, fmt: FloatFormat, bits: int) -> Tensor:
    """Code and residual as one signed code of the format with that many more mantissa bits."""
    negative = -((codes & fmt.sign_bit) >> (fmt.bits - 1))
    signed = ((codes & (fmt.sign_bit - 1)) ^ negative) - negative
    return (signed << bits) + residual


def split_codes(signed: Tensor, fmt: FloatFormat, bits: int) -> tuple[Tensor, Tensor]:
    """The nearest code and what is left, between ``-2^(bits-1)`` and ``2^(bits-1) - 1`` parts of a step."""
    nearest = (signed + (1 << (bits - 1))) >> bits
    return nearest.abs() | (nearest & fmt.sign_bit), signed - (nearest << bits)


def unless_special(codes: Tensor, old: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes (int32) as bytes, but codes of NaN stay what they are: the step knows only finite weights."""
    if fmt.nan_codes:
        old = old.to(torch.int32)
        special = old == fmt.nan_codes[0] if len(fmt.nan_codes) == 1 else (old & (fmt.sign_bit - 1)) > fmt.max_code
        codes = torch.where(special, old, codes)
    return codes.to(torch.uint8)
