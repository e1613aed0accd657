"""The five rounding modes as pure functions of float32 or float64 tensors, and rounding on a scaled grid.

Every operation is exact.  Temporaries are reused in place: over a cached block, allocating one costs as much as the
operation that fills it.
"""

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._native._arrays import rounded
from fp8manifold._numerics.blocks import BLOCK, runs_in_blocks
from fp8manifold._numerics.codec import mirrored
from fp8manifold._numerics.float_bits import binade, check_holds, float_bits, working_dtype
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import RANDOM_BITS, Stream, draw_range
from fp8manifold.scaling import BLOCK_SIZE

Rounding = Literal["nearest", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "inf_or_nan"]
ROUNDINGS: Final[tuple[str, ...]] = get_args(Rounding)
OVERFLOWS: Final[tuple[str, ...]] = get_args(Overflow)
Draws = Callable[[int, int], Tensor | None]


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


def rounded_at(
    x: Tensor, scale: Tensor, fmt: FloatFormat, rounding: str = "nearest", key: Stream | None = None, *, blocks: bool
) -> Tensor:
    """``s round(x / s)`` in ``x``'s dtype, detached, saturating.

    Args:
        x: float tensor.
        scale: float32, broadcasting against ``x``, or with ``blocks`` one for every 32 values of a row.
        fmt: the format.
        rounding: any of the modes of :func:`fp8manifold.round_to_grid`.
        key: of ``stochastic``.
        blocks: whether the scales are of blocks.
    """
    return _walk(x, scale, fmt, rounding, key, blocks, rescale=True).to(x.dtype)


def rounded_units(x: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """``round(x / s)``, nearest, in units of the scale: values of the format, in the dtype they were computed in."""
    return _walk(x, scale, fmt, "nearest", None, blocks=False, rescale=False)


def _walk(
    x: Tensor, scale: Tensor, fmt: FloatFormat, rounding: str, key: Stream | None, blocks: bool, rescale: bool
) -> Tensor:
    work = working_dtype(x)
    check_holds(work, fmt)
    x, scale = x.detach(), scale.to(work)
    shape = x.shape
    if blocks:
        x, scale = x.reshape(-1, BLOCK_SIZE), scale.reshape(-1, 1)
    rows = _rows_of(x, scale)
    if rows is not None and rounding in ("nearest", "stochastic"):
        native = rounded(x, fmt, key if rounding == "stochastic" else None, scale=scale, rescale=rescale)
        if native is not None:
            return native.view(shape)
    draws = _draws(x, rounding, key)
    if rows is None or not runs_in_blocks(x.device, x.numel()):
        units = x.to(work) / scale
        values = round_block(units.reshape(-1), fmt, rounding, "saturate", draws(0, x.numel())).view(x.shape)
        return (values * scale if rescale else values).view(shape)
    out = torch.empty(x.numel(), dtype=work, device=x.device)
    _by_pieces(x.reshape(rows, -1), scale.reshape(-1, 1), out.view(rows, -1), fmt, rounding, draws, rescale)
    return out.view(shape)


def _by_pieces(
    x: Tensor, scale: Tensor, out: Tensor, fmt: FloatFormat, rounding: str, draws: Draws, rescale: bool
) -> None:
    """Round a matrix with one scale a row, or one in all, in pieces that stay in a core's cache."""
    single = scale.shape[0] == 1
    if single:
        x, out = x.reshape(-1, 1), out.view(-1, 1)
    length = max(BLOCK // x.shape[1], 1)
    for start in range(0, len(x), length):
        part, target = x[start : start + length], out[start : start + length]
        unit = scale if single else scale[start : start + length]
        units = part.to(out.dtype) / unit
        bits = draws(start * x.shape[1], part.numel())
        flat = round_block(units.reshape(-1), fmt, rounding, "saturate", bits, target.view(-1))
        if rescale:
            flat.view(part.shape).mul_(unit)


def _rows_of(x: Tensor, scale: Tensor) -> int | None:
    """Number of rows with a scale of their own, 1 for one scale in all; None for any other way to broadcast."""
    if scale.numel() == 1:
        return 1
    leading = 0
    while leading < scale.dim() and scale.dim() == x.dim() and scale.shape[leading] == x.shape[leading]:
        leading += 1
    rest = scale.shape[leading:]
    return scale.numel() if leading and rest.numel() == 1 and scale.dim() == x.dim() else None


def _draws(x: Tensor, rounding: str, key: Stream | None) -> Draws:
    if rounding != "stochastic":
        return lambda start, size: None
    assert key is not None
    return lambda start, size: draw_range(start, size, key, x.device)
