"""Put weights of files together to a model's parameter, and take them apart again.

A model may have in one parameter what files have in several tensors: stacked experts,
or the columns of q, k and v joined to one matrix::

    files       q (M, K)   k (M, K)   v (M, K)     each with its scales
    model       qkv (3 M, K)                       one FP8Parameter
    Place       "qkv", [0:M, :]  [M:2M, :]  ...    where in it each tensor is

Codes are copied to their part. Scales are put where those of the part are; parts with
one scale each share it if the model joins them in one matrix. If these differ, the
parameter has a scale for each row instead, and its rows are rescaled to one before they
are written back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.blocks import Index, pieces
from fp8manifold._encoded.storage import SQUARE
from fp8manifold._published.stored_weight import StoredWeight, read_parts
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import decode, encode
from fp8manifold.parameter import FP8Parameter
from fp8manifold.scaling import BLOCK_SIZE
from fp8manifold.tensor import FP8Tensor


@dataclass(frozen=True)
class Place:
    """The part of a parameter that one tensor of a file holds."""

    #: Name of the parameter.
    target: str
    #: Its part: a number or a slice for each dimension; empty for the whole.
    index: Index = ()


class ScalePlace(NamedTuple):
    """The part of a parameter's scales that belongs to a part of the parameter."""

    part: Index
    #: The shape of all scales of the parameter.
    shape: tuple[int, ...]


def weight_of(
    target: str,
    parts: Sequence[tuple[Index, StoredWeight]],
    shape: Sequence[int],
    read: Callable[[str], Tensor],
    done: Callable[[int], None],
    **options: Any,
) -> FP8Parameter:
    """Return a parameter, put together from its parts in files.

    Args:
        target: its name.
        parts: its parts.
        shape: its shape.
        read: returns a tensor of the files by its name.
        done: called with the number of bytes that are needed no more.
        options: ``device`` and those of :meth:`FP8Tensor.from_codes`.

    Raises:
        ValueError: parts whose formats or scales one parameter can't have.
    """
    first = parts[0][1]
    for _, stored in parts[1:]:
        if (stored.format, stored.granularity) != (first.format, first.granularity):
            raise ValueError(
                f"{first.codes!r} is {_format_and_scales(first)}, but {stored.codes!r} is "
                f"{_format_and_scales(stored)}, and the model joins them in {target!r}: they must "
                "be alike"
            )
    device = options.pop("device", None)
    codes = torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    part_scales = []
    for index, stored in parts:
        part_codes, scale = read_parts(stored, read)
        codes[index].copy_(part_codes)
        done(part_codes.nbytes)
        part_scales.append(scale.to(device=device, copy=True))
        # The next part is read without this one in memory.
        del part_codes
    is_whole = not parts[0][0]
    scales = part_scales[0] if is_whole else _joined_scales(target, parts, part_scales, codes.shape)
    return FP8Parameter.from_codes(
        codes, scales, first.format, block_size=first.block_size, requires_grad=True, **options
    )


def _format_and_scales(stored: StoredWeight) -> str:
    return f"{stored.format.name} with a scale for each {stored.granularity}"


def _joined_scales(
    target: str,
    parts: Sequence[tuple[Index, StoredWeight]],
    part_scales: Sequence[Tensor],
    shape: Sequence[int],
) -> Tensor:
    """Return the scales of a parameter from those of its parts.

    Where parts of one matrix have one scale each, and these differ, the parameter has a
    scale for each row.
    """
    for by_row in (False, True):
        are_alike = True
        # transformers sets another default dtype while it reads. NaN is where no part
        # has put its scale yet.
        scales = part_scales[0].new_full(
            scales_at(*parts[0], shape, by_row).shape, torch.nan, dtype=torch.float32
        )
        for (index, stored), scale in zip(parts, part_scales, strict=True):
            scale_index, _ = scales_at(index, stored, shape, by_row)
            present = scales[scale_index]
            if stored.granularity == "tensor":
                scale = scale.expand(present.shape)
            else:
                scale = scale.view_as(present)
            # NaN, where no scale is yet, does not equal itself
            is_shared = bool((present == present).any())
            if is_shared and not torch.equal(present, scale):
                are_alike = False
            scales[scale_index] = scale
        if are_alike:
            return scales
    raise ValueError(
        f"{parts[0][1].codes!r} and other columns of {target!r} in the model have one scale each, "
        "but these scales differ: read a model with the same scale for all of them, or with a "
        "scale for each row (FP8_DYNAMIC of llm-compressor)"
    )


def scales_at(
    index: Index, stored: StoredWeight, shape: Sequence[int], by_row: bool = False
) -> ScalePlace:
    """Return where a part's scales are among those of a parameter.

    Args:
        index: the part.
        stored: what files have of it.
        shape: the parameter's.
        by_row: whether parts with one scale each have it per row, where they are rows
            of one matrix. Otherwise they share it.

    Raises:
        ValueError: the model cuts the elements that share a scale.
    """
    if stored.granularity == "tensor":
        numbers = tuple(entry for entry in index if isinstance(entry, int))
        if by_row:
            return ScalePlace((*index[:-1], slice(0, 1)), (*shape[:-1], 1))
        # () for all of a parameter, or (experts, 1, 1) for a stack
        ones = [1] * (len(index) - len(numbers)) if numbers else []
        return ScalePlace(numbers, (*shape[: len(numbers)], *ones))
    sharing_counts = iter(_sharing_counts(stored))
    scale_index: list[int | slice] = []
    scale_shape: list[int] = []
    for entry, size in zip(index, shape, strict=True):
        if isinstance(entry, int):
            scale_index.append(entry)
            scale_shape.append(size)
            continue
        count = next(sharing_counts) or size
        if entry.start % count or (entry.stop % count and entry.stop != size):
            raise ValueError(
                f"{stored.codes!r} has a scale for each {stored.granularity}, but the model puts "
                f"it at {entry.start} to {entry.stop} of {size} rows or columns, which cuts one: "
                "its scales could not be written back"
            )
        scale_index.append(slice(entry.start // count, -(-entry.stop // count)))
        scale_shape.append(-(-size // count))
    return ScalePlace(tuple(scale_index), tuple(scale_shape))


def _sharing_counts(stored: StoredWeight) -> list[int]:
    """Return how many entries of each dimension share a scale; 0 for all of them."""
    dims = len(stored.shape)
    if stored.granularity == "channel":
        return [1] + [0] * (dims - 1)
    last_counts = {"row": [0], "block": [BLOCK_SIZE], "square": list(SQUARE)}[stored.granularity]
    return [1] * (dims - len(last_counts)) + last_counts


def part_of(weight: FP8Tensor, place: Place, stored: StoredWeight) -> FP8Tensor:
    """Return the part of a parameter that a file has; the parameter does not change.

    Rows that share a scale in the file have their largest, if it holds all values.

    Raises:
        ValueError: it does not; :func:`share_scale_` rounds them.
    """
    if not place.index:
        return weight
    scale_index, shape = scales_at(place.index, stored, weight.shape)
    codes = weight.codes[place.index].contiguous()
    if tuple(weight.kept_scale.shape) == shape:
        scale = weight.kept_scale[scale_index]
    else:
        scale_index, _ = scales_at(place.index, stored, weight.shape, by_row=True)
        row_scales = weight.scale[scale_index]
        scale = row_scales.max()
        codes = _codes_at(codes, row_scales, scale, place, stored, weight.format)
    if stored.granularity == "tensor":
        scale = scale.flatten()[:1].reshape(())
    # a seed by default would advance torch's generator
    return FP8Tensor.from_codes(
        codes,
        scale,
        weight.format,
        block_size=weight.block_size,
        dtype=weight.dtype,
        seed=weight.seed,
    )


def share_scale_(weight: FP8Tensor, place: Place, stored: StoredWeight) -> None:
    """Give rows of a parameter that share a scale in the file their largest, in place."""
    if not place.index:
        return
    _, shape = scales_at(place.index, stored, weight.shape)
    if tuple(weight.kept_scale.shape) == shape:
        return
    scale_index, _ = scales_at(place.index, stored, weight.shape, by_row=True)
    scale = weight.scale.clone()
    scale[scale_index] = scale[scale_index].max()
    if not torch.equal(scale, weight.scale):
        weight.rescale_(scale)


def _codes_at(
    codes: Tensor,
    row_scales: Tensor,
    scale: Tensor,
    place: Place,
    stored: StoredWeight,
    fmt: FloatFormat,
) -> Tensor:
    """Return the codes of rows at one scale for all of them, if it holds their values."""
    if bool((row_scales == scale).all()):
        return codes
    codes_at_scale = torch.empty_like(codes)
    # by rows, so that no float copy of all of them is made
    for rows in pieces(codes):
        values = decode(codes[rows], fmt) * row_scales[rows]
        is_nan = values.isnan()
        part = torch.where(is_nan, codes[rows], encode(values / scale, fmt))
        if not torch.equal((decode(part, fmt) * scale)[~is_nan], values[~is_nan]):
            raise ValueError(
                f"{stored.codes!r} has one scale in {stored.file!r}, but the rows of "
                f"{place.target!r} have {row_scales.unique().numel()}, and none of them holds all "
                "values: call share_scales_() of fm.served_weights(model), which rounds the "
                "values to one scale"
            )
        codes_at_scale[rows] = part
    return codes_at_scale
