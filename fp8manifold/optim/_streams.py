"""Streams: key words that give each parameter random bits of its own."""

from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.reading import eager_only
from fp8manifold._native._arrays import content
from fp8manifold._ranks import local_of, share_of
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._slot import stiffness_manifold_of
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.tensor import FP8Tensor

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
    """A stream of 63 bits that no other parameter of the state has or had.

    It is made of the parameter's first values, and of the seed of a one-byte tensor or
    of a grid's manifold: both storages draw the same bits. Parameters that share both
    differ by their order in the optimizer (``twin``, as
    :func:`twins` counts it) or, without a seed and ``alone`` in an optimizer each, by their first gradients, whose last
    bits differ between machines. ``begun`` counts the streams given, also to removed
    parameters; ``values`` are the first values, if they have changed since.
    """
    used = [entry["stream"] for entry in state.values() if "stream" in entry]
    seed, words = _seed_of(parameter), _seed_words(parameter)
    if draws or seed is not None:
        first = parameter if values is None else values
        held = local_of(first)
        floats = (
            held.dequantize() if isinstance(held, FP8Tensor) else held.detach().as_subclass(Tensor)
        )
        words += (_whole_word(first, floats, _VALUES),)
        if alone and not seed and parameter.grad is not None:
            words += (_whole_word(first, local_of(parameter.grad.detach()), _GRADIENT),)
    removed = max(begun - len(used), 0)
    return next(
        stream for i in count(twin) if (stream := mixed_word(*words, removed, i)) not in used
    )


def twins(parameters: Iterable[Tensor]) -> dict[Tensor, int]:
    """For each parameter the number of earlier ones with its seed, or of ordinary ones
    with its shape.
    """
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
    if isinstance(held := local_of(parameter), FP8Tensor):
        return held.seed
    manifold = stiffness_manifold_of(parameter)
    return int(manifold.seed_word) if isinstance(manifold, FP8Manifold) else None


def _whole_word(parameter: Tensor, held: Tensor, key: tuple[int, int, int]) -> int:
    """The sum of :func:`content_word` over all processes that hold a part."""
    share = share_of(parameter)
    if share is None:
        return content_word(held, key)
    word = content_word(held, key, share.offset)
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word], device=held.device)
    return int(share.ranks.total(signed)) % 2**64


@eager_only
def content_word(x: Tensor, key: tuple[int, int, int], offset: int = 0) -> int:
    """``sum(bits_i r_i) mod 2^64`` over all elements, with ``r`` drawn by position: the
    words of parts add up to it.

    Every NaN counts as the quiet one, because a GPU's arithmetic gives other bits than
    a CPU's.
    """
    if (native := content(x, key, offset)) is not None:
        return native
    flat = x.reshape(-1).resolve_neg()
    total = torch.zeros(
        (), dtype=torch.int64, device=x.device
    )  # on the GPU of x, so that the host waits once
    size = block_on(x.device)
    quiet = int(
        torch.tensor(torch.nan, dtype=flat.dtype).view(integer := _INTEGERS[flat.element_size()])
    )
    for start in range(0, flat.numel(), size):
        values = flat[start : start + size]
        part = values.view(integer).masked_fill(values.isnan(), quiet).to(torch.int64)
        words = word_range(offset + start, part.numel(), key, x.device).to(torch.int64)
        total += (part * words).sum()
    return int(total) % 2**64
