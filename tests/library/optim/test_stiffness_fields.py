"""The mean of a stiffness field and the share at its bounds, with and without counts."""

import math
from fractions import Fraction

import pytest
import torch
from grid_inputs import NAMED, ODD
from optimizer_cases import normal, step_from

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._base.blocks import BLOCK
from fp8manifold._encoded.exponents import counts_in_pieces, exponent_counts
from fp8manifold._native._arrays import exponents_by_kernel
from fp8manifold._numerics.charts import MetricName
from fp8manifold._numerics.stiffness import Field, bounded_share, reference_stiffness
from fp8manifold.optim import _stiffness_fields
from fp8manifold.optim._slot import slot_of
from fp8manifold.optim._stiffness_fields import stiffness_at_weights, stiffness_field
from fp8manifold.scaling import STORED_GRANULARITIES

pytestmark = pytest.mark.covering(2)

E4M3 = fm.formats.as_format("E4M3")
ALL = NAMED | ODD
#: granularities, and what scales are multiplied by: those of blocks stay powers of two
SCALES = [(granularity, 1.0) for granularity in STORED_GRANULARITIES]
SCALES += [
    (granularity, 1.2345679) for granularity in STORED_GRANULARITIES if granularity != "block"
]

every_format = pytest.mark.parametrize("fmt", ALL.values(), ids=ALL)


def any_codes(fmt, *shape):
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randint(2 * fmt.sign_bit, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 100, BLOCK, 3 * BLOCK + 7])
def test_the_mean_of_a_field_and_the_share_are_those_of_the_whole(count, dtype):
    exponents = torch.randint(-20, 20, (count,), generator=torch.Generator().manual_seed(count))
    x = torch.ldexp(torch.ones(count, dtype=dtype), exponents.to(dtype))
    total = sum(Fraction(value) * int((x == value).sum()) for value in x.unique().tolist())
    mean = float(total / count)
    assert math.isclose(reference_stiffness(Field(x)), mean, rel_tol=2**-52)
    ratio = x / mean
    beyond = ((ratio < 0.1) | (ratio > 16.0)).sum().item()
    assert bounded_share(Field(x), mean, 0.1, 16.0) == beyond / count
    # The last, in the last piece, becomes no power of two.
    added = 0.5 * x[-1].item()
    x[-1] *= 1.5
    assert math.isclose(reference_stiffness(Field(x)), mean + added / count, rel_tol=2**-50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 100, BLOCK + 7])
def test_counts_give_the_bits_of_values_that_are_repeated(count, dtype):
    generator = torch.Generator().manual_seed(count)
    values = torch.rand(count, generator=generator, dtype=dtype) + 2.0**-30
    times = torch.randint(4, (count,), generator=generator)
    times[0] = 3
    counted, whole = Field(values, times), Field(values.repeat_interleave(times))
    mean = reference_stiffness(whole)
    assert reference_stiffness(counted) == mean
    assert bounded_share(counted, mean, 0.4, 1.2) == bounded_share(whole, mean, 0.4, 1.2)
    assert counted.largest() == whole.largest()


def test_the_largest_value_is_one_that_a_weight_has():
    field = Field(torch.tensor([1.0, 5.0]), torch.tensor([2, 0]))
    assert field.largest() == 1.0
    assert Field(torch.tensor([5.0]), torch.tensor([0])).largest() == 0.0


@every_format
@pytest.mark.parametrize(("runs", "length"), [(1, 700), (7, 100), (60, 1), (2, BLOCK + 5)])
def test_codes_are_counted_by_their_exponent_fields(fmt, runs, length):
    codes = any_codes(fmt, runs, length)
    ulps, counts = exponent_counts(codes, fmt, runs)
    expected = torch.zeros(runs, 1 << fmt.exponent_bits, dtype=torch.int64)
    for code in range(2 * fmt.sign_bit):
        field = (code & (fmt.sign_bit - 1)) >> fmt.mantissa_bits
        expected[:, field] += (codes == code).sum(1)
    assert torch.equal(counts, expected)
    assert torch.equal(counts_in_pieces(codes, fmt, runs), expected)
    for field, ulp in enumerate(ulps.tolist()):
        assert ulp == 2.0 ** (max(field, 1) - fmt.bias - fmt.mantissa_bits)


@every_format
def test_spacings_are_those_of_the_reference(fmt):
    ulps = exponent_counts(any_codes(fmt, 4), fmt, 1).ulps
    for code in range(reference.max_code(fmt) + 1):
        gap = reference.magnitude(code + 1, fmt) - reference.magnitude(code, fmt)
        assert ulps[code >> fmt.mantissa_bits].item() == gap


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_count_the_same_codes(threads):
    codes = any_codes(E4M3, 300, 2000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        counts = exponents_by_kernel(codes, E4M3, 300)
    finally:
        torch.set_num_threads(before)
    if counts is None:
        pytest.skip("native code is not built")
    assert torch.equal(counts, counts_in_pieces(codes, E4M3, 300))


def test_strided_codes_are_counted_in_their_order():
    codes = any_codes(E4M3, 300, 20).T
    counts = exponent_counts(codes, E4M3, 20).counts
    assert torch.equal(counts, counts_in_pieces(codes.contiguous(), E4M3, 20))


@every_format
@pytest.mark.parametrize(("granularity", "factor"), SCALES)
def test_a_field_of_codes_has_the_bits_of_one_number_for_each_weight(fmt, granularity, factor):
    slot = slot_of_codes(fmt, granularity, factor)
    counted = stiffness_field(slot, MetricName.ULP)
    whole = Field(stiffness_at_weights(slot, MetricName.ULP))
    # the 384 weights of a row are too few for 2^7 fields, and the 32 of a block for 2^4 or more
    length = slot.weight.numel() // slot.scale.numel()
    assert (counted.counts is not None) == (length >= 4 << fmt.exponent_bits)
    mean = reference_stiffness(whole)
    assert reference_stiffness(counted) == mean
    assert counted.largest() == whole.largest()
    for damping, clip in ((0.9, 1.1), (0.5, 2.0), (2.0**-8, 16.0)):
        share = bounded_share(whole, mean, damping, clip)
        assert bounded_share(counted, mean, damping, clip) == share


@pytest.mark.parametrize("factor", [1.0, 1.2345679])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "square"])
def test_a_riemannian_step_counts_its_bounds_by_the_scale_of_each_value(granularity, factor):
    """The share is that of chart lengths in units of the scale's mantissa."""
    shares = []
    for counts in (True, False):
        slot = slot_of_codes(E4M3, granularity, factor)
        optimizer = fm.optim.RiemannianAdam([slot.parameter], lr=0.5, damping=0.5, clip=2.0)
        with pytest.MonkeyPatch.context() as patch:
            if not counts:
                patch.setattr(_stiffness_fields, "_counts", lambda *arguments: None)
            optimizer.step()
        shares.append(optimizer.bounded_share)
    assert shares[0] == shares[1]
    assert 0.0 < shares[0] < 1.0


def test_a_first_step_makes_no_number_for_each_weight(monkeypatch):
    """The field of the largest layer took four bytes a weight, at the moment when its
    gradient is there.
    """

    def refused(*arguments):
        raise AssertionError("the field was made")

    monkeypatch.setattr(_stiffness_fields, "stiffness_at_weights", refused)
    parameter = fm.FP8Parameter(normal(60, 512, seed=1), "E4M3")
    optimizer = fm.optim.StiffnessAdamW([parameter], 1e-3, moments="8bit")
    step_from(optimizer, parameter, normal(60, 512, seed=2))
    assert optimizer.state[parameter]["reference"] > 0


def test_codes_are_counted_in_pieces(monkeypatch):
    """Fields of codes and their int64 copies took 15 bytes a weight."""
    sizes = []
    bincount = torch.bincount

    def counted(x, *arguments, **keywords):
        sizes.append(x.numel())
        return bincount(x, *arguments, **keywords)

    monkeypatch.setattr(torch, "bincount", counted)
    counts_in_pieces(any_codes(E4M3, 600, 512), E4M3, 600)
    counts_in_pieces(any_codes(E4M3, 2, 3 * BLOCK), E4M3, 2)
    assert sum(sizes) == 600 * 512 + 6 * BLOCK
    assert max(sizes) <= BLOCK


def slot_of_codes(fmt, granularity, factor):
    parameter = fm.FP8Parameter(normal(256, 384, seed=3), fmt, granularity=granularity)
    if factor != 1:
        parameter.set_scale_(parameter.scale * factor)
    parameter.grad = normal(256, 384, seed=4)
    optimizer = fm.optim.StiffnessAdamW([parameter])
    return slot_of(optimizer.param_groups[0], parameter, {})
