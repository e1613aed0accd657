"""What a file holds for one weight: dtypes and shapes of its codes and of its scales."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fp8manifold._encoded.storage import SQUARE, BlockSize
from fp8manifold.formats import FloatFormat, as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, StoredGranularity

FORMATS: Final = {
    "F8_E4M3": as_format("E4M3"),
    "F8_E5M2": as_format("E5M2"),
    "F8_E4M3FNUZ": as_format("E4M3FNUZ"),
    "F8_E5M2FNUZ": as_format("E5M2FNUZ"),
}
"""Formats of codes of a byte each, by the dtypes of safetensors."""
PACKED: Final = ("F4", "U8", "I8")
"""Dtypes of codes of E2M1, two a byte; of ``F4`` a header counts codes, and torch bytes."""
EXPONENTS: Final = ("F8_E8M0", "U8")  #: Dtypes in which scales are exponents, E8M0.
SCALES: Final = ("F32", "BF16", "F16", *EXPONENTS)  #: Dtypes that scales are read from.
_A_BYTE: Final = 2


@dataclass(frozen=True)
class Header:
    """One tensor of a file: what its header says, with dtypes as safetensors names them."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredWeight:
    """One weight that files hold as codes and scales, by names in the files; ``name`` is that in a model.

    ``shape`` is that of the codes, unpacked; a model may have its weight transposed, as transformers has experts whose
    codes are called ``_blocks``.  ``extras`` are tensors beside it that are no part of it, such as ``input_scale``.
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
        """The shape in which :class:`fp8manifold.FP8Tensor` has the scales."""
        return next(shape for granularity, shape in scale_shapes(self.shape) if granularity == self.granularity)

    @property
    def block_size(self) -> BlockSize:
        """What shares a scale, as :meth:`fp8manifold.FP8Tensor.from_codes` takes it."""
        return BLOCK_SIZE if self.granularity == "block" else SQUARE if self.granularity == "square" else None


def scale_shapes(shape: tuple[int, ...]) -> Iterator[tuple[StoredGranularity, tuple[int, ...]]]:
    """Shapes that scales of a weight may have, of each granularity our own first.

    Where two granularities have the same shape, they say the same of every weight.
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
    """Shapes of a weight in E2M1 and of the bytes that hold it, by rows or by blocks of 32; None of anything else."""
    if codes.dtype not in PACKED or scale.dtype not in EXPONENTS or not scale.shape:
        return None
    *rows, blocks = scale.shape
    shape, flat = (*rows, blocks * BLOCK_SIZE), (*rows, blocks * BLOCK_SIZE // _A_BYTE)
    if codes.dtype == "F4":
        return (shape, flat) if codes.shape == shape else None
    return (shape, codes.shape) if codes.shape in (flat, (*rows, blocks, BLOCK_SIZE // _A_BYTE)) else None
