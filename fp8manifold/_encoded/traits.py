"""What a tensor of codes is, apart from its tensors: the part that a compiler treats as constant."""

from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, Self, get_args

import torch

from fp8manifold._encoded.squares import BlockSize
from fp8manifold._numerics.checks import check_choice, check_int
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import Draws

__all__ = ["DRAWS", "ROUNDINGS", "Rounding", "Traits"]

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: Final = ("nearest", "stochastic")
DRAWS: Final = get_args(Draws)


class Traits(NamedTuple):
    """Format, options and apparent dtype."""

    format: FloatFormat
    rounding: Rounding
    seed: int
    dtype: torch.dtype
    block_size: BlockSize
    #: whether the operator that writes is a word of the key of its draws
    by_operator: bool = True
    #: how the draws of one weight follow each other, write by write
    draws: Draws = "independent"

    @property
    def flat(self) -> tuple[Any, ...]:
        """With the format by name: what can be compared, hashed and unpickled without a class of ours."""
        return (self.format.name, *self[1:])

    def check(self) -> None:
        """Raise TypeError or ValueError unless the options are valid."""
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("draws", self.draws, DRAWS)
        check_int("seed", self.seed, 0, 2**63 - 1)

    @classmethod
    def in_graphs(cls, flat: tuple[Any, ...]) -> Self:
        """Those that compiled code depends on: none is drawn there."""
        return cls.from_flat(flat)._replace(seed=0, by_operator=True, draws="independent")

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...]) -> Self:
        """Read what `flat` gave."""
        if len(flat) != len(cls._fields):
            raise ValueError(f"{flat!r} are not the {len(cls._fields)} traits of a tensor: {', '.join(cls._fields)}")
        return cls(_format_named(flat[0]), *flat[1:])


@lru_cache(maxsize=256)
def _format_named(name: str) -> FloatFormat:
    return FloatFormat.from_string(name)
