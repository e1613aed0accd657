"""Products straight from codes.

Operands are compared with another package's rounding, products with the emulation of
their definition, and layouts with what a card asks for. There is no card here: torch
checks fake tensors on one.
"""

import copy
import json
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut
from optimizer_cases import normal
from refused import check_refused
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fp8manifold as fm
from fp8manifold._encoded import products
from fp8manifold.formats import as_format
from fp8manifold.nn import _products
from fp8manifold.nn._products import check_operands
from fp8manifold.nn._saved import put_layers, recipe_of

E4M3 = torch.float8_e4m3fn
UNITS = {"E4M3": "fp8", "E5M2": "fp8", "E1M6": "int8"}


def layer(fmt="E4M3", size=(768, 1024), dtype=torch.bfloat16, *, bias=False, spread=1.0, **options):
    """Make a layer of products from codes; the sizes of its rows have a spread in log2."""
    linear = nn.Linear(*size, bias=bias)
    sizes = torch.exp2(normal(size[1], 1, seed=2, std=spread))
    linear.weight.data = normal(*linear.weight.shape, seed=1, std=0.02) * sizes
    spec = fm.LayerSpec(fmt, **{"products": UNITS[fmt], **options})
    return fm.quantize_model(linear.to(dtype), spec, storage="codes", seed=1)


def batch(size=(768, 1024), rows=512, *, spread=1.0):
    """Return an input with a large column and the gradient of an output."""
    x = normal(rows, size[0], seed=3) * torch.exp(normal(rows, 1, seed=4, std=spread))
    x[:, 5] *= 20.0 if spread else 1.0
    g = normal(rows, size[1], seed=5, std=1e-4) * torch.exp(normal(rows, 1, seed=6, std=spread))
    return x.bfloat16(), g.bfloat16()


def passes(net, x, g, call=None):
    """Return the output and all gradients of a forward and a backward pass."""
    x = x.detach().clone().requires_grad_()
    for p in net.parameters():
        p.grad = None
    y = (net if call is None else call)(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def product(a, b, rows, columns, dtype):
    wide = torch.float64 if a.dtype is torch.int8 else torch.float32
    return ((a.to(wide) @ b.to(wide).t()).float() * rows * columns).to(dtype)


def emulated(net, x, g):
    """Multiply operands that the oracle has rounded: y, dx and dw by their definition."""
    w, units = net.weight, UNITS[net.weight.format.name]
    unit = w.format.ulp_min if units == "int8" else 1.0
    codes = (
        products.codes_to_int8(w.codes) if units == "int8" else w.codes.view(FLOAT8[w.format.name])
    )

    def numbers(codes):
        return codes if units == "int8" else codes.view(E4M3)

    scale = w.scale.expand(w.shape[0], 1)
    (a, p), (b, q) = quantised(x, None, units), quantised(g, scale.t(), units)
    y = product(numbers(a), codes, p, scale.t() * unit, x.dtype)
    dx = product(numbers(b), codes.t().contiguous(), q, unit, x.dtype)
    if net.spec.gradient_products == "bfloat16":
        return [y, dx, g.t() @ x]
    h, r = quantised(g.t(), p.t(), "fp8")
    return [y, dx, product(h.view(E4M3), a.t().contiguous().view(E4M3), r, 1.0, x.dtype)]


#: Formats of codes, and the dtype in which the gradient of the weight is multiplied.
CASES = [("E4M3", "bfloat16"), ("E4M3", "fp8"), ("E5M2", "fp8"), ("E1M6", "bfloat16")]
every_case = pytest.mark.parametrize(("fmt", "gradient"), CASES)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_case
def test_products_are_the_emulations_to_the_bit(fmt, gradient, dtype, granularity):
    size = (1024, 256)
    net = layer(fmt, size, dtype, gradient_products=gradient, granularity=granularity)
    x, g = (part.to(dtype) for part in batch(size, 128))
    for index, (actual, expected) in enumerate(
        zip(passes(net, x, g), emulated(net, x, g), strict=True)
    ):
        assert actual.dtype is dtype, index
        assert torch.equal(actual, expected), index


def test_integer_sums_are_exact_in_any_order():
    """4,096 whole numbers of 7 bits, whose sum float32 rounds."""
    net, (x, g) = layer("E1M6", (4096, 32), torch.float32), batch((4096, 32), 16, spread=0.0)
    x = 1.0 + 0.1 * x.abs()
    net.weight.codes.copy_(
        torch.randint(64, 128, (32, 4096), generator=torch.Generator().manual_seed(2))
    )
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    shuffled = copy.deepcopy(net)
    shuffled.weight.codes.copy_(net.weight.codes[:, order])
    y = passes(net, x.float(), g.float())[0]
    y_shuffled = passes(shuffled, x[:, order].float(), g.float())[0]
    a, p = products.int8_rows(x)
    sums = a.to(torch.int32) @ products.codes_to_int8(net.weight.codes).to(torch.int32).t()
    assert sums.amin() > 2**24
    assert torch.equal(y, sums.float() * p * net.weight.scale.t() * 2.0**-5)
    assert torch.equal(y, y_shuffled)


@pytest.mark.parametrize(
    ("fmt", "gradient", "spread", "budget"),
    [
        ("E4M3", "bfloat16", 1.0, (0.030, 0.028, 0.002)),
        ("E4M3", "fp8", 1.0, (0.030, 0.028, 0.039)),
        ("E5M2", "bfloat16", 1.0, (0.030, 0.028, 0.002)),
        ("E1M6", "bfloat16", 1.0, (0.058, 0.038, 0.002)),  # its grid is uniform
        ("E1M6", "bfloat16", 0.0, (0.011, 0.016, 0.002)),
    ],
)
def test_relative_errors_are_within_their_budget(fmt, gradient, spread, budget):
    """Errors of y, dx and dw, with rows of other sizes and one channel of outliers.

    A product in bfloat16 alone has an error of 0.17%. No budget is twice the error.
    """
    net, (x, g) = layer(fmt, gradient_products=gradient, spread=spread), batch(spread=spread)
    w = net.weight.dequantize().double()
    exact = (x.double() @ w.t(), g.double() @ w, g.double().t() @ x.double())
    for index, (actual, expected, largest) in enumerate(
        zip(passes(net, x, g), exact, budget, strict=True)
    ):
        error = ((actual - expected).norm() / expected.norm()).item()
        assert 0.5 * largest < error <= largest, index


class Context:
    """The context of an autograd function."""

    needs_input_grad = (True, True, False)

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("in_graph", [False, True])
@every_case
def test_torchs_own_products_give_the_same_bits(fmt, gradient, in_graph, monkeypatch):
    """Of sums that float32 holds.

    Torch multiplies rows with their scales, or at scales of 1 with powers of two afterwards.
    """
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient), batch((64, 32), 16)
    # Codes of two significant bits.
    net.weight.codes.copy_(torch.where(net.weight.codes > 127, 0xA0, 0x48).to(torch.uint8))
    x, g = x.sign() * 2.0, g.sign() * 0.25
    expected = passes(net, x, g)
    monkeypatch.setattr(_products, "is_on_card", lambda x: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: in_graph)
    assert all(map(torch.equal, passes(net, x, g), expected))


class Call(NamedTuple):
    """Operands and options of a product."""

    a: torch.Tensor
    b: torch.Tensor
    options: dict


@pytest.fixture
def torchs_products(monkeypatch):
    """Return a list of the calls of torch's own products."""
    calls = []

    def recorded(product):
        def call(a, b, **options):
            calls.append(Call(a, b, options))
            return product(a, b, **options)

        return call

    for name in ("_scaled_mm", "_int_mm"):
        monkeypatch.setattr(torch, name, recorded(getattr(torch, name)))
    return calls


@pytest.mark.parametrize(("size", "rows"), [((768, 3072), 8192), ((64, 32), 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_graph", [False, True])
@every_case
def test_layouts_scales_and_sizes_are_those_of_a_card(
    fmt, gradient, in_graph, dtype, size, rows, torchs_products, monkeypatch
):
    """By torch's own checks, of fake tensors on a card."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: in_graph)
    rounds = gradient == "fp8"
    with FakeTensorMode():
        empty = partial(torch.empty, device="cuda")
        x = empty(rows, size[0], dtype=dtype)
        codes, scale = empty(*size[::-1], dtype=torch.uint8), empty(size[1], 1)
        weight = fm.FP8Parameter(fm.FP8Tensor.from_codes(codes, scale, fmt, dtype=dtype, seed=1))
        ctx = Context()
        with torch.no_grad():
            y = _products._FromCodes.forward(ctx, x, weight, None, UNITS[fmt], rounds)
            dx, dw, *_ = _products._FromCodes.backward(ctx, torch.empty_like(y))
        assert (y.shape, dx.shape, dw.shape) == ((rows, size[1]), x.shape, weight.shape)
        assert {result.device.type for result in (y, dx, dw)} == {"cuda"}
    assert len(torchs_products) == (3 if rounds else 2)
    for a, b, options in torchs_products:
        if "scale_a" not in options:
            assert a.shape[0] > 16
            continue
        scale_a, scale_b = options["scale_a"], options["scale_b"]
        if dtype is torch.bfloat16 and not in_graph:
            assert (scale_a.shape, scale_a.stride()) == ((a.shape[0], 1), (1, 1))
            assert (scale_b.shape, scale_b.stride()) == ((1, b.shape[1]), (b.shape[1], 1))
        else:
            assert scale_a.shape == scale_b.shape == ()


@every_case
def test_a_compiler_sees_one_graph_on_a_card(fmt, gradient):
    """It does not trace which kernels there are. Another size makes a dimension a symbol."""
    torch._dynamo.reset()
    spec = fm.LayerSpec(fmt, products=UNITS[fmt], gradient_products=gradient)
    for rows, length, width in ((32, 64, 32), (48, 96, 64), (64, 128, 96)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            codes = torch.empty(width, length, dtype=torch.uint8, device="cuda")
            scale = torch.empty(width, 1, device="cuda")
            weight = fm.FP8Parameter(
                fm.FP8Tensor.from_codes(codes, scale, fmt, dtype=torch.bfloat16, seed=1)
            )
            x = torch.empty(rows, length, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            product = partial(
                _products.linear_from_codes, weight=weight, bias=None, units=UNITS[fmt], spec=spec
            )
            assert torch.compile(product, backend="eager", fullgraph=True)(x).shape == (
                rows,
                width,
            ), rows
    with pytest.raises(RuntimeError, match="the input has 64 features, but the layer takes 128"):
        product(torch.zeros(16, 64, dtype=torch.bfloat16))


def zero_codes(rows, columns):
    return torch.zeros(rows, columns, dtype=torch.uint8).view(E4M3)


E5M2 = torch.float8_e5m2
#: Operands that a CPU takes and a card does not.
BAD_OPERANDS = {
    "both E5M2": (zero_codes(16, 32).view(E5M2), zero_codes(48, 32).view(E5M2)),
    "first E5M2": (zero_codes(16, 32).view(E5M2), zero_codes(48, 32)),
    "first by columns": (zero_codes(32, 16).t(), zero_codes(48, 32)),
    "second by columns": (zero_codes(16, 32), zero_codes(32, 48).t()),
    "40 rows": (zero_codes(16, 32), zero_codes(40, 32)),
    "24 columns": (zero_codes(16, 24), zero_codes(48, 24)),
}


@pytest.mark.parametrize(("a", "b"), BAD_OPERANDS.values(), ids=BAD_OPERANDS)
def test_what_a_cpu_takes_and_a_card_does_not_is_refused_everywhere(a, b):
    with pytest.raises(AssertionError):
        check_operands(a, b)


def test_operands_that_a_card_takes_are_accepted():
    check_operands(zero_codes(16, 32), zero_codes(48, 32))
    check_operands(zero_codes(16, 32), zero_codes(48, 32).view(E5M2))


def test_operands_of_all_products_are_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(_products, "check_operands", lambda a, b: checked.append((a, b)))
    passes(layer("E5M2", (64, 32), gradient_products="fp8"), *batch((64, 32), 16))
    assert len(checked) == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_case
def test_an_input_that_is_not_finite_spoils_its_row(fmt, gradient, bad):
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient), batch((64, 32), 16)
    expected = passes(net, x, g)[0]
    x[3, 5] = bad
    y = passes(net, x, g)[0]
    assert y[3].isnan().all()
    is_other = torch.arange(16) != 3
    assert torch.equal(y[is_other], expected[is_other])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_case
def test_a_gradient_that_is_not_finite_spoils_both_gradients(fmt, gradient, bad):
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient), batch((64, 32), 16)
    g[3, 5] = bad
    _, dx, dw = passes(net, x, g)
    assert dx.isnan().all()
    assert dw.isnan().all()
    # Without dx, too, whose scales say it otherwise.
    net.weight.grad = None
    net(x).backward(g)
    assert net.weight.grad.isnan().all()


def bare_layer(fmt, gradient):
    return layer(fmt, (64, 32), gradient_products=gradient), *batch((64, 32), 32)


@every_case
def test_autocast_multiplies_in_its_dtype(fmt, gradient):
    net = layer(fmt, (64, 32), torch.float32, bias=True, gradient_products=gradient)
    x, g = batch((64, 32), 32)
    bare = copy.deepcopy(net).bfloat16()
    bare.bias = None
    y, dx, dw = passes(bare, x, g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = passes(net, x.float(), g)
    assert [result.dtype for result in results] == [torch.bfloat16, *[torch.float32] * 3]
    expected = (y + net.bias.bfloat16(), dx.float(), dw.float(), g.sum(0).float())
    assert all(map(torch.equal, results, expected))


@every_case
def test_inputs_of_any_layout_have_the_same_products(fmt, gradient):
    net, x, g = bare_layer(fmt, gradient)
    y, dx, dw = passes(net, x, g)
    batched = passes(net, x.view(2, 16, 64), g.view(2, 16, 32))
    assert all(map(torch.equal, batched, (y.view(2, 16, 32), dx.view(2, 16, 64), dw)))
    by_columns = passes(net, x.t().contiguous().t(), g.t().contiguous().t())
    assert all(map(torch.equal, by_columns, (y, dx, dw)))
    assert torch.equal(net(x.view(2, 16, 64)), y.view(2, 16, 32))
    assert not net(x.view(2, 16, 64))._is_view()
    with torch.inference_mode():
        assert torch.equal(net(x), y)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
@every_case
def test_an_empty_input_has_an_empty_product(fmt, gradient, shape):
    net, x, _ = bare_layer(fmt, gradient)
    y, dx, dw = passes(net, x.new_empty(shape), x.new_empty(*shape[:-1], 32))
    assert y.shape == (*shape[:-1], 32)
    assert dx.shape == shape
    assert not dw.any()


@pytest.mark.parametrize("fmt", [fmt for fmt, gradient in CASES if gradient == "bfloat16"])
def test_a_single_token_needs_no_batch(fmt):
    net, x, g = bare_layer(fmt, "bfloat16")
    y, dx, _ = passes(net, x[:1], g[:1])
    assert all(map(torch.equal, passes(net, x[0], g[0])[:2], (y[0], dx[0])))


@pytest.mark.parametrize("during", ["forward", "both"])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
@every_case
def test_autocast_rounds_the_result_and_no_sum(fmt, gradient, cast, during):
    """Sums without their scales are far beyond float16; the scales are no powers of two."""
    net = layer(fmt, (256, 64), torch.float32, gradient_products=gradient)
    net.weight.set_scale_(net.weight.scale * 1.3)
    x, g = (part.to(cast) for part in batch((256, 64), 32, spread=0.0))
    y, dx, dw = passes(net, x.float(), g.float())
    x = x.float().requires_grad_()
    net.weight.grad = None
    with torch.autocast("cpu", cast):
        output = net(x)
        if during == "both":
            output.backward(g)
    if during == "forward":
        output.backward(g)
    assert torch.equal(output, y.to(cast))
    assert torch.equal(x.grad, dx.to(cast).float())
    if gradient == "fp8":
        assert torch.equal(net.weight.grad, dw.to(cast).float())
    else:
        assert torch.equal(net.weight.grad, (g.t() @ x.detach().to(cast)).float())


@every_case
def test_autocast_around_a_backward_pass_alone_changes_nothing(fmt, gradient):
    net = layer(fmt, (64, 32), torch.float32, gradient_products=gradient)
    x, g = (part.float() for part in batch((64, 32), 32))
    _, *expected = passes(net, x, g)
    x.requires_grad_()
    net.weight.grad = None
    y = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(g)
    assert all(map(torch.equal, (x.grad, net.weight.grad), expected))


@every_case
def test_an_input_without_dimensions_is_refused(fmt, gradient):
    net = layer(fmt, (64, 32), torch.float32, gradient_products=gradient)
    with pytest.raises(RuntimeError, match=r"^the input has no dimension; [^\n]*$"):
        net(torch.tensor(1.0))


@pytest.mark.parametrize("autocast", [False, True])
@every_case
def test_a_layer_without_values_has_shapes(fmt, gradient, autocast):
    """Of all three products, under autocast of a processor too."""
    net = layer(fmt, (64, 32), torch.float32, gradient_products=gradient).to("meta")
    x = torch.empty(2, 16, 64, device="meta", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(x)
    y.sum().backward()
    assert (y.shape, y.dtype, y.device.type) == ((2, 16, 32), torch.float32, "meta")
    assert x.grad.shape == x.shape
    assert net.weight.grad.shape == (32, 64)
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        net(torch.ones(16, 64))


TRACED = {
    "decoded": (fm.LayerSpec("E4M3"), "codes"),
    "gradient": (fm.LayerSpec("E4M3", gradient="E5M2"), "codes"),
    "grid": (fm.LayerSpec("E4M3"), "grid"),
}
NOT_TRACED = {
    "fp8": (fm.LayerSpec("E4M3", products="fp8"), "codes"),
    "int8": (fm.LayerSpec("E1M6", products="int8"), "codes"),
    "activation": (fm.LayerSpec("E4M3", activation="E4M3"), "codes"),
    "blocks": (fm.LayerSpec("E4M3", activation="E4M3", granularity="block"), "codes"),
    "master": (fm.LayerSpec("E4M3"), "master"),
}


@pytest.mark.filterwarnings("ignore")  # of torch, of its own trace
@pytest.mark.parametrize(("spec", "storage"), TRACED.values(), ids=TRACED)
def test_a_layer_that_rounds_nothing_is_traced(spec, storage):
    net = fm.quantize_model(nn.Linear(32, 16), spec, storage, seed=1)
    with torch.no_grad():
        traced = torch.jit.trace(net, (normal(16, 32, seed=1),))
    x = normal(48, 32, seed=2, std=3.0)
    assert torch.equal(traced(x), net(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("spec", "storage"), NOT_TRACED.values(), ids=NOT_TRACED)
def test_a_layer_that_rounds_is_not_traced(spec, storage):
    net = fm.quantize_model(nn.Linear(32, 16), spec, storage, seed=1)
    with pytest.raises(RuntimeError, match=r"^torch\.jit\.trace can't .*: use torch\.export$"):
        torch.jit.trace(net, (normal(16, 32, seed=1),))


@pytest.mark.filterwarnings("ignore")
def test_rounding_is_not_traced():
    with pytest.raises(RuntimeError, match=r"use torch\.export$"):
        torch.jit.trace(lambda x: fm.fake_quantize(x, "E4M3", 1.0), (normal(4, 4),))


@pytest.mark.parametrize(
    ("trains", "gradient", "dtypes"),
    [
        (True, "bfloat16", [torch.bfloat16]),
        (True, "fp8", [torch.uint8]),
        (False, "fp8", []),
    ],
    ids=["bfloat16", "fp8", "frozen"],
)
def test_what_no_gradient_needs_is_not_saved(trains, gradient, dtypes):
    saved = []
    x, _ = batch((64, 32), 16)
    net = layer("E4M3", (64, 32), gradient_products=gradient)
    net.weight.requires_grad_(trains)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        net(x.clone().requires_grad_())
    assert [tensor.dtype for tensor in saved if tensor.shape == x.shape] == dtypes
    assert any(isinstance(tensor, fm.FP8Tensor) for tensor in saved)


@pytest.mark.parametrize(("products", "limit"), [("decoded", 360), ("fp8", 742)])
def test_guards_of_twelve_layers(products, limit):
    """A dense model has 177. There were 742 before layers had products."""
    dense = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    net = fm.quantize_model(dense, "E4M3", storage="codes", products=products)
    explanation = torch._dynamo.explain(net)(torch.ones(16, 16))
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
    assert len(explanation.out_guards) <= limit


@every_case
def test_one_graph_and_repeated_passes_have_the_same_bits(fmt, gradient):
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient, bias=True), batch((64, 32), 16)
    explanation = torch._dynamo.explain(net)(x)
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
    eager = passes(net, x, g)
    calls = {
        "compiled": torch.compile(net, fullgraph=True, backend="aot_eager"),
        "checkpoint": partial(checkpoint, net, use_reentrant=False),
        "reentrant checkpoint": partial(checkpoint, net, use_reentrant=True),
    }
    for name, call in calls.items():
        assert all(map(torch.equal, passes(net, x, g, call), eager)), name


def test_a_graph_asks_the_device_once(monkeypatch):
    def capability(device):
        torch._dynamo.graph_break()
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    spec = fm.LayerSpec("E4M3", products="auto")

    @torch.compile(fullgraph=True, backend="eager")
    def on_card(x):
        return x + (_products.units_on("fp8", spec, torch.device("cuda", 0)) == "fp8")

    assert on_card(torch.zeros(1)).item() == 1.0


def test_a_graph_copies_bytes_no_sooner_than_their_gradient_is_there():
    copies = {}

    def compiler(graph, _, name):
        copies[name] = sum("transpose_bytes" in str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    net, (x, g) = layer("E4M3", (64, 32)), batch((64, 32), 16)
    compilers = {f"{name}_compiler": partial(compiler, name=name) for name in ("fw", "bw")}
    backend = aot_autograd(**compilers, partition_fn=min_cut)
    passes(torch.compile(net, backend=backend, fullgraph=True), x, g)
    assert copies == {"fw": 0, "bw": 1}


def test_it_is_shown_and_made_again_from_what_was_saved():
    net = nn.Sequential(layer("E5M2", (64, 32), gradient_products="fp8"), nn.Linear(32, 16))
    assert repr(net[0]).endswith("storage=codes, gradient_products=fp8, products=fp8)")
    fresh = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16), nn.Linear(32, 16))
    put_layers(fresh, json.loads(json.dumps(recipe_of(net))))
    assert fresh[0].spec == net[0].spec
    fresh.load_state_dict(net.state_dict())
    x, _ = batch((64, 32), 16)
    assert torch.equal(fresh[0](x), net[0](x))
    assert torch.equal(copy.deepcopy(net)[0](x), net[0](x))
    decoded = fm.quantize_model(nn.Linear(4, 4), "E4M3", storage="codes")
    assert "products" not in recipe_of(decoded)[0]["spec"]


def test_all_functions_that_quantize_take_products():
    spec = fm.LayerSpec("E4M3", products="fp8")
    net = fm.quantize_model(nn.Linear(32, 16), "E4M3", storage="codes", products="fp8")
    assert net.spec == spec
    net = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3))
    formats = {"*": {"weight": "E4M3", "products": "fp8"}, "1": "none"}
    assert fm.quantize_model(net, formats, storage="codes")[0].spec == spec
    empty, state = nn.Linear(32, 16, device="meta"), nn.Linear(32, 16).state_dict()
    assert fm.files.load_into(empty, state, "E4M3", products="fp8").spec == spec
    specs = fm.files.check_formats("E4M3", {"a": (32, 16)}, "codes", products="auto")
    assert specs["a"].products == "auto"


@dataclass(frozen=True)
class Automatic:
    """A layer of products="auto", why it is decoded on a CPU, and its units on cards."""

    spec: dict
    reason: str
    out_features: int = 32
    #: by the card's capability, where it has any
    units: dict[tuple[int, int], str] = field(default_factory=dict)


AUTOMATIC = {
    "E4M3": Automatic({}, "cpu has no fast FP8 units", units={(9, 0): "fp8"}),
    "E1M6": Automatic(
        {"weight": "E1M6"},
        "cpu has no fast INT8 units",
        units={(9, 0): "int8", (8, 0): "int8"},
    ),
    "E3M4": Automatic({"weight": "E3M4"}, "no units multiply codes of weight=E3M4"),
    "blocks": Automatic({"granularity": "block"}, "granularity='block'"),
    "gradient": Automatic({"gradient": "E5M2"}, "activation_gradient=E5M2 is given"),
    "activation": Automatic({"activation": "E4M3"}, "activation=E4M3 is given"),
    "33 outputs": Automatic({}, "16 does not divide 33", out_features=33),
}


def automatic_net(case):
    spec = fm.LayerSpec(**{"weight": "E4M3", "products": "auto", **case.spec})
    return fm.quantize_model(nn.Sequential(nn.Linear(32, case.out_features)), spec, "codes")


@pytest.mark.parametrize("case", AUTOMATIC.values(), ids=AUTOMATIC)
def test_auto_says_why_it_decodes_on_a_cpu(case):
    net = automatic_net(case)
    (layer,) = fm.quantization_report(net).layers
    assert "products=auto: decoded, as " in layer.detail
    assert case.reason in layer.detail


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (7, 5)], ids=str)
@pytest.mark.parametrize("case", AUTOMATIC.values(), ids=AUTOMATIC)
def test_auto_takes_codes_where_a_card_has_units_for_them(case, capability, monkeypatch):
    net = automatic_net(case)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    units = _products.units_on(net[0]._units, net[0].spec, device=torch.device("cuda", 0))
    assert units == case.units.get(capability)


def test_auto_is_decoded_on_a_cpu():
    net = fm.quantize_model(nn.Linear(32, 32), "E4M3", "codes", products="auto")
    x = normal(4, 32)
    assert torch.equal(net(x), nn.functional.linear(x, net.weight.dequantize(), net.bias))


def test_a_report_says_nothing_of_products_of_a_decoded_layer():
    net = fm.quantize_model(nn.Sequential(nn.Linear(32, 32)), "E4M3", "codes")
    (layer,) = fm.quantization_report(net).layers
    assert "products" not in layer.detail
    assert _products.units_on(net[0]._units, net[0].spec, device=torch.device("cuda", 0)) is None


def test_devices_without_units_are_refused_at_once(monkeypatch):
    units_on = partial(_products.units_on, "fp8", layer("E4M3", (64, 32)).spec)
    with pytest.raises(
        RuntimeError, match=r"='fp8': mps has no FP8 units; take products='decoded' or 'auto'$"
    ):
        units_on(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        RuntimeError, match=r"FP8 units begin at compute capability 8\.9, and cuda:0 has 8\.6; take"
    ):
        units_on(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(RuntimeError, match=r"ROCm has no FP8 units"):
        units_on(torch.device("cuda", 0))
    monkeypatch.setattr(_products, "why_no_units", lambda units, device: "it has none")
    with pytest.raises(RuntimeError, match=r"^products='fp8': it has none; take"):
        fm.quantize_model(nn.Linear(32, 16), "E4M3", storage="codes", products="fp8")


def tied():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    model[1].weight = model[0].weight
    return model


SUBJECTS = {
    "both": tied,
    "linear": lambda: nn.Linear(32, 16),
    "odd": lambda: nn.Linear(32, 50257, device="meta"),
    "net": lambda: layer("E4M3", (32, 16), gradient_products="fp8"),
    "wide": lambda: nn.Linear(151936, 16, device="meta"),
}
REFUSED = {
    "LayerSpec('E4M3', products='fp4')": "ValueError: products='fp4' & decoded, fp8, int8, auto",
    "LayerSpec('E4M3', products='fp8', gradient_products='int8')": "ValueError: 'int8' & bfloat16, "
    "fp8",
    "LayerSpec('E4M3', gradient_products='fp8')": "ValueError: needs products='fp8', not "
    "products='decoded'",
    "LayerSpec('E1M6', products='auto', gradient_products='fp8')": "ValueError: not "
    "products='auto' of weight=E1M6",
    "LayerSpec('E1M6', products='fp8')": "ValueError: products='fp8': codes of E1M6 take "
    "products='int8'",
    "LayerSpec('E4M3', products='int8')": "ValueError: products='int8': codes of E4M3 take "
    "products='fp8'",
    "LayerSpec('E4M3FNUZ', products='fp8')": "ValueError: no units multiply codes of "
    "weight=E4M3FNUZ",
    "LayerSpec(activation='E4M3', products='fp8')": "ValueError: no units multiply codes of "
    "weight=none",
    "LayerSpec('E4M3', granularity='block', products='fp8')": "ValueError: 'block', not 'tensor' "
    "or 'channel'",
    "LayerSpec('E4M3', activation='E4M3', products='fp8')": "ValueError: activation=E4M3 is given "
    "& 'decoded'",
    "LayerSpec('E4M3', gradient='E5M2', products='fp8')": "ValueError: activation_gradient=E5M2 is "
    "given",
    "quantize_model(linear, 'E4M3', 'master', products='fp8')": "ValueError: needs storage='codes', "
    "not storage='master'",
    "quantize_model(linear, LayerSpec('E4M3'), 'codes', products='fp8')": "ValueError: give products "
    "to each LayerSpec",
    "quantize_model(linear, 'E4M3', 'codes', products='FP8')": "ValueError: products='FP8' & 'fp8'",
    "quantize_model(both, 'E4M3', 'codes', products='fp8', embeddings='E4M3')": "ValueError: '1' is "
    "shared",
    "quantize_model(odd, 'E4M3', 'codes', products='fp8')": "ValueError: products='fp8': 16 does not "
    "divide 50257; take",
    "quantize_model(wide, 'E1M6', 'codes', products='int8')": "ValueError: a sum of 151936 & beyond "
    "32 bits",
    "check_formats('E4M3', {'a': (768, 50257)}, 'codes', products='fp8')": "ValueError: 16 does not "
    "divide 50257",
    "check_formats('E4M3', {'a': (16, 0)}, 'codes', products='fp8')": "ValueError: there is nothing "
    "to multiply",
    "net(zeros(8191, 32, dtype=bfloat16))": "ValueError: 8191 & 16 does not divide & "
    "gradient_products='bfloat16'",
    "net(zeros(16, 32))": "RuntimeError: the input has dtype torch.float32, but the weight "
    "torch.bfloat16",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_does_not_fit_is_refused(call):
    check_refused(call, REFUSED[call], SUBJECTS)


def test_second_derivatives_and_other_weights_are_refused():
    net, (x, _) = layer("E4M3", (64, 32)), batch((64, 32), 16)
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="multiplies codes, and the weight is a Tensor"):
        torch.func.functional_call(net, {"weight": torch.zeros(32, 64, dtype=torch.bfloat16)}, (x,))
    unlike_weight = fm.FP8Parameter(torch.ones(32, 64), "E2M5")
    with pytest.raises(ValueError, match="'E2M5', 'channel'\\), but the layer's weight has"):
        net.weight = unlike_weight
    with pytest.raises(RuntimeError, match="made for codes of E4M3, not of E2M5"):
        torch.func.functional_call(net, {"weight": unlike_weight}, (x,))


FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def least_scale(amax, largest):
    """Return the least power of two that takes a magnitude to `largest` at most, exactly."""
    if not np.isfinite(amax):
        return float("nan")
    exponent = -126
    while amax and Fraction(amax) > largest * Fraction(2) ** exponent:
        exponent += 1
    return 2.0 ** (exponent if amax else 0)


def quantised(x, fold, units):
    """Codes and scales of the rows of a float64 product, rounded by another package."""
    wide = x.double().numpy() * (1.0 if fold is None else fold.double().numpy())
    codes = np.zeros(wide.shape, np.int8 if units == "int8" else np.uint8)
    scales = np.ones((len(wide), 1), np.float32)
    for i, row in enumerate(wide):
        scales[i] = least_scale(np.abs(row).max(), 127 if units == "int8" else 448)
        if np.isfinite(scales[i, 0]):
            steps = row / np.float64(scales[i, 0])
            codes[i] = (
                np.rint(steps)
                if units == "int8"
                else steps.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            )
    return torch.from_numpy(codes), torch.from_numpy(scales)


def edges(width=64):
    """Return rows of all magnitudes, both zeros, subnormals, ends of formats, and no numbers."""
    x = normal(40, width, seed=1) * torch.exp2(normal(40, 1, seed=2).mul(20).round())
    ends = (
        0.0,
        -0.0,
        448.0,
        449.0,
        480.0,
        464.0,
        127.0,
        127.5,
        1e-38,
        1e-41,
        3e38,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    for row, end in enumerate(ends):
        x[row, width // 2 :] = end
    x[0] = 0.0
    x[1] = -0.0
    # Subnormals and ties of E4M3.
    x[20] = torch.tensor([448.0, *(2.0**-k for k in range(5, 15))]).repeat(width)[:width]
    x[21] = torch.arange(width) + 0.5
    return x


def assert_same(rounded, expected):
    """Compare codes and scales; scales of NaN may differ in their payload."""
    (codes, scales), (expected_codes, expected_scales) = rounded, expected
    assert codes.dtype == expected_codes.dtype
    assert torch.equal(codes, expected_codes)
    leading_bits, expected_bits = (
        x.view(torch.int32) & 0x7FC00000 for x in (scales, expected_scales)
    )
    assert torch.equal(leading_bits, expected_bits)
    assert torch.equal(scales.nan_to_num(-1.0), expected_scales.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folded", [False, True])
def test_rows_and_columns_are_rounded_as_another_package_does(folded, dtype):
    x = edges().to(dtype)
    if folded and dtype is not torch.float16:
        x = x.clamp(-1e30, 1e30)  # the product stays in range
    fold = torch.exp2(normal(1, 64, seed=3).mul(6).round().clamp(-20, 20)) if folded else None
    x[x.abs() < 1e-30] *= not folded
    assert_same(products.round_rows(x, fold), quantised(x, fold, "fp8"))
    assert_same(products.int8_rows(x, fold), quantised(x, fold, "int8"))
    codes, scales = products.round_columns(x.t(), None if fold is None else fold.t())
    assert_same((codes, scales), quantised(x, fold, "fp8"))
    assert codes.is_contiguous()


@pytest.mark.parametrize("place", ["at the end", "beyond it"])
@pytest.mark.parametrize("largest", [448.0, 127.0])
def test_scales_are_the_least_ones_at_every_end(largest, place):
    amax, exponents = largest * torch.exp2(torch.arange(-126, 118).float()), range(-126, 118)
    if place == "beyond it":
        amax, exponents = torch.nextafter(amax, torch.tensor(torch.inf)), range(-125, 119)
    scale, inverse = products.pow2_scales(amax, largest)
    assert torch.equal(scale, torch.exp2(torch.tensor(exponents).float()))
    assert torch.equal(scale * inverse, torch.ones_like(scale))


def test_scales_of_zeros_subnormals_and_no_numbers():
    scale, inverse = products.pow2_scales(torch.tensor([0.0, 1e-45, torch.inf, torch.nan]), 448.0)
    assert scale[:2].tolist() == [1.0, 2.0**-126]
    assert scale[2:].isnan().all()
    assert inverse.tolist() == [1.0, 2.0**126, 0.0, 0.0]


@pytest.mark.parametrize("fmt", FLOAT8)
def test_all_codes_are_numbers_of_the_dtype(fmt):
    by_torch, decoded = ALL_CODES.view(FLOAT8[fmt]).float(), fm.decode(ALL_CODES, fmt)
    assert torch.equal(by_torch.isnan(), decoded.isnan())
    numbers, expected = (x.nan_to_num().view(torch.int32) for x in (by_torch, decoded))
    assert torch.equal(numbers, expected)
    w = fm.FP8Tensor(normal(32, 48, seed=1) * torch.exp2(normal(32, 1, seed=2).mul(4)), fmt)
    assert torch.equal(w.codes.view(FLOAT8[fmt]).float() * w.scale, w.dequantize())


def test_all_codes_of_e1m6_are_whole_numbers():
    unit, codes = as_format("E1M6").ulp_min, ALL_CODES.view(16, 16)
    assert torch.equal(products.codes_to_int8(codes) * unit, fm.decode(codes, "E1M6"))
    assert torch.equal(
        products.codes_to_int8(codes, transposed=True), products.codes_to_int8(codes).t()
    )
    assert torch.equal(products.transpose_bytes(codes), codes.t())
    assert products.transpose_bytes(codes).is_contiguous()
