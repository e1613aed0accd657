"""Counter-based random bits: a pure function of (seed, step, stream, element index).

There is no state anywhere. The bits of an element are a hash of its position under a key,
so they are the same in any order, on any device and however a tensor is cut up::

    key words     seed, step, stream, high half of the position
                      | SplitMix64, once for a whole tensor
    round keys    k1, k2, k3                                        32 bits each

    position      low half of it + k1                               32 bits
                      | x ^= x >> 17,  x *= ED5AD4BB,  x += k2
                      | x ^= x >> 11,  x *= AC4C1B51,  x += k3
                      | x ^= x >> 15,  x *= 31848BAB
    word          32 bits, all arithmetic modulo 2^32
    draw          its top 24 bits: as many as a float32 holds exactly

torch has no unsigned shifts, so words are int32 tensors: a right shift copies the sign, and
a mask clears the copies.
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
from fp8manifold._interface import HASH_MULTIPLIERS, HASH_SHIFTS, KEYS

__all__ = ["RANDOM_BITS", "random_bits"]

#: Number of random bits in a draw: as many as a float32 holds exactly.
RANDOM_BITS: Final = 24
_MASK_64: Final = 2**64 - 1
# 2^64 over the golden ratio, the increment of SplitMix64
_GOLDEN_64: Final = 0x9E3779B97F4A7C15
KEY_WORDS: Final = len(KEYS.fields)
"""Words of the keys of one kind of draws: round keys, and a phase after them."""
ROUND_KEYS: Final = slice(0, KEYS.word("phase"))
"""Positions of the round keys among these words."""
Words = tuple[int, ...]
#: The relation of one element's draws in successive steps.
Draws = Literal["independent", "dither"]
#: Steps after which dithered draws take new phases.
EPOCH: Final = 256
# 2^32 over the golden ratio: multiples of it are spread evenly over the circle of words
_PHASE_STEP: Final = 0x9E3779B9
FOR_MOMENTS, FOR_RESCALING, _FOR_DITHER, FOR_SUMS = 1, 2, 3, 4
"""Fourth key words, of draws that are apart from the independent draws of weights.

They are for moments, for weights whose scale doubles, for dithered draws of weights, which
begin at phases of their own, and for sums of gradients.
"""


class DrawKey(NamedTuple):
    """The key of an array of random words."""

    words: Words
    #: added to each random word; it moves with time
    phase: int = 0


def draw_key(draws: str, seed: int, step: int, stream: int) -> DrawKey:
    """Return the key of one step's draws.

    With ``dither`` the key words are those of an epoch of 256 steps, within which the
    phase advances.
    """
    if draws == "independent":
        return DrawKey((seed, step, stream))
    epoch, step_in_epoch = divmod(step, EPOCH)
    phase = signed_word(_PHASE_STEP * step_in_epoch)
    return DrawKey((seed, epoch, stream, _FOR_DITHER), phase)


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
    r"""Return uniform 24-bit integers that depend only on their key and their position.

    .. math:: r_i = f(\text{seed}, \text{step}, \text{stream}, \text{offset} + i)
              \in \{0, \dots, 2^{24} - 1\}

    The bits are the same eager and compiled, on CPU and GPU, and however a tensor is
    cut into parts. Streams are not shifted copies of one another.

    With ``draws="dither"`` an element's draws begin at a random phase. The golden ratio
    advances the phase in each step, and a new one replaces it after 256 steps:

    .. math:: r_i = \lfloor 2^{-8} (
              f_{32}(\text{seed}, \lfloor \text{step} / 256 \rfloor, \text{stream}, i)
              + \mathtt{9E3779B9}_{16} (\text{step} \bmod 256) \bmod 2^{32}) \rfloor

    Each draw is uniform and independent of other elements and streams, but not of the
    element's earlier draws. Where the rounded value depends on these (the spacing
    changes, or weights decay), weights are pulled towards 0.

    Args:
        shape: shape of the result. Positions count in row-major order.
        seed: key word of a run, ``0 <= seed < 2**64``.
        step: key word of an optimizer's step, in the same range.
        stream: key word of a parameter, in the same range.
        offset: global position of the first element, for a part of a larger tensor.
        device: where the result lives.
        draws: ``independent`` or ``dither``.

    Returns:
        int32 tensor of ``shape``; empty for an empty shape.

    Raises:
        TypeError, ValueError: a key word is not an int, or below 0 or above ``2**64 -
            1``; unknown ``draws``.

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
    numel = math.prod(shape)
    key = draw_key(draws, seed, step, stream)
    if not runs_in_blocks(device, numel):
        return draw_range(offset, numel, key, device).view(shape)
    parts = []
    for start in range(0, numel, BLOCK):
        length = min(BLOCK, numel - start)
        parts.append(draw_range(offset + start, length, key, device))
    return torch.cat(parts).view(shape)


def check_words(**words: int) -> None:
    """Raise TypeError or ValueError for a key word that is no int of 64 bits."""
    for name, word in words.items():
        check_int(name, word, 0, _MASK_64)


def draw_range(offset: int, numel: int, key: DrawKey, device: torch.device | str | None) -> Tensor:
    """Return the draws at positions ``offset .. offset + numel``, flat."""
    return word_range(offset, numel, key.words, device, RANDOM_BITS, phase=key.phase)


def draw_of(word: Tensor) -> Tensor:
    """Return the 24-bit draw in a 32-bit random word: its top bits."""
    return (word >> (32 - RANDOM_BITS)) & ((1 << RANDOM_BITS) - 1)


def word_range(
    offset: int,
    numel: int,
    words: Words,
    device: torch.device | str | None,
    bits: int = 32,
    *,
    phase: int = 0,
) -> Tensor:
    """Return random words at positions ``offset .. offset + numel``, flat.

    Each is the upper ``bits`` (24 or 32) of a sum modulo 2^32, of a word and ``phase``.
    """
    high, low = divmod(offset, 2**32)
    if low + numel > 2**32:
        # The high half of the position changes on the way, and the round keys with it.
        rest = 2**32 - low
        lower = word_range(offset, rest, words, device, bits, phase=phase)
        upper = word_range(offset + rest, numel - rest, words, device, bits, phase=phase)
        return torch.cat([lower, upper])
    first, second, third = round_keys(words, high)
    x = _positions(numel, device) + signed_word(first + low)
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        word = mix(x, second, third) + phase
        return word if bits == 32 else draw_of(word)
    # NumPy has the unsigned shifts that torch lacks, and works on the same memory.
    unsigned = x.numpy().view(np.uint32)
    _mix_unsigned(unsigned, np.uint32(second % 2**32), np.uint32(third % 2**32))
    if phase:
        np.add(unsigned, np.uint32(phase % 2**32), out=unsigned)
    if bits < 32:
        np.right_shift(unsigned, np.uint32(32 - bits), out=unsigned)
    return x


def words_at(positions: Tensor, words: Words) -> Tensor:
    """Return the random words (int32) at any positions (int64), in their shape."""
    random_words = torch.empty_like(positions, dtype=torch.int32)
    if not random_words.numel():
        return random_words
    high_halves = positions >> 32
    # One value, except in tensors of over 2^32 elements.
    for high in range(int(high_halves.min()), int(high_halves.max()) + 1):
        first, second, third = round_keys(words, high)
        low = (positions + first % 2**32) & (2**32 - 1)
        signed = torch.where(low < 2**31, low, low - 2**32).to(torch.int32)
        random_words = torch.where(high_halves == high, mix(signed, second, third), random_words)
    return random_words


def mix(x: Tensor, second: int | Tensor, third: int | Tensor) -> Tensor:
    """Return ``x`` after three keyed rounds of xorshift and multiplication.

    The first round key has been added to ``x`` already.
    """
    for key, shift, multiplier in zip(
        (None, second, third), HASH_SHIFTS, HASH_MULTIPLIERS, strict=True
    ):
        if key is not None:
            x = x + key
        # An unsigned shift: the mask clears the copies of the sign.
        folded = (x >> shift) & ((1 << (32 - shift)) - 1)
        x = (x ^ folded) * signed_word(multiplier)
    return x


def _mix_unsigned(x: NDArray[np.uint32], second: np.uint32, third: np.uint32) -> None:
    """Apply :func:`mix` in place on the CPU, in half the time."""
    folded = np.empty_like(x)
    for key, shift, multiplier in zip(
        (None, second, third), HASH_SHIFTS, HASH_MULTIPLIERS, strict=True
    ):
        if key is not None:
            np.add(x, key, out=x)
        np.right_shift(x, np.uint32(shift), out=folded)
        np.bitwise_xor(x, folded, out=x)
        np.multiply(x, np.uint32(multiplier), out=x)


# Traced big integers would overflow.
@eager_only
def round_keys(words: Words, high: int) -> tuple[int, int, int]:
    """Return three signed 32-bit round keys.

    They depend on the key words and on the high half of a 64-bit position.
    """
    # The parameters of a step share seed and step, whose hash is cached.
    mixed = _hash_of_words(words[:2])
    for word in (*words[2:], high):
        mixed = _mix64(mixed ^ word)
    return signed_word(mixed), signed_word(mixed >> 32), signed_word(_mix64(mixed))


def round_key_rows(
    prefixes: Sequence[Words], streams: NDArray[np.uint64], *further_words: int
) -> NDArray[np.int32]:
    """Return the round keys of many parameters at position 0, one row for each.

    A parameter's key words are its prefix (seed, step), its stream and the further
    words.
    """
    hashes = {words: _hash_of_words(words) for words in set(prefixes)}
    mixed = np.array([hashes[words] for words in prefixes], dtype=np.uint64)
    for word in (streams, *further_words, 0):
        mixed = _mix64(np.bitwise_xor(mixed, np.asarray(word, dtype=np.uint64)))
    first = mixed.astype(np.uint32)
    second = (mixed >> np.uint64(32)).astype(np.uint32)
    third = _mix64(mixed).astype(np.uint32)
    return np.stack([first, second, third], axis=1).view(np.int32)


class StepKeys:
    """The keys of many parameters' draws, which are new in every step.

    Args:
        seeds: the seed of each.
        streams: the stream of each.
        draws: how the draws of each weight follow each other, independent or dithered.
        with_moments: the positions of those whose moments are rounded at random. A moment
            forgets, so with dither earlier draws would enter its odds: its draws are
            always independent.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        streams: Sequence[int],
        draws: Sequence[str],
        with_moments: Sequence[int],
    ) -> None:
        self._seeds = seeds
        self._streams = np.array(streams, dtype=np.uint64)
        self._with_moments = list(with_moments)
        self._positions_by_draws: dict[str, list[int]] = {}
        for i, kind in enumerate(draws):
            self._positions_by_draws.setdefault(kind, []).append(i)

    def rows(self, steps: Sequence[int]) -> NDArray[np.int32]:
        """Return the keys of a step, as records of native code and of kernels have them.

        A row has three round keys and a phase for the draws of weights, and the same for
        those of moments.

        Args:
            steps: the number of the step of each parameter, from 1.
        """
        rows = np.zeros((len(steps), 2 * KEY_WORDS), dtype=np.int32)
        prefixes = list(zip(self._seeds, steps, strict=True))
        for draws, positions in self._positions_by_draws.items():
            # One key for each (seed, step), made for stream 0. Its words are seed, step, 0;
            # with dither seed, epoch, 0, a word. The streams take the place of the 0.
            key_by_prefix = {}
            keys = []
            for i in positions:
                prefix = prefixes[i]
                if prefix not in key_by_prefix:
                    key_by_prefix[prefix] = draw_key(draws, *prefix, 0)
                keys.append(key_by_prefix[prefix])
            seeds_and_epochs: list[tuple[int, ...]] = [key.words[:2] for key in keys]
            further_words = keys[0].words[3:]
            rows[positions, ROUND_KEYS] = round_key_rows(
                seeds_and_epochs, self._streams[positions], *further_words
            )
            rows[positions, ROUND_KEYS.stop] = [key.phase for key in keys]
        moments = self._with_moments
        if moments:
            of_moments = rows[:, KEY_WORDS:]
            of_moments[moments, ROUND_KEYS] = round_key_rows(
                [prefixes[i] for i in moments], self._streams[moments], FOR_MOMENTS
            )
        return rows


@lru_cache(maxsize=64)
def _hash_of_words(words: Words) -> int:
    mixed = 0
    for word in words:
        mixed = _mix64(mixed ^ word)
    return mixed


def _positions(numel: int, device: torch.device | str | None) -> Tensor:
    """Return ``0 .. numel`` as int32, which must not be written to."""
    if numel <= BLOCK and not torch.compiler.is_compiling():
        return _block_positions(torch.device(device if device is not None else "cpu"))[:numel]
    return torch.arange(numel, dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def _block_positions(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device)


def _mix64(word: Any) -> Any:
    """Return SplitMix64's hash of a number, or of an array of uint64."""
    word = (word + _GOLDEN_64) & _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)


def mixed_word(*words: int) -> int:
    """Return the hash of several words in 63 bits, by the hash of key words."""
    return _hash_of_words(tuple(word & _MASK_64 for word in words)) >> 1


@lru_cache(maxsize=256)
def named_word(name: str) -> int:
    """Return the hash of a name, a word of 63 bits."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fresh_seed() -> int:
    """Return a seed from torch's default generator.

    It is another one at every call, and the same ones again after ``manual_seed``.
    """
    with _disable_current_modes():
        return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))


def signed_word(word: int) -> int:
    """Return the low 32 bits as a signed integer, the only kind int32 tensors take."""
    return ((word + 2**31) % 2**32) - 2**31
