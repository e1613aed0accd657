"""Counter-based random bits: a pure function of (seed, step, stream, element index),
with no state anywhere.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8manifold._base.blocks import BLOCK, runs_in_blocks
from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._base.reading import eager_only

__all__ = ["RANDOM_BITS", "random_bits"]

RANDOM_BITS: Final = 24  #: Number of random bits in a draw: as many as a float32 holds exactly.
_LOW = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (
    0xED5AD4BB,
    0xAC4C1B51,
    0x31848BAB,
)  # triple32, https://github.com/skeeto/hash-prospector
_SHIFTS = (17, 11, 15)
Words = tuple[int, ...]
Draws = Literal[
    "independent", "dither"
]  #: The relation of one element's draws in successive steps.
EPOCH: Final = 256  #: Steps after which dithered draws take new phases.
# 2^32 over the golden ratio: multiples of it are spread evenly over the circle of words
_ADVANCE = 0x9E3779B9
_DITHERED = 3  # a key word, so that the phases of dithered draws differ from independent draws


class Stream(NamedTuple):
    """The key words of random words, and what is added to each word: a phase that moves
    with time.
    """

    words: Words
    phase: int = 0


def stream_of(draws: str, seed: int, step: int, stream: int) -> Stream:
    """The key of one step's draws: its words, or with ``dither`` those of its epoch and
    a phase.
    """
    if draws == "independent":
        return Stream((seed, step, stream))
    epoch, since = divmod(step, EPOCH)
    return Stream((seed, epoch, stream, _DITHERED), signed_word(_ADVANCE * since))


def random_bits(
    shape: Sequence[int] | int,
    *,
    seed: int,
    step: int = 0,
    stream: int = 0,
    offset: int = 0,
    device: torch.device | str | None = None,
    draws: Draws = "independent",
) -> Tensor:
    """Uniform 24-bit integers that depend only on their key and their position.

    .. math:: r_i = f(\\text{seed}, \\text{step}, \\text{stream}, \\text{offset} + i) \\in \\{0, \\dots, 2^{24} - 1\\}

    The bits are the same eager and compiled, on CPU and GPU, and however a tensor is
    cut into parts; streams are not shifted copies of one another.

    With ``draws="dither"`` an element's draws begin at a random phase, which the golden
    ratio advances in each step and a new phase replaces after 256 steps,

    .. math:: r_i = \\lfloor 2^{-8} (f_{32}(\\text{seed}, \\lfloor \\text{step} / 256 \\rfloor, \\text{stream}, i)
              + \\mathtt{9E3779B9}_{16} (\\text{step} \\bmod 256) \\bmod 2^{32}) \\rfloor

    Each draw is uniform and independent of other elements and streams, but not of the
    element's earlier draws: where the rounded value depends on these (the spacing
    changes, or weights decay), weights are pulled towards 0.

    Args:
        shape: shape of the result; positions count in row-major order.
        seed, step, stream: key words of a run, an optimizer's step and a parameter,
            ``0 <= word < 2**64``.
        offset: global position of the first element, for a part of a larger tensor.
        device: where the result lives.
        draws: ``independent`` or ``dither``.

    Returns:
        int32 tensor of ``shape``; empty for an empty shape.

    Raises:
        TypeError, ValueError: a key word is no int, or below 0 or above ``2**64 - 1``;
            unknown ``draws``.

    Example:
        >>> whole = random_bits(6, seed=1, step=2, stream=3)
        >>> part = random_bits(4, seed=1, step=2, stream=3, offset=2)
        >>> torch.equal(whole[2:], part)
        True

    Source: C. Wellons' triple32 hash, keyed; SplitMix64 (Steele, Lea, Flood 2014) for
    the keys; Knuth, The Art of Computer Programming, 6.4, for the golden ratio.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape={shape} has a negative size")
    check_words(seed=seed, step=step, stream=stream, offset=offset)
    check_choice("draws", draws, get_args(Draws))
    numel, key = math.prod(shape), stream_of(draws, seed, step, stream)
    if not runs_in_blocks(device, numel):
        return draw_range(offset, numel, key, device).view(shape)
    starts = range(0, numel, BLOCK)
    parts = [draw_range(offset + start, min(BLOCK, numel - start), key, device) for start in starts]
    return torch.cat(parts).view(shape)


def check_words(**words: int) -> None:
    for name, word in words.items():
        check_int(name, word, 0, _LOW)


def draw_range(offset: int, numel: int, key: Stream, device: torch.device | str | None) -> Tensor:
    """The draws at positions ``offset .. offset + numel``, flat."""
    return word_range(offset, numel, key.words, device, RANDOM_BITS, phase=key.phase)


def draw_of(word: Tensor) -> Tensor:
    """The 24-bit draw in a 32-bit random word: its top bits."""
    return (word >> (32 - RANDOM_BITS)) & (
        (1 << RANDOM_BITS) - 1
    )  # int32 shifts copy the sign: clear it


def word_range(
    offset: int,
    numel: int,
    words: Words,
    device: torch.device | str | None,
    bits: int = 32,
    *,
    phase: int = 0,
) -> Tensor:
    """The upper ``bits`` (24 or 32) of random words plus ``phase`` at positions
    ``offset .. offset + numel``, flat.
    """
    high, low = divmod(offset, 2**32)
    if low + numel > 2**32:
        below, above = 2**32 - low, low + numel - 2**32
        parts = ((offset, below), (offset + below, above))
        return torch.cat([word_range(*part, words, device, bits, phase=phase) for part in parts])
    first, second, third = round_keys(words, high)
    x = _positions(numel, device) + signed_word(first + low)
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        word = mix(x, second, third) + phase
        return word if bits == 32 else draw_of(word)
    unsigned = x.numpy().view(np.uint32)
    _mix_unsigned(unsigned, np.uint32(second % 2**32), np.uint32(third % 2**32))
    if phase:
        np.add(unsigned, np.uint32(phase % 2**32), out=unsigned)
    if bits < 32:
        np.right_shift(unsigned, np.uint32(32 - bits), out=unsigned)
    return x


def words_at(positions: Tensor, words: Words) -> Tensor:
    """The random words at any positions, int64, of one tensor; int32, of the same
    shape.
    """
    x = torch.empty_like(positions, dtype=torch.int32)
    if not x.numel():
        return x
    high = positions >> 32
    for each in range(
        int(high.min()), int(high.max()) + 1
    ):  # one value, except in tensors of over 2^32 elements
        first, second, third = round_keys(words, each)
        low = (positions + first % 2**32) & (2**32 - 1)
        signed = torch.where(low < 2**31, low, low - 2**32).to(torch.int32)
        x = torch.where(high == each, mix(signed, second, third), x)
    return x


def mix(x: Tensor, second: int | Tensor, third: int | Tensor) -> Tensor:
    """Three keyed multiply-xorshift rounds; the first key is in ``x`` already."""
    for key, shift, multiplier in zip((None, second, third), _SHIFTS, _MULTIPLIERS, strict=True):
        if key is not None:
            x = x + key
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * signed_word(multiplier)
    return x


def _mix_unsigned(x: NDArray[np.uint32], second: np.uint32, third: np.uint32) -> None:
    """:func:`mix` in place on the CPU, where NumPy has the unsigned shifts that torch lacks: half the time."""
    folded = np.empty_like(x)
    for key, shift, multiplier in zip((None, second, third), _SHIFTS, _MULTIPLIERS, strict=True):
        if key is not None:
            np.add(x, key, out=x)
        np.right_shift(x, np.uint32(shift), out=folded)
        np.bitwise_xor(x, folded, out=x)
        np.multiply(x, np.uint32(multiplier), out=x)


@eager_only  # traced big integers would overflow
def round_keys(words: tuple[int, ...], high: int) -> tuple[int, int, int]:
    """Three signed 32-bit round keys from the key words and the high half of a 64-bit
    position.
    """
    mixed = _prefix(words[:2])  # a step's parameters share seed and step
    for word in (*words[2:], high):
        mixed = _mix64(mixed ^ word)
    return signed_word(mixed), signed_word(mixed >> 32), signed_word(_mix64(mixed))


def round_key_rows(
    prefixes: Sequence[Words], streams: NDArray[np.uint64], *more: int
) -> NDArray[np.int32]:
    """:func:`round_keys` of many words (seed, step, stream, ``*more``) at position 0: one row of three keys each."""
    known = {words: _prefix(words) for words in set(prefixes)}
    mixed = np.array([known[words] for words in prefixes], dtype=np.uint64)
    for word in (streams, *more, 0):
        mixed = _mix64(np.bitwise_xor(mixed, np.asarray(word, dtype=np.uint64)))
    low, high = _mix64(mixed).astype(np.uint32), (mixed >> np.uint64(32)).astype(np.uint32)
    return np.stack([mixed.astype(np.uint32), high, low], axis=1).view(np.int32)


@lru_cache(maxsize=64)
def _prefix(words: tuple[int, ...]) -> int:
    mixed = 0
    for word in words:
        mixed = _mix64(mixed ^ word)
    return mixed


def _positions(numel: int, device: torch.device | str | None) -> Tensor:
    if numel <= BLOCK and not torch.compiler.is_compiling():
        return _block_positions(torch.device(device if device is not None else "cpu"))[:numel]
    return torch.arange(numel, dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def _block_positions(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device)


def _mix64(word: Any) -> Any:
    """SplitMix64's mixing of a number, or of an array of uint64."""
    word = (word + _GOLDEN) & _LOW
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _LOW
    return word ^ (word >> 31)


def mixed_word(*words: int) -> int:
    """One word of 63 bits from several: each is mixed by itself, as in the key
    schedule.
    """
    return _prefix(tuple(word & _LOW for word in words)) >> 1


@lru_cache(maxsize=256)
def named_word(name: str) -> int:
    """The word that a name stands for, 63 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def fresh_seed() -> int:
    """A seed from torch's default generator: another one at every call, the same again
    after ``manual_seed``.
    """
    with _disable_current_modes():
        return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))


def signed_word(word: int) -> int:
    """The low 32 bits as a signed integer, the only kind int32 tensors take."""
    return ((word + 2**31) % 2**32) - 2**31
