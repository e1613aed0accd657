"""Weights with storage ``grid`` stay points of the grid and on its manifold, whatever
is loaded or moved.
"""

import copy

import geoopt
import pytest
import torch
from optimizer_cases import frozen, normal, through_disk
from torch import nn

import fp8manifold as fm
from fp8manifold import QuantizedLinear

both_assigns = pytest.mark.parametrize("assign", [False, True])


def grid(seed=0, name="E4M3", std=0.1, **options) -> QuantizedLinear:
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.weight.copy_(normal(4, 8, seed=seed, std=std))
    return fm.quantize_model(linear, name, "grid", seed=seed, **options)


def is_on_grid(layer: QuantizedLinear) -> bool:
    assert layer.manifold is not None
    assert isinstance(layer.weight, geoopt.ManifoldParameter)
    assert layer.weight.manifold is layer.manifold
    assert isinstance(layer.weight, nn.Parameter)
    return layer.manifold.check_point_on_manifold(layer.weight)


@pytest.fixture(params=[False, True], ids=["", "swap"])
def swap(request):
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@both_assigns
@pytest.mark.usefixtures("swap")
def test_a_state_is_taken_to_the_bit(assign) -> None:
    layer = grid(1)
    loaded = grid(2, std=3.0)
    layer.manifold.counter += 5
    loaded.load_state_dict(through_disk(layer.state_dict()), assign=assign)
    assert is_on_grid(loaded)
    assert frozen(loaded.state_dict()) == frozen(layer.state_dict())
    optimizer = fm.optim.StiffnessAdamW(loaded.parameters(), lr=0.1)
    loaded(normal(3, 8)).sum().backward()
    optimizer.step()
    assert is_on_grid(loaded)


@both_assigns
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("factor", [1e-5, 1.0, 1e5])
def test_floats_are_rounded_at_a_scale_of_their_own(factor, strict, assign) -> None:
    floats, layer = nn.Linear(8, 4), grid(1, headroom=8.0)
    with torch.no_grad():
        floats.weight.mul_(factor)
    layer.load_state_dict(floats.state_dict(), strict=strict, assign=assign)
    expected = fm.quantize_model(copy.deepcopy(floats), "E4M3", "grid", headroom=8.0)
    assert is_on_grid(layer)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.manifold.scale, expected.manifold.scale)


@both_assigns
def test_values_between_the_points_are_rounded_to_them(assign) -> None:
    layer = grid(1)
    state = layer.state_dict()
    state["weight"] = state["weight"] * 1.01
    layer.load_state_dict(state, assign=assign)
    assert is_on_grid(layer)
    state["weight"] = state["weight"] * 1e6
    with pytest.warns(fm.SaturationWarning):
        layer.load_state_dict(state, assign=assign)
    assert is_on_grid(layer)


@both_assigns
def test_codes_are_taken_exactly(assign) -> None:
    layer = grid(1)
    stored = fm.quantize_model(nn.Linear(8, 4), "E4M3", "codes", headroom=2.0)
    layer.load_state_dict(stored.state_dict(), assign=assign)
    assert is_on_grid(layer)
    assert torch.equal(layer.weight, stored.weight.dequantize())
    assert torch.equal(layer.manifold.scale, stored.weight.scale)


def test_a_scale_without_weights_is_refused() -> None:
    layer = grid(1)
    state = grid(2, std=3.0).state_dict()
    del state["weight"]
    old_scale = layer.manifold.scale.clone()
    with pytest.raises(
        RuntimeError, match=r"manifold\.scale comes without weight.*load both or neither"
    ):
        layer.load_state_dict(state, strict=False)
    assert torch.equal(layer.manifold.scale, old_scale)
    assert is_on_grid(layer)


@pytest.mark.usefixtures("swap")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_a_cast_keeps_the_manifold(dtype) -> None:
    layer = grid(1)
    weight = layer.weight
    values = weight.detach().clone()
    codes = layer.weight_codes()
    weight.grad = torch.ones(4, 8)
    layer.to(dtype)
    assert layer.weight is weight
    assert is_on_grid(layer)
    assert torch.equal(layer.weight_codes(), codes)
    assert weight.grad.dtype == layer(torch.ones(1, 8, dtype=dtype)).dtype == dtype
    layer.to(torch.float32)
    assert layer.weight is weight
    assert is_on_grid(layer)
    assert torch.equal(layer.weight, values)


@pytest.mark.usefixtures("swap")
def test_a_way_to_meta_and_back_keeps_the_manifold() -> None:
    layer = grid(1)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.to("meta")
    assert layer.weight.manifold is layer.manifold
    assert layer.weight.is_meta
    assert layer.weight.requires_grad
    layer.load_state_dict(state, assign=True)
    assert is_on_grid(layer)
    assert torch.equal(layer.weight, state["weight"])


def test_a_model_made_on_meta_is_filled() -> None:
    with torch.device("meta"):
        layer = grid(1)
    layer.load_state_dict(nn.Linear(8, 4).state_dict(), assign=True)
    assert is_on_grid(layer)
    assert int(layer.manifold.counter) == 0
    with torch.device("meta"):
        layer = grid(1)
    layer.to_empty(device="cpu")
    assert layer.weight.manifold is layer.manifold
    layer.load_state_dict(grid(2).state_dict())
    assert is_on_grid(layer)


def test_a_dtype_without_the_points_is_refused() -> None:
    """float16 has 40 binades, which the format's and the scale's may exceed."""
    layer = grid(1, "E5M2")
    with pytest.raises(
        TypeError, match=r"storage='grid' can't be torch\.float16.*take torch\.float32"
    ):
        layer.half()
    assert layer.weight.dtype == layer.bias.dtype == torch.float32
    layer = grid(1, "E3M4")
    layer.half()
    assert is_on_grid(layer)


def test_a_half_precision_layer_without_the_points_is_refused() -> None:
    """By surgery and by what is loaded into one; nothing has changed then."""
    lacks = (
        r"torch\.float16, which lacks points of its grid \(E\dM\d at scales of.*take torch\.float32"
    )
    model = nn.Sequential(nn.Linear(8, 4)).half()
    with pytest.raises(TypeError, match=rf"storage='grid' can't be {lacks}"):
        fm.quantize_model(model, "E5M2", "grid")
    assert type(model[0]) is nn.Linear
    layer = fm.quantize_model(model, "E4M3", "grid")[0]
    assert is_on_grid(layer)
    old_weight = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"weight can't be loaded into {lacks}"):
        layer.load_state_dict(grid(1, std=1e-5).state_dict())
    assert torch.equal(layer.weight, old_weight)
    layer.load_state_dict(grid(1).state_dict())
    assert is_on_grid(layer)


@both_assigns
@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_what_a_hook_makes_of_a_state_is_loaded(storage, assign) -> None:
    floats = normal(4, 8, seed=7)
    layer = fm.quantize_model(nn.Linear(8, 4), "E4M3", storage)

    def hook(module, state, prefix, *_) -> None:
        assert module is layer
        state[prefix + "weight"] = floats
        for name in ("manifold.scale", "weight_scale", "weight_counter", "weight_traits"):
            state.pop(prefix + name, None)

    layer.register_load_state_dict_pre_hook(hook)
    layer.load_state_dict(layer.state_dict(), assign=assign)
    if storage == "grid":
        assert is_on_grid(layer)
    codes = fm.quantize_model(nn.Linear(8, 4), "E4M3", storage)
    codes.load_state_dict({"weight": floats}, strict=False)
    assert torch.equal(layer.weight, codes.weight)
