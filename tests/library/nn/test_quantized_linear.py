"""QuantizedLinear: what it computes, copies and files of it, the way back, and whether
it learns.
"""

import copy
import warnings

import geoopt
import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal, on_grid
from surgery_models import LINEARS, TOKENS, Model, layers, stored
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import (
    LayerSpec,
    QuantizedLinear,
    SaturationWarning,
    dequantize_model,
    quantize_model,
)

all_storages = pytest.mark.parametrize("storage", ["master", "grid", "codes"])
FORMATS = ("E4M3", "E5M2", "E3M4", "E1M6", "E7M0")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("name", FORMATS)
def test_master_is_a_fake_quantised_weight(name, granularity, bias) -> None:
    linear = nn.Linear(16, 5, bias=bias)
    weight = linear.weight
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity), storage="master")
    assert layer.weight is weight
    x = normal(3, 16)
    expected = fm.fake_quantize(weight, name, granularity=granularity)
    assert torch.equal(layer(x), F.linear(x, expected, linear.bias))
    assert torch.equal(layer.quantized_weight(), expected)
    assert torch.equal(fm.decode(layer.weight_codes(), name) * layer.weight_scale(), expected)
    layer(x).sum().backward()
    assert torch.equal(weight.grad, x.sum(0).expand(5, 16))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("name", FORMATS)
def test_grid_is_the_weight_itself(name, granularity, bias) -> None:
    """On the grid, at power-of-two scales with headroom 16, within half an ULP of the
    weight it was.
    """
    linear = nn.Linear(64, 5, bias=bias)
    linear.weight.data = normal(5, 64, std=0.1)
    floats = linear.weight.detach().clone()
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity), "grid", headroom=16.0)
    scale = layer.weight_scale()
    fmt = fm.FloatFormat.from_string(name)
    assert isinstance(layer.weight, geoopt.ManifoldParameter)
    assert layer.weight.manifold is layer.manifold
    assert on_grid(layer.weight)
    assert scale.shape == ((5, 1) if granularity == "channel" else ())
    assert (torch.frexp(scale).mantissa == 0.5).all()
    amax = floats.abs().amax(1, keepdim=True) if granularity == "channel" else floats.abs().amax()
    assert (16 * amax <= scale * fmt.max).all()
    assert ((layer.weight - floats).abs() <= fm.ulp(floats / scale, fmt) * scale / 2).all()
    x = normal(3, 64)
    assert torch.equal(
        layer(x), F.linear(x, layer.weight.detach().as_subclass(Tensor), linear.bias)
    )
    assert torch.equal(
        fm.decode(layer.weight_codes(), fmt) * scale, layer.weight.detach().as_subclass(Tensor)
    )
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(5, 64))


def exported(model: nn.Module, x: Tensor, *, strict: bool) -> nn.Module:
    """Return the program of a model.

    torch warns that a forward pass stores scales for logging.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (x,), strict=strict).module()


def same_frozen(model: nn.Module, way: str) -> nn.Module:
    """Return a model that has the frozen scales of another, by one of four ways."""
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "state":
        fresh = quantize_model(
            nn.Sequential(nn.Linear(8, 4)), model[0].spec, storage=model[0].storage
        )
        fresh.load_state_dict(model.state_dict())
        return fresh.eval()
    if way == "freeze":
        scale = model[0].activation_scaler.value
        model[0].activation_scaler.reset_parameters()
        model[0].activation_scaler.freeze(scale)
    return model


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("way", ["itself", "deepcopy", "state", "freeze"])
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
def test_a_frozen_scale_is_exported(storage, way, strict) -> None:
    spec = LayerSpec("E4M3", activation={"format": "E4M3", "policy": "static"})
    model = quantize_model(nn.Sequential(nn.Linear(8, 4)), spec, storage=storage).eval()
    first = torch.linspace(-3.0, 3.0, 16).view(2, 8)
    with torch.no_grad():
        model(first)
        model = same_frozen(model, way)
        smaller = first * 0.3
        expected = model(smaller)
        program = exported(model, first, strict=strict)
        assert torch.equal(program(smaller), expected)
        assert model[0].activation_scaler.value == first.abs().max() / 448.0


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_scale_that_is_not_frozen_yet_is_not_exported(reset, strict) -> None:
    spec = LayerSpec("E4M3", activation={"format": "E4M3", "policy": "static"})
    model = quantize_model(nn.Sequential(nn.Linear(8, 4)), spec).eval()
    x = torch.ones(2, 8)
    if reset:
        model(x)
        model[0].activation_scaler.reset_parameters()
    with pytest.raises(Exception, match=r"run the model once before torch\.export"):
        exported(model, x, strict=strict)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_delayed_scale_is_exported(training) -> None:
    spec = LayerSpec("E4M3", activation={"format": "E4M3", "policy": "delayed"})
    model = quantize_model(nn.Sequential(nn.Linear(8, 4)), spec)
    x = torch.linspace(-3.0, 3.0, 16).view(2, 8)
    model(x)
    model.train(training)
    program = exported(model, x, strict=False)
    with torch.no_grad():
        assert torch.equal(program(x * 0.3), copy.deepcopy(model)(x * 0.3))


def test_static_scales_are_frozen_after_the_first_forward() -> None:
    layer = quantize_model(
        nn.Linear(8, 4), LayerSpec("E4M3", activation="E4M3", policy="static"), storage="master"
    )
    x = normal(3, 8)
    layer(x)
    scales = [layer.weight_scale().clone(), layer.activation_scaler.value.clone()]
    layer(x / 2)
    assert torch.equal(layer.weight_scale(), scales[0])
    assert torch.equal(layer.activation_scaler.value, scales[1])
    with pytest.warns(SaturationWarning, match="4 times"):
        layer(x * 4)
    layer.weight.data *= 3
    with pytest.warns(SaturationWarning, match="3 times"):
        layer(x)


@all_storages
def test_gradients_flow_to_what_they_did_before(storage) -> None:
    dtype = torch.bfloat16 if storage == "codes" else torch.float64
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype).eval()
    model[0].weight.requires_grad_(False)
    quantize_model(model, "E4M3", storage)
    assert not model[0].training
    assert {layer.weight.dtype for layer in model} == {dtype}
    out = model(torch.ones(1, 4, dtype=dtype))
    assert out.dtype == dtype
    out.sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def seeds_of(model) -> set[int]:
    return {int(layer.weight.manifold.seed_word) for layer in layers(model)}


def roundings_of(model) -> set[str]:
    return {layer.weight.manifold.rounding for layer in layers(model)}


@pytest.mark.parametrize("storage", ["grid", "codes"])
def test_options_reach_the_weights(storage) -> None:
    options = {"rounding": "nearest", "headroom": 4.0, "granularity": "tensor"}
    model = quantize_model(Model(), "E4M3", storage, seed=3, **options)
    reseeded = quantize_model(Model(), "E4M3", storage, seed=4, **options)
    assert len(seeds_of(model)) == len(seeds_of(reseeded)) == 49
    assert not seeds_of(model) & seeds_of(reseeded)
    assert roundings_of(model) == {"nearest"}
    assert roundings_of(stored()) == {"stochastic"}
    expected = fm.storage_scale(Model().lm_head.weight, "E4M3", "tensor", headroom=4.0)
    assert torch.equal(model.lm_head.weight_scale(), expected)


def test_a_remainder_is_there_on_request() -> None:
    options = {"rounding": "nearest", "headroom": 4.0, "granularity": "tensor"}
    assert {layer.weight.remainder for layer in layers(stored(**options))} == {None}
    remainders = [layer.weight.remainder for layer in layers(stored(keep_remainder=True))]
    assert all(remainder.count_nonzero() > 0 for remainder in remainders)


@all_storages
def test_a_deep_copy_is_independent(storage) -> None:
    model = quantize_model(Model(), "E4M3", storage)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), model(TOKENS))
    layer, copied = model.lm_head, twin.lm_head
    if storage == "grid":
        assert copied.weight.manifold is copied.manifold
        assert copied.manifold is not layer.manifold
    with torch.no_grad():
        copied.weight.zero_()
    assert layer.weight.abs().sum() > 0


@all_storages
def test_dequantize_puts_plain_layers_back(storage) -> None:
    model = quantize_model(Model(), {"*": "E4M3", "lm_head": "none"}, storage)
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    expected = model.eval()(TOKENS)
    bias = model.blocks[0].attn.qkv.bias
    assert dequantize_model(model) is model
    assert torch.equal(model(TOKENS), expected)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert list(linears) == LINEARS
    assert {type(m) for m in linears.values()} == {nn.Linear}
    assert {type(m.weight) for m in linears.values()} == {nn.Parameter}
    assert not linears["blocks.0.attn.qkv"].weight.requires_grad
    assert linears["blocks.0.attn.qkv"].bias is bias
    assert linears["blocks.0.attn.proj"].bias is None
    assert not any(m.training for m in linears.values())
    quantize_model(model, "E4M3", storage)
    fresh = Model()
    assert dequantize_model(fresh) is fresh
    if storage == "codes":
        # Values of the grid are those that rounding once more gives.
        fresh = dequantize_model(quantize_model(fresh, "E4M3"))
        assert torch.equal(dequantize_model(model)(TOKENS), fresh(TOKENS))


def trained_loss(storage, make, formats="E4M3", steps=150) -> tuple[float, float, nn.Module]:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    for i, p in enumerate(model.parameters()):
        p.data = normal(*p.shape, seed=i, std=0.3)
    quantize_model(model, formats, storage)
    optimizer = make(model.parameters())
    x = normal(256, 6, seed=99)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses[0], sum(losses[-10:]) / 10, model


TRAINERS = {
    "master-adamw": ("master", lambda p: torch.optim.AdamW(p, lr=0.01)),
    "codes-stiffness": ("codes", lambda p: fm.optim.StiffnessAdamW(p, lr=0.01)),
    "grid-stiffness": ("grid", lambda p: fm.optim.StiffnessAdamW(p, lr=0.01)),
    "grid-anneal": (
        "grid",
        lambda p: fm.optim.StiffnessAdamW(p, lr=0.01, stiffness=fm.optim.anneal(1.0, 0.0, 150)),
    ),
    "grid-riemannian": ("grid", lambda p: fm.optim.RiemannianAdam(p, lr=0.5, float_lr=0.01)),
    "grid-wrapped": (
        "grid",
        lambda p: fm.optim.StiffnessWrapper(torch.optim.AdamW(p, lr=0.01), exponent=1.0),
    ),
}


@pytest.mark.parametrize(
    "formats", ["E4M3", LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="split")]
)
@pytest.mark.parametrize(("storage", "make"), TRAINERS.values(), ids=TRAINERS)
def test_a_small_network_learns(storage, make, formats) -> None:
    first, last, model = trained_loss(storage, make, formats)
    assert last < (0.2 if formats == "E4M3" else 0.25) * first
    if storage == "grid":
        assert all(on_grid(m.weight) for m in model.modules() if isinstance(m, QuantizedLinear))


def loss_of_small_steps(writeback: str) -> float:
    """Return the last losses after steps a thousandth in size."""
    _, last, _ = trained_loss(
        "grid",
        lambda p: fm.optim.StiffnessAdamW(p, 1e-3, stiffness=0.0, writeback=writeback),
    )
    return last


def test_nearest_rounding_stalls_where_stochastic_learns() -> None:
    """What the library is about, in one comparison."""
    assert loss_of_small_steps("stochastic") < 0.8 * loss_of_small_steps("nearest")


@all_storages
@pytest.mark.parametrize("activation", [None, "E4M3"])
def test_a_state_of_floats_goes_into_every_layer_and_scales_are_measured_anew(
    storage, activation
) -> None:
    floats = nn.Sequential(nn.Linear(16, 4))
    x = normal(3, 16)
    model = quantize_model(
        nn.Sequential(nn.Linear(16, 4)), LayerSpec("E4M3", activation=activation), storage=storage
    )
    model(1000 * x)
    model.load_state_dict({name: value / 64 for name, value in floats.state_dict().items()})
    assert torch.allclose(model(x), floats(x) / 64, atol=2e-3)
