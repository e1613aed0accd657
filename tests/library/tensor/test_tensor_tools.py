"""One-byte weights in the hands of other tools: exported programs, fake tensors, empty weights, format strings."""

from typing import Any

import pytest
import torch
from laws import each
from tensor_cases import INPUT, every_granularity, parameter, same_store
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8manifold as fm


def quantized(storage: Any = "fp8", fmt: str = "E5M2", **options: Any) -> Any:
    torch.manual_seed(0)
    return fm.quantize_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), fmt, storage, **options)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch 2.13 of itself
def test_an_exported_program_can_be_decomposed() -> None:
    model = quantized().requires_grad_(False)
    program = torch.export.export(model, (INPUT,)).run_decompositions()
    assert torch.equal(program.module()(INPUT), model(INPUT))
    held = [t for t in program.state_dict.values() if t.dtype == torch.uint8]
    assert [tuple(t.shape) for t in held] == [(64, 32), (4, 64)]
    assert not any("fp8manifold" in str(node.target) for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_an_exported_program_that_trains_is_not_decomposed() -> None:
    program = torch.export.export(quantized(), (INPUT,))
    with pytest.raises(RuntimeError, match="can require gradients"):
        program.run_decompositions()


@every_granularity
def test_fake_tensors_are_quantized(granularity: Any) -> None:
    spec = fm.LayerSpec(fm.OperandSpec("E2M1", granularity=granularity))
    with FakeTensorMode():
        model = fm.quantize_model(nn.Linear(64, 4), spec, "fp8", keep_remainder=True)
        model(torch.ones(3, 64)).sum().backward()
    like = fm.quantize_model(nn.Linear(64, 4), spec, "fp8", keep_remainder=True)
    assert type(model.weight) is fm.FP8Parameter
    for name in ("codes", "scale", "counter", "remainder"):
        fake, real = getattr(model.weight, name), getattr(like.weight, name)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert model.weight.grad.shape == (4, 64)


@each("policy", ["dynamic", "static", "delayed"])
def test_fake_master_weights_are_quantized(policy: Any) -> None:
    spec = fm.LayerSpec(fm.OperandSpec("E4M3", policy=policy), fm.OperandSpec("E4M3", policy=policy))
    with FakeTensorMode():
        model = fm.quantize_model(nn.Linear(64, 4), spec, "master")
        assert model(torch.ones(3, 64)).shape == (3, 4)


def test_a_grid_of_fake_tensors_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="take storage='fp8', or quantise a model"):
        fm.quantize_model(nn.Linear(64, 4), "E4M3", "grid")


def test_a_single_value_is_formatted_as_a_number() -> None:
    p = fm.FP8Parameter(torch.tensor([[0.3, -0.7]]), "E4M3")
    assert f"{p.detach()[0, 0]:.2f} {p[0, 1]:+.3f} {p[0, 0]}" == "0.31 -0.688 0.3125"
    assert f"{fm.FP8Parameter(torch.tensor(0.3), 'E4M3'):.1e}" == "3.1e-01"
    assert f"{p}" == repr(p)


def test_weights_are_made_empty_by_accelerate() -> None:
    """accelerate makes each parameter again on the meta device, from its attributes: format and options stay."""
    import accelerate

    with accelerate.init_empty_weights():
        model = quantized(rounding="nearest", granularity="tensor", seed=3)
    like = quantized(rounding="nearest", granularity="tensor", seed=3)
    for empty, full in ((model[0].weight, like[0].weight), (model[2].weight, like[2].weight)):
        assert type(empty) is fm.FP8Parameter
        assert (empty.device.type, empty.requires_grad) == ("meta", True)
        assert (empty.format, empty.seed, empty.rounding) == (full.format, full.seed, full.rounding)
        assert empty.granularity == full.granularity
    model.to_empty(device="cpu").load_state_dict(like.state_dict())
    assert torch.equal(model(INPUT), like(INPUT))


@every_granularity
def test_a_parameter_of_a_stored_tensor_is_its_parameter(granularity: Any) -> None:
    stored = parameter("E3M4", granularity=granularity, keep_remainder=True).detach()
    p = fm.FP8Parameter(stored)
    assert same_store(p, stored)
    assert p.codes is stored.codes
    assert p.requires_grad
    assert not fm.FP8Parameter(stored, requires_grad=False).requires_grad
    assert fm.FP8Parameter(stored, "E5M2").format.name == "E5M2"
