"""Quantised gradients, and the rounding, scales and policies of every operand of a
layer.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import close, normal, through_disk
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import LayerSpec, OperandSpec, QuantizedLinear, fake_quantize, quantize_model

storages = pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
X, G = normal(6, 32, seed=11, std=2.0), normal(6, 64, seed=12, std=1e-4)
BACKWARD = ("activation_gradient", "weight_gradient")


def layer_of(spec, storage="master", seed=0, **options) -> QuantizedLinear:
    linear = nn.Linear(32, 64)
    linear.weight.data, linear.bias.data = normal(64, 32, seed=1, std=0.1), normal(64, seed=2)
    return QuantizedLinear(linear, spec, storage, seed=seed, **options)


def gradients(layer, x=X, g=G, run=None) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    (run or layer)(x).backward(g)
    return x.grad, layer.weight.grad, layer.bias.grad


@storages
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("operands", [BACKWARD, BACKWARD[:1], BACKWARD[1:]], ids=str)
def test_gradients_are_quantised_once_each(storage, granularity, operands) -> None:
    """The one that arrives before both products, the weight's after its own; the bias
    sees what arrived.
    """
    gradient = {
        name.partition("_")[0]: {"format": "E5M2", "granularity": granularity} for name in operands
    }
    layer = layer_of(LayerSpec("E4M3", activation="E3M4", gradient=gradient), storage)
    for_x, for_weight, for_bias = gradients(layer)

    def rounded(name: str, x: Tensor) -> Tensor:
        return fake_quantize(x, "E5M2", granularity=granularity) if name in operands else x

    arrived = rounded("activation_gradient", G)
    assert close(for_x, arrived @ layer.quantized_weight().detach())
    assert close(for_weight, rounded("weight_gradient", arrived.t() @ fake_quantize(X, "E3M4")))
    assert torch.equal(for_bias, G.sum(0))


def test_weight_gradients_of_micro_steps_are_added_up_in_float32() -> None:
    """Each at its own scale: a thousandth beside a large one would be lost in the sum's
    8 bits.
    """
    layer = layer_of(LayerSpec("E4M3", gradient={"weight": "E5M2"}))
    total = torch.zeros(64, 32)
    for factor in (1.0, 1e-3):
        layer(X).backward(G * factor)
        total += fake_quantize((G * factor).t() @ X, "E5M2")
    assert torch.equal(layer.weight.grad, total)
    assert not torch.equal(fake_quantize(total, "E5M2"), total)


def test_under_autocast_the_weights_gradient_keeps_its_values() -> None:
    """Products in bfloat16; what is quantised is not rounded to bfloat16 again."""
    layer = layer_of(LayerSpec("E4M3", gradient="E5M2"))
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(G.bfloat16())
    grad, scale = layer.weight.grad, layer.weight_gradient_scaler.value
    assert (y.dtype, grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(grad, fake_quantize(grad, "E5M2", scale))
    exact = gradients(layer)
    assert close(x.grad, exact[0], 0.02)
    assert close(grad, exact[1], 0.05)


def test_batches_of_any_shape() -> None:
    layer = layer_of(
        LayerSpec("E4M3", {"format": "E4M3", "granularity": "channel"}, gradient="E5M2")
    )
    flat, cube = gradients(layer), gradients(layer, X.view(2, 3, 32), G.view(2, 3, 64))
    assert torch.equal(cube[0].view(6, 32), flat[0])
    assert torch.equal(cube[1], flat[1])
    assert layer(X[0]).shape == (64,)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_gradient_that_is_not_finite_is_not_hidden_by_saturation(granularity, bad) -> None:
    layer = layer_of(LayerSpec("E4M3", gradient={"format": "E5M2", "granularity": granularity}))
    g = G.clone()
    g[2, 3] = bad
    for_x, for_weight, _ = gradients(layer, X, g)
    assert for_x.isnan().all()
    assert for_weight.isnan().all()
    assert gradients(layer)[1].isfinite().all()


def test_frozen_parameters_get_no_gradient() -> None:
    layer = layer_of(LayerSpec("E4M3", gradient="E5M2"))
    layer.weight.requires_grad_(False)
    for_x, for_weight, _ = gradients(layer)
    assert for_weight is None
    assert for_x.abs().sum() > 0
    with torch.no_grad():
        assert not layer(X).requires_grad


@pytest.mark.parametrize("operand", ["weight", "activation"])
def test_stochastic_rounding_draws_anew_in_every_forward_pass(operand) -> None:
    """The average of many passes is the operand itself; a layer in eval mode draws
    nothing.
    """
    layer = layer_of(LayerSpec(**{operand: {"format": "E4M3", "rounding": "stochastic"}}))
    exact = layer.weight.detach() if operand == "weight" else X
    total, sums = torch.zeros_like(exact), set()
    for _ in range(300):
        weight, y = layer.quantized_weight().detach(), layer(X).detach()
        values = weight if operand == "weight" else layer.quantized_input(X)
        assert torch.equal(y, F.linear(layer.quantized_input(X), weight, layer.bias))
        total += values
        sums.add(values.sum().item())
    spacing = (
        fake_quantize(exact, "E4M3", granularity="channel" if operand == "weight" else "tensor")
        - exact
    )
    assert len(sums) > 200
    assert (total / 300 - exact).abs().mean() < 0.2 * spacing.abs().mean()
    passes = int(layer.draws)
    layer.eval()
    assert torch.equal(layer(X), layer(X))
    assert int(layer.draws) == passes == 300


@pytest.mark.parametrize("operand", BACKWARD)
def test_stochastic_gradients_are_unbiased(operand) -> None:
    kind = operand.removesuffix("_gradient")
    spec = LayerSpec("E4M3", gradient={kind: {"format": "E5M2", "rounding": "stochastic"}})
    layer, nearest = layer_of(spec), layer_of(LayerSpec("E4M3", gradient={kind: "E5M2"}))
    exact, rounded = gradients(layer_of(LayerSpec("E4M3")))[1], gradients(nearest)[1]
    mean = sum(gradients(layer)[1] for _ in range(200)) / 200
    assert (mean - exact).norm() < 0.25 * (rounded - exact).norm()


def test_split_rounding_is_nearest_forward_and_stochastic_backward() -> None:
    layer = layer_of(LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="split"))
    assert torch.equal(layer(X), layer_of(LayerSpec("E4M3", activation="E4M3"))(X))
    first, second = gradients(layer), gradients(layer)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_draws_are_a_function_of_seed_and_pass() -> None:
    """A layer that is loaded goes on as the one that was saved; another seed draws
    others.
    """
    spec = LayerSpec("E4M3", gradient="E5M2", rounding="stochastic")
    layer, reseeded = layer_of(spec, seed=5), layer_of(spec, seed=6)
    gradients(layer)
    resumed = layer_of(spec, seed=5)
    resumed.load_state_dict(through_disk(layer.state_dict()))
    weight_gradients = [gradients(one)[1] for one in (layer, copy.deepcopy(resumed), resumed)]
    assert not torch.equal(
        weight_gradients[0], gradients(copy.deepcopy(resumed))[1]
    )  # a pass further
    assert torch.equal(weight_gradients[0], weight_gradients[1])
    assert torch.equal(weight_gradients[0], weight_gradients[2])
    assert not torch.equal(gradients(reseeded)[1], weight_gradients[0])


def test_one_models_layers_draw_apart() -> None:
    spec = LayerSpec(activation="E4M3", rounding="stochastic")
    model = quantize_model(nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 64)]), spec, "master")
    model[1].load_state_dict(model[0].state_dict())
    assert not torch.equal(model[0](X), model[1](X))


def test_master_weights_in_blocks_have_scales_that_are_powers_of_two() -> None:
    layer = layer_of(LayerSpec("E4M3", granularity="block"))
    scale = layer.weight_scale()
    assert scale.shape == (64, 32)
    assert layer.weight_scaler.preview(layer.weight).shape == (64, 1)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert torch.equal(fm.decode(layer.weight_codes(), "E4M3") * scale, layer.quantized_weight())
    assert torch.equal(
        layer(X), F.linear(X, fake_quantize(layer.weight, "E4M3", granularity="block"), layer.bias)
    )


@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_activations_with_a_scale_for_each_row_or_block(granularity) -> None:
    layer = layer_of(
        LayerSpec(activation={"format": "E3M4", "granularity": granularity, "ste": "clipped"})
    )
    x = X * torch.logspace(-3, 3, 6).view(6, 1)  # one scale for all would lose the first rows
    quantized = fake_quantize(x, "E3M4", granularity=granularity)
    assert torch.equal(layer(x), F.linear(quantized, layer.weight, layer.bias))
    assert torch.equal(layer.quantized_input(x), quantized)
    assert (quantized != 0).any(1).all()


def test_delayed_scales_follow_the_magnitudes_of_the_past() -> None:
    layer = layer_of(
        LayerSpec("E4M3", activation="E4M3", policy="delayed", history=2, gradient="E5M2")
    )
    used = []
    for factor in (1.0, 4.0, 1.0, 1.0, 1.0):
        gradients(layer, X * factor, G * factor)
        used.append(
            [
                getattr(layer, f"{name}_scaler").value.item()
                for name in ("activation", "activation_gradient")
            ]
        )
    first = used[0]
    assert first[0] == pytest.approx(X.abs().max().item() / 448)
    assert [row[0] / first[0] for row in used] == pytest.approx([1, 1, 4, 4, 1])
    assert [row[1] / first[1] for row in used] == pytest.approx([1, 1, 4, 4, 1])
    layer.eval()
    layer(X * 100)
    layer.train()
    layer(X)
    assert layer.activation_scaler.value.item() == pytest.approx(first[0])


def test_looking_at_a_layer_changes_nothing() -> None:
    spec = LayerSpec(
        "E4M3", activation="E4M3", policy="delayed", rounding="stochastic", gradient="E5M2"
    )
    layer = layer_of(spec)
    layer(X)
    old_state = {name: t.clone() for name, t in layer.state_dict().items()}
    (
        layer.weight_scale(),
        layer.quantized_weight(),
        layer.weight_codes(),
        layer.quantized_input(X),
        repr(layer),
    )
    assert all(torch.equal(t, old_state[name]) for name, t in layer.state_dict().items())


def test_a_scale_that_is_given_saturates() -> None:
    small = {"format": "E4M3", "scale": 2.0**-20}
    layer = layer_of(LayerSpec(small, small, gradient=small))
    assert layer.quantized_weight().abs().max() == 448 * 2.0**-20
    assert layer.weight_scale() == 2.0**-20
    for_x, for_weight, _ = gradients(layer)
    assert for_weight.abs().max() <= 448 * 2.0**-20
    assert close(for_x, fake_quantize(G, "E4M3", 2.0**-20) @ layer.quantized_weight().detach())


def net(scale) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False))
    model[0].weight.data, model[1].weight.data = (
        normal(32, 32, seed=3),
        normal(64, 32, seed=4) * 1e-6,
    )
    return quantize_model(
        model, LayerSpec(gradient={"format": "E4M3", "scale": scale}), storage="master"
    )


def test_the_global_magnitude_is_the_largest_of_the_previous_pass() -> None:
    model = net("global")
    model(X).backward(torch.ones(6, 64))
    scalers = [getattr(layer, f"{name}_scaler") for layer in model for name in BACKWARD]
    hidden = model[0](X).detach()
    first = (torch.ones(64, 6) @ hidden).abs().max() / 448
    model(X * 3).backward(torch.ones(6, 64))
    assert {s.value.item() for s in scalers} == {scalers[0].value.item()}
    assert scalers[0].value.item() == pytest.approx(first.item(), rel=1e-5)
    second = (fake_quantize(torch.ones(64, 6), "E4M3", first) @ (3 * hidden)).abs().max() / 448
    resumed = net("global")
    resumed.load_state_dict(through_disk(model.state_dict()))
    for one in (model, copy.deepcopy(model), resumed):
        one(X).backward(torch.ones(6, 64))
        last = one[1].weight_gradient_scaler.value
        assert last.item() == pytest.approx(second.item(), rel=1e-5)


@pytest.mark.parametrize("storage", ["grid", "fp8"])
@pytest.mark.parametrize(
    "option", [{"policy": "delayed"}, {"rounding": "nearest"}, {"scale": 1.0}, {"ste": "clipped"}]
)
def test_stored_weights_refuse_what_they_would_ignore(storage, option) -> None:
    with pytest.raises(
        ValueError, match=rf"weight has {next(iter(option))}=.* needs storage='master'"
    ):
        layer_of(LayerSpec(OperandSpec("E4M3", **option)), storage)
    layer_of(LayerSpec(OperandSpec("E4M3"), activation=OperandSpec("E4M3", **option)), storage)


@pytest.mark.parametrize(
    "option", [{"policy": "delayed"}, {"rounding": "nearest"}, {"ste": "identity"}]
)
def test_options_of_a_layer_need_an_operand_that_takes_them(option) -> None:
    name = next(iter(option))
    refused = pytest.raises(ValueError, match=f"the layer has {name}=.*which no operand takes")
    for storage in ("grid", "fp8"):
        with refused:
            layer_of(LayerSpec("E4M3", **option), storage)
        layer_of(LayerSpec("E4M3", "E4M3", **option), storage)
    with refused:
        layer_of(LayerSpec(OperandSpec("E4M3", **option), **option))
    with refused if name == "ste" else nullcontext():
        layer_of(LayerSpec("E4M3", gradient="E5M2", **option), "fp8")
    with refused if name == "policy" else nullcontext():
        layer_of(LayerSpec(OperandSpec("E4M3", scale=1.0), **option))
    layer_of(LayerSpec("E4M3", **option))


@pytest.mark.parametrize("operand", ["weight", "activation", *BACKWARD])
def test_blocks_must_fit(operand) -> None:
    kind = {operand.removesuffix("_gradient"): {"format": "E4M3", "granularity": "block"}}
    arguments = {"gradient": kind} if operand.endswith("gradient") else kind
    shape = (32, 40) if operand == "activation_gradient" else (40, 32)
    with pytest.raises(
        ValueError, match=f"granularity='block' of {operand} needs rows whose length 32 divides"
    ):
        QuantizedLinear(nn.Linear(*shape), LayerSpec(**arguments), storage="master")


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo's own doing, as is
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_the_gradients_are_the_same() -> None:
    layer = layer_of(LayerSpec("E4M3", activation="E4M3", gradient="E5M2"))
    compiled = gradients(layer, run=torch.compile(lambda x: layer(x)))
    assert all(close(x, y) for x, y in zip(compiled, gradients(layer), strict=True))
