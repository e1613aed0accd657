"""One stored weight: dtypes and shapes of its codes and scales, and their conversion to
FP8Tensor and back.
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
"""Dtypes of codes of E2M1, two per byte; of ``F4`` a header counts the codes, torch the
bytes.
"""
EXPONENTS: Final = ("F8_E8M0", "U8")  #: Dtypes in which scales are exponents, E8M0.
SCALES: Final = ("F32", "BF16", "F16", *EXPONENTS)  #: Dtypes that scales are read from.
_A_BYTE: Final = 2
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
_NOTHING: Final = {True: 2.0, False: 1 + 2.0**-7}
"""The scale of codes whose scale in the file is 0, by whether it is an exponent there.

Quantisers write the scale 0 where all weights are 0 (or 0 / 0 is NaN): no value depends
on it. Others write 1 or a small number there, but not this one, which is refused in a
file. It is near our own scale of zeros, and a number of bfloat16 and float16, also
after a step has multiplied it by powers of two.
"""


@dataclass(frozen=True)
class Header:
    """The header of one tensor of a file, with the dtype as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredWeight:
    """One weight that files hold as codes and scales, by their names in the files;
    ``name`` is the weight's in a model.

    ``shape`` is that of the codes, unpacked; a model may have its weight transposed, as
    transformers has experts whose codes are called ``_blocks``. ``extras`` are tensors
    beside the weight, such as ``input_scale``.
    """

    name: str
    codes: str
    scale: str
    format: FloatFormat
    granularity: StoredGranularity
    shape: tuple[int, ...]
    code_dtype: str
    code_shape: tuple[int, ...]
    scale_dtype: str
    scale_shape: tuple[int, ...]
    file: str
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
        """The elements that share a scale, as :meth:`fp8manifold.FP8Tensor.from_codes`
        takes them.
        """
        return (
            BLOCK_SIZE
            if self.granularity == "block"
            else SQUARE
            if self.granularity == "square"
            else None
        )


def scale_shapes(shape: tuple[int, ...]) -> Iterator[tuple[StoredGranularity, tuple[int, ...]]]:
    """Shapes that scales of a weight may have, for each granularity ours first.

    Where two granularities have the same shape, the same weights share a scale.
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
    """Shapes of a weight in E2M1 and of the bytes that hold it, by rows or by blocks of
    32; None of anything else.
    """
    if codes.dtype not in PACKED or scale.dtype not in EXPONENTS or not scale.shape:
        return None
    *rows, blocks = scale.shape
    shape, flat = (*rows, blocks * BLOCK_SIZE), (*rows, blocks * BLOCK_SIZE // _A_BYTE)
    if codes.dtype == "F4":
        return (shape, flat) if codes.shape == shape else None
    return (
        (shape, codes.shape)
        if codes.shape in (flat, (*rows, blocks, BLOCK_SIZE // _A_BYTE))
        else None
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype of codes or scales; torch's name of any other."""
    return next((name for name, known in _DTYPES.items() if known is dtype), str(dtype))


def read_parts(stored: StoredWeight, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales as :meth:`FP8Tensor.from_codes` takes them; ``read``
    gives a tensor by its name.

    A scale below 2^-126 or not finite is refused, except 0 (in E8M0 the byte 0) where
    all codes are 0 or NaN.
    """
    codes = read(stored.codes).view(torch.uint8)
    if stored.code_dtype not in FORMATS:
        codes = torch.stack((codes & 15, codes >> 4), -1).view(
            stored.shape
        )  # the first of two in the low bits
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
            entry = ("the exponent " if exponents else "") + f"{kept[wrong | clash][0].item():g}"
            raise ValueError(
                f"{stored.scale}, of the codes {stored.codes} of {stored.file!r}, holds {entry}: "
                f"scales are finite and 2^-126 at least; where all codes are 0, it may be 0 (E8M0: "
                f"the byte 0), but not {nothing:g}"
            )
        scale = scale.masked_fill(scale == 0, nothing)
    return codes, scale


def written_parts(stored: StoredWeight, weight: FP8Tensor) -> dict[str, Tensor]:
    """The two tensors of the files by their names: the same bytes for a weight that no
    step has changed.
    """
    if (weight.format, tuple(weight.shape), weight.block_size, tuple(weight.scale.shape)) != (
        stored.format, stored.shape, stored.block_size, stored.own_scale_shape,
    ):  # fmt: skip
        its, wanted = ((x.format.name, x.granularity, tuple(x.shape)) for x in (weight, stored))
        raise ValueError(
            f"{stored.name} is {its}, and was {wanted} in {stored.file!r}: it can't be written back"
        )
    codes, scale, dtype = weight.codes, weight.scale, _DTYPES[stored.scale_dtype]
    exponents = stored.scale_dtype in EXPONENTS
    if bool((nothing := scale == _NOTHING[exponents]).any()):
        scale = scale.masked_fill(nothing & _holds_nothing(stored, codes), 0.0)
    kept = exponents_of(scale) if exponents else scale.to(dtype)
    if not torch.equal(decoded_scale(kept).float(), scale):
        entry = scale[decoded_scale(kept).float() != scale][0].item()
        raise ValueError(
            f"{stored.name} has the scale {entry!r}: {stored.scale_dtype} of {stored.scale} can't "
            f"hold it"
        )
    if stored.code_dtype not in FORMATS:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = (pairs[..., 0] | pairs[..., 1] << 4).view(stored.code_shape)
    return {
        stored.codes: codes.view(_DTYPES[stored.code_dtype]),
        stored.scale: kept.view(dtype).reshape(stored.scale_shape),
    }


def _holds_nothing(stored: StoredWeight, codes: Tensor) -> Tensor:
    """A mask of scales whose codes are all zeros or NaN."""
    ones = torch.ones(stored.own_scale_shape, device=codes.device)
    return largest_magnitude(codes, ones, stored.format, stored.block_size) == 0
