"""Products straight from codes: operands by another package, sums by their definition,
and what a card asks of both.
"""

import copy
import json
from fractions import Fraction
from functools import partial

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


def layer(fmt="E4M3", size=(768, 1024), dtype=torch.bfloat16, **how):
    linear, spread = nn.Linear(*size, bias=how.pop("bias", False)), how.pop("spread", 1.0)
    sizes = torch.exp2(normal(size[1], 1, seed=2, std=spread))
    linear.weight.data = normal(*linear.weight.shape, seed=1, std=0.02) * sizes
    spec = fm.LayerSpec(fmt, **{"products": UNITS[fmt], **how})
    return fm.quantize_model(linear.to(dtype), spec, storage="fp8", seed=1)


def batch(size=(768, 1024), rows=512, *, spread=1.0):
    x = normal(rows, size[0], seed=3) * torch.exp(normal(rows, 1, seed=4, std=spread))
    x[:, 5] *= 20.0 if spread else 1.0
    g = normal(rows, size[1], seed=5, std=1e-4) * torch.exp(normal(rows, 1, seed=6, std=spread))
    return x.bfloat16(), g.bfloat16()


def passes(net, x, g, call=None):
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
    """The three products of the page, of operands by the oracle."""
    w, units = net.weight, UNITS[net.weight.format.name]
    unit = w.format.ulp_min if units == "int8" else 1.0
    codes = (
        products.codes_to_int8(w.codes) if units == "int8" else w.codes.view(FLOAT8[w.format.name])
    )

    def read(made):
        return made if units == "int8" else made.view(E4M3)

    scale = w.scale.expand(w.shape[0], 1)
    (a, p), (b, q) = quantised(x, None, units), quantised(g, scale.t(), units)
    y = product(read(a), codes, p, scale.t() * unit, x.dtype)
    dx = product(read(b), codes.t().contiguous(), q, unit, x.dtype)
    if net.spec.gradient_products == "bfloat16":
        return [y, dx, g.t() @ x]
    h, r = quantised(g.t(), p.t(), "fp8")
    return [y, dx, product(h.view(E4M3), a.t().contiguous().view(E4M3), r, 1.0, x.dtype)]


CASES = [("E4M3", "bfloat16"), ("E4M3", "fp8"), ("E5M2", "fp8"), ("E1M6", "bfloat16")]
cases = pytest.mark.parametrize(("fmt", "gradient"), CASES)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@cases
def test_products_are_the_emulations_to_the_bit(fmt, gradient, dtype, granularity):
    size = (1024, 256)
    net = layer(fmt, size, dtype, gradient_products=gradient, granularity=granularity)
    x, g = (each.to(dtype) for each in batch(size, 128))
    for ours, expected in zip(passes(net, x, g), emulated(net, x, g), strict=True):
        assert ours.dtype is dtype
        assert torch.equal(ours, expected)


def test_integer_sums_are_exact_in_any_order():
    """4,096 whole numbers of 7 bits, whose sum float32 rounds."""
    net, (x, g) = layer("E1M6", (4096, 32), torch.float32), batch((4096, 32), 16, spread=0.0)
    x = 1.0 + 0.1 * x.abs()
    net.weight.codes.copy_(
        torch.randint(64, 128, (32, 4096), generator=torch.Generator().manual_seed(2))
    )
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    turned = copy.deepcopy(net)
    turned.weight.codes.copy_(net.weight.codes[:, order])
    y, other = (
        passes(net, x.float(), g.float())[0],
        passes(turned, x[:, order].float(), g.float())[0],
    )
    a, p = products.int8_rows(x)
    sums = a.to(torch.int32) @ products.codes_to_int8(net.weight.codes).to(torch.int32).t()
    assert sums.amin() > 2**24
    assert torch.equal(y, sums.float() * p * net.weight.scale.t() * 2.0**-5)
    assert torch.equal(y, other)


def test_each_error_is_within_its_budget():
    """Rows of other sizes and one channel of outliers, or neither; what is decoded has
    0.17% in bfloat16.
    """
    bounds = {
        ("E4M3", "bfloat16", 1.0): (0.030, 0.028, 0.002),
        ("E4M3", "fp8", 1.0): (0.030, 0.028, 0.039),
        ("E5M2", "bfloat16", 1.0): (0.030, 0.028, 0.002),
        ("E1M6", "bfloat16", 1.0): (0.058, 0.038, 0.002),  # its grid is uniform
        ("E1M6", "bfloat16", 0.0): (0.011, 0.016, 0.002),
    }
    for (fmt, gradient, spread), bound in bounds.items():
        net, (x, g) = layer(fmt, gradient_products=gradient, spread=spread), batch(spread=spread)
        w = net.weight.dequantize().double()
        exact = (x.double() @ w.t(), g.double() @ w, g.double().t() @ x.double())
        errors = [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(passes(net, x, g), exact, strict=True)
        ]
        within = [0.5 * most < error <= most for error, most in zip(errors, bound, strict=True)]
        assert all(within), (fmt, gradient, errors)


class Context:
    needs_input_grad = (True, True, False)

    def save_for_backward(self, *kept):
        self.saved_tensors = kept


@pytest.mark.parametrize("in_graph", [False, True])
@cases
def test_torchs_own_products_give_the_same_bits(fmt, gradient, in_graph, monkeypatch):
    """By rows with their scales, or at scales of 1 with powers of two afterwards, of
    sums that float32 holds.
    """
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient), batch((64, 32), 16)
    net.weight.codes.copy_(
        torch.where(net.weight.codes > 127, 0xA0, 0x48).to(torch.uint8)
    )  # two bits each
    x, g = x.sign() * 2.0, g.sign() * 0.25
    expected = passes(net, x, g)
    monkeypatch.setattr(_products, "is_on_card", lambda x: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: in_graph)
    assert all(map(torch.equal, passes(net, x, g), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_graph", [False, True])
@cases
def test_layouts_scales_and_sizes_are_those_of_a_card(fmt, gradient, in_graph, dtype, monkeypatch):
    """Torch's own checks, of fake tensors on a card that there is not."""
    called = []
    for name, torchs in (("_scaled_mm", torch._scaled_mm), ("_int_mm", torch._int_mm)):

        def seen(a, b, own=torchs, **more):
            called.append((a, b, more))
            return own(a, b, **more)

        monkeypatch.setattr(torch, name, seen)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: in_graph)
    rounds = gradient == "fp8"
    for size, rows in (((768, 3072), 8192), ((64, 32), 16)):
        called.clear()
        with FakeTensorMode():
            empty = partial(torch.empty, device="cuda")
            x, codes, scale = (
                empty(rows, size[0], dtype=dtype),
                empty(*size[::-1], dtype=torch.uint8),
                empty(size[1], 1),
            )
            weight = fm.FP8Parameter(
                fm.FP8Tensor.from_codes(codes, scale, fmt, dtype=dtype, seed=1)
            )
            ctx = Context()
            with torch.no_grad():
                y = _products._FromCodes.forward(ctx, x, weight, None, UNITS[fmt], rounds)
                dx, dw, *_ = _products._FromCodes.backward(ctx, torch.empty_like(y))
            assert (y.shape, dx.shape, dw.shape) == ((rows, size[1]), x.shape, weight.shape)
            assert {each.device.type for each in (y, dx, dw)} == {"cuda"}
        assert len(called) == 2 + rounds
        for a, b, more in called:
            if "scale_a" in more and dtype is torch.bfloat16 and not in_graph:
                assert (more["scale_a"].shape, more["scale_a"].stride()) == (
                    (a.shape[0], 1),
                    (1, 1),
                )
                assert (more["scale_b"].shape, more["scale_b"].stride()) == (
                    (1, b.shape[1]),
                    (b.shape[1], 1),
                )
            elif "scale_a" in more:
                assert more["scale_a"].shape == more["scale_b"].shape == ()
            else:
                assert a.shape[0] > 16


@cases
def test_a_compiler_sees_one_graph_on_a_card(fmt, gradient):
    """Fake tensors there: no compiler traces which kernels there are; another size
    makes a dimension a symbol.
    """
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
            assert torch.compile(product, backend="eager", fullgraph=True)(x).shape == (rows, width)
    with pytest.raises(RuntimeError, match="the input has 64 features, and the layer takes 128"):
        product(torch.zeros(16, 64, dtype=torch.bfloat16))


def test_what_a_cpu_takes_and_a_card_does_not_is_refused_everywhere(monkeypatch):
    a, b = (
        torch.zeros(16, 32, dtype=torch.uint8).view(E4M3),
        torch.zeros(48, 32, dtype=torch.uint8).view(E4M3),
    )
    check_operands(a, b)
    check_operands(a, b.view(torch.float8_e5m2))
    for pair in (
        (a.view(torch.float8_e5m2), b.view(torch.float8_e5m2)),
        (a.view(torch.float8_e5m2), b),
        (torch.zeros(32, 16, dtype=torch.uint8).view(E4M3).t(), b),
        (a, torch.zeros(32, 48, dtype=torch.uint8).view(E4M3).t()),
        (a, b[:40]),
        (a[:, :24].contiguous(), b[:, :24].contiguous()),
    ):
        with pytest.raises(AssertionError):
            check_operands(*pair)
    called = []
    monkeypatch.setattr(_products, "check_operands", lambda a, b: called.append((a, b)))
    passes(layer("E5M2", (64, 32), gradient_products="fp8"), *batch((64, 32), 16))
    assert len(called) == 3


@cases
def test_what_is_not_finite_is_seen(fmt, gradient):
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient), batch((64, 32), 16)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = x.clone()
        spoilt[3, 5] = bad
        y = passes(net, spoilt, g)[0]
        assert y[3].isnan().all()
        others = torch.arange(16) != 3
        assert torch.equal(y[others], passes(net, x, g)[0][others])
        spoilt = g.clone()
        spoilt[3, 5] = bad
        assert all(made.isnan().all() for made in passes(net, x, spoilt)[1:])
        net.weight.grad = None
        net(x).backward(spoilt)  # without dx, of which q says it
        assert net.weight.grad.isnan().all()


@cases
def test_shapes_bias_and_autocast(fmt, gradient):
    size, how = (64, 32), {"gradient_products": gradient}
    net, (x, g) = layer(fmt, size, torch.float32, bias=True, **how), batch(size, 32)
    bare = copy.deepcopy(net).bfloat16()
    bare.bias = None
    y, dx, dw = passes(bare, x, g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = passes(net, x.float(), g)
    assert [each.dtype for each in made] == [torch.bfloat16, *[torch.float32] * 3]
    expected = (y + net.bias.bfloat16(), dx.float(), dw.float(), g.sum(0).float())
    assert all(map(torch.equal, made, expected))
    cut = passes(bare, x.view(2, 16, 64), g.view(2, 16, 32))
    assert all(map(torch.equal, cut, (y.view(2, 16, 32), dx.view(2, 16, 64), dw)))
    turned = passes(bare, x.t().contiguous().t(), g.t().contiguous().t())
    assert all(map(torch.equal, turned, (y, dx, dw)))
    for shape in ((0, 64), (2, 0, 64)):
        nothing = passes(bare, x.new_empty(shape), x.new_empty(*shape[:-1], 32))
        assert nothing[0].shape == (*shape[:-1], 32)
        assert nothing[1].shape == shape
        assert not nothing[2].any()
    assert torch.equal(bare(x.view(2, 16, 64)), y.view(2, 16, 32))
    assert not bare(x.view(2, 16, 64))._is_view()
    with torch.inference_mode():
        assert torch.equal(bare(x), y)
    if gradient == "bfloat16":  # a single token, and a row without a batch
        y, dx, _ = passes(bare, x[:1], g[:1])
        assert all(map(torch.equal, passes(bare, x[0], g[0])[:2], (y[0], dx[0])))


@pytest.mark.parametrize("during", ["forward", "both"])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
@cases
def test_autocast_rounds_the_result_and_no_sum(fmt, gradient, cast, during):
    """Sums without their scales are far beyond float16; scales of a file are no powers
    of two.
    """
    net = layer(fmt, (256, 64), torch.float32, gradient_products=gradient)
    net.weight.set_scale_(net.weight.scale * 1.3)
    x, g = (part.to(cast) for part in batch((256, 64), 32, spread=0.0))
    y, dx, dw = passes(net, x.float(), g.float())
    x = x.float().requires_grad_()
    net.weight.grad = None
    with torch.autocast("cpu", cast):
        made = net(x)
        if during == "both":
            made.backward(g)
    if during == "forward":
        made.backward(g)
    assert torch.equal(made, y.to(cast))
    assert torch.equal(x.grad, dx.to(cast).float())
    if gradient == "fp8":
        assert torch.equal(net.weight.grad, dw.to(cast).float())
    else:
        assert torch.equal(net.weight.grad, (g.t() @ x.detach().to(cast)).float())


@cases
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


@cases
def test_an_input_without_dimensions_is_refused(fmt, gradient):
    net = layer(fmt, (64, 32), torch.float32, gradient_products=gradient)
    with pytest.raises(RuntimeError, match=r"^the input has no dimension, [^\n]*$"):
        net(torch.tensor(1.0))


@pytest.mark.parametrize("autocast", [False, True])
@cases
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
    "decoded": (fm.LayerSpec("E4M3"), "fp8"),
    "gradient": (fm.LayerSpec("E4M3", gradient="E5M2"), "fp8"),
    "grid": (fm.LayerSpec("E4M3"), "grid"),
}
NOT_TRACED = {
    "fp8": (fm.LayerSpec("E4M3", products="fp8"), "fp8"),
    "int8": (fm.LayerSpec("E1M6", products="int8"), "fp8"),
    "activation": (fm.LayerSpec("E4M3", activation="E4M3"), "fp8"),
    "blocks": (fm.LayerSpec("E4M3", activation="E4M3", granularity="block"), "fp8"),
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


def test_what_no_gradient_needs_is_not_held():
    held = []
    x, _ = batch((64, 32), 16)
    for trained, gradient, expected in (
        (True, "bfloat16", [torch.bfloat16]),
        (True, "fp8", [torch.uint8]),
        (False, "fp8", []),
    ):
        net = layer("E4M3", (64, 32), gradient_products=gradient)
        net.weight.requires_grad_(trained)
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: held.append(each) or each, lambda each: each
        ):
            net(x.clone().requires_grad_())
        assert [each.dtype for each in held if each.shape == x.shape] == expected
        assert any(each is net.weight or isinstance(each, fm.FP8Tensor) for each in held)


@pytest.mark.parametrize(("way", "most"), [("decoded", 360), ("fp8", 742)])
def test_guards_of_twelve_layers(way, most):
    """No more than there were before products, 742; a dense model has 177."""
    dense = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    net = fm.quantize_model(dense, "E4M3", storage="fp8", products=way)
    found = torch._dynamo.explain(net)(torch.ones(16, 16))
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    assert len(found.out_guards) <= most


@cases
def test_one_graph_and_repeated_passes_have_the_same_bits(fmt, gradient):
    net, (x, g) = layer(fmt, (64, 32), gradient_products=gradient, bias=True), batch((64, 32), 16)
    found = torch._dynamo.explain(net)(x)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    eager = passes(net, x, g)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for call in (
        compiled,
        *(partial(checkpoint, net, use_reentrant=reentrant) for reentrant in (False, True)),
    ):
        assert all(map(torch.equal, passes(net, x, g, call), eager))


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
    passes(
        torch.compile(net, backend=aot_autograd(**compilers, partition_fn=min_cut), fullgraph=True),
        x,
        g,
    )
    assert copies == {"fw": 0, "bw": 1}


def test_it_is_shown_and_made_again_from_what_was_saved():
    net = nn.Sequential(layer("E5M2", (64, 32), gradient_products="fp8"), nn.Linear(32, 16))
    assert repr(net[0]).endswith("storage=fp8, gradient_products=fp8, products=fp8)")
    fresh = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16), nn.Linear(32, 16))
    put_layers(fresh, json.loads(json.dumps(recipe_of(net))))
    assert fresh[0].spec == net[0].spec
    fresh.load_state_dict(net.state_dict())
    x, _ = batch((64, 32), 16)
    assert torch.equal(fresh[0](x), net[0](x))
    assert torch.equal(copy.deepcopy(net)[0](x), net[0](x))
    assert (
        "products"
        not in recipe_of(fm.quantize_model(nn.Linear(4, 4), "E4M3", storage="fp8"))[0]["spec"]
    )


def test_every_way_to_a_model_takes_it():
    made = fm.quantize_model(nn.Linear(32, 16), "E4M3", storage="fp8", products="fp8")
    assert made.spec == fm.LayerSpec("E4M3", products="fp8")
    net, by_dict = (
        nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3)),
        {"*": {"weight": "E4M3", "products": "fp8"}},
    )
    assert fm.quantize_model(net, by_dict | {"1": "none"}, storage="fp8")[0].spec == made.spec
    empty = nn.Linear(32, 16, device="meta")
    assert (
        fm.load_quantized(empty, nn.Linear(32, 16).state_dict(), "E4M3", products="fp8").spec
        == made.spec
    )
    assert fm.check_formats("E4M3", {"a": (32, 16)}, "fp8", products="auto")["a"].products == "auto"


def test_auto_takes_codes_where_they_fit_and_says_why_not(monkeypatch):
    automatic = {"3": {"granularity": "block"}, "4": {"gradient": "E5M2"}}
    automatic |= {
        "0": {},
        "1": {"weight": "E1M6"},
        "2": {"weight": "E3M4"},
        "5": {"activation": "E4M3"},
        "6": {},
    }
    specs = {
        name: fm.LayerSpec(**{"weight": "E4M3", "products": "auto", **given})
        for name, given in automatic.items()
    }
    specs["7"] = fm.LayerSpec("E4M3")
    net = nn.Sequential(*(nn.Linear(32, 32 if i != 6 else 33) for i in range(8)))
    fm.quantize_model(net, specs, storage="fp8")
    words = [
        "cpu has no fast FP8 units",
        "cpu has no fast INT8 units",
        "no units multiply codes of weight=E3M4",
    ]
    words += [
        "granularity='block'",
        "activation_gradient=E5M2 is given",
        "activation=E4M3 is given",
    ]
    words += ["16 does not divide 33"]
    reported = [each.detail for each in fm.quantization_report(net).layers]
    assert all("products=auto: decoded, as " in said for said in reported[:7])
    assert [word for word, said in zip(words, reported, strict=False) if word not in said] == []
    assert "products" not in reported[7]
    x = normal(4, 32)
    assert torch.equal(net[0](x), nn.functional.linear(x, net[0].weight.dequantize(), net[0].bias))
    units_on = partial(_products.units_on, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    for capability, found in (
        ((9, 0), ["fp8", "int8"]),
        ((8, 0), [None, "int8"]),
        ((7, 5), [None, None]),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        assert [units_on(net[i]._units, net[i].spec) for i in (0, 1)] == found
        assert [units_on(each._units, each.spec) for each in net[2:]] == [None] * 6


def test_devices_without_units_are_refused_at_once(monkeypatch):
    on = partial(_products.units_on, "fp8", layer("E4M3", (64, 32)).spec)
    with pytest.raises(
        RuntimeError, match=r"='fp8': mps has no FP8 units; take products='decoded' or 'auto'$"
    ):
        on(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        RuntimeError, match=r"FP8 units begin at compute capability 8\.9, and cuda:0 has 8\.6; take"
    ):
        on(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(RuntimeError, match=r"ROCm has no FP8 units"):
        on(torch.device("cuda", 0))
    monkeypatch.setattr(_products, "why_no_units", lambda units, device: "it has none")
    with pytest.raises(RuntimeError, match=r"^products='fp8': it has none; take"):
        fm.quantize_model(nn.Linear(32, 16), "E4M3", storage="fp8", products="fp8")


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
    "LayerSpec('E4M3', gradient_products='fp8')": "ValueError: belongs to products='fp8', not to "
    "products='decoded'",
    "LayerSpec('E1M6', products='auto', gradient_products='fp8')": "ValueError: not to "
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
    "quantize_model(linear, 'E4M3', 'master', products='fp8')": "ValueError: needs storage='fp8', "
    "not storage='master'",
    "quantize_model(linear, LayerSpec('E4M3'), 'fp8', products='fp8')": "ValueError: give products "
    "to each LayerSpec",
    "quantize_model(linear, 'E4M3', 'fp8', products='FP8')": "ValueError: products='FP8' & 'fp8'",
    "quantize_model(both, 'E4M3', 'fp8', products='fp8', embeddings='E4M3')": "ValueError: '1' is "
    "shared",
    "quantize_model(odd, 'E4M3', 'fp8', products='fp8')": "ValueError: products='fp8': 16 does not "
    "divide 50257; take",
    "quantize_model(wide, 'E1M6', 'fp8', products='int8')": "ValueError: a sum of 151936 & beyond "
    "32 bits",
    "check_formats('E4M3', {'a': (768, 50257)}, 'fp8', products='fp8')": "ValueError: 16 does not "
    "divide 50257",
    "check_formats('E4M3', {'a': (16, 0)}, 'fp8', products='fp8')": "ValueError: there is nothing "
    "to multiply",
    "net(zeros(8191, 32, dtype=bfloat16))": "ValueError: 8191 & 16 does not divide & "
    "gradient_products='bfloat16'",
    "net(zeros(16, 32))": "RuntimeError: the input has dtype torch.float32, and the weight "
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
    other = fm.FP8Parameter(torch.ones(32, 64), "E2M5")
    with pytest.raises(ValueError, match="'E2M5', 'channel'\\), and the layer's weight is"):
        net.weight = other
    with pytest.raises(RuntimeError, match="made for codes of E4M3, not of E2M5"):
        torch.func.functional_call(net, {"weight": other}, (x,))


FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def least_scale(amax, largest):
    """The least power of two that takes a magnitude to ``largest`` at most, by exact
    fractions.
    """
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
    """Rows of all magnitudes, zeros of both signs, subnormals, the ends of the formats,
    and what is not finite.
    """
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
    x[20] = torch.tensor([448.0, *(2.0**-k for k in range(5, 15))]).repeat(width)[
        :width
    ]  # subnormals and ties of E4M3
    x[21] = torch.arange(width) + 0.5
    return x


def same(ours, expected):
    assert ours[0].dtype == expected[0].dtype
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(
        ours[1].view(torch.int32) & 0x7FC00000, expected[1].view(torch.int32) & 0x7FC00000
    )
    assert torch.equal(ours[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folded", [False, True])
def test_rows_and_columns_are_rounded_as_another_package_does(folded, dtype):
    x = edges().to(dtype)
    x = x.clamp(-1e30, 1e30) if folded and dtype is not torch.float16 else x  # short of the range
    fold = torch.exp2(normal(1, 64, seed=3).mul(6).round().clamp(-20, 20)) if folded else None
    x[x.abs() < 1e-30] *= not folded
    same(products.round_rows(x, fold), quantised(x, fold, "fp8"))
    same(products.int8_rows(x, fold), quantised(x, fold, "int8"))
    codes, scales = products.round_columns(x.t(), None if fold is None else fold.t())
    same((codes, scales), quantised(x, fold, "fp8"))
    assert codes.is_contiguous()


def test_scales_are_the_least_ones_at_every_end():
    for largest in (448.0, 127.0):
        at = largest * torch.exp2(torch.arange(-126, 118).float())
        above = torch.nextafter(at, torch.tensor(torch.inf))
        for amax, exponents in ((at, range(-126, 118)), (above, range(-125, 119))):
            scale, inverse = products.pow2_scales(amax, largest)
            assert torch.equal(scale, torch.exp2(torch.tensor(exponents).float()))
            assert torch.equal(scale * inverse, torch.ones_like(scale))
    scale, inverse = products.pow2_scales(torch.tensor([0.0, 1e-45, torch.inf, torch.nan]), 448.0)
    assert scale[:2].tolist() == [1.0, 2.0**-126]
    assert scale[2:].isnan().all()
    assert inverse.tolist() == [1.0, 2.0**126, 0.0, 0.0]


@pytest.mark.parametrize("fmt", FLOAT8)
def test_all_codes_are_numbers_of_the_dtype(fmt):
    read, decoded = ALL_CODES.view(FLOAT8[fmt]).float(), fm.decode(ALL_CODES, fmt)
    assert torch.equal(read.isnan(), decoded.isnan())
    assert torch.equal(read.nan_to_num().view(torch.int32), decoded.nan_to_num().view(torch.int32))
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
