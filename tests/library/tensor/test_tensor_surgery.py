"""quantize_model(storage="fp8"), QuantizedLinear over codes, and the way back."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import each
from optimizer_cases import normal, through_disk
from surgery_models import TOKENS, Model, layers, stored
from tensor_cases import FORMATS, GRANULARITIES, same_store
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import LayerSpec, dequantize_model, quantize_model


@each("granularity", GRANULARITIES)
@each("name", FORMATS)
def test_the_weight_is_the_grids_in_one_byte(name: str, granularity: Any) -> None:
    """Codes, scales and outputs equal those of storage `grid` with the same headroom; `grid` has no blocks."""
    linear = nn.Linear(64, 6)
    twin = copy.deepcopy(linear)
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity), "fp8", headroom=2.0)
    assert isinstance(layer.weight, fm.FP8Parameter)
    assert layer.bias is linear.bias
    assert layer.weight.granularity == granularity
    x = normal(3, 64)
    values = fm.decode(layer.weight_codes(), name) * layer.weight_scale()
    assert torch.equal(layer(x), F.linear(x, values, linear.bias))
    assert torch.equal(layer.weight_codes(), layer.weight.codes)
    assert layer.weight_codes().data_ptr() != layer.weight.codes.data_ptr()
    if granularity != "block":
        grid = quantize_model(twin, LayerSpec(name, granularity=granularity), "grid", headroom=2.0)
        assert torch.equal(layer.weight_codes(), grid.weight_codes())
        assert torch.equal(layer.weight_scale(), grid.weight_scale())
        assert torch.equal(layer(x), grid(x))


def begun(model: nn.Module) -> list[Tensor]:
    """The residuals that a first step of nothing begins with."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = fm.optim.StiffnessSGD(model.parameters(), lr=1e-9, momentum=0.9, writeback="residual8")
    optimizer.step()
    return [optimizer.state[layer.weight]["residual"] for layer in layers(model)]


def through_state(model: nn.Module) -> dict[str, Any]:
    return through_disk(model.state_dict())


def through_tensors_of_codes(model: nn.Module) -> dict[str, Any]:
    return through_disk(fm.unflatten_state_dict(model.state_dict()))


@each("assign", [False, True])
@each("way", [nn.Module.state_dict, through_state, through_tensors_of_codes], ids=["state", "disk", "tensors of codes"])
def test_what_rounding_left_is_part_of_the_state(way: Any, assign: bool) -> None:
    """Until an optimizer has taken it: residuals begin with it after a state was loaded, as they do before."""
    model, other = stored(keep_remainder=True), stored(seed=1)
    state, expected = way(model), [layer.weight.remainder.clone() for layer in layers(model)]
    other.load_state_dict(state if assign is False else copy.deepcopy(state), assign=assign)
    for net in (other, model):
        for residual, remainder in zip(begun(net), expected, strict=True):
            assert remainder.count_nonzero() > 0
            assert torch.equal(residual, remainder)
    assert not any("remainder" in name for name in model.state_dict())
    assert model.state_dict(keep_vars=True)["lm_head.weight"] is model.lm_head.weight


def test_floats_that_are_loaded_leave_a_remainder() -> None:
    for assign in (False, True):
        model, floats = stored(keep_remainder=True), Model()
        model.load_state_dict({name: 0.7 * x for name, x in floats.state_dict().items()}, assign=assign)
        assert all(r.count_nonzero() > 0 for r in begun(model))


@each("writeback", ["stochastic", "nearest", "residual8"])
def test_a_step_makes_the_remainder_void_for_all_that_share_it(writeback: str) -> None:
    """Codes that were written again have left something else, which no later optimizer may begin with."""
    model = stored(keep_remainder=True)
    shared = model.state_dict()["lm_head.weight_remainder"]
    assert shared.count_nonzero() > 0
    optimizer = fm.optim.StiffnessSGD(model.parameters(), lr=0.01, momentum=0.9, writeback=writeback)
    model(TOKENS).sum().backward()
    optimizer.step()
    assert model.lm_head.weight.remainder is None
    assert shared.count_nonzero() == 0


def test_a_remainder_that_does_not_fit_is_refused() -> None:
    state = stored(keep_remainder=True).state_dict()
    state["lm_head.weight_remainder"] = state["lm_head.weight_remainder"].float()
    with pytest.raises(RuntimeError, match=r"lm_head\.weight can't be put together .*remainder is torch\.float32"):
        stored().load_state_dict(state)


@each("assign", [False, True])
@each("scale", [2.0**-9, 1.0, 500.0])
def test_a_float_checkpoint_is_rounded_at_a_scale_of_its_own(assign: bool, scale: float) -> None:
    floats = Model()
    for p in floats.parameters():
        p.data *= scale
    model = stored(headroom=8.0, seed=4)
    model.load_state_dict(through_disk(floats.state_dict()), assign=assign)
    expected = quantize_model(floats, "E4M3", "fp8", headroom=8.0, seed=4)
    for a, b in zip(layers(model), layers(expected), strict=True):
        assert same_store(a.weight, b.weight)
        assert (type(a.weight), a.weight.seed, a.weight.requires_grad) == (fm.FP8Parameter, b.weight.seed, True)


@each("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused_before_anything_changes(dtype: torch.dtype) -> None:
    layer = quantize_model(nn.Linear(8, 4), "E4M3", "fp8")
    with pytest.raises(TypeError, match=f"can't be {dtype}: take float32 or bfloat16"):
        layer.to(dtype)
    assert layer.bias.dtype == layer.weight.dtype == torch.float32


def test_between_storages_through_floats() -> None:
    model = quantize_model(Model(), "E3M4", "grid", headroom=4.0)
    expected = model(TOKENS)
    quantize_model(dequantize_model(model), "E3M4", "fp8", headroom=4.0)
    assert torch.equal(model(TOKENS), expected)
