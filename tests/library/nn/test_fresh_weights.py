"""Layers that begin anew, and those of GPT-2's kind, Conv1D."""

import copy

import pytest
import torch
from hf_cases import gpt2, logits
from optimizer_cases import frozen, normal, through_disk
from tensor_cases import GRANULARITIES, parameter
from torch import nn

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, dequantize_model, quantize_model

storages = pytest.mark.parametrize("storage", ["master", "grid", "codes"])
INITIALISERS = {
    "normal": lambda w, s: nn.init.normal_(w, std=s),
    "trunc_normal": lambda w, s: nn.init.trunc_normal_(w, std=s, a=-2 * s, b=2 * s),
    "xavier": lambda w, s: nn.init.xavier_normal_(w, gain=s),
    "kaiming": lambda w, s: nn.init.kaiming_uniform_(w),
    "constant": nn.init.constant_,
    "orthogonal": lambda w, s: nn.init.orthogonal_(w),
}


def near(p: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether weights in E4M3 are within a step of the values.

    The last term is for values below the smallest code of their row.
    """
    p = p.detach()
    top = values.abs().amax(-1, keepdim=True)
    return bool(((p - values).abs() <= values.abs() / 8 + top * 2.0**-12).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("std", [1e-7, 1e-3, 1e3])
@pytest.mark.parametrize("fill", INITIALISERS.values(), ids=INITIALISERS)
def test_initialisers_take_a_fresh_scale(fill, std, granularity) -> None:
    if fill is INITIALISERS["trunc_normal"] and torch.__version__ < (2, 9):
        pytest.skip(
            "torch 2.8 writes between the first values and the last, which are rounded on the way"
        )
    p, q = parameter(granularity=granularity, rounding="nearest"), normal(4, 64)
    with torch.no_grad():
        for w in (p, q):
            torch.manual_seed(0)
            fill(w, std)
    assert near(p, q)


def test_zeros_keep_the_scale() -> None:
    p = parameter(rounding="nearest")
    with torch.no_grad():
        values = p.dequantize()
        p.zero_().add_(values)
    assert torch.equal(p.dequantize(), values)


@pytest.mark.parametrize(("size", "stays"), [(0.1, True), (1e-3, False), (100.0, False)])
def test_an_orthogonal_matrix_takes_the_scale_that_suits_it(size, stays) -> None:
    torch.manual_seed(0)
    p = fm.FP8Parameter(torch.randn(64, 64) * size, "E4M3", granularity="tensor", seed=0)
    old_scale = p.scale.clone()
    nn.init.orthogonal_(p)
    assert torch.equal(p.scale, old_scale) is stays
    values = p.dequantize()
    assert (values @ values.T - torch.eye(64)).abs().max() < 0.08


def test_an_identity_is_written_at_the_old_scale_with_a_warning() -> None:
    p = fm.FP8Parameter(torch.full((4, 4), 1e-4), "E4M3", granularity="tensor", seed=0)
    scale = p.scale.clone()
    with pytest.warns(UserWarning, match="beyond the range"):
        nn.init.eye_(p)
    assert torch.equal(p.scale, scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1e4])
def test_floats_of_another_size_are_loaded_at_a_scale_of_their_own(factor, granularity) -> None:
    layer = nn.Linear(64, 4, bias=False)
    values = normal(4, 64, seed=3, std=0.1) * factor
    layer.weight = parameter(granularity=granularity, rounding="nearest")
    layer.load_state_dict({"weight": values})
    expected = fm.FP8Parameter(values, "E4M3", granularity=granularity)
    assert torch.equal(layer.weight.codes, expected.codes)
    assert torch.equal(layer.weight.scale, expected.scale)


def test_points_of_the_grid_are_copied_as_they_are() -> None:
    """A step of geoopt's is a copy: it changes no scale, however small the weights have
    become.
    """
    p = parameter(rounding="nearest", scale=1.0)
    scale = p.scale.clone()
    points = torch.full(p.shape, p.format.ulp_min)
    with torch.no_grad():
        p.copy_(points)
    assert torch.equal(p.scale, scale)
    assert torch.equal(p.dequantize(), points)


@pytest.mark.parametrize(
    "write", [lambda p: p.mul_(1e-6), lambda p: p[1].mul_(1e-6)], ids=["all", "a row"]
)
def test_what_arithmetic_loses_is_warned_of(write) -> None:
    p = parameter(rounding="nearest")
    with (
        torch.no_grad(),
        pytest.warns(fm.UnderflowWarning, match="are below half a step of .* near 0.*adapt_scale_"),
    ):
        write(p)


def quantized_layer(storage, *, bias=True, **options):
    gradient = {"format": "E5M2", "rounding": "stochastic"}
    spec = fm.LayerSpec(
        "E4M3", activation={"format": "E5M2", "policy": "delayed"}, gradient=gradient
    )
    return fm.quantize_model(nn.Linear(64, 32, bias=bias), spec, storage, seed=5, **options)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that one-byte weights consist of, or the tensor itself."""
    if isinstance(tensor, fm.FP8Tensor):
        return tensor.codes, tensor.scale, tensor.counter
    return (tensor,)


def fill_memory(layer: nn.Module) -> None:
    """Give memory to a layer on meta, and write into it what memory may hold."""
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        for part in parts_of(tensor):
            part.detach().view(-1).view(torch.uint8).fill_(17)


def change_all(layer: nn.Module) -> None:
    """Let a layer remember magnitudes, draw, and have other weights."""
    for step in range(2):
        layer(normal(3, 64, seed=step)).sum().backward()
    layer.zero_grad()
    with torch.no_grad():
        layer.weight.mul_(0.5)


def weight_gradient(layer: nn.Module) -> torch.Tensor:
    torch.manual_seed(2)
    layer(normal(3, 64)).sum().backward()
    return layer.weight.grad


@storages
@pytest.mark.parametrize("bare", [False, True])
def test_a_layer_begins_anew(bare, storage) -> None:
    """Trained, or on meta, given memory, and reset: a layer as if it had been made in
    the ordinary way.
    """
    options = {"keep_remainder": storage == "codes"}
    torch.manual_seed(1)
    expected = quantized_layer(storage, bias=bare, **options)
    with torch.device("meta" if bare else "cpu"):
        layer = quantized_layer(storage, bias=bare, **options)
    if bare:
        fill_memory(layer)
    else:
        change_all(layer)
    torch.manual_seed(1)
    layer.reset_parameters()
    assert frozen(layer.state_dict()) == frozen(expected.state_dict())
    assert torch.equal(weight_gradient(layer), weight_gradient(expected))


@pytest.fixture(scope="module")
def gpt():
    return gpt2(n_layer=1).eval()


def quantized(model, storage, **options):
    return quantize_model(copy.deepcopy(model), {"*": "E4M3"}, storage, tied="leave", **options)


def convs(model):
    """Return the `Conv1D` layers by name, quantised or not."""
    names = ("Conv1D", "QuantizedConv1D")
    return {name: m for name, m in model.named_modules() if type(m).__name__ in names}


@storages
def test_it_computes_what_fake_quantisation_by_hand_does(gpt, storage) -> None:
    model = quantized(gpt, storage)
    by_hand = copy.deepcopy(gpt)
    assert len(convs(model)) == 4
    for name, conv in convs(by_hand).items():
        rows = conv.weight.data.t()
        scale = None if storage == "master" else fm.storage_scale(rows, "E4M3")
        conv.weight.data = fm.fake_quantize(rows, "E4M3", scale, granularity="channel").t()
        layer = convs(model)[name]
        assert isinstance(layer, QuantizedLinear), name
        # The sum decodes a weight of codes, and takes the class of a point off it.
        assert torch.equal(layer.quantized_weight().detach().t() + 0, conv.weight), name
        assert (layer.nf, layer.nx, layer.bias.numel()) == (conv.nf, conv.nx, conv.nf), name
        assert layer.weight_scale().numel() == conv.nf, name
    torch.testing.assert_close(logits(model), logits(by_hand), rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits(model), logits(gpt))
    assert "QuantizedConv1D" in str(fm.quantization_report(model))


ASSIGNS = pytest.mark.parametrize("assign", [False, True])


@storages
@ASSIGNS
def test_a_state_is_loaded(gpt, storage, assign) -> None:
    model = quantized(gpt, storage)
    loaded = quantized(gpt, storage, seed=1)
    with torch.no_grad():
        for layer in convs(loaded).values():
            layer.weight.mul_(0.5)
    state = model.state_dict()
    assert set(gpt.state_dict()) <= set(state)
    loaded.load_state_dict(through_disk(state), assign=assign)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("storage", ["master", "codes"])
@ASSIGNS
def test_a_state_of_floats_is_loaded(gpt, storage, assign) -> None:
    """A grid is left out, as its scales are part of its state."""
    model = quantized(gpt, storage)
    loaded = quantized(gpt, storage)
    parts = ("_scale", "_counter", "_traits")
    state = {name: x for name, x in loaded.state_dict().items() if not name.endswith(parts)}
    loaded.load_state_dict({**state, **through_disk(gpt.state_dict())}, assign=assign)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("storage", ["master", "grid"])
@ASSIGNS
def test_a_state_is_loaded_into_a_float_model(gpt, storage, assign) -> None:
    model = quantized(gpt, storage)
    state = model.state_dict()
    floats = copy.deepcopy(gpt)
    floats.load_state_dict({name: state[name] for name in gpt.state_dict()}, assign=assign)
    name = "transformer.h.0.attn.c_proj"
    weight = model.get_submodule(name).weight
    assert torch.equal(floats.get_submodule(name).weight, weight.t() + 0)


@storages
def test_the_way_back_gives_conv1d(gpt, storage) -> None:
    model = quantized(gpt, storage)
    model.transformer.h[0].mlp.c_fc.note = "stays"
    expected = logits(model)
    state = torch.get_rng_state()
    dequantize_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(model.state_dict()) == set(gpt.state_dict())
    for name, conv in convs(gpt).items():
        back = model.get_submodule(name)
        assert type(back) is type(conv), name
        assert back.weight.shape == conv.weight.shape, name
        notes = {"note"} if name.endswith("c_fc") else set()
        assert set(vars(back)) - set(vars(conv)) == notes, name
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


def test_gradients_and_hooks_of_a_transposed_weight(gpt) -> None:
    model = copy.deepcopy(gpt)
    conv = model.transformer.h[0].attn.c_proj
    alone = copy.deepcopy(conv)
    alone.weight.grad = normal(32, 32)
    assert torch.equal(quantize_model(alone, "E4M3", "codes").weight.grad, normal(32, 32).t())
    conv.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="for the untransposed gradient: remove them"):
        quantize_model(model, {"c_proj": LayerSpec("E4M3")}, storage="master")
    assert type(model.transformer.h[0].mlp.c_proj) is type(conv)
