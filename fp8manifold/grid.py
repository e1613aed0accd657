"""Functions of (x, format): the spacing, rounding, codes and the chart of a float
format.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import get_args

import torch
from torch import Tensor

from fp8manifold._base.blocks import blockwise
from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import binade, check_holds, working_dtype
from fp8manifold._base.reading import is_read_at_once, refuse_on_gpu
from fp8manifold._native._arrays import decoded, encoded, rounded
from fp8manifold._numerics.charts import UlpChart, clamp_to_ends
from fp8manifold._numerics.codec import OVERFLOWS, ROUNDINGS, Overflow, Rounding, round_block
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.random_bits import DrawKey, Draws, check_words, draw_key, draw_range

__all__ = [
    "Overflow",
    "Rounding",
    "check_codes",
    "decode",
    "encode",
    "from_chart",
    "round_to_grid",
    "to_chart",
    "ulp",
]


def ulp(x: Tensor, fmt: FormatLike) -> Tensor:
    """The spacing of the format at ``x``: one unit in the last place, the stiffness S.

    .. math:: S(x) = 2^{e(x) - M}, \\qquad e(x) = \\max(\\lfloor \\log_2 |x| \\rfloor, e_{min})

    Args:
        x, fmt: a float tensor of any shape; a format or its name.

    Returns:
        Tensor like ``x``, positive. NaN gives NaN; values beyond the range, Inf
        included, have the spacing of the top binade; +0, -0 and subnormals have the
        smallest one. An empty tensor gives an empty one.

    Raises:
        TypeError, ValueError: ``x`` is not a float tensor, its dtype can't hold the
            format, or there is no such format.

    Example:
        >>> ulp(torch.tensor([0.0, 1.0, 1.9, 2.0]), "E4M3").tolist()
        [0.001953125, 0.125, 0.125, 0.25]
    """
    fmt = as_format(fmt)
    work = working_dtype(x)
    check_holds(x.dtype, fmt)
    x_work = x.detach().to(work)
    spacing = binade(x_work.clamp(-fmt.max, fmt.max), fmt.emin) * 2.0**-fmt.mantissa_bits
    return torch.where(x_work.isnan(), x_work, spacing).to(x.dtype)


def round_to_grid(
    x: Tensor,
    fmt: FormatLike,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    seed: int | None = None,
    *,
    step: int = 0,
    stream: int = 0,
    offset: int = 0,
    bits: Tensor | None = None,
    draws: Draws = "independent",
) -> Tensor:
    """Round every element to a value of the format, in the dtype of ``x``.

    ``nearest`` breaks ties to the even code; ``stochastic`` moves away from zero with
    the probability

    .. math:: P = \\lceil 2^{24} f \\rceil / 2^{24}, \\qquad f = |x|/S(x) - \\lfloor |x|/S(x) \\rfloor

    which is ``f`` itself for normal float32 (within ``2^-24`` of it for subnormals of
    the format and for float64). A positive number moves if its draw ``r < 2^24 f``, a
    negative one if ``2^24 - 1 - r < 2^24 f``, so that one draw moves both signs in one
    direction.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape; float64 is rounded
            once.
        fmt: a format or its name.
        rounding: ``nearest``, ``toward_zero``, ``up``, ``down`` or ``stochastic``.
        overflow: ``saturate`` takes everything beyond the range, Inf included, to
            ``+-max``; ``inf_or_nan`` gives Inf, or NaN where the layout has no Inf (a
            ``finite`` layout saturates).
        seed, step, stream, offset: key of the random bits of ``stochastic``, as in
            :func:`fp8manifold.random_bits`.
        bits: the 24-bit draws themselves (int32, shape of ``x``), in place of ``seed``.
        draws: ``independent``, or ``dither``: spread evenly over the steps, as in
            :func:`fp8manifold.random_bits`.

    Returns:
        Tensor of the shape and dtype of ``x``, detached. NaN stays NaN; -0 is preserved
        if the layout has it; an empty tensor stays empty.

    Raises:
        TypeError: ``x`` is no float tensor, or float16 with a format that reaches
            beyond it; a key word is no int.
        ValueError: an unknown format or mode, ``stochastic`` without ``seed`` or
            ``bits``, or a key out of range.

    Example:
        >>> round_to_grid(torch.tensor([1.06, 500.0, -0.0]), "E4M3").tolist()
        [1.0, 448.0, -0.0]

    Source: OCP FP8 specification 1.0; IEEE P3109.
    """
    fmt = as_format(fmt)
    check_choice("rounding", rounding, ROUNDINGS)
    check_choice("overflow", overflow, OVERFLOWS)
    work = working_dtype(x)
    check_holds(x.dtype, fmt)
    key = (
        None
        if rounding != "stochastic" or seed is None
        else _key(draws, seed, step, stream, offset)
    )
    drawn = _draws(x, key, offset, bits) if rounding == "stochastic" else lambda start, size: None
    native = (
        rounded(x, fmt, key, offset)
        if bits is None and _saturates(fmt, rounding, overflow)
        else None
    )
    if native is not None:
        return native

    def block(part: Tensor, start: int, out: Tensor | None) -> Tensor:
        fits = out is not None and out.dtype == work
        return round_block(
            part.to(work),
            fmt,
            rounding,
            overflow,
            drawn(start, part.numel()),
            out if fits else None,
        )

    return blockwise(block, x.detach(), x.dtype)


def encode(
    x: Tensor,
    fmt: FormatLike,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    seed: int | None = None,
    *,
    step: int = 0,
    stream: int = 0,
    offset: int = 0,
    bits: Tensor | None = None,
    draws: Draws = "independent",
) -> Tensor:
    """Round every element to the format and return its code.

    .. math:: \\mathrm{decode}(\\mathrm{encode}(x)) = \\mathrm{round\\_to\\_grid}(x)

    Args:
        x, fmt, rounding, overflow, seed, step, stream, offset, bits, draws: as in
            :func:`round_to_grid`.

    Returns:
        uint8 tensor of the shape of ``x``: sign, exponent and mantissa in the low
        ``fmt.bits`` bits. NaN gives the format's (positive, quiet) NaN code, Inf the
        code of what :func:`round_to_grid` makes of it, and -0 the code of +0 where the
        layout has no other; an empty tensor gives an empty one.

    Raises:
        TypeError: as :func:`round_to_grid`.
        ValueError: as :func:`round_to_grid`, and for a NaN in a format that has none.
            On a GPU that is a device assertion, which the host raises later as a
            RuntimeError.

    Example:
        >>> encode(torch.tensor([1.0, -1.0, 448.0]), "E4M3").tolist()
        [56, 184, 126]
    """
    fmt = as_format(fmt)
    check_choice("rounding", rounding, ROUNDINGS)
    check_choice("overflow", overflow, OVERFLOWS)
    if (
        (rounding == "nearest" or seed is not None)
        and bits is None
        and _saturates(fmt, rounding, overflow)
    ):
        key = (
            None
            if seed is None or rounding == "nearest"
            else _key(draws, seed, step, stream, offset)
        )
        native = _native_codes(x, fmt, key, offset)
        if native is not None:
            return native
    y = round_to_grid(
        x,
        fmt,
        rounding,
        overflow,
        seed,
        step=step,
        stream=stream,
        offset=offset,
        bits=bits,
        draws=draws,
    )
    has_nan = _may_hold_nan(y)
    if fmt.nan_code is None and has_nan:
        _refuse_nan(y, fmt)
    codes = blockwise(
        lambda part, _start, _out: _codes_of(part.to(working_dtype(part)), fmt), y, torch.uint8
    )
    if fmt.inf_code is not None and overflow == "inf_or_nan":
        infinities = (y < 0).to(torch.uint8) * fmt.sign_bit + fmt.inf_code
        codes = torch.where(y.isinf(), infinities, codes)
    return (
        torch.where(y.isnan(), fmt.nan_code, codes)
        if fmt.nan_code is not None and has_nan
        else codes
    )


def decode(codes: Tensor, fmt: FormatLike, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes: a table look-up of :meth:`FloatFormat.decode_code`.

    .. math:: (-1)^s \\, 2^{\\max(E, 1) - bias} ([E > 0] + m / 2^M)

    for sign ``s``, exponent field ``E`` and mantissa field ``m``.

    Args:
        codes, fmt: a uint8 tensor of any shape; a format or its name.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        Tensor of ``codes``' shape; the codes of NaN, Inf and -0 give NaN, Inf and -0;
        an empty tensor an empty one.

    Raises:
        TypeError: ``codes`` is not uint8, or ``dtype`` can't hold the format.
        ValueError: an unknown format, or a code with bits above its width; on a GPU as
            in :func:`encode`.

    Example:
        >>> decode(torch.tensor([56, 184, 127], dtype=torch.uint8), "E4M3").tolist()
        [1.0, -1.0, nan]
    """
    fmt = as_format(fmt)
    check_codes(codes)
    working_dtype(torch.empty(0, dtype=dtype), "dtype")
    check_holds(dtype, fmt)
    if fmt.bits < 8 and codes.numel():
        largest, allowed = codes.max(), f"out of range for {fmt.name}: 0 to {2 * fmt.sign_bit - 1}"
        if not is_read_at_once(codes):
            refuse_on_gpu(largest < 2 * fmt.sign_bit, f"a code is {allowed}")
        elif int(largest) >= 2 * fmt.sign_bit:
            raise ValueError(f"code {int(largest)} is {allowed}")
    return decode_known(codes, fmt, dtype)


def decode_known(codes: Tensor, fmt: FloatFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """:func:`decode` of codes that have been checked: checking them again would wait for a GPU."""
    if (native := decoded(codes, fmt, dtype)) is not None:
        return native
    table = _decode_table(fmt, dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def check_codes(codes: Tensor, name: str = "codes") -> None:
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{name} must be a uint8 tensor, not {got}")


def to_chart(x: Tensor, fmt: FormatLike) -> Tensor:
    """The coordinate of ``x`` that counts representable steps from zero.

    .. math:: \\varphi(x) = \\operatorname{sign}(x) \\left[ (e - e_{min}) 2^M + |x| / 2^{e - M} \\right], \\; e = e(x)

    At a value of the format it is the signed integer code; between neighbours it is
    linear.

    Args:
        x, fmt: a float tensor of any shape; a format or its name.

    Returns:
        Tensor like ``x``, in steps (ulp); differentiable, with derivative 1/S. Values
        beyond the range, Inf included, go to its ends; NaN stays NaN; -0 gives -0; an
        empty tensor stays empty.

    Raises:
        TypeError, ValueError: as :func:`ulp`.

    Example:
        >>> to_chart(torch.tensor([0.0, 1.0, 1.0625, -448.0]), "E4M3").tolist()
        [0.0, 56.0, 56.5, -126.0]
    """
    fmt = as_format(fmt)
    work = working_dtype(x)
    check_holds(x.dtype, fmt)
    return _chart(fmt).forward(clamp_to_ends(x.to(work), fmt.max)).to(x.dtype)


def from_chart(c: Tensor, fmt: FormatLike) -> Tensor:
    """The value at a chart coordinate: the inverse of :func:`to_chart`.

    .. math:: \\varphi^{-1}(c) = \\operatorname{sign}(c) \\, (|c| - b \\, 2^M) \\, 2^{e_{min} + b - M}, \\qquad
              b = \\max(\\lfloor |c| / 2^M \\rfloor - 1, 0)

    Args:
        c, fmt: a float tensor of any shape, in steps from zero; a format or its name.

    Returns:
        Tensor like ``c``, differentiable with derivative S; integers give values of the
        format exactly. Coordinates beyond the last code, Inf included, give ``+-max``;
        NaN stays NaN; -0 gives -0; an empty tensor stays empty.

    Raises:
        TypeError, ValueError: as :func:`ulp`, for ``c``.

    Example:
        >>> from_chart(torch.tensor([56.0, 56.5, -1000.0]), "E4M3").tolist()
        [1.0, 1.0625, -448.0]
    """
    fmt = as_format(fmt)
    work = working_dtype(c, "c")
    check_holds(c.dtype, fmt)
    return _chart(fmt).inverse(clamp_to_ends(c.to(work), fmt.max_code)).to(c.dtype)


@lru_cache(maxsize=256)
def _chart(fmt: FloatFormat) -> UlpChart:
    return UlpChart(fmt.mantissa_bits, fmt.emin, fmt.emax)


def _key(draws: str, seed: int, step: int, stream: int, offset: int) -> DrawKey:
    check_words(seed=seed, step=step, stream=stream, offset=offset)
    check_choice("draws", draws, get_args(Draws))
    return draw_key(draws, seed, step, stream)


def _draws(
    x: Tensor, key: DrawKey | None, offset: int, bits: Tensor | None
) -> Callable[[int, int], Tensor]:
    """The draws of any run of positions (start, size), given or generated."""
    if bits is not None:
        if bits.dtype != torch.int32 or bits.shape != x.shape:
            raise ValueError(
                f"bits must be int32 of the shape of x, {tuple(x.shape)}: got {bits.dtype} of "
                f"shape {tuple(bits.shape)}"
            )
        given = bits.reshape(-1)
        return lambda start, size: given[start : start + size]
    if key is None:
        raise ValueError(
            "rounding='stochastic' needs seed=... (or bits=..., the 24-bit draws themselves)"
        )
    return lambda start, size: draw_range(offset + start, size, key, x.device)


def _saturates(fmt: FloatFormat, rounding: str, overflow: str) -> bool:
    """True if native code can round in this mode: it always saturates."""
    return rounding in ("nearest", "stochastic") and (
        overflow == "saturate" or fmt.layout == "finite"
    )


def _native_codes(x: Tensor, fmt: FloatFormat, key: DrawKey | None, offset: int) -> Tensor | None:
    """Codes by native code; None where it can't make them, or ``x`` may hold a NaN that
    has no code.
    """
    if not isinstance(x, Tensor) or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        return None
    if fmt.nan_code is None and is_read_at_once(x) and not bool(x.sum().isfinite()):
        return None
    codes = encoded(x, fmt, key, offset)
    if codes is not None and fmt.nan_code is None and not is_read_at_once(x):
        _refuse_nan(x, fmt)
    return codes


def _may_hold_nan(y: Tensor) -> bool:
    """True if there is a NaN, or if finding out would wait for a GPU or be traced."""
    if torch.compiler.is_compiling() or not is_read_at_once(y):
        return True
    return bool(y.sum().isnan())  # one pass, where a mask would cost four


def _refuse_nan(y: Tensor, fmt: FloatFormat) -> None:
    """Raise ValueError for a NaN, as the format has no code for it; on a GPU as a
    device assertion.
    """
    rest = f"NaN, and {fmt.name} has no code for NaN: remove them first"
    if torch.compiler.is_compiling() or is_read_at_once(y):
        if count := int(y.isnan().sum()):
            raise ValueError(f"x holds {count} {rest}")
    elif y.numel():
        largest = y.amax()  # NaN, if there is one
        refuse_on_gpu(largest == largest, f"x holds {rest}")


def _codes_of(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes (int32) of values on the grid; those of Inf and NaN have no meaning."""
    return _chart(fmt).forward(y).abs().to(torch.int32) + y.signbit() * fmt.sign_bit


@lru_cache(maxsize=256)
def _decode_table(fmt: FloatFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = [fmt.decode_code(code) for code in range(2 * fmt.sign_bit)]
    return torch.tensor(values, dtype=torch.float64, device=device).to(dtype)
