"""Decode, round and encode whole arrays, in native code or on a GPU.

::

    decode_by_kernel, round_by_kernel, ... is the dtype one that a kernel takes?
      -> _run_kernel                       is there memory that may be read?
           -> _run_in_c                    an array of the CPU, if native code was built
           -> array_on_gpu                 an array of a GPU, if Triton is there

All of them return None where a kernel can't serve: callers then do the same with
PyTorch's operations (:mod:`fp8manifold._numerics.codec`), to the same bits.

Codes are uint8, and values float32 if nothing else is said. There is one scale, or one
for each of equal runs. Rounding is stochastic with a key, by draws from the position
``offset`` on, and otherwise to nearest.
"""

from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.blocks import blockwise
from fp8manifold._base.float_bits import check_holds, working_dtype
from fp8manifold._base.reading import refuse_trace
from fp8manifold._native import WORTH_A_THREAD, library, threads_for
from fp8manifold._numerics.codec import Rounding, round_block
from fp8manifold._numerics.records import (
    ARRAY_STRUCT,
    KEYS_STRUCT,
    array_values,
    format_record,
)
from fp8manifold._triton.whole import array_on_gpu
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import DrawKey, draw_range, round_keys, signed_word
from fp8manifold.scaling import BLOCK_SIZE

Kernel = Literal["decode", "round", "encode"]

_VALUE_DTYPES: Final = (torch.float32, torch.bfloat16)
_PLAIN_CLASSES: Final = (Tensor, torch.nn.Parameter)
_LARGEST_FLOAT16: Final = 65504.0
_NO_KEYS: Final = KEYS_STRUCT.pack(0, 0, 0, 0)


class _Draws(NamedTuple):
    """The draws of stochastic rounding: keys of their words, and the first position."""

    round_keys: tuple[int, int, int]
    phase: int
    start: int


def decode_by_kernel(
    codes: Tensor, fmt: FloatFormat, dtype: torch.dtype = torch.float32, scale: Tensor | None = None
) -> Tensor | None:
    """Return ``scale * decode(codes)``.

    A small layer's product takes no longer than what comes before it, in both passes. So
    for few codes on a CPU this function asks by itself what `_run_kernel` and `_run_in_c`
    would ask, and calls C.
    """
    if dtype not in _VALUE_DTYPES or codes.dtype is not torch.uint8:
        return None
    size = codes.numel()
    if (
        scale is None
        or not 0 < size < WORTH_A_THREAD
        or type(codes) not in _PLAIN_CLASSES
        or type(scale) not in _PLAIN_CLASSES
        or not (codes.is_cpu and scale.is_cpu and scale.dtype is torch.float32)
        or not (codes.is_contiguous() and scale.is_contiguous())
        or codes.is_neg()
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
    ):
        return _run_kernel("decode", codes, fmt, dtype, scale)
    kernels = library()
    values = torch.empty_like(codes, dtype=dtype)
    rows = scale.numel()
    if kernels is None or type(values) is not Tensor or size % rows:
        return None
    record = _record(fmt, rows, size // rows, dtype, False)
    try:
        addresses = codes.data_ptr(), values.data_ptr(), scale.data_ptr()
    except RuntimeError:
        # raised in vmap and the other transforms
        return None
    kernels.fp8manifold_decode(record, *addresses, 1)
    return values


def round_by_kernel(
    x: Tensor,
    fmt: FloatFormat,
    key: DrawKey | None = None,
    offset: int = 0,
    scale: Tensor | None = None,
    *,
    rescale: bool = True,
) -> Tensor | None:
    """Return ``scale * round(x / scale)``, saturating.

    Without ``rescale`` it is in units of the scale.
    """
    if x.dtype is not torch.float32:
        return None
    return _run_kernel("round", x, fmt, torch.float32, scale, key, offset, rescale=rescale)


def encode_by_kernel(
    x: Tensor, fmt: FloatFormat, key: DrawKey | None = None, offset: int = 0
) -> Tensor | None:
    """Return the codes of ``x``, saturating.

    NaN gives the format's code for it, or the code of zero if it has none.
    """
    if x.dtype is not torch.float32:
        return None
    return _run_kernel("encode", x, fmt, torch.uint8, None, key, offset)


def encode_on_gpu(x: Tensor, fmt: FloatFormat, scale: Tensor) -> Tensor | None:
    """Return the codes of ``x / scale``, to nearest and saturating, on a GPU only."""
    if x.dtype not in _VALUE_DTYPES or x.is_cpu:
        return None
    return _run_kernel("encode", x, fmt, torch.uint8, scale)


def content(x: Tensor, key: tuple[int, ...], offset: int = 0) -> int | None:
    """Return ``sum(bits_i r_i) mod 2^64`` over float32 elements.

    ``r`` are the random words drawn by position. Optimizers make words of it for their
    random streams.
    """
    kernels = library()
    high, low = divmod(offset, 2**32)
    if kernels is None or x.dtype is not torch.float32:
        return None
    if low + x.numel() >= 2**32 or not is_plain(x):
        return None
    flat = x.detach().contiguous().resolve_neg()
    first, second, third = round_keys(key, high)
    keys = KEYS_STRUCT.pack(signed_word(first + low), second, third, 0)
    return int(kernels.fp8manifold_content(flat.data_ptr(), flat.numel(), keys))


def exponents_by_kernel(codes: Tensor, fmt: FloatFormat, rows: int) -> Tensor | None:
    """Return how many codes have each exponent field, (rows, 2^E) int64; on a CPU only."""
    kernels = library()
    if kernels is None or not codes.numel() or not is_plain(codes):
        return None
    codes = codes.detach().contiguous()
    counts = torch.empty(rows, 1 << fmt.exponent_bits, dtype=torch.int64, device=codes.device)
    if type(counts) is not Tensor:
        return None
    record = _record(fmt, rows, codes.numel() // rows, torch.float32, False)
    threads = threads_for(codes.numel())
    kernels.fp8manifold_exponents(record, codes.data_ptr(), counts.data_ptr(), threads)
    return counts


def rescale_by_kernel(
    codes: Tensor,
    residual: Tensor | None,
    fmt: FloatFormat,
    factors: Tensor,
    key: DrawKey,
    offset: int,
) -> bool:
    """Multiply rows by their factors, rounded stochastically in place; on a CPU only.

    Args:
        codes: (rows, length).
        residual: of the codes, int8, if they have some.
        fmt: the format of the codes.
        factors: float32; a row whose factor is 1 stays.
        key: of the draws.
        offset: the position of the first weight among all draws.

    Returns:
        False if the kernel can't serve.
    """
    kernels = library()
    tensors = [codes, factors] if residual is None else [codes, factors, residual]
    # Positions of draws count up to 2^32 under one set of round keys.
    high, low = divmod(offset, 2**32)
    if kernels is None or not 0 < codes.numel() <= 2**32 - low or factors.dtype != torch.float32:
        return False
    if not all(is_plain(x) and x.is_contiguous() for x in tensors):
        return False
    rows, length = codes.shape
    draws = _Draws(round_keys(key.words, high), key.phase, low)
    record = _new_record(fmt, rows, length, torch.float32, False, draws)
    addresses = [None if x is None else x.data_ptr() for x in (codes, residual, factors)]
    kernels.fp8manifold_rescale(record, *addresses, threads_for(codes.numel()))
    torch.autograd.graph.increment_version(codes if residual is None else [codes, residual])
    return True


def _run_kernel(
    kernel: Kernel,
    x: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    key: DrawKey | None = None,
    offset: int = 0,
    *,
    rescale: bool = False,
) -> Tensor | None:
    """Run a kernel over an array; its result has ``dtype``."""
    # Positions of draws count up to 2^32 under one set of round keys.
    high, low = divmod(offset, 2**32)
    if not 0 < x.numel() <= 2**32 - low:
        return None
    if not (has_memory(x) if scale is None else has_memory(x, scale)):
        return None
    if x.is_neg() or not x.is_contiguous():
        x = x.detach().resolve_neg().contiguous()
    if scale is not None:
        if scale.dtype is not torch.float32 or scale.is_cpu is not x.is_cpu:
            return None
        scale = scale.detach().contiguous()
    draws = None
    if key is not None:
        draws = _Draws(round_keys(key.words, high), key.phase, low)
    if x.is_cpu:
        return _run_in_c(kernel, x, fmt, dtype, scale, draws, rescale=rescale)
    if not x.is_cuda or not _triton.is_available():
        return None
    keys = None
    if draws is not None:
        first, second, third = draws.round_keys
        keys = (signed_word(first + draws.start), second, third, draws.phase)
    return array_on_gpu(kernel, x, fmt, dtype, scale, keys, rescale=rescale)


def _run_in_c(
    kernel: Kernel,
    x: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None,
    draws: _Draws | None,
    *,
    rescale: bool,
) -> Tensor | None:
    """Run a kernel over a contiguous array of the CPU."""
    kernels = library()
    out = torch.empty_like(x, dtype=dtype)
    rows = 1 if scale is None else scale.numel()
    # In a mode of torch's, such as that of fake tensors, the new tensor has no memory.
    if type(out) is not Tensor or kernels is None or x.numel() % rows:
        return None
    length = x.numel() // rows
    if draws is None:
        record = _record(fmt, rows, length, dtype, rescale)
    else:
        record = _new_record(fmt, rows, length, dtype, rescale, draws)
    scales = None if scale is None else scale.data_ptr()
    run = getattr(kernels, f"fp8manifold_{kernel}")
    run(record, x.data_ptr(), out.data_ptr(), scales, threads_for(x.numel()))
    return out


def _new_record(
    fmt: FloatFormat,
    rows: int,
    length: int,
    dtype: torch.dtype,
    rescale: bool,
    draws: _Draws | None = None,
) -> bytes:
    """Return the facts of arrays as C reads them, without the memory of one."""
    keys = _NO_KEYS
    position = 0
    if draws is not None:
        keys = KEYS_STRUCT.pack(*draws.round_keys, draws.phase)
        position = signed_word(draws.start)
    facts = {
        "format": format_record(fmt),
        "input": 0,
        "output": 0,
        "scale": 0,
        "rows": rows,
        "length": length,
        "shared": rows == 1,
        "stochastic": draws is not None,
        "rescale": rescale,
        "bfloat16": dtype is torch.bfloat16,
        "keys": keys,
        "position": position,
    }
    return ARRAY_STRUCT.pack(*array_values(facts))


# without draws the facts are the same for many arrays
_record: Final = lru_cache(maxsize=1024)(_new_record)


def is_plain(x: Tensor) -> bool:
    """Return whether ``x`` is on the CPU and :func:`has_memory`."""
    return x.device.type == "cpu" and has_memory(x)


def has_memory(*tensors: Tensor) -> bool:
    """Return whether all tensors have memory that may be read now, on any device.

    Subclasses have none of their own, nor have tensors within tracers and transforms.
    """
    # What is read now would be a constant of the compiled program.
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    try:
        for x in tensors:
            if type(x) not in _PLAIN_CLASSES:
                return False
            x.data_ptr()
    except RuntimeError:
        # raised in vmap and the other transforms
        return False
    return True


def round_at_scale(
    x: Tensor,
    scale: Tensor,
    fmt: FloatFormat,
    rounding: Rounding = "nearest",
    key: DrawKey | None = None,
    *,
    blocks: bool = False,
    rescale: bool = True,
) -> Tensor:
    """Return ``s round(x / s)``, detached and saturating, by a kernel if there is one.

    Args:
        x: any float dtype, which the result has.
        scale: one in all, or one per index of leading dimensions.
        fmt: the format.
        rounding: any of the roundings.
        key: of the draws, for ``stochastic``.
        blocks: whether each scale is for 32 values of a row.
        rescale: if False, the result is in units of the scale, and in the dtype that
            ``x`` is computed in.
    """
    refuse_trace()
    work_dtype = working_dtype(x)
    shape = x.shape
    out_dtype = x.dtype if rescale else work_dtype
    check_holds(work_dtype, fmt)
    x = x.detach()
    scale = scale.to(work_dtype)
    if blocks:
        x = x.reshape(-1, BLOCK_SIZE)
        scale = scale.reshape(-1, 1)
    is_for_kernel = work_dtype is torch.float32 and rounding in ("nearest", "stochastic")
    if is_for_kernel and has_memory(x) and _is_of_rows(scale, x):
        draw_key = key if rounding == "stochastic" else None
        values = round_by_kernel(x.float(), fmt, draw_key, scale=scale, rescale=rescale)
        if values is not None:
            return _in_dtype(values.view(shape), out_dtype)

    def round_part(part: Tensor, start: int, out: Tensor | None) -> Tensor:
        draws = None
        if rounding == "stochastic":
            assert key is not None
            draws = draw_range(start, part.numel(), key, x.device)
        return round_block(part, fmt, rounding, "saturate", draws, out)

    values = blockwise(round_part, x.to(work_dtype) / scale, work_dtype)
    if rescale:
        values = values * scale
    return _in_dtype(values.view(shape), out_dtype)


def _in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in their dtype.

    float16, whose largest number a grid may exceed, saturates.
    """
    if dtype is torch.float16:
        values = values.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    return values.to(dtype)


def _is_of_rows(scale: Tensor, x: Tensor) -> bool:
    """Return whether there is one scale, or one per index of the leading dimensions."""
    if scale.numel() == 1:
        return True
    for leading in range(1, x.dim() + 1):
        if scale.shape == (*x.shape[:leading], *(1,) * (x.dim() - leading)):
            return True
    return False
