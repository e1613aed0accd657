"""Range figures and attention entropy against counts, definitions and limits known in advance."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from grid_inputs import critical
from optimizer_cases import ROWS, normal, stored_weight

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.monitor import attention_entropy, range_figures, scale_changes

NAMES = ["E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1", "E4M3FNUZ", "P3109_8P3"]
SHARES = ("overflow", "clamped", "underflow", "subnormal")


def shares_by_definition(values: list[float], fmt: fm.FloatFormat) -> dict[str, float]:
    """Each value rounded in exact arithmetic to a grid that goes on beyond the largest value."""
    counts = dict.fromkeys(SHARES, 0)
    for value in map(abs, values):
        low = max(c for c in range(fmt.max_code + 1) if reference.magnitude(c, fmt) <= Fraction(value))
        middle = (reference.magnitude(low, fmt) + reference.magnitude(low + 1, fmt)) / 2
        code = low if Fraction(value) < middle else low + 1 if Fraction(value) > middle else low + low % 2
        counts["overflow"] += code > fmt.max_code
        counts["clamped"] += value > fmt.max * (1 + 2**-20)
        counts["underflow"] += value > 0 and code == 0
        counts["subnormal"] += 0 < code < 1 << fmt.mantissa_bits
    return {name: count / len(values) for name, count in counts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_those_of_exact_rounding(name: str) -> None:
    fmt = fm.FloatFormat.from_string(name)
    around = torch.from_numpy(critical(fmt)).float()
    values = around[around.abs() <= 4 * fmt.max].unique()[:: max(1, len(around) // 3000)].tolist()
    middle = float((reference.magnitude(fmt.max_code, fmt) + reference.magnitude(fmt.max_code + 1, fmt)) / 2)
    least = fmt.ulp_min / 2
    values += [middle, -middle, middle * 1.001, least, least * 1.001, fmt.min_normal - least, 0.0, -0.0]
    found = range_figures(torch.tensor(values), fmt)
    assert {share: getattr(found, share) for share in SHARES} == shares_by_definition(values, fmt)
    assert found.overflow
    assert found.underflow


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 0.3, torch.tensor(2.0)])
@pytest.mark.parametrize("shape", [(1000,), (300, 500)])
def test_37_overflowing_values_are_counted(scale: float | torch.Tensor, shape: tuple[int, ...]) -> None:
    x = normal(*shape, std=10.0).clamp(-400, 400)
    places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
    x.view(-1)[places[:37]] = 465.0
    x.view(-1)[places[37:40]] = 460.0  # beyond 448, and still nearer to it than to the next step
    x.view(-1)[places[40:45]] = 0.0
    x.view(-1)[places[45:56]] = 2.0**-11
    found = range_figures(x * scale, "E4M3", scale)
    nearly = {"rel": 1e-9}
    assert found.overflow == 37 / x.numel()
    assert found.clamped == 40 / x.numel()
    assert found.underflow == pytest.approx(((x != 0) & (x.abs() <= 2.0**-10)).double().mean().item(), **nearly)
    assert found.subnormal == pytest.approx(
        ((x.abs() > 2.0**-10) & (x.abs() < 2.0**-6 - 2.0**-10)).double().mean().item(), **nearly
    )
    assert found.scale == pytest.approx(float(scale))
    assert found.size == x.numel()


def test_a_scale_for_each_channel() -> None:
    x = normal(3, 50_000, std=0.1)
    found = range_figures(x, "E4M3", ROWS * 2.0**-6)
    units = x / (ROWS * 2.0**-6)
    assert found.overflow == (units.abs() > 464).double().mean().item() > 0
    assert found.scale == pytest.approx(2.0**-11)
    assert found.amax == x.abs().max().item()


@pytest.mark.parametrize("shape", [(7,), (400, 500)])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_moments(shape: tuple[int, ...], offset: float) -> None:
    x = normal(*shape, seed=3, std=2.0) ** 3 + offset
    found, wide = range_figures(x), x.double()
    centred = wide - wide.mean()
    variance = centred.square().mean()
    assert found.kurtosis == pytest.approx((centred.pow(4).mean() / variance**2).item(), rel=1e-4)
    assert found.amax_over_std == pytest.approx((wide.abs().max() / variance.sqrt()).item(), rel=1e-5)
    assert (found.overflow, found.clamped, found.underflow, found.subnormal) == (None,) * 4


def test_kurtosis_of_distributions_that_are_known() -> None:
    assert range_figures(normal(500_000)).kurtosis == pytest.approx(3, abs=0.05)
    assert range_figures(torch.linspace(-1, 1, 200_001)).kurtosis == pytest.approx(1.8, abs=1e-3)
    assert range_figures(torch.tensor([1.0, -1.0])).kurtosis == 1
    one_in_a_thousand = torch.zeros(1000)
    one_in_a_thousand[5] = 1e30  # fourth powers are beyond float32
    assert range_figures(one_in_a_thousand).kurtosis == pytest.approx(0.998**2 / 0.999 * 1000, rel=1e-2)


@pytest.mark.parametrize("shape", [(7,), (400, 500)])
def test_moments_of_logarithms(shape: tuple[int, ...]) -> None:
    x = normal(*shape, seed=3, std=2.0) ** 3
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, -math.inf])
    logs = x.double().abs().log2().flatten()[3:]
    found = range_figures(x)
    assert found.log2_std == pytest.approx(logs.std(correction=0).item(), rel=1e-5)
    third = (logs - logs.mean()).pow(3).mean() / logs.std(correction=0) ** 3
    assert found.log2_skewness == pytest.approx(third.item(), rel=1e-4, abs=1e-5)


def test_logarithms_of_distributions_that_are_known() -> None:
    found = range_figures(normal(500_000))
    # log |z| has variance pi^2 / 8 and third central moment -7 zeta(3) / 4
    std = math.pi / math.sqrt(8)
    assert found.log2_std == pytest.approx(std / math.log(2), abs=0.01)
    assert found.log2_skewness == pytest.approx(-7 * 1.2020569 / 4 / std**3, abs=0.03)
    x = normal(500_000, seed=5, std=3.0).exp2() * normal(500_000, seed=6).sign()
    found = range_figures(x * 2.0**-60)
    assert (found.log2_std, found.log2_skewness) == pytest.approx((3, 0), abs=0.02)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_a_constant_has_no_kurtosis(value: float) -> None:
    found = range_figures(torch.full((1000,), value), "E4M3")
    assert found.kurtosis is None
    assert found.amax_over_std is None
    assert found.amax == pytest.approx(abs(value))
    assert found.log2_std == (0.0 if value else None)
    assert found.log2_skewness is None


def test_what_is_not_finite_is_told_apart() -> None:
    x = torch.cat([normal(997), torch.tensor([math.nan, math.inf, -math.inf])])
    found, finite = range_figures(x, "E5M2"), range_figures(x[:997], "E5M2")
    assert found.nonfinite == 3 / 1000
    assert found.overflow == found.clamped == 2 / 1000
    assert (found.amax, found.kurtosis, found.amax_over_std) == (finite.amax, finite.kurtosis, finite.amax_over_std)
    nothing = range_figures(torch.full((3,), math.nan), "E7M0")
    assert (nothing.nonfinite, nothing.overflow, nothing.amax, nothing.kurtosis) == (1.0, 0.0, 0.0, None)
    empty = range_figures(torch.empty(0, 3), "E4M3")
    assert (empty.size, empty.overflow, empty.subnormal, empty.amax, empty.kurtosis) == (0, 0.0, 0.0, 0.0, None)
    assert empty.log2_std is nothing.log2_std is empty.log2_skewness is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_dtype(dtype: torch.dtype) -> None:
    x = normal(1000, dtype=dtype, std=200.0)
    found = range_figures(x, "E4M3")
    assert found.overflow == (x.double().abs() > 464).double().mean().item() > 0
    assert found.amax == x.abs().max().item()


def test_one_byte_weights_and_graphs() -> None:
    weight = stored_weight()
    found = range_figures(weight, "E4M3", weight.expanded_scale())
    assert found.amax == weight.dequantize().abs().max().item()
    assert found.overflow == found.clamped == 0
    assert range_figures(torch.ones(2, requires_grad=True) * 2).amax == 2


def test_the_largest_value_under_its_own_scale_is_not_clamped() -> None:
    for seed in range(50):
        x = normal(20, seed=seed)
        assert range_figures(x, "E4M3", fm.amax_scale(x, "E4M3")).clamped == 0


def test_scale_changes() -> None:
    assert scale_changes(1.0, 1.0) == 0
    assert scale_changes(torch.tensor(1.0), torch.tensor(2.0)) == 1
    assert scale_changes(ROWS, ROWS * torch.tensor([[1.0], [2.0], [1.0]])) == pytest.approx(1 / 3)


# Attention


def test_entropy_of_uniform_and_of_peaked_attention() -> None:
    zeros = torch.zeros(2, 3, 5, 4)
    uniform = sum(math.log(i + 1) for i in range(5)) / 5
    assert attention_entropy(zeros, zeros).tolist() == pytest.approx([uniform] * 3)
    assert attention_entropy(zeros, zeros, causal=False).tolist() == pytest.approx([math.log(5)] * 3)
    one_hot = torch.eye(5).expand(1, 1, 5, 5) * 100
    assert attention_entropy(one_hot, one_hot).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_the_sum_by_hand(causal: bool, dtype: torch.dtype) -> None:
    query, key = normal(3, 2, 6, 4, seed=1, std=2).to(dtype), normal(3, 2, 6, 4, seed=2).to(dtype)
    scores = query.double() @ key.double().transpose(2, 3) * 0.7
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
    p = scores.softmax(-1)
    expected = torch.special.entr(p).sum(-1).mean((0, 2))
    assert attention_entropy(query, key, causal=causal, scale=0.7).tolist() == pytest.approx(
        expected.tolist(), rel=1e-4
    )


def test_entropy_in_pieces_and_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = normal(5, 2, 6, 4, seed=1), normal(5, 2, 6, 4, seed=2)
    whole = attention_entropy(query, key)
    monkeypatch.setattr("fp8manifold.monitor.attention._CHUNK", 150)
    assert attention_entropy(query, key).tolist() == pytest.approx(whole.tolist())
    query[0, 1, 0, 0] = math.nan
    assert attention_entropy(query, key).isnan().tolist() == [False, True]
    assert attention_entropy(query[:0], key[:0]).tolist() == [0, 0]
