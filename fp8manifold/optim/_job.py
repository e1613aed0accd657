"""One parameter's step before it is taken: what it is, and the tensors that it reads and changes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fp8manifold._ranks import Share
from fp8manifold.optim._geometry import bounded_ends
from fp8manifold.optim._layout import Layout, row_view
from fp8manifold.optim._variant import BOUNDS, Variant

__all__ = ["Job", "Member", "Parameters"]

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

    @property
    def blockwise(self) -> bool:
        """Whether averages are stored in blocks."""
        return self.variant.moments == "8bit" and bool(self.variant.stores)

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """Everything by name, as views that broadcast against each other."""
        dims, blocks = self.layout.dims, self.layout.block_dims
        arrays = {name: t.view(blocks if name.endswith("_bound") else dims) for name, t in self.held.items()}
        if self.scale is not None:
            arrays["scale"] = row_view(self.scale, self.shape, self.layout)
            if self.variant.geometry in ("exponential", "tangent") and self.variant.metric == "ulp":
                assert self.variant.fmt is not None
                arrays |= bounded_ends(self.variant.fmt, arrays["scale"], *self.ends)
        return arrays

    def gather(self) -> None:
        """Take all rows of the state; bounds are whole in every process."""
        assert self.share is not None
        for name in self.held.keys() - {"weight", *BOUNDS.values()}:
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
