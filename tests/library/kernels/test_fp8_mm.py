"""fp8_mm: values and gradients by definition, torch's checks, torchao's float8 linear."""

import pytest
import torch
from optimizer_cases import close, normal
from torch import nn

import fp8manifold as fm
from fp8manifold import amax_scale, fake_quantize, ops
from fp8manifold.ops import fp8_mm

granularities = pytest.mark.parametrize("granularity", ["tensor", "channel"])


def both_gradients(a, b, gradient, **options):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    product = fp8_mm(a, b, **options)
    product.backward(gradient)
    return [product.detach(), a.grad, b.grad]


@granularities
@pytest.mark.parametrize("gradient_format", ["E5M2", "E3M4", None])
@pytest.mark.parametrize(
    ("a_format", "b_format"), [("E4M3", "E4M3"), ("E7M0", "E1M6"), ("E5M2", None), (None, "E4M3")]
)
def test_products_of_quantised_operands(a_format, b_format, gradient_format, granularity):
    """Scales are of the rows and columns that a product keeps.

    So the backward pass rounds the operands anew.
    """
    a, b, g = normal(9, 16, seed=1, std=3.0), normal(16, 7, seed=2, std=0.1), normal(9, 7, seed=3)
    options = {"a_format": a_format, "b_format": b_format, "gradient_format": gradient_format}
    product, for_a, for_b = both_gradients(a, b, g, granularity=granularity, **options)

    def q(x, fmt, axis):
        return x if fmt is None else fake_quantize(x, fmt, granularity=granularity, axis=axis)

    assert close(product, q(a, a_format, 0) @ q(b, b_format, 1))
    assert close(for_a, q(g, gradient_format, 0) @ q(b.t(), b_format, 1))
    assert close(for_b, q(a.t(), a_format, 0) @ q(g, gradient_format, 1))


@granularities
@pytest.mark.parametrize("formats", [("E4M3", "E4M3"), ("E5M2", None), ("E1M6", "E1M6")])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_autocast_gives_the_dtype_of_the_result_alone(cast, formats, granularity):
    """Forward and backward pass within: sums in units of the scales stay in float32."""
    a, b, g = normal(64, 256, seed=1), normal(256, 32, seed=2), normal(64, 32, seed=3)
    options = {"a_format": formats[0], "b_format": formats[1], "granularity": granularity}
    expected = both_gradients(a, b, g.to(cast), out_dtype=cast, **options)
    with torch.autocast("cpu", cast):
        results = both_gradients(a, b, g.to(cast), **options)
        wide = fp8_mm(a, b, out_dtype=torch.float32, **options)
        exact = fp8_mm(a.double(), b.double(), **options)
    assert results[0].dtype is cast
    assert wide.dtype is torch.float32
    assert exact.dtype is torch.float64
    assert all(map(torch.equal, results, expected))
    assert torch.equal(wide, fp8_mm(a, b, **options))


def test_scales_that_are_given():
    a, b, g = normal(4, 8, std=300.0), normal(8, 3), normal(4, 3)
    product, for_a, for_b = both_gradients(
        a, b, g, a_scale=0.5, b_scale=torch.tensor(2.0**-5), gradient_format=None
    )
    a_rounded, b_rounded = fake_quantize(a, "E4M3", 0.5), fake_quantize(b, "E4M3", 2.0**-5)
    assert a_rounded.abs().max() == 224
    assert close(product, a_rounded @ b_rounded)
    assert close(for_a, g @ b_rounded.t())
    assert close(for_b, a_rounded.t() @ g)
    rows, columns = torch.arange(1.0, 5.0).view(4, 1), torch.arange(1.0, 4.0).view(1, 3)
    scaled = fp8_mm(a, b, granularity="channel", a_scale=rows, b_scale=columns)
    assert close(scaled, fake_quantize(a, "E4M3", rows) @ fake_quantize(b, "E4M3", columns))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_added_up_in_float32(dtype):
    a, b = normal(4, 600, seed=1).to(dtype), normal(600, 4, seed=2).to(dtype)
    product = fp8_mm(a, b)
    assert product.dtype == dtype
    assert torch.equal(product, fp8_mm(a.float(), b.float()).to(dtype))
    assert fp8_mm(a, b, out_dtype=torch.float32).dtype == torch.float32
    _, for_a, for_b = both_gradients(a, b, normal(4, 4).to(dtype))
    assert for_a.dtype == for_b.dtype == dtype


def test_doubles_are_added_up_in_doubles():
    a, b = normal(4, 600, seed=1, dtype=torch.float64), normal(600, 4, seed=2, dtype=torch.float64)
    exact = fake_quantize(a, "E4M3", 0.25) @ fake_quantize(b, "E4M3", 0.25)
    assert close(fp8_mm(a, b, a_scale=0.25, b_scale=0.25), exact, 1e-14)


def test_strides_and_large_operands_change_nothing():
    a, b = normal(300, 600, seed=1), normal(500, 600, seed=2)
    assert torch.equal(fp8_mm(a, b.t()), fp8_mm(a.t().contiguous().t(), b.t().contiguous()))
    expected = (
        fake_quantize(a, "E4M3", granularity="channel")
        @ fake_quantize(b, "E4M3", granularity="channel").t()
    )
    assert close(fp8_mm(a, b.t(), granularity="channel"), expected)


def test_special_values():
    a = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [0.0, -0.0]])
    product = fp8_mm(a, torch.eye(2), a_scale=1.0, b_scale=1.0)
    assert product[0].isnan().all()
    assert product[1].tolist() == [448.0, 1.0]
    assert product[2].tolist() == [0.0, 0.0]
    assert fp8_mm(torch.empty(0, 2), torch.eye(2)).shape == (0, 2)
    assert fp8_mm(torch.empty(2, 0), torch.empty(0, 3)).tolist() == [[0.0] * 3] * 2


@granularities
def test_saturation_does_not_hide_an_infinite_gradient(granularity):
    g = normal(4, 3)
    g[1, 2] = float("inf")
    _, for_a, for_b = both_gradients(normal(4, 8), normal(8, 3), g, granularity=granularity)
    assert for_a.isnan().all()
    assert for_b.isnan().all()


@granularities
@pytest.mark.parametrize("gradient_format", ["E5M2", "none"])
# torch's check looks at it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_passes_torchs_own_checks(granularity, gradient_format):
    a, b = normal(5, 7, seed=1).requires_grad_(), normal(7, 3, seed=2).requires_grad_()
    scales = amax_scale(a, "E4M3", granularity, axis=0), amax_scale(b, "E4M3", granularity, axis=1)
    arguments = (a, b, *scales, "E4M3", "E4M3", gradient_format, granularity, False, torch.float32)
    checks = torch.library.opcheck(torch.ops.fp8manifold.fp8_mm.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("cpp_compiler")
def test_compiled_it_is_the_same():
    def loss(a, b):
        return fp8_mm(a, b.t(), granularity="channel").square().sum()

    a, b = normal(6, 16, seed=1).requires_grad_(), normal(4, 16, seed=2).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, dynamic=False)
    expected = torch.autograd.grad(loss(a, b), (a, b))
    assert all(map(close, torch.autograd.grad(compiled(a, b), (a, b)), expected))


@pytest.fixture
def products(monkeypatch):
    """Take the device for one with FP8 units, and return a list of the options they get.

    Layouts of the matrices are checked in every call.
    """
    calls = []

    def scaled_mm(a, b, **options):
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.dtype in ops._HARDWARE.values()
        calls.append(options)
        product = a.float() @ b.float()
        return (product * options["scale_a"] * options["scale_b"]).to(options["out_dtype"])

    monkeypatch.setattr(ops, "_has_hardware_for", lambda a, b, *formats: "none" not in formats)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return calls


def codes_by_runs(x, fmt, scale):
    """Stand for the kernel: it knows a scale for equal runs of memory, and no shapes."""
    runs = x.contiguous().float().reshape(scale.numel(), -1)
    return fm.encode((runs / scale.reshape(-1, 1)).view(x.shape), fmt)


@granularities
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hardware_is_given_scales_and_dtype(
    granularity, dtype, by_kernel, products, monkeypatch
):
    """The units multiply by all scales and round to the dtype.

    But not by scales of rows where the result is not bfloat16: they can't.
    """
    dtypes = []

    def kernel(x, *arguments):
        dtypes.append(x.dtype)
        return codes_by_runs(x, *arguments)

    if by_kernel:
        monkeypatch.setattr(ops, "encode_on_gpu", kernel)
    a, b = normal(32, 64, seed=1).to(dtype), normal(48, 64, seed=2).to(dtype)
    g, options = normal(32, 48, seed=3).to(dtype), {"granularity": granularity, "pow2": True}
    results = both_gradients(a, b.t(), g, **options)
    assert len(products) == 3
    assert set(dtypes) <= {dtype}
    units_scale = granularity == "tensor" or dtype is torch.bfloat16
    units_scale_rows = units_scale and granularity == "channel"
    for call in products:
        assert call["out_dtype"] is (dtype if units_scale else torch.float32)
        assert (call["scale_a"].dim() == 2) == units_scale_rows
        assert (call["scale_b"].dim() == 2) == units_scale_rows
        assert bool((call["scale_a"] != 1).any()) == units_scale
    with pytest.MonkeyPatch.context() as without_units:
        without_units.setattr(ops, "_has_hardware_for", lambda *_: False)
        expected = both_gradients(a, b.t(), g, **options)
    assert all(map(torch.equal, results, expected))
    by_columns = both_gradients(a.t().contiguous().t(), b.t().contiguous(), g, **options)
    assert all(map(torch.equal, by_columns, expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@granularities
def test_on_a_gpu_it_is_what_it_is_on_the_cpu(granularity):
    """Hopper adds up the products of 8-bit floats with fewer bits than float32 has."""
    a, b, g = normal(64, 256, seed=1), normal(256, 32, seed=2), normal(64, 32, seed=3)
    expected = both_gradients(a, b, g, granularity=granularity)
    results = both_gradients(a.cuda(), b.cuda(), g.cuda(), granularity=granularity)
    assert all(close(x.cpu(), y, 1e-3) for x, y in zip(results, expected, strict=True))
    options = {"granularity": granularity, "out_dtype": torch.bfloat16}
    product, *gradients = both_gradients(a.cuda(), b.cuda(), g.cuda().bfloat16(), **options)
    assert product.dtype is torch.bfloat16
    assert close(product.cpu().float(), expected[0], 5e-3)
    assert all(x.isfinite().all() for x in gradients)


def float8_linear(weight, granularity, pow2):
    """Return torchao's layer with E5M2 gradients, emulated."""
    from torchao import float8
    from torchao.float8 import config

    rows = (
        config.ScalingGranularity.AXISWISE
        if granularity == "channel"
        else config.ScalingGranularity.TENSORWISE
    )
    dtypes = {
        "input": torch.float8_e4m3fn,
        "weight": torch.float8_e4m3fn,
        "grad_output": torch.float8_e5m2,
    }
    casts = {
        f"cast_config_{name}": config.CastConfig(scaling_granularity=rows, target_dtype=dtype)
        for name, dtype in dtypes.items()
    }
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    options = config.Float8LinearConfig(**casts, emulate=True, round_scales_to_power_of_2=pow2)
    return float8.convert_to_float8_training(nn.Sequential(linear), config=options)[0]


def test_a_large_gradient_is_no_nan():
    """The sum of all gradients is beyond float32."""
    a, g = torch.ones(1000, 1, requires_grad=True), torch.full((1000, 1), 2.0**118)
    fp8_mm(a, torch.ones(1, 1)).backward(g)
    assert torch.allclose(a.grad, g)


# What torchao's import announces is its own business.
@pytest.mark.filterwarnings("ignore")
@granularities
@pytest.mark.parametrize("pow2", [True, False])
def test_it_is_torchaos_float8_linear(granularity, pow2):
    """Within 1e-6.

    At scales that are powers of two all quantised values are equal, and only sums differ.
    At others torchao multiplies by the reciprocal of our scale: a value at the edge of
    two codes may go either way.
    """
    x, weight = normal(64, 48, seed=1), normal(32, 48, seed=2, std=0.05)
    g = normal(64, 32, seed=3, std=1e-3)
    layer, leaf = float8_linear(weight, granularity, pow2), x.clone().requires_grad_()
    expected = layer(leaf)
    expected.backward(g)
    options = {"granularity": granularity, "pow2": pow2}
    product, for_x, for_weight = both_gradients(x, weight.t(), g, **options)
    assert close(product, expected.detach())
    assert close(for_x, leaf.grad)
    assert close(for_weight.t(), layer.weight.grad)
