"""Decoding, rounding and encoding whole arrays in native code or on a GPU; None where
neither can.

Codes are uint8, and values float32 where nothing else is said. There is one scale, or
one for each of equal runs. Rounding is stochastic with a key, by draws from the
position ``offset`` on, and otherwise to nearest.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.blocks import blockwise
from fp8manifold._base.float_bits import check_holds, working_dtype
from fp8manifold._base.reading import refuse_trace
from fp8manifold._native import library, threads_for
from fp8manifold._numerics.codec import round_block
from fp8manifold._numerics.records import ARRAY, format_record
from fp8manifold._triton.whole import array_on_gpu
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import DrawKey, draw_range, round_keys, signed_word
from fp8manifold.scaling import BLOCK_SIZE

_OUT: Final = (torch.float32, torch.bfloat16)
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def decoded(
    codes: Tensor, fmt: FloatFormat, dtype: torch.dtype = torch.float32, scale: Tensor | None = None
) -> Tensor | None:
    """``scale * decode(codes)``."""
    return (
        _made("decode", codes, fmt, dtype, scale)
        if dtype in _OUT and codes.dtype is torch.uint8
        else None
    )


def spacings(codes: Tensor, fmt: FloatFormat, scale: Tensor) -> Tensor | None:
    """``scale * ulp(decode(codes))``, float32."""
    return _made("decode", codes, fmt, torch.float32, scale, spacing=True)


def rounded(
    x: Tensor,
    fmt: FloatFormat,
    key: DrawKey | None = None,
    offset: int = 0,
    scale: Tensor | None = None,
    *,
    rescale: bool = True,
) -> Tensor | None:
    """``scale * round(x / scale)``, or in units of the scale unless ``rescale``,
    saturating.
    """
    fits = x.dtype is torch.float32
    return (
        _made("round", x, fmt, torch.float32, scale, key, offset, rescale=rescale) if fits else None
    )


def encoded(
    x: Tensor, fmt: FloatFormat, key: DrawKey | None = None, offset: int = 0
) -> Tensor | None:
    """The codes of ``x``, saturating; NaN gives the format's code for it, or the code
    of zero if it has none.
    """
    return (
        _made("encode", x, fmt, torch.uint8, None, key, offset)
        if x.dtype is torch.float32
        else None
    )


def encoded_units(x: Tensor, fmt: FloatFormat, scale: Tensor) -> Tensor | None:
    """The codes of ``x / scale``, to nearest and saturating, on a GPU only."""
    return _made("encode", x, fmt, torch.uint8, scale) if x.dtype in _OUT and not x.is_cpu else None


def content(x: Tensor, key: tuple[int, ...], offset: int = 0) -> int | None:
    """``sum(bits_i r_i) mod 2^64`` over float32 elements, with ``r`` the random words
    drawn by position.
    """
    kernels, (high, low) = library(), divmod(offset, 2**32)
    if (
        kernels is None
        or x.dtype is not torch.float32
        or low + x.numel() >= 2**32
        or not is_plain(x)
    ):
        return None
    flat = x.detach().contiguous().resolve_neg()
    first, second, third = round_keys(key, high)
    words = np.array([signed_word(first + low), second, third, 0], dtype=np.int32)
    return int(kernels.fp8manifold_content(flat.data_ptr(), flat.numel(), words.ctypes.data))


def _made(
    made: str,
    given: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    key: DrawKey | None = None,
    offset: int = 0,
    *,
    rescale: bool = False,
    spacing: bool = False,
) -> Tensor | None:
    """An array through ``decode``, ``round`` or ``encode``, in C or on a GPU."""
    (high, low), numel = divmod(offset, 2**32), given.numel()
    if not 0 < numel <= 2**32 - low or not (
        has_memory(given) if scale is None else has_memory(given, scale)
    ):
        return None
    if given.is_neg() or not given.is_contiguous():
        given = given.detach().resolve_neg().contiguous()
    rows, at = 1, 0
    if scale is not None:
        if scale.dtype is not torch.float32 or scale.is_cpu is not given.is_cpu:
            return None
        scale = scale.detach().contiguous()
        rows, at = scale.numel(), scale.data_ptr()
    first, second, third = (0, 0, 0) if key is None else round_keys(key.words, high)
    phase = 0 if key is None else key.phase
    if not given.is_cpu:
        keys = None if key is None else (signed_word(first + low), second, third, phase)
        on_card = given.is_cuda and _triton.is_available()
        return (
            array_on_gpu(made, given, fmt, dtype, scale, keys, rescale=rescale, spacing=spacing)
            if on_card
            else None
        )
    out, kernels = torch.empty_like(given, dtype=dtype), library()
    if type(out) is not Tensor or kernels is None or numel % rows:
        return None
    known, nan_code = _known(fmt)
    places = given.data_ptr(), out.data_ptr(), at, rows, numel // rows
    how = rows == 1, key is not None, rescale, dtype is torch.bfloat16
    record = ARRAY.pack(
        known, *places, *how, nan_code, spacing, first, second, third, phase, signed_word(low)
    )
    getattr(kernels, f"fp8manifold_{made}")(record, threads_for(numel))
    return out


@lru_cache(maxsize=256)
def _known(fmt: FloatFormat) -> tuple[bytes, int]:
    """A format as C has it, and the code that a NaN gets."""
    return format_record(fmt).tobytes(), fmt.nan_code or 0


def is_plain(x: Tensor) -> bool:
    """True if ``x`` has memory of the CPU that may be read now: no subclass, outside of
    tracers and transforms.
    """
    return x.device.type == "cpu" and has_memory(x)


def has_memory(*parts: Tensor) -> bool:
    """True if all parts have memory that may be read now, on the CPU or elsewhere."""
    if (
        torch.compiler.is_compiling() or torch._C._is_tracing()
    ):  # what is read now would be a constant
        return False
    try:
        for x in parts:
            if type(x) not in _PLAIN:
                return False
            x.data_ptr()
    except RuntimeError:  # of vmap and the other transforms
        return False
    return True


def rounded_at(
    x: Tensor,
    scale: Tensor,
    fmt: FloatFormat,
    rounding: str = "nearest",
    key: DrawKey | None = None,
    *,
    blocks: bool = False,
    rescale: bool = True,
) -> Tensor:
    """``s round(x / s)`` in ``x``'s dtype, detached, saturating; with ``blocks`` a
    scale is for 32 values of a row.

    Without ``rescale`` it is in units of the scale, and in the dtype that ``x`` is
    computed in.
    """
    refuse_trace()
    work, shape = working_dtype(x), x.shape
    dtype = x.dtype if rescale else work
    check_holds(work, fmt)
    x, scale = x.detach(), scale.to(work)
    if blocks:
        x, scale = x.reshape(-1, BLOCK_SIZE), scale.reshape(-1, 1)
    if (
        work is torch.float32
        and rounding in ("nearest", "stochastic")
        and has_memory(x)
        and _is_of_rows(scale, x)
    ):
        native = rounded(
            x.float(), fmt, key if rounding == "stochastic" else None, scale=scale, rescale=rescale
        )
        if native is not None:
            return _in_dtype(native.view(shape), dtype)

    def block(part: Tensor, start: int, out: Tensor | None) -> Tensor:
        draws = None
        if rounding == "stochastic":
            assert key is not None
            draws = draw_range(start, part.numel(), key, x.device)
        return round_block(part, fmt, rounding, "saturate", draws, out)

    values = blockwise(block, x.to(work) / scale, work)
    return _in_dtype((values * scale if rescale else values).view(shape), dtype)


def _in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in their dtype; float16, whose largest number a grid may exceed,
    saturates.
    """
    return (values.clamp(-65504.0, 65504.0) if dtype is torch.float16 else values).to(dtype)


def _is_of_rows(scale: Tensor, x: Tensor) -> bool:
    """True if there is one scale in all, or one for each index of the leading
    dimensions.
    """
    shapes = ((*x.shape[:n], *(1,) * (x.dim() - n)) for n in range(1, x.dim() + 1))
    return scale.numel() == 1 or any(scale.shape == shape for shape in shapes)
