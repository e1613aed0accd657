"""The counter-based random bits: uniform, uncorrelated along every coordinate, and a function of the key alone."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from laws import each
from numpy.typing import NDArray
from torch._dynamo.testing import CompileCounterWithBackend

import fp8manifold as fm

N = 1 << 20
BITS = 24
RANGE = 1 << BITS
BITS_OF_BYTES = np.arange(256)[:, None] >> np.arange(8) & 1
#: |correlation| of n independent pairs is below this but for one case in 16,000. All inputs are fixed.
BOUND = 4 / math.sqrt(N)
WORDS = ("seed", "step", "stream")
KEYS = [
    {"seed": 0},
    {"seed": 1},
    {"seed": 2**63 + 11, "step": 3, "stream": 2},
    {"seed": 123, "step": 99_999, "stream": 147, "offset": 2**32 - N // 2},
    {"seed": 7, "step": 2**40, "stream": 2**35, "offset": 2**50 + 3},
]
LAGS = (1, 2, 3, 4, 7, 8, 16, 31, 64, 127, 128, 129, 256, 512, 768, 1000, 1024, 4096, 65535, 65536, 131072)
every_key = each("key", KEYS, ids=str)


def draws(n: int = N, **key: int) -> NDArray[np.int64]:
    return fm.random_bits((n,), **{"seed": 0, **key}).numpy().astype(np.int64)


def correlation(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    mean, variance = (RANGE - 1) / 2, (RANGE**2 - 1) / 12
    return float(np.mean((a - mean) * (b - mean)) / variance)


def bit_correlations(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    octets = (a ^ b).astype("<u4").view(np.uint8).reshape(-1, 4)
    counts = [np.bincount(octets[:, i], minlength=256) @ BITS_OF_BYTES for i in range(BITS // 8)]
    return 1 - 2 * np.concatenate(counts) / len(a)


def assert_independent(a: NDArray[np.int64], b: NDArray[np.int64], context: str) -> None:
    bound = 4 / math.sqrt(len(a))
    assert abs(correlation(a, b)) < bound, context
    assert abs(bit_correlations(a, b)).max() < 1.25 * bound, context  # the largest of 24
    expected = len(a) / RANGE
    assert (a == b).sum() <= expected + 6 * math.sqrt(expected) + 4, context


@every_key
def test_bits_of_a_draw_are_uniform_and_independent(key: dict[str, int]) -> None:
    signs = np.stack([1.0 - 2 * (draws(**key) >> bit & 1) for bit in range(BITS)])
    assert abs(signs.mean(1)).max() < 1.25 * BOUND
    correlations = signs @ signs.T / N
    assert abs(correlations - np.eye(BITS)).max() < 1.3 * BOUND  # the largest of 276


@every_key
def test_lags_are_uncorrelated(key: dict[str, int]) -> None:
    x = draws(**key)
    for lag in LAGS:
        assert_independent(x[lag:], x[:-lag], f"lag {lag}")


CHANGES = ((0, 1), (1, 1), (7, 1), (41, 1), (0, 2), (0, 16), (0, 256), (5, 2**16), (3, 2**31), (9, 2**32))
NEIGHBOURS = [({word: value}, {word: value + change}) for word in WORDS for value, change in CHANGES]
NEIGHBOURS += [({"seed": 3, "step": 1}, {"seed": 3, "stream": 1}), ({"seed": 1, "step": 0}, {"seed": 0, "step": 1})]
neighbours = each(("one", "other"), NEIGHBOURS, ids=str)
#: For the tests that compare two streams in many alignments: consecutive keys, and two keys exchanged.
consecutive = each(("one", "other"), NEIGHBOURS[:30:10] + NEIGHBOURS[3:30:10] + NEIGHBOURS[30:], ids=str)


@neighbours
def test_neighbouring_keys_are_uncorrelated(one: dict[str, int], other: dict[str, int]) -> None:
    assert_independent(draws(**one), draws(**other), f"{one} {other}")


@consecutive
def test_one_stream_is_no_shift_of_another(one: dict[str, int], other: dict[str, int]) -> None:
    a, b = draws(**one), draws(**other)
    for shift in (*range(1, 17), *(1 << k for k in range(5, 18))):
        assert_independent(a[shift:], b[:-shift], f"shift {shift}")
        assert_independent(b[shift:], a[:-shift], f"shift -{shift}")


def test_every_bit_of_every_key_word_changes_half_of_the_bits() -> None:
    """Avalanche: one flipped bit of a key or of the high half of the offset flips 12 of 24 bits on average."""
    n = 4096
    base = {"seed": 0x1234_5678_9ABC_DEF0, "step": 20_000, "stream": 37, "offset": 12_345}
    original = draws(n, **base)
    for word, bit in itertools.product(base, range(64)):
        flipped = draws(n, **(base | {word: base[word] ^ (1 << bit)}))
        changed = np.mean([(original ^ flipped) >> k & 1 for k in range(BITS)])
        assert abs(changed - 0.5) < 5 * 0.5 / math.sqrt(n * BITS), (word, bit)


@each("offset", [0, 5, 65_536, 2**32 - 1000, 2**32, 2**32 + 77, 2**53, 2**62])
def test_parts_are_cut_from_the_whole(offset: int) -> None:
    key = {"seed": 8, "step": 4, "stream": 6}
    whole = fm.random_bits((200_000,), **key, offset=offset)
    for start, stop in ((0, 1), (1, 2), (0, 65_536), (65_535, 65_537), (999, 1001), (777, 131_073), (131_072, 200_000)):
        part = fm.random_bits((stop - start,), **key, offset=offset + start)
        assert torch.equal(part, whole[start:stop])


def test_shape_is_row_major() -> None:
    flat = fm.random_bits((24,), seed=3)
    assert torch.equal(fm.random_bits((2, 3, 4), seed=3), flat.reshape(2, 3, 4))
    assert fm.random_bits((), seed=3) == flat[0]
    assert fm.random_bits((0,), seed=3).shape == (0,)
    assert fm.random_bits((3, 0), seed=3).shape == (3, 0)
    assert torch.equal(fm.random_bits(torch.Size([4]), seed=3), flat[:4])


def test_an_answer_is_not_a_view_of_a_cache() -> None:
    first = fm.random_bits((1000,), seed=1)
    kept = first.clone()
    first.zero_()
    assert torch.equal(fm.random_bits((1000,), seed=1), kept)


def test_global_random_state_is_neither_used_nor_changed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = fm.random_bits((1000,), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(999)
    assert torch.equal(fm.random_bits((1000,), seed=1), first)


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_compiled_is_eager(n: int) -> None:
    def draw() -> torch.Tensor:
        return fm.random_bits((n,), seed=42, step=17, stream=5, offset=2**32 - 500)

    assert torch.equal(torch.compile(draw)(), draw())


@pytest.mark.usefixtures("cpp_compiler")
def test_compiled_is_eager_when_the_step_changes() -> None:
    """From the second value on, torch.compile treats the step as a symbol."""

    def draw(step: int) -> torch.Tensor:
        return fm.random_bits((1000,), seed=42, step=step, stream=5)

    compiled = torch.compile(draw)
    for step in (0, 1, 2, 3, 2**33):
        assert torch.equal(compiled(step), draw(step))


@pytest.mark.parametrize(
    "bits", [fm.random_bits, lambda n, seed: fm.round_to_grid(torch.ones(n), "E4M3", "stochastic", seed=seed)]
)
def test_hashing_and_shifting_are_one_graph_when_compiled(bits: Callable[..., torch.Tensor]) -> None:
    """Each graph more is a pass over the tensor more."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    torch.compile(bits, backend=counter)(1000, seed=1)
    shifting = [graph for graph in counter.graphs if any("rshift" in str(node.target) for node in graph.graph.nodes)]
    assert len(shifting) == 1


GOLDEN: list[tuple[dict[str, int], list[int]]] = [
    ({"seed": 0}, [6670574, 10070138, 7652464, 12498536, 6841553, 1862877]),
    ({"seed": 1, "step": 2, "stream": 3}, [8809687, 13808414, 15682877, 16037148, 163626, 15996505]),
    (
        {"seed": 2**64 - 1, "step": 10**6, "stream": 147, "offset": 2**32 - 3},
        [12665533, 7238182, 10391066, 13974059, 3406891, 12186137],
    ),
]


@each(("key", "expected"), GOLDEN, ids=str)
def test_pinned_values(key: dict[str, int], expected: list[int]) -> None:
    """Runs are to be repeated in later releases too: these never change."""
    assert fm.random_bits((len(expected),), **key).tolist() == expected


def test_numpys_rounds_are_torchs() -> None:
    """The CPU's eager path scrambles unsigned words in NumPy; everything else signed ones in torch."""
    from fp8manifold.random_bits import draw_of, mix, round_keys

    first, second, third = round_keys((5, 6, 7), 0)
    index = torch.arange(2**17, dtype=torch.int32)
    assert torch.equal(draw_of(mix(index + first, second, third)), fm.random_bits(2**17, seed=5, step=6, stream=7))
