"""Running averages in 16 and 8 bits.

Their rounding is unbiased, and Muon's momentum in fitted blocks is compared with its
definition, one value at a time.
"""

import copy
from fractions import Fraction

import numpy as np
import pytest
import torch
from optimizer_cases import normal, step_from, stored_weight
from paths import PATHS, on_path
from scalar_grid import Codes, exponent_of, f32

import fp8manifold as fm
from fp8manifold.optim import StiffnessMuon
from fp8manifold.optim._eager_step import _root_codes, _to_bfloat16
from fp8manifold.optim._spec import MOMENT_FORMAT, MOMENTUM_FORMAT
from fp8manifold.random_bits import word_range

DRAWS = torch.arange(1 << 16, dtype=torch.int32)


@pytest.mark.parametrize("x", [1.00001, -3.14159, 1e-30, -7e20, 2.0**-126, 255.99999, 0.0])
def test_bfloat16_is_unbiased_over_all_draws(x):
    """Exactly: the mean over all 2^16 draws is the value."""
    value = torch.tensor(x)
    rounded = _to_bfloat16(value.expand(len(DRAWS)).contiguous(), DRAWS).double()
    assert rounded.mean().item() == value.double().item()
    assert len(rounded.unique()) == (1 if value.bfloat16() == value else 2)


@pytest.mark.parametrize(
    "root", [1.03, 100.7, 15.96875, 2.0**-9, 1.5 * 2.0**-9, 6.01 * 2.0**-9, 447.9, 500.0]
)
def test_roots_of_roots_are_unbiased(root):
    """Over evenly spaced draws, the mean of the roots of the codes is the root's root.

    In units of the scale: to 2^-13 of the distance between its neighbours, and to 2^-10
    in the lowest binade, which has fewer than eight spacings.
    """
    draws = (DRAWS << 8) + 128
    codes = _root_codes(torch.full((len(DRAWS),), root), torch.tensor(1.0), draws)
    rounded = fm.decode(codes, MOMENT_FORMAT).double()
    roots = rounded.sqrt()
    expected = min(torch.tensor(root).double().item(), MOMENT_FORMAT.max) ** 0.5
    share = 2.0**-13 if root >= MOMENT_FORMAT.min_normal else 2.0**-10
    tolerance = share * (roots.max() - roots.min()).item() + 2.0**-22 * expected
    assert abs(roots.mean().item() - expected) <= tolerance
    is_a_code = rounded.max().item() == root or root > MOMENT_FORMAT.max
    assert len(rounded.unique()) == (1 if is_a_code else 2)
    if rounded.min() > 0:
        assert rounded.mean() >= min(root, MOMENT_FORMAT.max)


@pytest.mark.parametrize("draw", [0, 1, 0xFFFFFF])
def test_a_root_of_a_code_stays(draw):
    codes = torch.arange(MOMENT_FORMAT.max_code + 1, dtype=torch.int32)
    draws, scale = torch.full_like(codes, draw), torch.tensor(1.0)
    values = fm.decode(codes.to(torch.uint8), MOMENT_FORMAT)
    assert torch.equal(_root_codes(values, scale, draws).int(), codes)


@pytest.mark.parametrize("draw", [0, 1, 0xFFFFFF])
@pytest.mark.parametrize("tiny", [2.0**-10, 1e-30, 2.0**-149])
def test_no_root_but_0_becomes_0(draw, tiny):
    """Below the smallest code an average is overstated: steps are divided by it."""
    values = torch.full((MOMENT_FORMAT.max_code + 1,), tiny)
    draws = torch.full(values.shape, draw, dtype=torch.int32)
    assert (_root_codes(values, torch.tensor(1.0), draws) == 1).all()


E2M5 = Codes(MOMENTUM_FORMAT)
MU = 0.95


class Slow:
    """The momentum of one matrix, a value at a time.

    It consists of codes and the largest magnitude of each block. Its draws are
    independent, whatever those of the weights are.
    """

    def __init__(self, count, block, momentum, words):
        self.codes, self.largest = [0] * count, [f32(0)] * (count // block)
        self.block, self.words, self.steps = block, words, 0
        self.decay, self.gain = f32(momentum), f32(1 - momentum)

    def scale(self, block):
        """Return the smallest normal power of two that puts the largest within 7.875."""
        largest = float(self.largest[block])
        exponent = exponent_of(largest) - 2 if largest >= 2.0**-126 else -126
        if Fraction(largest) > Fraction(63, 8) * Fraction(2) ** exponent:
            exponent += 1
        return 2.0 ** max(exponent, -126)

    def step(self, gradient):
        self.steps += 1
        seed, stream = self.words
        words = word_range(0, len(self.codes), (seed, self.steps, stream, 1), "cpu").tolist()
        new = []
        for i, (code, g) in enumerate(zip(self.codes, gradient, strict=True)):
            value = f32(f32(E2M5.value(E2M5.signed(code))) * f32(self.scale(i // self.block)))
            value = f32(-0.0) if code == MOMENTUM_FORMAT.sign_bit else value
            new.append(f32(f32(value * self.decay) + f32(f32(g) * self.gain)))
        for b in range(len(self.largest)):
            self.largest[b] = max(abs(x) for x in new[b * self.block : (b + 1) * self.block])
        for i, (x, word) in enumerate(zip(new, words, strict=True)):
            scaled = Fraction(float(x)) / Fraction(self.scale(i // self.block))
            self.codes[i] = E2M5.code(
                E2M5.round(float(scaled), word % 2**32 >> 8), bool(np.signbit(x))
            )


def gradient(shape, step):
    """Values over some binades, both zeros, and rows of zeros, tiny and huge values."""
    g = normal(*shape, seed=100 + step) * torch.exp2(normal(*shape, seed=200 + step).mul(3).round())
    g.view(-1)[step::7] = 0.0
    g.view(-1)[step::11] = -0.0
    g[1] = 0.0 if step != 2 else 1e-42
    g[2] *= 1e15 if step == 1 else 1.0
    return g


SHAPES = ((3, 14, 14), (4, 300, 150), (3, 1301, 1301), (3, 512, 256))


@pytest.mark.parametrize("draws", ["independent", "dither"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
def test_codes_and_largest_are_those_of_the_definition(rows, columns, block, path, draws):
    weight = stored_weight(shape=(rows, columns))
    optimizer = on_path(
        path, StiffnessMuon([weight], 0.01, momentum=MU, seed=5, moments="8bit", draws=draws)
    )
    slow = None
    for t in range(4):
        step_from(optimizer, weight, gradient((rows, columns), t))
        state = optimizer.state[weight]
        slow = slow or Slow(rows * columns, block, MU, (5, state["stream"]))
        slow.step(weight.grad.view(-1).tolist())
        assert state["momentum_buffer"].view(-1).tolist() == slow.codes, t
        assert state["avg_largest"].view(-1).tolist() == [float(x) for x in slow.largest], t


@pytest.mark.parametrize(
    ("kind", "average", "bound"),
    [
        ("StiffnessMuon", "momentum_buffer", "avg_largest"),
        ("StiffnessAdamW", "exp_avg_sq", "sq_bound"),
    ],
)
def test_an_average_without_the_bound_of_its_blocks_is_refused(kind, average, bound):
    weight = stored_weight(shape=(4, 64))
    optimizer = getattr(fm.optim, kind)([weight], 0.01, moments="8bit")
    step_from(optimizer, weight, normal(4, 64, seed=1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0][bound]
    with pytest.raises(ValueError, match=f"{average} in 8 bits without {bound}"):
        optimizer.load_state_dict(saved)
