"""Places of a file's weights in the parameters of a model: whole, or as experts and as parts of a fused matrix."""

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
    """The part of a parameter that one tensor of a file is."""

    target: str  #: Name of the parameter.
    index: Index = ()  #: What of it, a number or a slice for each dimension; empty of the whole.


def weight_of(
    target: str,
    parts: Sequence[tuple[Index, StoredWeight]],
    shape: Sequence[int],
    read: Callable[[str], Tensor],
    done: Callable[[int], None],
    **options: Any,
) -> FP8Parameter:
    """The parameter ``target``, put together from its parts in files, which ``read`` gives one at a time.

    ``done`` is called with the number of bytes that are needed no more; ``options`` are ``device`` and those of
    :meth:`FP8Tensor.from_codes`.
    """
    first = parts[0][1]
    for _, stored in parts[1:]:
        if (stored.format, stored.granularity) != (first.format, first.granularity):
            its, other = (f"{s.format.name} with a scale for each {s.granularity}" for s in (first, stored))
            raise ValueError(
                f"{first.codes!r} is {its}, and {stored.codes!r} {other}: the model has both in {target!r}"
            )
    device = options.pop("device", None)
    codes = torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    scales: Tensor | None = None
    for index, stored in parts:
        part, scale = read_parts(stored, read)
        codes[index].copy_(part)
        done(part.nbytes)
        if index:
            at, sizes = scales_at(index, codes.shape, stored)
            if scales is None:  # transformers has another default dtype while it reads
                scales = torch.full(sizes, torch.nan, dtype=torch.float32, device=device)
            scale = scale.to(scales.device).reshape(scales[at].shape)
            if bool((scales[at] == scales[at]).any()) and not torch.equal(scales[at], scale):
                raise ValueError(
                    f"{stored.codes!r} has the scale {scale.item():g}, and another part of {target!r} in the model "
                    f"{scales[at].item():g}: one scale is kept for both; read a folder with the same scale for the "
                    "parts, or with a scale for each row (FP8_DYNAMIC of llm-compressor)"
                )
            scales[at] = scale
        else:
            scales = scale.to(device=device, copy=True)
        del part
    assert scales is not None
    return FP8Parameter.from_codes(
        codes, scales, first.format, block_size=first.block_size, requires_grad=True, **options
    )


def scales_at(index: Index, shape: Sequence[int], stored: StoredWeight) -> tuple[Index, tuple[int, ...]]:
    """The index of a part's scales among those of a parameter, and the shape of these.

    Parts with one scale each share it where they are rows or columns of one matrix: theirs must be equal.
    """
    if stored.granularity == "tensor":
        numbers = tuple(entry for entry in index if isinstance(entry, int))
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
                f"{stored.codes!r} has a scale for each {stored.granularity}, and is {entry.start} to {entry.stop} of "
                f"the {size} rows or columns that the model has in one weight, whose scales could not be written back"
            )
        at.append(slice(entry.start // each, -(-entry.stop // each)))
        sizes.append(-(-size // each))
    return tuple(at), tuple(sizes)


def _shared(stored: StoredWeight) -> list[int]:
    """Number of entries of each dimension that share a scale; 0 where all do."""
    dims = len(stored.shape)
    if stored.granularity == "channel":
        return [1] + [0] * (dims - 1)
    last = {"row": [0], "block": [BLOCK_SIZE], "square": list(SQUARE)}[stored.granularity]
    return [1] * (dims - len(last)) + last


def part_of(weight: FP8Tensor, place: Place, stored: StoredWeight) -> FP8Tensor:
    """The part of a parameter that a file has, in the same memory."""
    if not place.index:
        return weight
    scale = weight.kept_scale[scales_at(place.index, weight.shape, stored)[0]]
    scale = scale.reshape(()) if stored.granularity == "tensor" else scale
    return FP8Tensor.from_codes(
        weight.codes[place.index].contiguous(), scale, weight.format, block_size=weight.block_size, dtype=weight.dtype
    )
