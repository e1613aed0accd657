"""The key word that tells one parameter's random bits from every other's, whichever optimizer steps it."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import count
from typing import Final

import torch
from torch import Tensor

from fp8manifold._blocks import BLOCK
from fp8manifold._eager import eager_only
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._kinds import own_manifold
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.tensor import FP8Tensor

__all__ = ["content_word", "new_stream", "twins"]

_CODES, _GRID, _FLOATS = 1, 2, 3
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES: Final = (0x5EED, 0, 0)
_GRADIENT: Final = (0x5EED, 1, 0)


def new_stream(parameter: Tensor, twin: int, used: Collection[int], begun: int, *, draws: bool) -> int:
    """A stream from what is the parameter's own, 63 bits, which no other parameter of the optimizer has or had.

    What is its own is the seed of a one-byte tensor, the seed of a grid's manifold with the values and gradient of the
    first step, and these alone for floats.  Neither the position in a group nor the group enters, so a parameter draws
    the same bits in an optimizer for itself as among others; only those that share a seed are told apart by their
    order.

    Args:
        parameter: with its gradient.
        twin: how many before it share its seed, as :func:`twins` has it.
        used: the optimizer's streams that are in use.
        begun: how many streams have been given: more than are in use where parameters or states were removed.
        draws: whether random bits are drawn for an ordinary parameter.
    """
    removed = max(begun - len(used), 0)
    words = (*_seed_words(parameter), *_content(parameter, draws))
    return next(stream for i in count(twin) if (stream := mixed_word(*words, removed, i)) not in used)


def twins(parameters: Iterable[Tensor]) -> dict[Tensor, int]:
    """For each parameter the number of earlier ones with its seed, or of ordinary ones with its shape."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = {}
    for parameter in parameters:
        words = _seed_words(parameter)
        numbers[parameter] = seen[words]
        seen[words] += 1
    return numbers


def _seed_words(parameter: Tensor) -> tuple[int, ...]:
    if isinstance(parameter, FP8Tensor):
        return (_CODES, parameter.seed)
    manifold = own_manifold(parameter)
    if isinstance(manifold, FP8Manifold):
        return (_GRID, int(manifold.seed_word))
    return (_FLOATS, *parameter.shape)


def _content(parameter: Tensor, draws: bool) -> tuple[int, ...]:
    """Words of the values and the gradient of what has no seed that is sure to be its own."""
    if isinstance(parameter, FP8Tensor) or not (draws or isinstance(own_manifold(parameter), FP8Manifold)):
        return ()
    assert parameter.grad is not None
    values = parameter.detach().as_subclass(Tensor)
    return content_word(values, _VALUES), content_word(parameter.grad.detach(), _GRADIENT)


@eager_only
def content_word(x: Tensor, key: tuple[int, int, int]) -> int:
    """``sum(bits_i r_i) mod 2^64`` over all elements, with ``r`` drawn by position: that of parts is their sum.

    Args:
        x: float tensor of any shape; positions count in row-major order.
        key: of ``r``.
    """
    total = 0
    flat = x.reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    for start in range(0, bits.numel(), BLOCK):
        part = bits[start : start + BLOCK].to(torch.int64)
        words = word_range(start, part.numel(), key, x.device).to(torch.int64)
        total += int((part * words).sum())
    return total % 2**64
