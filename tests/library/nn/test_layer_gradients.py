"""Quantised gradients, and the rounding, scales and policies of every operand of a
layer.
"""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import close, normal, through_disk
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import LayerSpec, OperandSpec, QuantizedLinear, fake_quantize, quantize_model

storages = pytest.mark.parametrize("storage", ["master", "grid", "codes"])
#: inputs, and gradients of the outputs
X = normal(6, 32, seed=11, std=2.0)
G = normal(6, 64, seed=12, std=1e-4)
BACKWARD = ("activation_gradient", "weight_gradient")


def layer_of(spec, storage="master", seed=0, **options) -> QuantizedLinear:
    linear = nn.Linear(32, 64)
    linear.weight.data = normal(64, 32, seed=1, std=0.1)
    linear.bias.data = normal(64, seed=2)
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
    """The gradient of the output is rounded before both products, the weight's after its own.

    The bias sees what arrived, unrounded.
    """
    gradient = {
        name.partition("_")[0]: {"format": "E5M2", "granularity": granularity} for name in operands
    }
    layer = layer_of(LayerSpec("E4M3", activation="E3M4", gradient=gradient), storage)
    for_x, for_weight, for_bias = gradients(layer)

    def rounded(name: str, x: Tensor) -> Tensor:
        return fake_quantize(x, "E5M2", granularity=granularity) if name in operands else x

    multiplied = rounded("activation_gradient", G)
    products = multiplied.t() @ fake_quantize(X, "E3M4")
    assert close(for_x, multiplied @ layer.quantized_weight().detach())
    assert close(for_weight, rounded("weight_gradient", products))
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
    grad = layer.weight.grad
    scale = layer.weight_gradient_scaler.value
    assert (y.dtype, grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(grad, fake_quantize(grad, "E5M2", scale))
    exact_x, exact_weight, _ = gradients(layer)
    assert close(x.grad, exact_x, 0.02)
    assert close(grad, exact_weight, 0.05)


def test_batches_of_any_shape() -> None:
    layer = layer_of(
        LayerSpec("E4M3", {"format": "E4M3", "granularity": "channel"}, gradient="E5M2")
    )
    flat_x, flat_weight, _ = gradients(layer)
    cube_x, cube_weight, _ = gradients(layer, X.view(2, 3, 32), G.view(2, 3, 64))
    assert torch.equal(cube_x.view(6, 32), flat_x)
    assert torch.equal(cube_weight, flat_weight)
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


#: a layer's operands in the forward pass, each with the granularity of its scales
FORWARD = {"weight": "channel", "activation": "tensor"}


@pytest.mark.parametrize("operand", FORWARD)
def test_stochastic_rounding_draws_anew_in_every_forward_pass(operand) -> None:
    """The average of many passes is the operand itself; a layer in eval mode draws
    nothing.
    """
    layer = layer_of(LayerSpec(**{operand: {"format": "E4M3", "rounding": "stochastic"}}))
    exact = layer.weight.detach() if operand == "weight" else X
    total = torch.zeros_like(exact)
    sums = set()
    for _ in range(300):
        # The weight as the pass that follows has it.
        weight = layer.quantized_weight().detach()
        y = layer(X).detach()
        inputs = layer.quantized_input(X)
        assert torch.equal(y, F.linear(inputs, weight, layer.bias))
        values = weight if operand == "weight" else inputs
        total += values
        sums.add(values.sum().item())
    error_of_nearest = fake_quantize(exact, "E4M3", granularity=FORWARD[operand]) - exact
    assert len(sums) > 200
    assert (total / 300 - exact).abs().mean() < 0.2 * error_of_nearest.abs().mean()
    assert int(layer.draws) == 300
    layer.eval()
    assert torch.equal(layer(X), layer(X))
    assert int(layer.draws) == 300


@pytest.mark.parametrize("operand", BACKWARD)
def test_stochastic_gradients_are_unbiased(operand) -> None:
    kind = operand.removesuffix("_gradient")
    stochastic = {"format": "E5M2", "rounding": "stochastic"}
    layer = layer_of(LayerSpec("E4M3", gradient={kind: stochastic}))
    nearest = layer_of(LayerSpec("E4M3", gradient={kind: "E5M2"}))
    _, exact, _ = gradients(layer_of(LayerSpec("E4M3")))
    _, rounded, _ = gradients(nearest)
    mean = sum(gradients(layer)[1] for _ in range(200)) / 200
    assert (mean - exact).norm() < 0.25 * (rounded - exact).norm()


def test_split_rounding_is_nearest_forward_and_stochastic_backward() -> None:
    layer = layer_of(LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="split"))
    assert torch.equal(layer(X), layer_of(LayerSpec("E4M3", activation="E4M3"))(X))
    first_x, first_weight, _ = gradients(layer)
    second_x, second_weight, _ = gradients(layer)
    assert not torch.equal(first_x, second_x)
    assert not torch.equal(first_weight, second_weight)


def weight_gradient(layer) -> Tensor:
    return gradients(layer)[1]


def test_draws_are_a_function_of_seed_and_pass() -> None:
    """A layer that is loaded goes on as the one that was saved; another seed draws
    others.
    """
    spec = LayerSpec("E4M3", gradient="E5M2", rounding="stochastic")
    layer = layer_of(spec, seed=5)
    gradients(layer)
    resumed = layer_of(spec, seed=5)
    resumed.load_state_dict(through_disk(layer.state_dict()))
    copied = copy.deepcopy(resumed)
    second = weight_gradient(layer)
    assert torch.equal(weight_gradient(copied), second)
    assert torch.equal(weight_gradient(resumed), second)
    assert not torch.equal(weight_gradient(resumed), second)
    reseeded = layer_of(spec, seed=6)
    gradients(reseeded)
    assert not torch.equal(weight_gradient(reseeded), second)


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
    scales = []
    gradient_scales = []
    for factor in (1.0, 4.0, 1.0, 1.0, 1.0):
        gradients(layer, X * factor, G * factor)
        scales.append(layer.activation_scaler.value.item())
        gradient_scales.append(layer.activation_gradient_scaler.value.item())
    assert scales[0] == pytest.approx(X.abs().max().item() / 448)
    assert [scale / scales[0] for scale in scales] == pytest.approx([1, 1, 4, 4, 1])
    first_gradient_scale = gradient_scales[0]
    ratios = [scale / first_gradient_scale for scale in gradient_scales]
    assert ratios == pytest.approx([1, 1, 4, 4, 1])
    layer.eval()
    layer(X * 100)
    layer.train()
    layer(X)
    assert layer.activation_scaler.value.item() == pytest.approx(scales[0])


def test_looking_at_a_layer_changes_nothing() -> None:
    spec = LayerSpec(
        "E4M3", activation="E4M3", policy="delayed", rounding="stochastic", gradient="E5M2"
    )
    layer = layer_of(spec)
    layer(X)
    old_state = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.weight_scale()
    layer.quantized_weight()
    layer.weight_codes()
    layer.quantized_input(X)
    repr(layer)
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
    model[0].weight.data = normal(32, 32, seed=3)
    model[1].weight.data = normal(64, 32, seed=4) * 1e-6
    spec = LayerSpec(gradient={"format": "E4M3", "scale": scale})
    return quantize_model(model, spec, storage="master")


def gradient_scales(model) -> list[float]:
    scalers = [getattr(layer, f"{name}_scaler") for layer, name in product(model, BACKWARD)]
    return [scaler.value.item() for scaler in scalers]


def test_the_global_magnitude_is_the_largest_of_the_previous_pass() -> None:
    model = net("global")
    ones = torch.ones(6, 64)
    model(X).backward(ones)
    hidden = model[0](X).detach()
    first = (ones.t() @ hidden).abs().max() / 448
    model(X * 3).backward(ones)
    scales = gradient_scales(model)
    assert set(scales) == {scales[0]}
    assert scales[0] == pytest.approx(first.item(), rel=1e-5)
    second = (fake_quantize(ones.t(), "E4M3", first) @ (3 * hidden)).abs().max() / 448
    resumed = net("global")
    resumed.load_state_dict(through_disk(model.state_dict()))
    copied = copy.deepcopy(model)
    followers = {"itself": model, "its copy": copied, "one that resumes": resumed}
    for name, following in followers.items():
        following(X).backward(ones)
        scale = following[1].weight_gradient_scaler.value.item()
        assert scale == pytest.approx(second.item(), rel=1e-5), name


@pytest.mark.parametrize("storage", ["grid", "codes"])
@pytest.mark.parametrize(
    "option", [{"policy": "delayed"}, {"rounding": "nearest"}, {"scale": 1.0}, {"ste": "clipped"}]
)
def test_stored_weights_refuse_what_they_would_ignore(storage, option) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=rf"weight has {name}=.* needs storage='master'"):
        layer_of(LayerSpec(OperandSpec("E4M3", **option)), storage)
    layer_of(LayerSpec(OperandSpec("E4M3"), activation=OperandSpec("E4M3", **option)), storage)


LAYER_OPTIONS = pytest.mark.parametrize(
    "option", [{"policy": "delayed"}, {"rounding": "nearest"}, {"ste": "identity"}]
)


def refused_for_no_operand(option):
    (name,) = option
    return pytest.raises(ValueError, match=f"the layer has {name}=.*which no operand takes")


@pytest.mark.parametrize("storage", ["grid", "codes"])
@LAYER_OPTIONS
def test_a_stored_weight_alone_takes_no_option_of_its_layer(option, storage) -> None:
    with refused_for_no_operand(option):
        layer_of(LayerSpec("E4M3", **option), storage)


@pytest.mark.parametrize("storage", ["grid", "codes"])
@LAYER_OPTIONS
def test_an_activation_takes_the_options_of_its_layer(option, storage) -> None:
    layer_of(LayerSpec("E4M3", "E4M3", **option), storage)


@LAYER_OPTIONS
def test_a_master_weight_takes_the_options_of_its_layer(option) -> None:
    layer_of(LayerSpec("E4M3", **option))


@LAYER_OPTIONS
def test_an_option_that_every_operand_has_itself_is_refused(option) -> None:
    with refused_for_no_operand(option):
        layer_of(LayerSpec(OperandSpec("E4M3", **option), **option))


@pytest.mark.parametrize("option", [{"policy": "delayed"}, {"rounding": "nearest"}])
def test_a_gradient_takes_policy_and_rounding(option) -> None:
    layer_of(LayerSpec("E4M3", gradient="E5M2", **option), "codes")


def test_a_gradient_takes_no_ste() -> None:
    option = {"ste": "identity"}
    with refused_for_no_operand(option):
        layer_of(LayerSpec("E4M3", gradient="E5M2", **option), "codes")


@pytest.mark.parametrize("option", [{"rounding": "nearest"}, {"ste": "identity"}])
def test_an_operand_with_a_given_scale_takes_rounding_and_ste(option) -> None:
    layer_of(LayerSpec(OperandSpec("E4M3", scale=1.0), **option))


def test_an_operand_with_a_given_scale_takes_no_policy() -> None:
    option = {"policy": "delayed"}
    with refused_for_no_operand(option):
        layer_of(LayerSpec(OperandSpec("E4M3", scale=1.0), **option))


@pytest.mark.parametrize("operand", ["weight", "activation", *BACKWARD])
def test_blocks_that_do_not_divide_a_row_are_refused(operand) -> None:
    kind = {operand.removesuffix("_gradient"): {"format": "E4M3", "granularity": "block"}}
    arguments = {"gradient": kind} if operand.endswith("gradient") else kind
    shape = (32, 40) if operand == "activation_gradient" else (40, 32)
    with pytest.raises(
        ValueError, match=f"granularity='block' of {operand} needs rows whose length 32 divides"
    ):
        QuantizedLinear(nn.Linear(*shape), LayerSpec(**arguments), storage="master")


@pytest.mark.usefixtures("cpp_compiler")
# Dynamo warns of what it does itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_the_gradients_are_the_same() -> None:
    layer = layer_of(LayerSpec("E4M3", activation="E4M3", gradient="E5M2"))
    compiled = gradients(layer, run=torch.compile(lambda x: layer(x)))
    assert all(close(x, y) for x, y in zip(compiled, gradients(layer), strict=True))
