"""The best mixture of formats in a budget of bytes, beside all mixtures there are."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_bench.evaluation.budget import best_mixture, bytes_within


def loss_of(choices, formats):
    """The sum of the losses of some formats, and that of their bytes."""
    chosen = [
        next(choice for choice in choices[name] if choice[0] == formats[name]) for name in choices
    ]
    return sum(loss for _, loss, _ in chosen), sum(size for _, _, size in chosen)


def least_loss(choices, budget):
    """The least loss of all mixtures that fit into the budget; None without any."""
    losses = []
    for mixture in itertools.product(*choices.values()):
        if sum(size for _, _, size in mixture) <= budget:
            losses.append(sum(loss for _, loss, _ in mixture))
    return min(losses, default=None)


#: losses of which many are alike, and others; bytes of one size, and of very different
LOSSES = st.integers(-4, 8).map(lambda eighths: eighths / 8) | st.floats(-1, 1, width=32)
BYTES = st.integers(-3, 3) | st.integers(-(10**10), 10**10)
PATTERNS = st.lists(st.lists(st.tuples(LOSSES, BYTES), min_size=1, max_size=4), max_size=5)


@settings(max_examples=300, deadline=None)
@given(patterns=PATTERNS, spare=st.integers(-2, 12), share=st.floats(0, 1))
def test_no_mixture_is_better(patterns, spare, share):
    choices = {
        f"pattern {number}": [(f"format {place}", *pair) for place, pair in enumerate(pairs)]
        for number, pairs in enumerate(patterns)
    }
    least = sum(min(size for _, _, size in pattern) for pattern in choices.values())
    largest = sum(max(size for _, _, size in pattern) for pattern in choices.values())
    budget = least + int(share * (largest - least)) + spare
    mixture, best = best_mixture(choices, budget), least_loss(choices, budget)
    if best is None:
        assert mixture is None
    else:
        loss, size = loss_of(choices, mixture)
        assert size <= budget
        assert loss == pytest.approx(best, abs=1e-12)


def test_a_budget_is_used_to_its_last_byte():
    choices = {name: [("E2M1", 1.0, 1), ("E4M3", 0.0, 2)] for name in "abc"}
    assert best_mixture(choices, 6) == dict.fromkeys("abc", "E4M3")
    assert list(best_mixture(choices, 5).values()).count("E2M1") == 1
    assert best_mixture(choices, 2) is None


def test_a_large_model_takes_a_moment():
    source = random.Random(0)
    kinds = {"q": 2**24, "k": 2**22, "v": 2**22, "o": 2**24, "gate": 7 * 2**23, "down": 7 * 2**23}
    choices = {}
    for block, (kind, size) in itertools.product(range(80), kinds.items()):
        formats = [("none", 0.0, 4 * size)]
        for number in range(8):
            loss = abs(source.gauss(0, 1e-3))
            formats.append((f"format {number}", loss, size + 2**14 * number))
        choices[f"blocks.{block}.{kind}"] = formats
    start = time.perf_counter()
    mixture = best_mixture(choices, 2 * 80 * sum(kinds.values()))
    assert 0 < list(mixture.values()).count("none") < len(mixture)
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("parameters", [3, 100, 134_515_008])
@pytest.mark.parametrize(("whole", "rest"), [(0, 1), (0, 57), (1, 1), (2, -1), (3, 7)])
def test_bytes_per_parameter_of_a_mixture_are_a_budget_for_it(parameters, whole, rest):
    size = whole * parameters + rest
    assert bytes_within(size / parameters, parameters) == size
