"""Decoding, rounding and encoding whole arrays in native code: None where that is not to be had.

Codes are uint8, and values float32 where nothing else is said.  A scale is one in all or one for each of equal runs.
Rounding is to nearest without a key of draws, which begin at the position ``offset``.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.blocks import BLOCK, runs_in_blocks
from fp8manifold._base.float_bits import check_holds, working_dtype
from fp8manifold._native import library, threads_for
from fp8manifold._numerics.records import ARRAY, format_record
from fp8manifold._numerics.rounding import round_block
from fp8manifold._triton.whole import decode_on_gpu, encode_on_gpu, round_on_gpu
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import Stream, draw_range, round_keys, signed_word
from fp8manifold.scaling import BLOCK_SIZE

_OUT: Final = (torch.float32, torch.bfloat16)
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def decoded(
    codes: Tensor, fmt: FloatFormat, dtype: torch.dtype = torch.float32, scale: Tensor | None = None
) -> Tensor | None:
    """``scale * decode(codes)``; for small codes most of the time is Python's, so the plain case goes straight to C."""
    if dtype not in _OUT or codes.dtype is not torch.uint8:
        return None
    half = dtype is torch.bfloat16
    if scale is not None and codes.is_cpu and has_memory(codes, scale) and 0 < codes.numel() <= 2**32:
        return _on_cpu("fp8manifold_decode", codes.contiguous(), fmt, dtype, scale, (0, 0, half), (0, 0, 0, 0, 0, 0))
    return _made("fp8manifold_decode", codes, fmt, dtype, scale, bfloat16=half)


def spacings(codes: Tensor, fmt: FloatFormat, scale: Tensor) -> Tensor | None:
    """``scale * ulp(decode(codes))``, float32."""
    return _made("fp8manifold_decode", codes, fmt, torch.float32, scale, spacing=True)


def rounded(
    x: Tensor,
    fmt: FloatFormat,
    key: Stream | None = None,
    offset: int = 0,
    scale: Tensor | None = None,
    *,
    rescale: bool = True,
) -> Tensor | None:
    """``scale * round(x / scale)``, or in units of the scale unless ``rescale``, saturating."""
    if x.dtype is not torch.float32:
        return None
    return _made("fp8manifold_round", x, fmt, torch.float32, scale, key, offset, rescale=rescale)


def encoded(x: Tensor, fmt: FloatFormat, key: Stream | None = None, offset: int = 0) -> Tensor | None:
    """The codes of ``x``, saturating; NaN has the format's code for it, or that of zero where there is none."""
    if x.dtype is not torch.float32:
        return None
    return _made("fp8manifold_encode", x, fmt, torch.uint8, None, key, offset)


def encoded_units(x: Tensor, fmt: FloatFormat, scale: Tensor) -> Tensor | None:
    """The codes of ``x / scale``, to nearest and saturating, on a GPU alone."""
    if x.dtype not in _OUT or x.device.type == "cpu":
        return None
    return _made("fp8manifold_encode", x, fmt, torch.uint8, scale)


def content(x: Tensor, key: tuple[int, ...], offset: int = 0) -> int | None:
    """``sum(bits_i r_i) mod 2^64`` over float32 elements, with ``r`` the random words drawn by position."""
    kernels, (high, low) = library(), divmod(offset, 2**32)
    if kernels is None or x.dtype is not torch.float32 or low + x.numel() >= 2**32 or not is_plain(x):
        return None
    flat = x.detach().contiguous().resolve_neg()
    first, second, third = round_keys(key, high)
    words = np.array([signed_word(first + low), second, third, 0], dtype=np.int32)
    return int(kernels.fp8manifold_content(flat.data_ptr(), flat.numel(), words.ctypes.data))


def _made(
    function: str,
    given: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    key: Stream | None = None,
    offset: int = 0,
    *,
    rescale: bool = False,
    bfloat16: bool = False,
    spacing: bool = False,
) -> Tensor | None:
    high, low = divmod(offset, 2**32)
    if not (has_memory(given) if scale is None else has_memory(given, scale)):
        return None
    if not (numel := given.numel()) or low + numel > 2**32:
        return None
    if given.is_neg() or not given.is_contiguous():
        given = given.detach().resolve_neg().contiguous()
    if given.is_cuda and _triton.is_available():
        keys = None if key is None else (*_keys_at(key, high, low), key.phase)
        return _on_gpu(function, given, fmt, dtype, scale, keys, rescale=rescale, spacing=spacing)
    if not given.is_cpu:
        return None
    words = (0, 0, 0) if key is None else round_keys(key.words, high)
    draws = *words, 0 if key is None else key.phase, signed_word(low)
    return _on_cpu(function, given, fmt, dtype, scale, (key is not None, rescale, bfloat16), (spacing, *draws))


def _on_cpu(
    function: str,
    given: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    how: tuple[int, ...],
    rest: tuple[int, ...],
) -> Tensor | None:
    """What C makes of contiguous memory, by the fields of its record before the code of NaN, and those after it."""
    out, kernels = torch.empty_like(given, dtype=dtype), library()
    if type(out) is not Tensor or kernels is None:
        return None
    rows, at = 1, 0
    if scale is not None:
        scale = scale.contiguous()
        rows, at = scale.numel(), scale.data_ptr()
    numel = given.numel()
    if numel % rows or not (scale is None or (scale.is_cpu and scale.dtype is torch.float32)):
        return None
    known, nan_code = _known(fmt)
    places = given.data_ptr(), out.data_ptr(), at, rows, numel // rows
    record = ARRAY.pack(known, *places, rows == 1, *how, nan_code, *rest)
    getattr(kernels, function)(record, threads_for(numel))
    return out


@lru_cache(maxsize=256)
def _known(fmt: FloatFormat) -> tuple[bytes, int]:
    """A format as C has it, and what a NaN is encoded as."""
    return format_record(fmt).tobytes(), fmt.nan_code or 0


def _on_gpu(
    function: str,
    given: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    keys: tuple[int, ...] | None,
    *,
    rescale: bool,
    spacing: bool,
) -> Tensor | None:
    if scale is not None:
        if scale.dtype is not torch.float32:
            return None
        scale = scale.detach().contiguous()
    if function == "fp8manifold_decode":
        return decode_on_gpu(given, fmt, dtype, scale, spacing=spacing)
    if function == "fp8manifold_round":
        return round_on_gpu(given, fmt, keys, scale, rescale=rescale)
    return encode_on_gpu(given, fmt, keys, scale)


def _keys_at(key: Stream, high: int, low: int) -> tuple[int, int, int]:
    """Round keys, the first with the position that is counted from."""
    first, second, third = round_keys(key.words, high)
    return signed_word(first + low), second, third


def is_plain(x: Tensor) -> bool:
    """Whether it is memory of the CPU that may be read now: no subclass, tracer or transform looks on."""
    return x.device.type == "cpu" and has_memory(x)


def has_memory(*parts: Tensor) -> bool:
    """Whether all is memory that may be read now, on the CPU or elsewhere."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():  # what is read now would be a constant
        return False
    try:
        for x in parts:
            if type(x) not in _PLAIN:
                return False
            x.data_ptr()
    except RuntimeError:  # of vmap and the other transforms
        return False
    return True


Draws = Callable[[int, int], Tensor | None]


def rounded_at(
    x: Tensor, scale: Tensor, fmt: FloatFormat, rounding: str = "nearest", key: Stream | None = None, *, blocks: bool
) -> Tensor:
    """``s round(x / s)`` in ``x``'s dtype, detached, saturating; with ``blocks`` a scale is for 32 values of a row."""
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
