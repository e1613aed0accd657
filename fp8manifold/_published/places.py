"""Places of a file's weights in the parameters of a model: whole, or as experts and as
parts of a fused matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.storage import SQUARE
from fp8manifold._published.stored import StoredWeight, read_parts
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import BLOCK_SIZE
from fp8manifold.tensor import FP8Tensor

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Place:
    """The part of a parameter that one tensor of a file holds."""

    target: str  #: Name of the parameter.
    index: Index = ()  #: Its part: a number or a slice for each dimension; empty for the whole.


def weight_of(
    target: str,
    parts: Sequence[tuple[Index, StoredWeight]],
    shape: Sequence[int],
    read: Callable[[str], Tensor],
    done: Callable[[int], None],
    **options: Any,
) -> FP8Parameter:
    """The parameter ``target``, put together from its parts in files, which ``read``
    gives one at a time.

    ``done`` is called with the number of bytes that are needed no more; ``options`` are
    ``device`` and those of
    :meth:`FP8Tensor.from_codes`.
    """
    first = parts[0][1]
    for _, stored in parts[1:]:
        if (stored.format, stored.granularity) != (first.format, first.granularity):
            its, other = (
                f"{s.format.name} with a scale for each {s.granularity}" for s in (first, stored)
            )
            raise ValueError(
                f"{first.codes!r} is {its}, {stored.codes!r} {other}: the model joins them in "
                f"{target!r}"
            )
    device = options.pop("device", None)
    codes = torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    found = []
    for index, stored in parts:
        part, scale = read_parts(stored, read)
        codes[index].copy_(part)
        done(part.nbytes)
        found.append(scale.to(device=device, copy=True))
        del part
    scales = _joined(target, parts, found, codes.shape) if parts[0][0] else found[0]
    return FP8Parameter.from_codes(
        codes, scales, first.format, block_size=first.block_size, requires_grad=True, **options
    )


def _joined(
    target: str,
    parts: Sequence[tuple[Index, StoredWeight]],
    found: Sequence[Tensor],
    shape: Sequence[int],
) -> Tensor:
    """The scales of a parameter from those of its parts; unlike ones of rows of a
    matrix become one per row.
    """
    for by_row in (False, True):
        unlike = False
        # transformers sets another default dtype while it reads
        scales = found[0].new_full(
            scales_at(*parts[0], shape, by_row)[1], torch.nan, dtype=torch.float32
        )
        for (index, stored), scale in zip(parts, found, strict=True):
            at = scales_at(index, stored, shape, by_row)[0]
            scale = (
                scale.expand(scales[at].shape)
                if stored.granularity == "tensor"
                else scale.view_as(scales[at])
            )
            unlike |= bool((scales[at] == scales[at]).any()) and not torch.equal(scales[at], scale)
            scales[at] = scale
        if not unlike:
            return scales
    raise ValueError(
        f"{parts[0][1].codes!r} and other columns of {target!r} in the model have one scale each, "
        f"and these differ: "
        "read a model with the same scale for all of them, or with a scale for each row "
        "(FP8_DYNAMIC of llm-compressor)"
    )


def scales_at(
    index: Index, stored: StoredWeight, shape: Sequence[int], by_row: bool = False
) -> tuple[Index, tuple[int, ...]]:
    """The index of a part's scales among those of a parameter, and the shape of these.

    Parts with one scale each share it where they are rows or columns of one matrix, or
    have it ``by_row``.
    """
    if stored.granularity == "tensor":
        numbers = tuple(entry for entry in index if isinstance(entry, int))
        if by_row:
            return (*index[:-1], slice(0, 1)), (*shape[:-1], 1)
        ones = [1] * (len(index) - len(numbers)) if numbers else []
        return numbers, (*shape[: len(numbers)], *ones)
    shared = iter(_shared(stored))
    at: list[int | slice] = []
    sizes: list[int] = []
    for entry, size in zip(index, shape, strict=True):
        if isinstance(entry, int):
            at.append(entry)
            sizes.append(size)
            continue
        each = next(shared) or size
        if entry.start % each or (entry.stop % each and entry.stop != size):
            raise ValueError(
                f"{stored.codes!r} has a scale for each {stored.granularity}, and the model puts "
                f"it at {entry.start} to {entry.stop} of {size} rows or columns, which cuts one: "
                f"its scales could not be written back"
            )
        at.append(slice(entry.start // each, -(-entry.stop // each)))
        sizes.append(-(-size // each))
    return tuple(at), tuple(sizes)


def _shared(stored: StoredWeight) -> list[int]:
    """The number of entries of each dimension that share a scale; 0 for all of them."""
    dims = len(stored.shape)
    if stored.granularity == "channel":
        return [1] + [0] * (dims - 1)
    last = {"row": [0], "block": [BLOCK_SIZE], "square": list(SQUARE)}[stored.granularity]
    return [1] * (dims - len(last)) + last


def part_of(weight: FP8Tensor, place: Place, stored: StoredWeight) -> FP8Tensor:
    """The part of a parameter that a file has; rows that share a scale in the file are
    rescaled to one first.
    """
    if not place.index:
        return weight
    at, sizes = scales_at(place.index, stored, weight.shape)
    if by_row := tuple(weight.kept_scale.shape) != sizes:
        at, _ = scales_at(place.index, stored, weight.shape, by_row)
        scale = weight.scale.clone()
        scale[at] = scale[at].max()
        if not torch.equal(scale, weight.scale):
            weight.rescale_(scale)
    scale = weight.kept_scale[at]
    scale = scale.flatten()[:1].reshape(()) if stored.granularity == "tensor" else scale
    return FP8Tensor.from_codes(
        weight.codes[place.index].contiguous(),
        scale,
        weight.format,
        block_size=weight.block_size,
        dtype=weight.dtype,
    )
