"""Tensors of one safetensors file to bytes and back; a header that claims too much is refused before it is read."""

from __future__ import annotations

from math import prod
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nanogpt_bench.checkpoint.bounded_json import parse
from nanogpt_bench.system.errors import one_line

#: bytes of a header: some ten thousand tensors
HEADER = 1 << 21
#: a header's length comes before it
PREFIX = 8
#: the types that can be written and read; E8M0 can only be written
TYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"),
)
DIMENSIONS = 64


def to_bytes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file of contiguous CPU tensors that share no memory.

    Raises:
        ValueError: a tensor that is none of these, or so many that `from_bytes` would refuse them.
    """
    try:
        data = save(tensors, metadata or None)
    except RuntimeError as error:
        raise ValueError(one_line(error)) from None
    read_header(data)
    return data


def from_bytes(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors with memory of their own, and the texts in the header.

    Raises:
        ValueError: no safetensors file, or one whose tensors torch can't hold.
    """
    metadata = read_header(data)
    try:
        return load(data), metadata
    except (SafetensorError, RuntimeError, AssertionError, KeyError) as error:
        raise ValueError(one_line(error)) from None


def header_size(data: bytes) -> int:
    """Return the length that the first bytes of a file give its header, without those bytes.

    Raises:
        ValueError: there are not even these bytes.
    """
    if len(data) < PREFIX:
        raise ValueError(f"is no safetensors file: {len(data)} bytes")
    return int.from_bytes(data[:PREFIX], "little")


def read_header(data: bytes) -> dict[str, str]:
    """Check the header in the first bytes of a file and return the texts in it; where the data lie is not checked.

    Raises:
        ValueError: a header that is too long, cut off, no JSON, or of tensors that can't be read.
    """
    size = header_size(data)
    if size > HEADER:
        raise ValueError(f"has a header of {size:,} bytes, more than the {HEADER:,} allowed")
    if len(data) < PREFIX + size:
        raise ValueError(f"is cut off in its header of {size:,} bytes")
    header = parse(data[PREFIX : PREFIX + size], limit=HEADER)
    if not isinstance(header, dict):
        raise ValueError("has a header that is no mapping")
    metadata = header.pop("__metadata__", None) or {}
    for name, entry in header.items():
        _check_tensor(name, entry)
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("has a header whose __metadata__ is no mapping of texts")
    return metadata


def _check_tensor(name: str, entry: Any) -> None:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if dtype not in TYPES:
        raise ValueError(f"has a tensor {name[:80]!r} of type {str(dtype)[:20]!r}, which can't be read")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError(f"has a tensor {name[:80]!r} without a shape of at most {DIMENSIONS} dimensions")
    # torch computes strides of empty tensors too
    if not all(isinstance(size, int) for size in shape) or prod(max(size, 1) for size in shape) >= 2**63:
        raise ValueError(f"has a tensor {name[:80]!r} larger than 64 bits can say")
