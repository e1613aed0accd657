"""Running averages in 16 and 8 bits: unbiased, without stalling, and within their blocks whatever the gradients do."""

import numpy as np
import torch
from laws import each

import fp8manifold as fm
from fp8manifold.optim._spec import MOMENT_FORMAT
from fp8manifold.optim._step import _root_codes, _to_bfloat16
from fp8manifold.random_bits import word_range

DRAWS = torch.arange(1 << 16, dtype=torch.int32)


@each("x", [1.00001, -3.14159, 1e-30, -7e20, 2.0**-126, 255.99999, 0.0])
def test_bfloat16_is_unbiased_over_all_draws(x: float) -> None:
    """Exactly: of the 2^16 draws, as many round away as there are parts beyond the value below."""
    value = torch.tensor(x)
    kept = _to_bfloat16(value.expand(len(DRAWS)).contiguous(), DRAWS).double()
    assert kept.mean().item() == value.double().item()
    assert len(kept.unique()) == (1 if value.bfloat16() == value else 2)


@each("root", [1.03, 100.7, 15.96875, 2.0**-9, 1.5 * 2.0**-9, 6.01 * 2.0**-9, 447.9, 500.0])
def test_roots_of_roots_are_unbiased(root: float) -> None:
    """In units of their scale, over draws that lie evenly: the root of what is kept has the mean.

    To 2^-13 of what lies between its neighbours; among the fewer than eight spacings of the lowest binade to 2^-10.
    """
    draws = (DRAWS << 8) + 128
    codes = _root_codes(torch.full((len(DRAWS),), root), torch.tensor(1.0), draws)
    kept = fm.decode(codes, MOMENT_FORMAT).double()
    roots = kept.sqrt()
    wanted = min(torch.tensor(root).double().item(), MOMENT_FORMAT.max) ** 0.5
    near = 2.0**-13 if root >= MOMENT_FORMAT.min_normal else 2.0**-10
    assert abs(roots.mean().item() - wanted) <= near * (roots.max() - roots.min()).item() + 2.0**-22 * wanted
    assert len(kept.unique()) == (1 if kept.max().item() == root or root > MOMENT_FORMAT.max else 2)
    if kept.min() > 0:
        assert kept.mean() >= min(root, MOMENT_FORMAT.max)


def test_a_root_of_a_code_stays_and_none_but_0_becomes_0() -> None:
    """Below the smallest code an average is overstated: steps are divided by it."""
    every = torch.arange(MOMENT_FORMAT.max_code + 1, dtype=torch.int32)
    for draw in (0, 1, 0xFFFFFF):
        draws = torch.full_like(every, draw)
        codes = _root_codes(fm.decode(every.to(torch.uint8), MOMENT_FORMAT), torch.tensor(1.0), draws)
        assert torch.equal(codes.int(), every)
        for tiny in (2.0**-10, 1e-30, 2.0**-149):
            assert (_root_codes(torch.full(every.shape, tiny), torch.tensor(1.0), draws) == 1).all()


def test_the_words_halves_are_uniform_and_uncorrelated() -> None:
    """Each average has one half of a 32-bit word: also the eight bits that no weight's draw looks at."""
    n = 1 << 20
    for words in ((0, 1, 0, 1), (2**63, 77, 12, 1)):
        word = word_range(0, n, words, "cpu").numpy().view(np.uint32)
        ones = np.array([np.mean(word >> bit & 1) for bit in range(32)])
        assert abs(2 * ones - 1).max() < 5 / np.sqrt(n)
        low, high = (word & 0xFFFF).astype(float), (word >> 16).astype(float)
        assert abs(np.corrcoef(low, high)[0, 1]) < 5 / np.sqrt(n)
        assert abs(np.corrcoef(low[1:], low[:-1])[0, 1]) < 5 / np.sqrt(n)
        of_weights = word_range(0, n, words[:3], "cpu").numpy().view(np.uint32).astype(float)
        assert abs(np.corrcoef(of_weights, word.astype(float))[0, 1]) < 5 / np.sqrt(n)
