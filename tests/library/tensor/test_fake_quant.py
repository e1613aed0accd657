"""fake_quantize: values of the round trip, and its four straight-through gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manifold_cases import deterministic
from optimizer_cases import bits_of, normal

from fp8manifold import amax_scale, fake_quantize, round_to_grid

STES = ("identity", "clipped", "relu", "none")


SCALES = {
    "one": 1.0,
    "power of two": 0.125,
    "tensor": torch.tensor(0.3),
    "row": torch.tensor([[0.25], [0.3], [2.0]]),
}


@pytest.mark.parametrize("ste", STES)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1", "E4M3FNUZ"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_value_is_the_scaled_rounding(name, scale, ste, dtype) -> None:
    """Whatever the gradient: the values are those of dividing, rounding, multiplying."""
    x = normal(3, 200, dtype=dtype, std=50.0)
    s = torch.as_tensor(scale).to(dtype)
    y = fake_quantize(x, name, scale, ste=ste)
    assert torch.equal(y, round_to_grid(x / s, name) * s)
    assert y.dtype == dtype


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("name", ["E2M1", "E4M3"])
def test_float16_saturates_where_its_grid_goes_on(name, granularity) -> None:
    x = torch.tensor([6.5e4, -6.5e4, 1.0, 0.0] * 8).half()
    y = fake_quantize(x, name, pow2=True, granularity=granularity)
    assert 6e4 < y[0] == -y[1] < math.inf


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(
    ("granularity", "axis"), [("tensor", 0), ("channel", 0), ("channel", 1), ("channel", -1)]
)
def test_without_a_scale_amax_gives_it(granularity, axis, pow2) -> None:
    x = normal(5, 6, std=3.0)
    scale = amax_scale(x, "E4M3", granularity, axis=axis, pow2=pow2)
    y = fake_quantize(x, "E4M3", granularity=granularity, axis=axis, pow2=pow2)
    assert torch.equal(y, fake_quantize(x, "E4M3", scale))
    # Half an ULP: nothing has saturated.
    assert ((y - x).abs() <= x.abs() / 16 + scale * 2.0**-10).all()


@pytest.mark.parametrize("size", [1e60, 1e-60, 1e300, 1e-300])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_float64_has_scales_of_its_own(granularity, pow2, size) -> None:
    x = normal(4, 64, dtype=torch.float64) * size
    y = fake_quantize(x, "E4M3", granularity=granularity, pow2=pow2)
    assert y.dtype is torch.float64
    assert ((y - x).abs() <= x.abs() / 16 + x.abs().max() * 2.0**-18).all()


@pytest.mark.parametrize("size", [1e60, 1e-60, 1e300, 1e-300])
@pytest.mark.parametrize("scale", [2.0**150, 2.0**-150])
def test_float64_takes_scales_that_float32_has_not(scale, size) -> None:
    x = normal(4, 64, dtype=torch.float64) * size / size
    expected = fake_quantize(x, "E4M3", 1.0)
    assert torch.equal(fake_quantize(x * scale, "E4M3", scale) / scale, expected)


def test_special_values() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30])
    y = fake_quantize(x, "E4M3", 0.5)
    assert y[0].isnan()
    assert y[1:].tolist() == [224.0, -224.0, 0.0, 0.0, 224.0]
    assert y.signbit().tolist()[3:5] == [False, True]
    dynamic = fake_quantize(x, "E4M3")  # no finite amax: scale 1
    assert dynamic[1:].tolist() == [448.0, -448.0, 0.0, 0.0, 448.0]
    assert fake_quantize(torch.empty(0, 3), "E4M3").shape == (0, 3)
    assert fake_quantize(torch.tensor(1.06), "E4M3", 1.0).item() == 1.0
    assert fake_quantize(torch.zeros(4), "E4M3").tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "toward_zero", "up", "down"])
@pytest.mark.parametrize("scale", ["tensor", "row", "column", "block"])
def test_pieces_of_a_large_tensor_are_rounded_as_the_whole(scale, rounding, dtype) -> None:
    """The definition divides, rounds and multiplies all of it, one after the other.

    Here the three walk over it together, piece by piece. Halves are computed in float32.
    """
    x = normal(600, 320, std=3.0).to(dtype)
    shapes = {"tensor": (), "row": (600, 1), "column": (1, 320), "block": (600, 10)}
    scales = normal(*shapes[scale], seed=1).abs() * 0.1 + 0.01
    spread = scales.repeat_interleave(32, 1) if scale == "block" else scales
    key = {"seed": 3, "step": 5, "stream": 7} if rounding == "stochastic" else {}
    granularity = "block" if scale == "block" else "tensor"
    y = fake_quantize(x, "E3M4", scales, granularity=granularity, rounding=rounding, **key)
    exact = round_to_grid(x.float() / spread, "E3M4", rounding, **key) * spread
    assert torch.equal(y, exact.to(dtype))


def gradient_of(x, upstream, **options) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    fake_quantize(leaf, "E4M3", **options).backward(upstream)
    assert leaf.grad.dtype == x.dtype
    return leaf.grad


#: Below the range, at its end, inside, both zeros, inside, at its end, above it: at a
#: scale of 0.5 the largest value of E4M3 is 224.
POINTS = torch.tensor([-1000.0, -224, -3, -0.0, 0, 2.0**-20, 3, 224, 224.5, 1000])
#: Per gradient, the points of POINTS that it passes on (1) or blocks (0).
PASSED = {
    "identity": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "clipped": [0, 1, 1, 1, 1, 1, 1, 1, 0, 0],
    "relu": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
    "none": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("ste", STES)
def test_the_four_gradients(ste) -> None:
    upstream = normal(10)
    gradient = gradient_of(POINTS, upstream, scale=0.5, ste=ste)
    assert torch.equal(gradient, upstream * torch.tensor(PASSED[ste]))


@pytest.mark.parametrize("ste", STES)
def test_the_gradient_of_blocks_is_that_of_their_scale_spread_out(ste) -> None:
    x, ones = normal(4, 64, std=3.0), torch.ones(4, 64)
    scale = 2.0 ** -torch.arange(4.0, 12).view(4, 2)
    wide = gradient_of(x, ones, scale=scale.repeat_interleave(32, 1), ste=ste)
    assert torch.equal(gradient_of(x, ones, scale=scale, granularity="block", ste=ste), wide)


@pytest.mark.parametrize("ste", STES)
def test_the_gradient_is_finite_at_special_values(ste) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 2.0**-149, 3e38])
    assert gradient_of(x, torch.ones(6), ste=ste).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@deterministic
@given(
    x=st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=20),
    channel=st.booleans(),
)
def test_a_dynamic_scale_clips_nothing(x, channel, dtype) -> None:
    options = {"ste": "clipped", "granularity": "channel" if channel else "tensor"}
    tensor = torch.tensor(x).to(dtype)
    if dtype is torch.float64:
        tensor *= 1 + 1e-9
    assert (gradient_of(tensor, torch.ones_like(tensor), **options) == 1).all()


def test_blocked_gradients_are_zero_whatever_comes_in() -> None:
    upstream = torch.tensor([math.inf, math.nan, 1.0])
    x = torch.tensor([1000.0, -1000.0, 1.0])
    assert gradient_of(x, upstream, scale=1.0, ste="clipped").tolist() == [0.0, 0.0, 1.0]
    assert gradient_of(-x, upstream, scale=1.0, ste="none").tolist() == [0.0, 0.0, 0.0]
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 2.0**-149, 3e38])
    gradient = gradient_of(x, torch.ones(6), ste="clipped", scale=1.0)
    assert torch.equal(gradient, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0]))


def test_chain_rule_and_scale_without_gradient() -> None:
    x, scale = normal(6).requires_grad_(), torch.tensor(0.1, requires_grad=True)
    (fake_quantize(x * 3, "E4M3", scale).square()).sum().backward()
    expected = 2 * fake_quantize((x * 3).detach(), "E4M3", 0.1) * 3
    assert torch.allclose(x.grad, expected)
    assert scale.grad is None


@pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="torch 2.8 compiles the backward pass to other bits"
)
@pytest.mark.usefixtures("cpp_compiler")
# Dynamo instantiates a deprecated class itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_values_and_gradients_are_the_eager_ones() -> None:
    def sum_of_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        clipped = fake_quantize(x, "E4M3", ste="clipped", granularity="channel")
        return clipped + fake_quantize(y, "E7M0", 0.25, ste="relu")

    results = []
    for function in (sum_of_both, torch.compile(sum_of_both, fullgraph=True, dynamic=False)):
        x = normal(3, 500, seed=1).requires_grad_()
        y = normal(3, 500, seed=2, std=10.0).requires_grad_()
        z = function(x, y)
        z.backward(normal(3, 500, seed=3))
        results.append([bits_of(t) for t in (z, x.grad, y.grad)])
    assert results[0] == results[1]
