"""Weights that files hold as codes and scales, found by the headers of their tensors: what is not known is refused."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8manifold.formats import FloatFormat, as_format
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, StoredGranularity

FORMATS: Final = {
    "F8_E4M3": as_format("E4M3"),
    "F8_E5M2": as_format("E5M2"),
    "F8_E4M3FNUZ": as_format("E4M3FNUZ"),
    "F8_E5M2FNUZ": as_format("E5M2FNUZ"),
}
"""Formats of codes of a byte each, by the dtypes of safetensors."""
EXPONENTS: Final = ("F8_E8M0", "U8")
"""Dtypes in which scales are exponents, E8M0."""
SCALES: Final = ("F32", "BF16", "F16", *EXPONENTS)
"""Dtypes that scales are read from."""


@dataclass(frozen=True)
class Header:
    """One tensor of a file: what its header says, with dtypes as safetensors names them."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredWeight:
    """One weight that files hold as codes and scales, by names in the files; ``name`` is that in a model."""

    name: str
    codes: str
    scale: str
    format: FloatFormat
    granularity: StoredGranularity
    shape: tuple[int, ...]
    code_dtype: str
    scale_dtype: str
    scale_shape: tuple[int, ...]
    file: str
    extras: tuple[str, ...] = ()

    @property
    def own_scale_shape(self) -> tuple[int, ...]:
        """The shape in which :class:`fp8manifold.FP8Tensor` has the scales."""
        return next(shape for granularity, shape in scale_shapes(self.shape) if granularity == self.granularity)

    @property
    def block_size(self) -> int | tuple[int, int] | None:
        """As :meth:`fp8manifold.FP8Tensor.from_codes` takes it."""
        return {"block": BLOCK_SIZE, "square": (SQUARE_SIZE, SQUARE_SIZE)}.get(self.granularity)


def scale_shapes(shape: tuple[int, ...]) -> Iterator[tuple[StoredGranularity, tuple[int, ...]]]:
    """Shapes that scales of a weight may have, of each granularity our own first; equal shapes mean the same."""
    yield "tensor", ()
    yield "tensor", (1,)
    yield "tensor", tuple(1 for _ in shape)
    if len(shape) < 2:
        return
    *lead, rows, columns = shape
    yield "channel", (shape[0], *(1 for _ in shape[1:]))
    yield "channel", shape[:1]
    yield "row", (*shape[:-1], 1)
    yield "row", shape[:-1]
    if columns % BLOCK_SIZE == 0:
        yield "block", (*shape[:-1], columns // BLOCK_SIZE)
    down, across = math.ceil(rows / SQUARE_SIZE), math.ceil(columns / SQUARE_SIZE)
    yield "square", (*lead, down, across)
    yield "square", (*lead, down, 1, across, 1)


def stored_weights(headers: Mapping[str, Header], config: Mapping[str, Any] | None) -> dict[str, StoredWeight]:
    """Find every weight in codes of a folder.

    Args:
        headers: of all tensors of all its files, by name.
        config: the ``quantization_config`` of its settings, if there is one.

    Returns:
        The weights by the names that a model has.

    Raises:
        ValueError: names a tensor, its file, what is there and what is read.
    """
    found = {}
    for name, header in headers.items():
        if header.dtype in FORMATS:
            weight = _stored(name, header, headers)
            found[weight.name] = weight
    return found


def _stored(name: str, header: Header, headers: Mapping[str, Header]) -> StoredWeight:
    where = f"{name} of {header.file!r} holds {header.dtype} of shape {header.shape}"
    scale = next((each for each in (f"{name}_scale_inv", f"{name}_scale") if each in headers), None)
    if scale is None:
        raise ValueError(f"{where}, and no scale: {name}_scale_inv or {name}_scale is missing")
    has = headers[scale]
    if has.dtype not in SCALES:
        raise ValueError(f"{where}, and {scale} is {has.dtype}: scales are read from {', '.join(SCALES)}")
    fits = [granularity for granularity, shape in scale_shapes(header.shape) if shape == has.shape]
    if not fits:
        raise ValueError(f"{where}, and {scale} has shape {has.shape}: one a tensor, row, 32 or 128 x 128 is read")
    granularity = "square" if "square" in fits and scale.endswith("_inv") else fits[0]
    return StoredWeight(
        name,
        name,
        scale,
        FORMATS[header.dtype],
        granularity,
        header.shape,
        header.dtype,
        has.dtype,
        has.shape,
        header.file,
    )
