"""The key word that tells one parameter's random bits from every other's, whichever optimizer steps it."""

from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._native._arrays import content
from fp8manifold._numerics.blocks import block_on
from fp8manifold._numerics.eager import eager_only
from fp8manifold._ranks import local_of, share_of
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._plan import own_manifold
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.tensor import FP8Tensor

__all__ = ["content_word", "new_stream", "twins"]

_SEEDED, _FLOATS = 1, 2
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES: Final = (0x5EED, 0, 0)
_GRADIENT: Final = (0x5EED, 1, 0)


def new_stream(
    parameter: Tensor,
    twin: int,
    state: dict[Tensor, Any],
    begun: int,
    *,
    draws: bool,
    alone: bool,
    values: Tensor | None = None,
) -> int:
    """A stream from what is the parameter's own, 63 bits, which no other parameter of the state has or had.

    What is its own are its first values, and the seed of a one-byte tensor or of a grid's manifold, so that the two
    storages draw the same bits.  Those that share both are told apart by their order in the optimizer, or, without a
    seed and in an optimizer each, by their first gradients: these differ between machines in the last bits, so they
    enter nowhere else.

    Args:
        parameter: with its gradient.
        twin: how many before it share its seed, as :func:`twins` has it.
        state: the optimizer's, with the streams in use.
        begun: how many streams have been given: more than are in use where parameters or states were removed.
        draws: whether random bits are drawn for an ordinary parameter.
        alone: whether it is the optimizer's only parameter.
        values: the first values, where the parameter has others by now.
    """
    used = [entry["stream"] for entry in state.values() if "stream" in entry]
    removed = max(begun - len(used), 0)
    seed = _seed_of(parameter)
    first = parameter if values is None else values
    content = _content(first, parameter.grad if alone and not seed else None) if draws or seed is not None else ()
    words = (*_seed_words(parameter), *content)
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
    seed = _seed_of(parameter)
    return (_FLOATS, *parameter.shape) if seed is None else (_SEEDED, seed)


def _seed_of(parameter: Tensor) -> int | None:
    """The seed of what is rounded to a grid."""
    if isinstance(held := local_of(parameter), FP8Tensor):
        return held.seed
    manifold = own_manifold(parameter)
    return int(manifold.seed_word) if isinstance(manifold, FP8Manifold) else None


def _content(first: Tensor, gradient: Tensor | None) -> tuple[int, ...]:
    """Words of the first values, and of the first gradient."""
    held = local_of(first)
    values = held.dequantize() if isinstance(held, FP8Tensor) else held.detach().as_subclass(Tensor)
    words = (_whole_word(first, values, _VALUES),)
    return words if gradient is None else (*words, _whole_word(first, local_of(gradient.detach()), _GRADIENT))


def _whole_word(parameter: Tensor, held: Tensor, key: tuple[int, int, int]) -> int:
    """:func:`content_word`, of what processes hold together: the sum of theirs."""
    share = share_of(parameter)
    if share is None:
        return content_word(held, key)
    word = content_word(held, key, share.offset)
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word], device=held.device)
    return int(share.ranks.total(signed)) % 2**64


@eager_only
def content_word(x: Tensor, key: tuple[int, int, int], offset: int = 0) -> int:
    """``sum(bits_i r_i) mod 2^64`` over all elements, with ``r`` drawn by position: that of parts is their sum.

    Args:
        x: float tensor of any shape; positions count in row-major order.
        key: of ``r``.
        offset: position of the first element.
    """
    if (native := content(x, key, offset)) is not None:
        return native
    flat = x.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)  # where x is: it is waited for once
    size = block_on(x.device)
    bits = flat.view(_INTEGERS[flat.element_size()])
    for start in range(0, bits.numel(), size):
        part = bits[start : start + size].to(torch.int64)
        words = word_range(offset + start, part.numel(), key, x.device).to(torch.int64)
        total += (part * words).sum()
    return int(total) % 2**64
