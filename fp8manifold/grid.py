"""The spacing, rounding, codes and chart of a float format, as functions of (x, format).

On the line of a format's values, here E4M3 between 1 and 1.25::

    value       1            1.125        1.25
    code        56           57           58
    chart       56    56.5   57           58           to_chart, from_chart
                      |                                1.0625
    ulp         1/8          1/8          1/8          the stiffness S

    round_to_grid   float -> value     encode   float -> code     decode   code -> value

Native code (C, or Triton on a GPU) does what it can: float32, rounding to nearest or by
random bits, saturating. Everything else goes through torch, block by block, with the same
result to the last bit. :mod:`fp8manifold.reference` defines it, one number at a time.
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
from fp8manifold._native._arrays import decode_by_kernel, encode_by_kernel, round_by_kernel
from fp8manifold._numerics.charts import UlpChart, clamp_to_ends
from fp8manifold._numerics.codec import OVERFLOWS, ROUNDINGS, Overflow, Rounding, round_block
from fp8manifold.formats import FloatFormat, FormatLike, Layout, as_format
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
    r"""Return the spacing of the format at ``x``: one unit in the last place, S.

    .. math:: S(x) = 2^{e(x) - M}, \qquad e(x) = \max(\lfloor \log_2 |x| \rfloor, e_{min})

    Args:
        x: a float tensor of any shape.
        fmt: a format or its name.

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
    r"""Round every element to a value of the format, in the dtype of ``x``.

    ``nearest`` breaks ties to the even code. ``stochastic`` moves away from zero with
    the probability

    .. math:: P = \lceil 2^{24} f \rceil / 2^{24},
              \qquad f = |x|/S(x) - \lfloor |x|/S(x) \rfloor

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
        seed: key word of the random bits of ``stochastic``, as in
            :func:`fp8manifold.random_bits`.
        step: key word of an optimizer's step.
        stream: key word of a parameter.
        offset: global position of the first element, for a part of a larger tensor.
        bits: the 24-bit draws themselves (int32, shape of ``x``), in place of ``seed``.
        draws: ``independent``, or ``dither``: spread evenly over the steps, as in
            :func:`fp8manifold.random_bits`.

    Returns:
        Tensor of the shape and dtype of ``x``, detached. NaN stays NaN; -0 is preserved
        if the layout has it; an empty tensor stays empty.

    Raises:
        TypeError: ``x`` is not a float tensor, or is float16 with a format that reaches
            beyond it; a key word is not an int.
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
    key = None
    draws_at: _DrawSource = _no_draws
    if rounding == "stochastic":
        if seed is not None:
            key = _checked_key(draws, seed, step, stream, offset)
        draws_at = _draw_source(x, key, offset, bits)
    if bits is None and _is_native_mode(fmt, rounding, overflow):
        native = round_by_kernel(x, fmt, key, offset)
        if native is not None:
            return native

    def round_part(part: Tensor, start: int, out: Tensor | None) -> Tensor:
        # What is computed in another dtype than the result's needs memory of its own.
        if out is not None and out.dtype != work:
            out = None
        block_draws = draws_at(start, part.numel())
        return round_block(part.to(work), fmt, rounding, overflow, block_draws, out)

    return blockwise(round_part, x.detach(), x.dtype)


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
    r"""Round every element to the format and return its code.

    .. math:: \mathrm{decode}(\mathrm{encode}(x)) = \mathrm{round\_to\_grid}(x)

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape.
        fmt: a format or its name.
        rounding: as in :func:`round_to_grid`, like the arguments below.
        overflow: ``saturate`` or ``inf_or_nan``.
        seed: key word of the random bits of ``stochastic``, as in
            :func:`fp8manifold.random_bits`.
        step: key word of an optimizer's step.
        stream: key word of a parameter.
        offset: global position of the first element, for a part of a larger tensor.
        bits: the 24-bit draws themselves (int32, shape of ``x``), in place of ``seed``.
        draws: ``independent`` or ``dither``.

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
    # Stochastic rounding without a seed takes bits, or is refused in round_to_grid.
    has_key = rounding == "nearest" or seed is not None
    if has_key and bits is None and _is_native_mode(fmt, rounding, overflow):
        key = None
        if rounding == "stochastic" and seed is not None:
            key = _checked_key(draws, seed, step, stream, offset)
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
    may_have_nan = _may_have_nan(y)
    if fmt.nan_code is None and may_have_nan:
        _refuse_nan(y, fmt)

    def encode_part(part: Tensor, start: int, out: Tensor | None) -> Tensor:
        return _codes_of_values(part.to(working_dtype(part)), fmt)

    codes = blockwise(encode_part, y, torch.uint8)
    if fmt.inf_code is not None and overflow == "inf_or_nan":
        infinities = (y < 0).to(torch.uint8) * fmt.sign_bit + fmt.inf_code
        codes = torch.where(y.isinf(), infinities, codes)
    if fmt.nan_code is not None and may_have_nan:
        codes = torch.where(y.isnan(), fmt.nan_code, codes)
    return codes


def decode(codes: Tensor, fmt: FormatLike, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Return the values of codes.

    .. math:: (-1)^s \, 2^{\max(E, 1) - bias} ([E > 0] + m / 2^M)

    for sign ``s``, exponent field ``E`` and mantissa field ``m``.

    Args:
        codes: a uint8 tensor of any shape.
        fmt: a format or its name.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        Tensor of ``codes``' shape. The codes of NaN, Inf and -0 give NaN, Inf and -0.
        An empty tensor gives an empty one.

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
    # refuses other dtypes
    working_dtype(torch.empty(0, dtype=dtype, device="cpu"), "dtype")
    check_holds(dtype, fmt)
    if fmt.bits < 8 and codes.numel():
        code_count = 2 * fmt.sign_bit
        largest = codes.max()
        problem = f"out of range for {fmt.name}: 0 to {code_count - 1}"
        if not is_read_at_once(codes):
            refuse_on_gpu(largest < code_count, f"a code is {problem}")
        elif int(largest) >= code_count:
            raise ValueError(f"code {int(largest)} is {problem}")
    return decode_checked(codes, fmt, dtype)


def decode_checked(codes: Tensor, fmt: FloatFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return :func:`decode` of codes that are known to be the format's."""
    native = decode_by_kernel(codes, fmt, dtype)
    if native is not None:
        return native
    table = _decode_table(fmt, dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def check_codes(codes: Tensor, name: str = "codes") -> None:
    """Raise TypeError unless ``codes`` is a uint8 tensor."""
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{name} must be a uint8 tensor, not {got}")


def to_chart(x: Tensor, fmt: FormatLike) -> Tensor:
    r"""Return the coordinate of ``x`` that counts representable steps from zero.

    .. math:: \varphi(x) = \operatorname{sign}(x)
              \left[ (e - e_{min}) 2^M + |x| / 2^{e - M} \right], \; e = e(x)

    At a value of the format it is the signed integer code. Between neighbours it is
    linear.

    Args:
        x: a float tensor of any shape.
        fmt: a format or its name.

    Returns:
        Tensor like ``x``, in steps (ulp), differentiable with derivative 1/S. Values
        beyond the range, Inf included, go to its ends. NaN stays NaN, -0 gives -0, and
        an empty tensor stays empty.

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
    r"""Return the value at a chart coordinate: the inverse of :func:`to_chart`.

    .. math:: \varphi^{-1}(c) = \operatorname{sign}(c) \, (|c| - b \, 2^M)
              \, 2^{e_{min} + b - M}, \qquad b = \max(\lfloor |c| / 2^M \rfloor - 1, 0)

    Args:
        c: a float tensor of any shape, in steps from zero.
        fmt: a format or its name.

    Returns:
        Tensor like ``c``, differentiable with derivative S. Integers give values of the
        format exactly. Coordinates beyond the last code, Inf included, give ``+-max``.
        NaN stays NaN, -0 gives -0, and an empty tensor stays empty.

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


_DrawSource = Callable[[int, int], Tensor | None]
"""A function of (start, size) that returns the draws of a run of positions."""


def _no_draws(start: int, size: int) -> None:
    """Return the draws of the modes of rounding that have none."""


def _checked_key(draws: str, seed: int, step: int, stream: int, offset: int) -> DrawKey:
    check_words(seed=seed, step=step, stream=stream, offset=offset)
    check_choice("draws", draws, get_args(Draws))
    return draw_key(draws, seed, step, stream)


def _draw_source(x: Tensor, key: DrawKey | None, offset: int, bits: Tensor | None) -> _DrawSource:
    """Return a function that cuts the draws out of ``bits``, or makes them with a key."""
    if bits is not None:
        if bits.dtype != torch.int32 or bits.shape != x.shape:
            raise ValueError(
                f"bits must be int32 of the shape of x, {tuple(x.shape)}: got {bits.dtype} of "
                f"shape {tuple(bits.shape)}"
            )
        flat_bits = bits.reshape(-1)
        return lambda start, size: flat_bits[start : start + size]
    if key is None:
        raise ValueError(
            "rounding='stochastic' needs seed=... (or bits=..., the 24-bit draws themselves)"
        )
    return lambda start, size: draw_range(offset + start, size, key, x.device)


def _is_native_mode(fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> bool:
    """True for the modes of native code, which always saturates."""
    saturates = overflow == "saturate" or fmt.layout == Layout.FINITE
    return saturates and rounding in ("nearest", "stochastic")


def _native_codes(x: Tensor, fmt: FloatFormat, key: DrawKey | None, offset: int) -> Tensor | None:
    """Return codes by native code, or None where it can't make them.

    None is also the answer where ``x`` may hold a NaN for which there is no code.
    """
    if not isinstance(x, Tensor) or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        return None
    if fmt.nan_code is None and is_read_at_once(x) and not bool(x.sum().isfinite()):
        return None
    codes = encode_by_kernel(x, fmt, key, offset)
    if codes is not None and fmt.nan_code is None and not is_read_at_once(x):
        _refuse_nan(x, fmt)
    return codes


def _may_have_nan(y: Tensor) -> bool:
    """True if there is a NaN, or if finding out would wait for a GPU or be traced."""
    if torch.compiler.is_compiling() or not is_read_at_once(y):
        return True
    # A sum takes one pass, a mask four. Inf - Inf is taken for a NaN, and looked at again.
    return bool(y.sum().isnan())


def _refuse_nan(y: Tensor, fmt: FloatFormat) -> None:
    """Raise ValueError for a NaN, as the format has no code for it.

    On a GPU it is a device assertion.
    """
    problem = f"NaN, and {fmt.name} has no code for NaN: remove them first"
    if torch.compiler.is_compiling() or is_read_at_once(y):
        count = int(y.isnan().sum())
        if count:
            raise ValueError(f"x holds {count} {problem}")
    elif y.numel():
        # NaN, if there is one, and only NaN differs from itself.
        largest = y.amax()
        refuse_on_gpu(largest == largest, f"x holds {problem}")


def _codes_of_values(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the codes (int32) of values on the grid; those of Inf and NaN mean nothing."""
    magnitudes = _chart(fmt).forward(y).abs().to(torch.int32)
    return magnitudes + y.signbit() * fmt.sign_bit


@lru_cache(maxsize=256)
def _decode_table(fmt: FloatFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = [fmt.decode_code(code) for code in range(2 * fmt.sign_bit)]
    return torch.tensor(values, dtype=torch.float64, device=device).to(dtype)
