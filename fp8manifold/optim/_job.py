"""One parameter's step before it is taken: its view, the tensors that it reads and changes, the keys of its draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._ranks import Share
from fp8manifold.optim._directions import KEYS
from fp8manifold.optim._geometry import bounded_ends
from fp8manifold.optim._variant import BOUND_NAMES, Variant
from fp8manifold.random_bits import Stream, round_key_rows, round_keys, signed_word, stream_of

__all__ = [
    "FOR_MOMENTS",
    "Job",
    "Layout",
    "Member",
    "Parameters",
    "index_in",
    "key_row",
    "key_rows",
    "layout_of",
    "row_view",
]

_LONGEST_BLOCK: Final = 256
_SHORTEST_BLOCK: Final = 32


@dataclass(frozen=True)
class Layout:
    """A view of one or two dimensions that every array of a step broadcasts to.

    ``dims`` are (rows, length), or the length alone where there is one row; a row is a block of the averages, where
    they are stored in blocks, or what shares a scale.
    """

    dims: tuple[int, ...]
    #: dimensions of a scale, one for a row or for an element; () for one in all
    row_dims: tuple[int, ...]
    #: rows of the view that share one of the scale's entries
    repeats: int = 1

    @property
    def block_dims(self) -> tuple[int, ...]:
        """Dimensions of what there is one of for a block."""
        return (*self.dims[:-1], 1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def compiles(self) -> bool:
        """A dimension of 1 is compiled for anew, so that such a view is left to eager code."""
        return min(self.dims) > 1


def index_in(shape: torch.Size, device: torch.device) -> Tensor:
    """The position of every element of a view, int32."""
    columns = torch.arange(shape[-1], dtype=torch.int32, device=device)
    if len(shape) == 1:
        return columns
    rows = torch.arange(shape[0], dtype=torch.int32, device=device) * shape[1]
    return rows.unsqueeze(1) + columns


def row_view(scale: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """What there is one of for a scale, for the rows of a view."""
    if layout.row_dims == layout.dims and scale.numel() != layout.numel:
        scale = scale.expand(shape)
    if layout.repeats > 1:
        scale = scale.reshape(-1).repeat_interleave(layout.repeats)
    return scale.reshape(layout.row_dims)


@lru_cache(maxsize=4096)
def layout_of(
    shape: tuple[int, ...], scale_shape: tuple[int, ...] | None, block_size: int | None, blocks: bool
) -> Layout:
    """The layout of a parameter.

    Args:
        shape: of the parameter.
        scale_shape: of its scale; None for an ordinary parameter.
        block_size: length of the blocks that share a scale, where there are such.
        blocks: whether averages are stored in blocks.
    """
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    if scale_shape is None or math.prod(scale_shape) == 1:
        row_dims: tuple[int, ...] | None = ()
        if not blocks and scale_shape is None:
            rows = 1
    elif block_size is not None:
        rows, row_dims = numel // block_size, None
    elif len(shape) > 1 and scale_shape == (rows, *(1,) * (len(shape) - 1)):
        row_dims = None
    else:
        return Layout((numel,), (numel,))
    length = numel // rows
    block = _block_length(length) if blocks else length
    repeats = length // block
    dims = (rows * repeats, block) if rows * repeats > 1 else (block,)
    row_dims = (rows * repeats, 1) if row_dims is None and len(dims) == 2 else ()
    return Layout(dims, row_dims, repeats if row_dims else 1)


def _block_length(length: int) -> int:
    """The longest block up to 256 that divides a row, or the row itself where only a short one does."""
    for block in range(min(length, _LONGEST_BLOCK), _SHORTEST_BLOCK - 1, -1):
        if length % block == 0:
            return block
    return length


Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""As they are given to an optimizer."""
Member = tuple[dict[str, Any], Tensor]
"""A group and one of its parameters."""


@dataclass
class Job:
    """One parameter's step: its tensors as they are kept, by name, and as views of one layout."""

    variant: Variant
    layout: Layout
    #: ``weight`` and ``gradient``, and what the state has: averages, bounds, ``residual``; all of them contiguous
    held: dict[str, Tensor]
    #: seed, step and stream of the draws
    words: tuple[int, int, int]
    scale: Tensor | None = None
    #: what the scale broadcasts to
    shape: tuple[int, ...] = ()
    #: exponents, in value, between which a chart of the ulp follows the format
    ends: tuple[int, int] = (0, 0)
    #: position of the first element in a tensor that this is a part of
    offset: int = 0
    #: whose step it is, and its group, where it is that of a whole parameter
    parameter: Any = None
    group: dict[str, Any] = field(default_factory=dict)
    #: the hyperparameters, by name
    numbers: dict[str, float] = field(default_factory=dict)
    #: whether ``weight`` is the parameter's own memory, and not a contiguous copy of it
    in_place: bool = True
    #: of a parameter that several processes hold and each of them steps whole
    share: Share | None = None
    #: the memory that the own rows of gathered tensors go back to, by name
    back: dict[str, Tensor] = field(default_factory=dict)
    #: how the draws for the weight follow each other, step by step
    draws: str = "independent"
    #: whether the step left a code of the largest magnitude, where it looked for one
    reached: list[bool] = field(default_factory=list)

    @cached_property
    def key(self) -> Stream:
        """Of the draws for the weight."""
        return stream_of(self.draws, *self.words)

    @cached_property
    def average_key(self) -> Stream:
        """Of the draws for the averages; those of a fitted one follow each other as the weight's do."""
        return stream_of(self.draws if self.variant.fitted else "independent", *self.words, FOR_MOMENTS)

    @property
    def blockwise(self) -> bool:
        """Whether averages are stored in blocks."""
        return self.variant.moments == "8bit" and bool(self.variant.stores)

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """Everything by name, as views that broadcast against each other."""
        dims, blocks = self.layout.dims, self.layout.block_dims
        arrays = {name: t.view(blocks if name in BOUND_NAMES else dims) for name, t in self.held.items()}
        if self.scale is not None:
            arrays["scale"] = row_view(self.scale, self.shape, self.layout)
            if self.variant.geometry in ("exponential", "tangent") and self.variant.metric == "ulp":
                assert self.variant.fmt is not None
                arrays |= bounded_ends(self.variant.fmt, arrays["scale"], *self.ends)
        return arrays

    def gather(self) -> None:
        """Take all rows of the state; bounds are whole in every process."""
        assert self.share is not None
        for name in self.held.keys() - {"weight", *BOUND_NAMES}:
            self.back[name], self.held[name] = self.held[name], self.share.gathered(self.held[name])

    def put_back(self) -> None:
        """Keep the own rows of what was gathered."""
        for name, memory in self.back.items():
            assert self.share is not None
            memory.copy_(self.share.own(self.held[name]))

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes."""
        return [tensor for name, tensor in self.held.items() if name != "gradient"]


FOR_MOMENTS: Final = 1
"""A fourth key word: the averages' draws are not the weights'."""


def key_row(job: Job) -> list[int]:
    """The round keys and phases of one job, the offset taken into the first of each three."""
    high, low = divmod(job.offset, 2**32)
    keys = []
    for words, phase in (job.key, job.average_key):
        first, second, third = round_keys(words, high)
        keys += [signed_word(first + low), second, third, phase]
    return keys


def _first_rows(keys: Sequence[Stream], streams: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Round keys and phases at offset 0."""
    rows = np.zeros((len(keys), 4), dtype=np.int32)
    for more in {key.words[3:] for key in keys}:
        some = [i for i, key in enumerate(keys) if key.words[3:] == more]
        rows[some, :3] = round_key_rows([keys[i].words[:2] for i in some], streams[some], *more)
    rows[:, 3] = [key.phase for key in keys]
    return rows


def key_rows(jobs: Sequence[Job]) -> NDArray[np.int32]:
    """:func:`key_row` of many jobs, those at offset 0 together."""
    rows = np.zeros((len(jobs), KEYS), dtype=np.int32)
    streams = np.array([job.words[2] for job in jobs], dtype=np.uint64)
    rows[:, :4] = _first_rows([job.key for job in jobs], streams)
    if any(job.variant.draws_for_moments for job in jobs):
        rows[:, 4:] = _first_rows([job.average_key for job in jobs], streams)
    for i, job in enumerate(jobs):
        if job.offset:
            rows[i] = key_row(job)
    return rows
