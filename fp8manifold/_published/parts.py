"""Codes and scales of one stored weight as FP8Tensor takes them, and back as the files have them."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import checked_codes, largest_magnitude
from fp8manifold._encoded.stored_scale import decoded_scale
from fp8manifold._published.stored import EXPONENTS, FORMATS, StoredWeight
from fp8manifold.tensor import FP8Tensor

_DTYPES: Final = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_TINY: Final = torch.finfo(torch.float32).tiny
_NOTHING: Final = {True: _TINY, False: _TINY * (1 + 2.0**-23)}
"""The scale of codes whose scale in the file is 0, by whether it is an exponent there.

Quantisers write 0 where all weights are 0, or by 0 / 0 NaN: no value depends on it.  A file may not have this there.
"""


def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype of codes or of scales; any other as torch has it."""
    return next((name for name, known in _DTYPES.items() if known is dtype), str(dtype))


def read_parts(stored: StoredWeight, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales as :meth:`fp8manifold.FP8Tensor.from_codes` takes them with ``stored.block_size``.

    Args:
        stored: of :func:`stored_weights`.
        read: gives a tensor of the files by its name; codes that are not packed share its memory.

    Raises:
        ValueError: names the tensor and its file: an Inf among the codes; a scale that is negative, NaN, Inf or below
            2^-126, but for 0 (in E8M0 the byte 0) where all codes are 0 or NaN.
    """
    codes = read(stored.codes).view(torch.uint8)
    if stored.code_dtype not in FORMATS:
        codes = torch.stack((codes & 15, codes >> 4), -1).view(stored.shape)  # the first of two in the low bits
    if stored.format.inf_code is not None:
        try:
            checked_codes(codes, stored.format)
        except ValueError as error:
            raise ValueError(f"{stored.codes} of {stored.file!r}: {error}") from None
    scale = read(stored.scale).reshape(stored.own_scale_shape)
    exponents = stored.scale_dtype in EXPONENTS
    if exponents:
        kept = scale.view(torch.uint8)
        wrong, scale = (kept == 0) | (kept == 255), decoded_scale(kept)
    else:
        kept = scale = scale.float()
        wrong = ~((scale >= _TINY) & scale.isfinite())
    nothing = _NOTHING[exponents]
    if bool((wrong | (scale == nothing)).any()):
        is_empty = _holds_nothing(stored, codes)
        wrong &= ~(is_empty & (scale == 0) & ~scale.signbit())
        clash = is_empty & (scale == nothing)
        if bool((wrong | clash).any()):
            entry = kept[wrong | clash][0].item()
            raise ValueError(
                f"{stored.scale}, of the codes {stored.codes} of {stored.file!r}, holds {entry:g}: scales are finite "
                "and 2^-126 at least, those of zeros alone may be 0"
            )
        scale = scale.masked_fill(scale == 0, nothing)
    return codes, scale


def written_parts(stored: StoredWeight, weight: FP8Tensor) -> dict[str, Tensor]:
    """The two tensors of the files by their names: of a weight that no step has changed, the same bytes.

    Args:
        stored: of :func:`stored_weights`.
        weight: read by it, in the same format and granularity; codes that are not packed share its memory.

    Raises:
        ValueError: another format, shape or granularity, or a scale that the dtype of the file's does not have.
    """
    if (weight.format, tuple(weight.shape), weight.block_size, tuple(weight.scale.shape)) != (
        stored.format, stored.shape, stored.block_size, stored.own_scale_shape,
    ):  # fmt: skip
        its, wanted = ((x.format.name, x.granularity, tuple(x.shape)) for x in (weight, stored))
        raise ValueError(f"{stored.name} is {its}, and {wanted} in {stored.file!r}: it can't be written so")
    codes, scale, dtype = weight.codes, weight.scale, _DTYPES[stored.scale_dtype]
    exponents = stored.scale_dtype in EXPONENTS
    if bool((nothing := scale == _NOTHING[exponents]).any()):
        scale = scale.masked_fill(nothing & _holds_nothing(stored, codes), 0.0)
    kept = _exponents(scale) if exponents else scale.to(dtype)
    if not torch.equal(decoded_scale(kept).float(), scale):
        entry = scale[decoded_scale(kept).float() != scale][0].item()
        raise ValueError(f"{stored.name} has a scale of {entry!r}, which is no {stored.scale_dtype} of {stored.scale}")
    if stored.code_dtype not in FORMATS:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = (pairs[..., 0] | pairs[..., 1] << 4).view(stored.code_shape)
    return {
        stored.codes: codes.view(_DTYPES[stored.code_dtype]),
        stored.scale: kept.view(dtype).reshape(stored.scale_shape),
    }


def _exponents(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def _holds_nothing(stored: StoredWeight, codes: Tensor) -> Tensor:
    """Where all codes of a scale are zeros or NaN."""
    ones = torch.ones(stored.own_scale_shape, device=codes.device)
    return largest_magnitude(codes, ones, stored.format, stored.block_size) == 0
