"""Streams: key words that give each parameter random bits of its own.

Random bits depend on (seed, step, stream, position). A parameter's stream is chosen once,
at its first step, and is stored in its state. It must not depend on memory, names or the
process: runs that are resumed, sharded or on another device draw the same bits. So it is
made of what is the same everywhere::

    first values of the weight   a sum over all elements, by position (`content_word`)
    its seed                     of one-byte tensors and of grids
    its twin number              tells parameters of the same seed apart, by their order
    streams begun                tells a parameter apart from a removed one

The optimizer calls `new_stream` and `twins` when a state begins; `_adopted.py` does for
states of other optimizers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.scaled import check_current
from fp8manifold._encoded.storage import decode_runs
from fp8manifold._encoded.stored_scale import decoded_scale
from fp8manifold._native._arrays import content
from fp8manifold._ranks import local_of, share_of
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._slot import scales_in_runs, stiffness_manifold_of
from fp8manifold.random_bits import mixed_word, word_range
from fp8manifold.tensor import FP8Tensor

_SEEDED, _FLOATS = 1, 2
"""First words of a parameter with a seed, and of one without."""
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers in which floats of so many bytes are read as bits."""
_VALUES: Final = (0x5EED, 0, 0)
_GRADIENT: Final = (0x5EED, 1, 0)
"""Keys of the numbers that values and gradients are multiplied by, position by position."""


def new_stream(
    parameter: Tensor,
    twin: int,
    state: dict[Tensor, Any],
    streams_begun: int,
    *,
    draws: bool,
    alone: bool,
    values: Tensor | None = None,
) -> int:
    """Return a stream of 63 bits that no other parameter of the state has or had.

    It is made of the parameter's first values, and of the seed of a one-byte tensor or
    of a grid's manifold: both storages draw the same bits. Parameters that share both
    differ by their order in the optimizer. Those without a seed, or with 0, each alone
    in an optimizer, differ by their first gradients, whose last bits differ between
    machines.

    Args:
        parameter: that the stream is for.
        twin: its number among parameters of the same seed, as :func:`twins` counts it.
        state: of all parameters.
        streams_begun: how many streams were given, also to parameters that were removed.
        draws: whether the parameter draws random bits at all.
        alone: whether the optimizer has no other parameter.
        values: the first values, if they have changed since.
    """
    used = [entry["stream"] for entry in state.values() if "stream" in entry]
    seed, words = _seed_of(parameter), _seed_words(parameter)
    if draws or seed is not None:
        first = parameter if values is None else values
        words += (_whole_word(first, local_of(first), _VALUES),)
        # A seed of 0 is the default: nobody has chosen it to draw the same bits again.
        has_chosen_seed = bool(seed)
        if alone and not has_chosen_seed and parameter.grad is not None:
            words += (_whole_word(first, local_of(parameter.grad.detach()), _GRADIENT),)
    removed = max(streams_begun - len(used), 0)
    stream = mixed_word(*words, removed, twin)
    while stream in used:
        twin += 1
        stream = mixed_word(*words, removed, twin)
    return stream


def twins(parameters: Iterable[Tensor]) -> dict[Tensor, int]:
    """Return for each parameter the number of earlier ones with its seed.

    Of ordinary parameters those with the same shape count.
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
    local = local_of(parameter)
    if isinstance(local, FP8Tensor):
        return local.seed
    manifold = stiffness_manifold_of(parameter)
    return int(manifold.seed_word) if isinstance(manifold, FP8Manifold) else None


def _whole_word(parameter: Tensor, local: Tensor, key: tuple[int, int, int]) -> int:
    """Return the sum of :func:`content_word` over all processes that have a part."""
    share = share_of(parameter)
    if share is None:
        return _word_of_pieces(local, key, 0)
    word = _word_of_pieces(local, key, share.offset)
    # torch adds signed integers
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word], device=local.device)
    return int(share.ranks.total(signed)) % 2**64


def _word_of_pieces(local: Tensor, key: tuple[int, int, int], offset: int) -> int:
    """Return :func:`content_word` of a tensor, of which only pieces are decoded."""
    total = 0
    for piece in _values_in_pieces(local):
        total += content_word(piece, key, offset)
        offset += piece.numel()
    return total % 2**64


def _values_in_pieces(local: Tensor) -> Iterator[Tensor]:
    """Yield the values in their order: those of codes some runs at a time."""
    if not isinstance(local, FP8Tensor):
        yield local.detach().as_subclass(Tensor)
        return
    size = block_on(local.device)
    if local.numel() <= size:
        yield local.dequantize()
        return
    check_current(local)
    kept_scale, _ = scales_in_runs(local)
    scale = decoded_scale(kept_scale).flatten()
    codes = local.codes.flatten()
    if len(scale) == 1:
        for piece in codes.split(size):
            yield decode_runs(piece, scale, local.format, local.dtype)
        return
    run_length = len(codes) // len(scale)
    runs = max(size // run_length, 1)
    pieces = codes.split(runs * run_length)
    for piece, some_scales in zip(pieces, scale.split(runs), strict=True):
        yield decode_runs(piece, some_scales, local.format, local.dtype)


@eager_only
def content_word(x: Tensor, key: tuple[int, int, int], offset: int = 0) -> int:
    """Return ``sum(bits_i r_i) mod 2^64`` over all elements, with ``r`` drawn by position.

    The words of parts add up to that of the whole. Every NaN counts as the quiet one,
    because a GPU's arithmetic gives other bits than a CPU's.
    """
    native = content(x, key, offset)
    if native is not None:
        return native
    flat = x.reshape(-1).resolve_neg()
    integer = _INTEGERS[flat.element_size()]
    quiet_nan = int(torch.tensor(torch.nan, dtype=flat.dtype, device="cpu").view(integer))
    # on the GPU of x, so that the host waits once
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    size = block_on(x.device)
    for start in range(0, flat.numel(), size):
        values = flat[start : start + size]
        bits = values.view(integer).masked_fill(values.isnan(), quiet_nan).to(torch.int64)
        words = word_range(offset + start, bits.numel(), key, x.device).to(torch.int64)
        total += (bits * words).sum()
    return int(total) % 2**64
