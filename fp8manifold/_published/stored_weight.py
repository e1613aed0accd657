"""One stored weight: its codes and scales in files, and as an FP8Tensor.

::

    two tensors of files                 read_parts ->     parts of an FP8Tensor
      codes: float8, one in a byte                           codes: one in a byte
             E2M1, two in a byte         <- written_parts
      scale: float32, bfloat16, float16                      scale: float32
             E8M0 (exponents)

A file may have the scale 0 where all codes are 0. An FP8Tensor may not: such a scale is
replaced by one that no file has, and becomes 0 again when it is written.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import SQUARE, BlockSize, checked_codes, largest_magnitude
from fp8manifold._encoded.stored_scale import decoded_scale, exponents_of
from fp8manifold.formats import FloatFormat, as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, StoredGranularity
from fp8manifold.tensor import FP8Tensor

FORMATS: Final = {
    "F8_E4M3": as_format("E4M3"),
    "F8_E5M2": as_format("E5M2"),
    "F8_E4M3FNUZ": as_format("E4M3FNUZ"),
    "F8_E5M2FNUZ": as_format("E5M2FNUZ"),
}
"""Formats with one code per byte, by the dtypes of safetensors."""
PACKED: Final = ("F4", "U8", "I8")
"""Dtypes of codes of E2M1, two per byte.

Of ``F4`` a header counts the codes, torch the bytes.
"""
EXPONENTS: Final = ("F8_E8M0", "U8")
"""Dtypes in which scales are exponents, E8M0."""
SCALES: Final = ("F32", "BF16", "F16", *EXPONENTS)
"""Dtypes that scales are read from."""
_CODES_A_BYTE: Final = 2
_DTYPES_OF_CODES_AND_SCALES: Final = {
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
_OTHER_DTYPES: Final = {
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "BOOL": torch.bool,
}
"""Dtypes of tensors that are neither codes nor scales."""
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny
_STAND_IN_FOR_0: Final = {True: 2.0, False: 1 + 2.0**-7}
"""The scale of codes whose scale in the file is 0, by whether it is an exponent there.

Quantisers write the scale 0 where all weights are 0 (or 0 / 0 is NaN): no value depends
on it. Others write 1 or a small number there, but not this one, which is refused in a
file. It is near our own scale of zeros, and a number of bfloat16 and float16, also
after a step has multiplied it by powers of two.
"""
_STAND_IN_BYTE: Final = 127 + 1
"""The byte of the exponent among them."""


@dataclass(frozen=True)
class Header:
    """The header of one tensor of a file, with the dtype as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredWeight:
    """One weight that files hold as codes and scales.

    A model may have it transposed: transformers has so experts whose codes are called
    ``_blocks``.
    """

    #: The weight's name in a model.
    name: str
    #: Names of the two tensors in the files.
    codes: str
    scale: str
    format: FloatFormat
    granularity: StoredGranularity
    #: The shape of the codes, one in a byte.
    shape: tuple[int, ...]
    #: Dtypes and shapes in the files.
    code_dtype: str
    code_shape: tuple[int, ...]
    scale_dtype: str
    scale_shape: tuple[int, ...]
    file: str
    #: Names of tensors beside the weight, such as ``input_scale``.
    extras: tuple[str, ...] = ()

    @property
    def own_scale_shape(self) -> tuple[int, ...]:
        """The shape that the scales have in :class:`fp8manifold.FP8Tensor`."""
        return next(
            shape
            for granularity, shape in scale_shapes(self.shape)
            if granularity == self.granularity
        )

    @property
    def block_size(self) -> BlockSize:
        """The elements that share a scale, as ``FP8Tensor.from_codes`` takes them."""
        if self.granularity == "block":
            return BLOCK_SIZE
        return SQUARE if self.granularity == "square" else None


def scale_shapes(shape: tuple[int, ...]) -> Iterator[tuple[StoredGranularity, tuple[int, ...]]]:
    """Yield (granularity, shape) of scales that a weight may have.

    Of each granularity the shape in an FP8Tensor is first. Where two granularities have
    the same shape, the same weights share a scale.
    """
    yield "tensor", ()
    yield "tensor", (1,)
    yield "tensor", tuple(1 for _ in shape)
    if len(shape) > 1:
        *lead, rows, columns = shape
        yield "channel", (shape[0], *(1 for _ in shape[1:]))
        yield "channel", shape[:1]
        yield "row", (*shape[:-1], 1)
        down, across = math.ceil(rows / SQUARE_SIZE), math.ceil(columns / SQUARE_SIZE)
        yield "square", (*lead, down, across)
        yield "square", (*lead, down, 1, across, 1)
    if shape and shape[-1] % BLOCK_SIZE == 0:
        yield "block", (*shape[:-1], shape[-1] // BLOCK_SIZE)


def unpacked(codes: Header, scale: Header) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of a weight in E2M1 and of the bytes that hold it.

    The bytes may be by rows or by blocks of 32. Return None if these are no such codes.
    """
    if codes.dtype not in PACKED or scale.dtype not in EXPONENTS or not scale.shape:
        return None
    *rows, blocks = scale.shape
    shape = (*rows, blocks * BLOCK_SIZE)
    bytes_by_row = (*rows, blocks * BLOCK_SIZE // _CODES_A_BYTE)
    bytes_by_block = (*rows, blocks, BLOCK_SIZE // _CODES_A_BYTE)
    if codes.dtype == "F4":
        return (shape, bytes_by_row) if codes.shape == shape else None
    if codes.shape in (bytes_by_row, bytes_by_block):
        return shape, codes.shape
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype of codes or scales; torch's of any other."""
    for name, known_dtype in _DTYPES_OF_CODES_AND_SCALES.items():
        if known_dtype is dtype:
            return name
    return str(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of codes, scales or floats, by the name in files."""
    known = _DTYPES_OF_CODES_AND_SCALES | _OTHER_DTYPES
    if name not in known:
        raise ValueError(f"dtype {name!r} of a file is unknown: one of {', '.join(known)}")
    return known[name]


def read_parts(stored: StoredWeight, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Return codes (uint8) and scales as :meth:`FP8Tensor.from_codes` takes them.

    ``read`` returns a tensor of the files by its name.

    Raises:
        ValueError: codes of Inf; a scale that is below 2^-126 or not finite, except 0
            (in E8M0 the byte 0) where all codes are 0 or NaN.
    """
    codes = read(stored.codes).view(torch.uint8)
    if stored.code_dtype not in FORMATS:
        # The first of two codes is in the low bits.
        codes = torch.stack((codes & 15, codes >> 4), -1).view(stored.shape)
    if stored.format.inf_code is not None:
        try:
            checked_codes(codes, stored.format)
        except ValueError as error:
            raise ValueError(f"{stored.codes} of {stored.file!r}: {error}") from None
    stored_scale = read(stored.scale).reshape(stored.own_scale_shape)
    are_exponents = stored.scale_dtype in EXPONENTS
    if are_exponents:
        stored_scale = stored_scale.view(torch.uint8)
        scale = decoded_scale(stored_scale)
        is_wrong = (stored_scale == 0) | (stored_scale == 255)
    else:
        stored_scale = scale = stored_scale.float()
        is_wrong = ~((scale >= _SMALLEST_SCALE) & scale.isfinite())
    stand_in = _STAND_IN_FOR_0[are_exponents]
    if bool((is_wrong | (scale == stand_in)).any()):
        is_of_zeros = _mask_of_zeros(stored, codes)
        is_wrong &= ~(is_of_zeros & (scale == 0) & ~scale.signbit())
        is_wrong |= is_of_zeros & (scale == stand_in)
        if bool(is_wrong.any()):
            value = f"{stored_scale[is_wrong][0].item():g}"
            entry = f"the exponent {value}" if are_exponents else value
            raise ValueError(
                f"{stored.scale}, of the codes {stored.codes} of {stored.file!r}, holds {entry}: "
                "scales are finite and 2^-126 at least; where all codes are 0, it may be 0 (E8M0: "
                f"the byte 0), but not {stand_in:g}"
            )
        scale = scale.masked_fill(scale == 0, stand_in)
    return codes, scale


def written_parts(stored: StoredWeight, weight: FP8Tensor) -> dict[str, Tensor]:
    """Return the two tensors of the files by their names.

    They are the same bytes for a weight that no step has changed.

    Raises:
        ValueError: a weight of another format, shape or granularity, or a scale that
            the file's dtype can't hold.
    """
    _check_is_stored_alike(stored, weight)
    codes, scale = weight.codes, _written_scale(stored, weight)
    if stored.code_dtype not in FORMATS:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 1] << 4
        codes |= pairs[..., 0]
        codes = codes.view(stored.code_shape)
    return {
        stored.codes: codes.view(_DTYPES_OF_CODES_AND_SCALES[stored.code_dtype]),
        stored.scale: scale.reshape(stored.scale_shape),
    }


def _written_scale(stored: StoredWeight, weight: FP8Tensor) -> Tensor:
    """Return a weight's scale in the file's dtype; 0 where a stand-in is still one."""
    dtype = _DTYPES_OF_CODES_AND_SCALES[stored.scale_dtype]
    are_exponents = stored.scale_dtype in EXPONENTS
    # exponents are compared and written as the bytes that they are
    kept = weight.scale if weight.exponents is None or not are_exponents else weight.exponents
    is_stand_in = kept == (
        _STAND_IN_BYTE if kept.dtype is torch.uint8 else _STAND_IN_FOR_0[are_exponents]
    )
    if bool(is_stand_in.any()):
        kept = kept.masked_fill(is_stand_in & _mask_of_zeros(stored, weight.codes), 0)
    if kept.dtype is torch.uint8:
        return kept.view(dtype)
    written = exponents_of(kept) if are_exponents else kept.to(dtype)
    read_back = decoded_scale(written).float()
    if not torch.equal(read_back, kept):
        entry = kept[read_back != kept][0].item()
        raise ValueError(
            f"{stored.name} has the scale {entry!r}: {stored.scale_dtype} of {stored.scale} can't "
            "hold it"
        )
    return written.view(dtype)


def _check_is_stored_alike(stored: StoredWeight, weight: FP8Tensor) -> None:
    is_same = (
        weight.format == stored.format
        and tuple(weight.shape) == stored.shape
        and weight.block_size == stored.block_size
        and tuple(weight.kept_scale.shape) == stored.own_scale_shape
    )
    if is_same:
        return
    present = (weight.format.name, weight.granularity, tuple(weight.shape))
    original = (stored.format.name, stored.granularity, tuple(stored.shape))
    raise ValueError(
        f"{stored.name} is {present}, but was {original} in {stored.file!r}: it can't be written "
        "back"
    )


def _mask_of_zeros(stored: StoredWeight, codes: Tensor) -> Tensor:
    """Return a mask of the scales whose codes are all zeros or NaN."""
    ones = torch.ones((), device=codes.device).expand(stored.own_scale_shape)
    return largest_magnitude(codes, ones, stored.format, stored.block_size) == 0
