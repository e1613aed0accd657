"""One number of a whole state, whichever processes hold its rows: what a file has lost is seen when it is read."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._ranks import ALONE, Ranks, Share, share_of
from fp8manifold.tensor import FP8Tensor

__all__ = ["NAME", "check_digest", "digest"]

NAME: Final = "digest"
"""The key under which a state keeps its own."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: odd numbers of 64 bits (the golden ratio's, and those of SplitMix64), as signed ones
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BLOCK: Final = 2**20


@torch.no_grad()
def digest(state: Mapping[str, Any]) -> Tensor:
    """Give one number of everything in a state: names, shapes, dtypes, every bit of every tensor, and its place.

    .. math:: \\sum_{name} \\sum_i \\mathrm{mix}(key_{name}, i, bits_i) \\bmod 2^{64}

    A sum over elements is the same however rows are divided among processes, so that what two processes have saved is
    checked by one or three.  Save it with the state; ``torch.distributed.checkpoint`` has no checksums of its own, and
    reads a flipped bit as a number.  It tells damage, not forgery.  Of an :class:`~fp8manifold.FP8Tensor` codes,
    scales and the counter count, and not the seed; of NaN and -0 the bits; empty tensors count by their name.
    Residuals of two or four bits are packed otherwise in rows than in one process, where the digest is another one.

    Args:
        state: nested dicts and lists of tensors, DTensors of rows, numbers, strings and None, as ``get_state_dict``
            gives them; an entry ``digest`` on top is left out.  All processes have to ask, of the same names.

    Returns:
        int64 of shape ``()``, the same in every process.

    Raises:
        TypeError: something else in the state.

    Example:
        >>> state = {"model": {"w": torch.arange(4.0)}}
        >>> state["digest"] = digest(state)
        >>> check_digest(state)
        >>> state["model"]["w"][1] = 1.5
        >>> check_digest(state)
        Traceback (most recent call last):
        RuntimeError: the state is not the one whose digest was saved: what was read is damaged, or incomplete

    Source: sums of mixed words are the multiset hashes of Clarke et al. 2003; the mixing is SplitMix64's (Steele et
    al. 2014).
    """
    found = [(name, value) for name, value in _leaves(state, "") if name != NAME]
    shares = [share for _, value in found if (share := _share(value)) is not None]
    ranks: Ranks = shares[0].ranks if shares else ALONE
    total = torch.zeros((), dtype=torch.int64, device=shares[0].local.device if shares else "cpu")
    for name, value in found:
        total += _word(name, value, ranks).to(total.device)
    return ranks.total(total)


def check_digest(state: Mapping[str, Any]) -> None:
    """Raise, in every process, unless a state is the one whose :func:`digest` it has under ``digest``.

    Args:
        state: as in :func:`digest`, after ``dcp.load``.

    Raises:
        RuntimeError: it is not.
        TypeError: as :func:`digest`.
        ValueError: it has none.

    Example:
        >>> state = {"step": 3}
        >>> check_digest(state | {"digest": digest(state)})
    """
    if not isinstance(state.get(NAME), Tensor):
        raise ValueError(
            "the state has no digest: save state['digest'] = fp8manifold.distributed.digest(state) with it"
        )
    differs = int(state[NAME]) != int(digest(state))
    share = next((share for _, value in _leaves(state, "") if (share := _share(value)) is not None), None)
    if share is not None:
        differs = share.ranks.any(differs, share.local.device)
    if differs:
        raise RuntimeError("the state is not the one whose digest was saved: what was read is damaged, or incomplete")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no container, by its path."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{name}/{i}")
    else:
        yield name, value


def _share(value: Any) -> Share | None:
    """The own rows of a tensor that is spread by rows; None of one that is whole in every process."""
    share = share_of(value) if isinstance(value, Tensor) else None
    return share if share is not None and share.placements[0].is_shard(0) else None


def _word(name: str, value: Any, ranks: Ranks) -> Tensor:
    """The sum over what is held here; of what every process holds it is the first one's."""
    share, first = _share(value), ranks.rank == 0
    if not isinstance(value, Tensor):
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"state entry {name!r} is of {type(value).__name__}: tensors, numbers and strings count")
        return torch.tensor(_key(name, value) if first else 0)
    held = getattr(value, "_local_tensor", value)
    row = 0 if share is None else min(ranks.rank * share.rows, share.shape[0])
    word = torch.tensor(_key(name, tuple(value.shape), value.dtype) if first else 0)
    for part, tensor, spread in _parts(held, share is not None):
        if spread or first:
            begin = row * tensor.shape[1:].numel() if spread else 0
            word = word + _sum(_key(name, part), tensor, begin).cpu()
    return word


def _parts(held: Tensor, spread: bool) -> Iterator[tuple[str, Tensor, bool]]:
    """Plain tensors by name, and whether each has the rows of its whole."""
    if not isinstance(held, FP8Tensor):
        yield "", held, spread
        return
    yield "codes", held.codes, spread
    yield "scale", held.scale, spread and bool(held.scale.dim())
    yield "counter", held.counter, False


def _key(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little", signed=True)


def _sum(key: int, tensor: Tensor, begin: int) -> Tensor:
    """The sum of one mixed word an element, from an element's place in the whole and its bits."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(begin + start, begin + start + bits.numel(), device=bits.device)
        total += _mixed(_mixed(place * _GOLDEN + key) ^ bits).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; shifts are of unsigned words."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))
