"""The product of a layer with a weight in codes.

The layer goes a shorter way than torch's dispatcher; values and gradients are the
dispatcher's, bit for bit.
"""

import copy

import pytest
import torch
from optimizer_cases import normal
from torch import nn

import fp8manifold as fm
from fp8manifold._encoded.dispatch import FLOAT8
from fp8manifold.formats import as_format
from fp8manifold.nn import _products


def layer(features, dtype, *, bias, granularity="channel"):
    linear = nn.Linear(features, 48, bias=bias)
    linear.weight.data = normal(48, features, seed=1, std=0.1)
    return fm.quantize_model(
        nn.Sequential(linear.to(dtype)), "E4M3", storage="codes", granularity=granularity, seed=1
    )


def passes(model, x, *, autocast):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("gradient", [None, "E5M2"])
def test_autocast_around_a_backward_pass_alone_changes_nothing(gradient):
    model = fm.quantize_model(
        nn.Linear(64, 32), fm.LayerSpec("E4M3", gradient=gradient), storage="codes", seed=1
    )
    x, g = normal(16, 64, seed=2), normal(16, 32, seed=3)
    results = []
    for enabled in (False, True):
        x, model.weight.grad = x.detach().clone().requires_grad_(), None
        y = model(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.backward(g)
        results.append((x.grad, model.weight.grad))
    assert all(map(torch.equal, *results))


@pytest.fixture
def dispatched(monkeypatch):
    """Return a function that calls another while products go by the dispatcher."""

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(_products, "_is_simple", lambda x, weight: False)
            return function(*args, **kwargs)

    return call


def assert_same(results, expected):
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 32), (1, 32), (2, 7, 64), (12, 64, 96), (0, 32), (32,)])
def test_the_bits_are_those_of_the_dispatcher(shape, dtype, bias, autocast, dispatched):
    model, x = layer(shape[-1], dtype, bias=bias), normal(*shape, seed=2).to(dtype)
    expected = dispatched(passes, copy.deepcopy(model), x, autocast=autocast)
    assert_same(passes(model, x, autocast=autocast), expected)


def test_autograd_keeps_the_codes_and_sees_them_change():
    model = layer(64, torch.float32, bias=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(normal(4, 64))
    assert [x for x in saved if x.shape == (48, 64) and not isinstance(x, fm.FP8Tensor)] == []
    assert any(isinstance(x, fm.FP8Tensor) for x in saved)
    loss = model(normal(4, 64)).sum()
    model[0].weight.rescale_(model[0].weight.scale * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_have_the_weight_in_them(dispatched):
    def second(model):
        x = normal(3, 64, seed=2).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return model[0].weight.grad

    model = layer(64, torch.float32, bias=True)
    assert torch.allclose(second(model), dispatched(second, copy.deepcopy(model)))


def test_transforms_and_forward_mode_see_torchs_operator():
    """They have their own ways through the dispatcher."""
    model, x = layer(64, torch.float32, bias=True), normal(3, 64, seed=2)
    assert torch.allclose(torch.func.vmap(model)(x.unsqueeze(0))[0], model(x))
    assert torch.allclose(torch.func.jacrev(model)(x[:1])[0, :, 0], model[0].weight.dequantize())
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, model[0].weight.dequantize().sum(1).expand(3, -1), atol=1e-5)


def on_a_card(monkeypatch):
    monkeypatch.setattr(_products, "is_on_card", lambda x: True)


def every_code(name, scale):
    """Return all codes but the infinite ones, a row for each scale."""
    fmt = as_format(name)
    codes = torch.arange(2 * fmt.sign_bit, dtype=torch.uint8)
    if fmt.inf_code is not None:
        codes = codes[(codes & (fmt.sign_bit - 1)) != fmt.inf_code]
    return fm.FP8Parameter(fm.FP8Tensor.from_codes(codes.repeat(scale.numel(), 1), scale, fmt))


@pytest.mark.parametrize("name", [fmt.name for fmt in FLOAT8])
def test_what_a_card_multiplies_by_has_the_bits_of_native_code(name, monkeypatch):
    """But for the payloads of NaN. Scales cover the whole range, powers of two and others.

    A weight has one scale a row or one in all.
    """
    scales = torch.exp2(torch.arange(-126.0, 128.0, dtype=torch.float64)).float()
    scales = torch.cat((scales, scales[:-1] * 1.3))
    weights = [every_code(name, scales[:, None])]
    weights += [every_code(name, scale) for scale in scales[::4]]
    expected = [_products._values(w, torch.bfloat16) for w in weights]
    on_a_card(monkeypatch)
    monkeypatch.setattr(_products, "dequantize_codes", None)
    for index, (w, native) in enumerate(zip(weights, expected, strict=True)):
        values = _products._values(w, torch.bfloat16)
        assert torch.equal(values.isnan(), native.isnan()), index
        assert torch.equal(
            *(x.masked_fill(x.isnan(), 0.0).view(torch.int16) for x in (values, native))
        ), index


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "card"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize("name", fm.NAMED_FORMATS)
def test_every_format_and_scale_has_the_bits_of_the_dispatcher(
    name, granularity, device, dtype, autocast, dispatched, monkeypatch
):
    linear = nn.Linear(160, 144, dtype=dtype)
    model = fm.quantize_model(
        nn.Sequential(linear), name, storage="codes", granularity=granularity, seed=1
    )
    x = normal(3, 160, seed=2).to(dtype)
    expected = dispatched(passes, copy.deepcopy(model), x, autocast=autocast)
    if device == "card":
        on_a_card(monkeypatch)
    assert_same(passes(model, x, autocast=autocast), expected)


def test_a_bias_of_another_dtype_is_refused_but_under_autocast():
    model = layer(32, torch.bfloat16, bias=True)
    model[0].bias = nn.Parameter(model[0].bias.detach().double())
    x = normal(3, 32).bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    _, _, _, of_bias = passes(model, x, autocast=True)
    assert of_bias.dtype is torch.float64


@pytest.mark.parametrize("operand", ["activation", "weight"])
def test_a_layer_that_rounds_one_gradient_is_more_than_a_product(operand):
    def gradients(storage, gradient):
        torch.manual_seed(0)
        spec = fm.LayerSpec("E4M3", gradient=gradient)
        model = fm.quantize_model(
            nn.Sequential(nn.Linear(32, 48)), spec, storage=storage, headroom=1, seed=1
        )
        _, dx, dw, _ = passes(model, normal(4, 32, seed=2), autocast=False)
        return {"activation": dx, "weight": dw}

    rounded = gradients("codes", {operand: "E5M2"})
    on_grid = gradients("grid", {operand: "E5M2"})
    assert_same(rounded.values(), on_grid.values())
    assert not torch.equal(rounded[operand], gradients("codes", None)[operand])


def test_compiled_code_serves_other_seeds_and_no_other_traits():
    def metadata(fmt="E4M3", **options):
        return fm.FP8Tensor(normal(32, 32), fmt, **{"seed": 1, **options}).__tensor_flatten__()[1]

    serves = fm.FP8Tensor.__metadata_guard__
    assert serves(metadata(), metadata(seed=2, draws="dither"))
    assert not serves(metadata(), metadata("E5M2"))
    assert not serves(metadata(), metadata(rounding="nearest"))
    assert not serves(metadata(), metadata(dtype=torch.bfloat16))
    assert not serves(metadata(), metadata(granularity="block"))


def test_a_stale_cast_is_not_flattened():
    w = fm.FP8Parameter(normal(16, 32), "E4M3", seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = w.to(torch.bfloat16)
    w.set_scale_(1.0)
    with pytest.raises(RuntimeError, match="whose codes it shares has changed since"):
        cast.__tensor_flatten__()
