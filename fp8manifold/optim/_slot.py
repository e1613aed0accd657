"""One parameter's step before it is taken: its view, the tensors that it reads and changes, the keys of its draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._ranks import Share
from fp8manifold.optim._directions import KEYS
from fp8manifold.optim._geometry import bounded_ends
from fp8manifold.optim._spec import BOUND_NAMES, Spec
from fp8manifold.random_bits import Stream, round_key_rows, round_keys, signed_word, stream_of

__all__ = [
    "FOR_MOMENTS",
    "FOR_RESCALING",
    "Key",
    "Member",
    "Parameters",
    "Slot",
    "View",
    "index_in",
    "key_row",
    "key_rows",
    "row_view",
    "view_of",
]


class Key(NamedTuple):
    """The key of one parameter's draws in one step."""

    seed: int
    step: int
    stream: int


_LONGEST_BLOCK: Final = 256
_SHORTEST_BLOCK: Final = 32


@dataclass(frozen=True)
class View:
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


def row_view(scale: Tensor, shape: tuple[int, ...], view: View) -> Tensor:
    """What there is one of for a scale, for the rows of a view."""
    if view.row_dims == view.dims and scale.numel() != view.numel:
        scale = scale.expand(shape)
    if view.repeats > 1:
        scale = scale.reshape(-1).repeat_interleave(view.repeats)
    return scale.reshape(view.row_dims)


@lru_cache(maxsize=4096)
def view_of(shape: tuple[int, ...], scale_shape: tuple[int, ...] | None, block_size: int | None, blocks: bool) -> View:
    """The view that a parameter is stepped in.

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
    elif len(shape) > 2 and scale_shape == (*shape[:-1], 1):
        rows, row_dims = numel // shape[-1], None
    else:
        return View((numel,), (numel,))
    length = numel // rows
    block = _block_length(length) if blocks else length
    repeats = length // block
    dims = (rows * repeats, block) if rows * repeats > 1 else (block,)
    row_dims = (rows * repeats, 1) if row_dims is None and len(dims) == 2 else ()
    return View(dims, row_dims, repeats if row_dims else 1)


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
class Slot:
    """One parameter's step: its tensors as they are kept, by name, and as views of one layout."""

    spec: Spec
    view: View
    #: ``weight`` and ``gradient``, and what the state has: averages, bounds, ``residual``; all of them contiguous
    tensors: dict[str, Tensor]
    key: Key
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
    def rounding_key(self) -> Stream:
        """Of the draws for the weight."""
        return stream_of(self.draws, *self.key)

    @cached_property
    def moments_key(self) -> Stream:
        """Of the draws for the moments: independent, for a moment forgets, so that earlier draws would enter its odds."""
        return Stream((*self.key, FOR_MOMENTS))

    @property
    def blockwise(self) -> bool:
        """Whether averages are stored in blocks."""
        return self.spec.moments == "8bit" and bool(self.spec.stores)

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """Everything by name, as views that broadcast against each other."""
        dims, blocks = self.view.dims, self.view.block_dims
        arrays = {name: t.view(blocks if name in BOUND_NAMES else dims) for name, t in self.tensors.items()}
        if self.scale is not None:
            arrays["scale"] = row_view(self.scale, self.shape, self.view)
            if self.spec.geometry in ("exponential", "tangent") and self.spec.metric == "ulp":
                assert self.spec.fmt is not None
                arrays |= bounded_ends(self.spec.fmt, arrays["scale"], *self.ends)
        return arrays

    def gather(self) -> None:
        """Take all rows of the state; bounds are whole in every process."""
        assert self.share is not None
        for name in self.tensors.keys() - {"weight", *BOUND_NAMES}:
            self.back[name], self.tensors[name] = self.tensors[name], self.share.gathered(self.tensors[name])

    def put_back(self) -> None:
        """Keep the own rows of what was gathered."""
        for name, memory in self.back.items():
            assert self.share is not None
            memory.copy_(self.share.own(self.tensors[name]))

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes."""
        return [tensor for name, tensor in self.tensors.items() if name != "gradient"]


FOR_MOMENTS: Final = 1
"""A fourth key word: the averages' draws are not the weights'."""
FOR_RESCALING: Final = 2
"""Another, so that no draw of a step is used again where its scales double."""


def key_row(slot: Slot) -> list[int]:
    """The round keys and phases of one slot, the offset taken into the first of each three."""
    high, low = divmod(slot.offset, 2**32)
    keys = []
    for words, phase in (slot.rounding_key, slot.moments_key):
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


def key_rows(slots: Sequence[Slot]) -> NDArray[np.int32]:
    """:func:`key_row` of many slots, those at offset 0 together."""
    rows = np.zeros((len(slots), KEYS), dtype=np.int32)
    streams = np.array([slot.key.stream for slot in slots], dtype=np.uint64)
    rows[:, :4] = _first_rows([slot.rounding_key for slot in slots], streams)
    if any(slot.spec.draws_for_moments for slot in slots):
        rows[:, 4:] = _first_rows([slot.moments_key for slot in slots], streams)
    for i, slot in enumerate(slots):
        if slot.offset:
            rows[i] = key_row(slot)
    return rows
