"""The five rounding modes as pure functions of float32 or float64 tensors.

Every operation is exact.  Temporaries are reused in place: over a cached block, allocating one costs as much as the
operation that fills it.
"""

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.float_bits import binade, float_bits
from fp8manifold._numerics.codec import mirrored
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import RANDOM_BITS

Rounding = Literal["nearest", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "inf_or_nan"]
ROUNDINGS: Final[tuple[str, ...]] = get_args(Rounding)
OVERFLOWS: Final[tuple[str, ...]] = get_args(Overflow)


def round_block(
    x: Tensor, fmt: FloatFormat, rounding: str, overflow: str, bits: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Round a float32 or float64 tensor to the grid of ``fmt``, in its own dtype, into ``out`` where one is given."""
    if overflow == "saturate" or fmt.layout == "finite":
        return _round_unbounded(torch.clamp(x, -fmt.max, fmt.max, out=out), x, fmt, rounding, bits)
    return _round_overflowing(x, fmt, rounding, bits)


def _round_unbounded(y: Tensor, x: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None) -> Tensor:
    """Round ``y`` in place as if the exponent had no upper end; ``x`` has the signs."""
    scratch = _nearest(y, fmt) if rounding == "nearest" else _by_fraction(y, fmt, rounding, bits)
    if not fmt.has_negative_zero and rounding == "nearest":
        return y  # the difference of two equal numbers is +0 already
    _set_signs(y, x, scratch)
    return y if fmt.has_negative_zero else y.add_(0.0)


def _nearest(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Adding ``1.5 * 2^(23-M)`` times the own power of two pushes all bits below the kept ones out of the float."""
    fields = float_bits(y.dtype)
    power = binade(y, fmt.emin)
    constant = 1.5 * 2.0 ** (fields.mantissa_bits - fmt.mantissa_bits)
    if fmt.mantissa_bits == 0:
        # One value a binade: the even code is that of an even exponent field, not an even multiple of the ulp.
        # An odd multiple of the power of two in the constant turns the tie the other way.
        odd = (power.view(fields.integer) >> fields.mantissa_bits).bitwise_and_(1)
        magic = power.mul_(constant + (1 ^ ((fields.bias - fmt.bias) & 1)))
        magic.view(fields.integer).bitwise_xor_(odd)
    else:
        magic = power.mul_(constant)
    y.add_(magic).sub_(magic)
    return magic


def _by_fraction(y: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None) -> Tensor:
    """Magnitudes of the modes that look at the fraction of an ulp: all but nearest.

    Comparisons are written as clamp and ceil: a chain that makes and consumes masks costs several times as much.
    """
    # Where the smallest ulp exceeds 1, the quotient of the smallest float by it would underflow: count finer units.
    finer = 1.0 if fmt.ulp_min <= 1 else 2.0**RANDOM_BITS
    if rounding in ("up", "down"):
        grows = (y.sign() if rounding == "up" else -y.sign()).clamp_(0.0, 1.0)
    elif rounding == "stochastic":
        assert bits is not None
        draws = mirrored(bits, y.signbit().to(torch.int32).neg_())
    y.abs_()
    unit = binade(y, fmt.emin).mul_(2.0**-fmt.mantissa_bits / finer)
    y.div_(unit)
    steps = y.floor() if finer == 1 else (y * (1 / finer)).floor_()
    if rounding == "toward_zero":
        y.sub_(y)  # not zero_: a NaN stays
    else:
        y.sub_(steps, alpha=finer)  # the fraction of an ulp, in units
        if rounding == "stochastic":
            y.sub_(draws.to(y.dtype), alpha=finer * 2.0**-RANDOM_BITS).clamp_(0.0, 1.0).ceil_()
        else:
            y.clamp_(0.0, 1.0).ceil_().mul_(grows)
    y.add_(steps).mul_(unit)
    if finer != 1:
        y.mul_(finer)
    return unit


def _round_overflowing(x: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None) -> Tensor:
    """Results beyond ``max`` become Inf, or NaN where the layout has no Inf."""
    keeps_top = rounding in ("toward_zero", "down")  # a finite value never rounds up past +max in these modes
    keeps_bottom = rounding in ("toward_zero", "up")
    beyond = 4.0 * 2.0**fmt.emax
    bounded = x.clamp(-fmt.max if keeps_bottom else -beyond, fmt.max if keeps_top else beyond)
    y = _round_unbounded(bounded, x, fmt, rounding, bits)
    special = torch.full_like(x, float("inf") if fmt.inf_code is not None else float("nan"))
    return torch.where((y.abs() > fmt.max) | x.isinf(), torch.copysign(special, x), y)


def _set_signs(y: Tensor, x: Tensor, scratch: Tensor) -> None:
    """Set the sign of ``y`` where ``x`` has it: brings -0 back, leaves every other value as it is."""
    fields = float_bits(y.dtype)
    signs = scratch.view(fields.integer)
    torch.bitwise_and(x.view(fields.integer), fields.sign_mask, out=signs)
    y.view(fields.integer).bitwise_or_(signs)
