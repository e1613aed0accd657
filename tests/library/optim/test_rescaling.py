"""Codes under other scales, by native code and by PyTorch's operations."""

from fractions import Fraction

import pytest
import torch
from grid_inputs import NAMED, ODD
from optimizer_cases import normal

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._native import is_available
from fp8manifold._native._arrays import rescale_by_kernel
from fp8manifold.optim import _rescaling
from fp8manifold.optim._rescaling import rescale_codes
from fp8manifold.optim._slot import scales_in_runs, slot_of
from fp8manifold.random_bits import FOR_RESCALING, DrawKey, random_bits
from fp8manifold.scaling import STORED_GRANULARITIES

pytestmark = pytest.mark.covering(2)

E4M3 = fm.formats.as_format("E4M3")
#: what scales are divided by, in turn; rows under 1 stay
FACTORS = (0.5, 1.0, 2.0**-3, 1.0, 4.0)

every_format = pytest.mark.parametrize("fmt", (NAMED | ODD).values(), ids=NAMED | ODD)
needs_native = pytest.mark.skipif(not is_available(), reason="native code is not built")


def slot_of_any_codes(fmt, granularity="channel", writeback="stochastic"):
    """Return a slot with all codes of a format, NaN and both zeros among them."""
    parameter = fm.FP8Parameter(normal(96, 64, seed=3), fmt, granularity=granularity)
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(2 * fmt.sign_bit, parameter.shape, generator=generator, dtype=torch.uint8)
    parameter.codes.copy_(codes)
    optimizer = fm.optim.StiffnessAdamW([parameter], writeback=writeback)
    residual = torch.randint(-128, 128, parameter.shape, generator=generator, dtype=torch.int8)
    state = {"step": torch.tensor(3), "stream": 11, "residual": residual}
    slot = slot_of(optimizer.param_groups[0], parameter, state)
    slot.spec = optimizer._spec(slot)
    return slot


def new_scales(slot):
    """Return other scales, in runs."""
    scale = slot.parameter.scale
    factors = torch.tensor(FACTORS).repeat(-(-scale.numel() // len(FACTORS)))[: scale.numel()]
    return scales_in_runs(slot.parameter, scale / factors.view(scale.shape))[0]


def rescaled(slot, monkeypatch=None):
    """Return codes and residuals after a rescaling, without native code if patched."""
    if monkeypatch is not None:
        monkeypatch.setattr(_rescaling, "rescale_by_kernel", lambda *_: False)
    rescale_codes(slot, new_scales(slot))
    return slot.parameter.codes, slot.state["residual"]


@needs_native
@every_format
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_native_code_has_the_bits_of_pytorch(fmt, writeback, monkeypatch):
    codes, residuals = rescaled(slot_of_any_codes(fmt, writeback=writeback))
    expected = rescaled(slot_of_any_codes(fmt, writeback=writeback), monkeypatch)
    assert torch.equal(codes, expected[0])
    assert torch.equal(residuals, expected[1])


@needs_native
@pytest.mark.parametrize("granularity", STORED_GRANULARITIES)
def test_native_code_has_the_bits_of_pytorch_under_all_scales(granularity, monkeypatch):
    codes, _ = rescaled(slot_of_any_codes(E4M3, granularity))
    expected, _ = rescaled(slot_of_any_codes(E4M3, granularity), monkeypatch)
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_each_value_goes_to_a_neighbour_by_its_draw(native, monkeypatch):
    slot = slot_of_any_codes(E4M3)
    before = slot.parameter.codes.clone()
    codes, _ = rescaled(slot, None if native else monkeypatch)
    seed, step, stream = slot.draw_words
    key = DrawKey((seed, step, stream, FOR_RESCALING))
    draws = _rescaling.draw_of(
        _rescaling.words_at(torch.arange(before.numel()), key.words)
    ).tolist()
    magnitudes = [reference.magnitude(code, E4M3) for code in range(E4M3.max_code + 1)]
    width = before.shape[1]
    pairs = torch.stack([before.flatten(), codes.flatten()], 1).tolist()
    for place, (old, new) in enumerate(pairs):
        factor = Fraction(FACTORS[place // width % len(FACTORS)])
        magnitude = old & 127
        if factor == 1 or magnitude > E4M3.max_code:
            assert new == old
            continue
        assert new & 128 == old & 128
        target = min(Fraction(magnitudes[magnitude]) * factor, Fraction(magnitudes[-1]))
        below = max(code for code, value in enumerate(magnitudes) if Fraction(value) <= target)
        draw = draws[place] if old < 128 else 2**24 - 1 - draws[place]
        goes_on = False
        if below < E4M3.max_code:
            gap = Fraction(magnitudes[below + 1]) - Fraction(magnitudes[below])
            goes_on = (target - Fraction(magnitudes[below])) / gap > Fraction(draw, 2**24)
        assert new & 127 == below + goes_on


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_take_rows_of_their_own(threads):
    codes = torch.randint(0, 127, (700, 300), dtype=torch.uint8)
    factors = torch.tensor(FACTORS).repeat(140)
    key = DrawKey((1, 2, 3, FOR_RESCALING))
    whole = codes.clone()
    assert rescale_by_kernel(whole, None, E4M3, factors, key, 40)
    parts = codes.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # a shard draws from its first weight's position on
        assert rescale_by_kernel(parts[:200], None, E4M3, factors[:200], key, 40)
        assert rescale_by_kernel(parts[200:], None, E4M3, factors[200:], key, 40 + 200 * 300)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(parts, whole)


@needs_native
def test_the_kernel_leaves_what_it_cannot_serve():
    codes = torch.randint(0, 127, (4, 8), dtype=torch.uint8)
    before = codes.clone()
    factors = torch.full((4,), 0.5)
    key = DrawKey((1, 2, 3, FOR_RESCALING))
    assert not rescale_by_kernel(codes, None, E4M3, factors.double(), key, 0)
    assert not rescale_by_kernel(codes.T, None, E4M3, torch.full((8,), 0.5), key, 0)
    # the high half of a position changes on the way
    assert not rescale_by_kernel(codes, None, E4M3, factors, key, 2**32 - 31)
    assert torch.equal(codes, before)
    version = codes._version
    assert rescale_by_kernel(codes, None, E4M3, factors, key, 2**32 - 32)
    assert codes._version > version


def test_draws_are_not_those_of_a_step():
    words = (1, 2, 3)
    of_step = random_bits(100, seed=1, step=2, stream=3)
    of_rescaling = _rescaling.draw_of(
        _rescaling.words_at(torch.arange(100), (*words, FOR_RESCALING))
    )
    assert not torch.equal(of_step, of_rescaling)
