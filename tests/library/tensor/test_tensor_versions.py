"""Weights written between a forward pass and its backward: torch's usual error, never gradients of other weights."""

from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
import torch.nn.functional as F
from laws import each
from optimizer_cases import normal
from tensor_cases import parameter
from torch import Tensor, nn

import fp8manifold as fm

CHANGED = "modified by an inplace operation"

WRITES: dict[str, Callable[[fm.FP8Parameter], Any]] = {
    "add_": lambda p: p.add_(1.0),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "write": lambda p: p.write(torch.ones(p.shape)),
    "adopt": lambda p: p.adopt(parameter(seed=1)),
    "rescale_": lambda p: p.rescale_(p.scale * 2),
    "adapt_scale_": lambda p: p.adapt_scale_(),
    "set_scale_": lambda p: p.set_scale_(p.scale * 2),
    "data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "row": lambda p: p[0].add_(1.0),
    "write of a view": lambda p: p[:2].t().write(torch.ones(64, 2)),
    "foreach of a view": lambda p: torch._foreach_mul_([p[1]], 0.5),
    "detached": lambda p: p.detach().rescale_(p.scale * 2),
    "detached view": lambda p: torch._foreach_mul_([p.detach()[1]], 0.5),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "StiffnessAdamW": lambda ps: fm.optim.StiffnessAdamW(ps),
    "RiemannianSGD": lambda ps: fm.optim.RiemannianSGD(ps, float_lr=0.01),
    "Madam": lambda ps: fm.optim.Madam(ps, float_lr=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "geoopt": lambda ps: geoopt.optim.RiemannianAdam(ps),
}


@each("use", [lambda p: p, lambda p: p[1:3]], ids=["whole", "view"])
@each("write", WRITES.values(), ids=WRITES)
def test_a_write_between_forward_and_backward_is_an_error(write: Any, use: Any) -> None:
    p, x = parameter(rounding="nearest", scale=1.0), normal(3, 64).requires_grad_()
    loss = F.linear(x, use(p)).sum()
    with torch.no_grad():
        write(p)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_what_only_reads_is_none() -> None:
    p, x = parameter(), normal(3, 64).requires_grad_()
    loss = F.linear(x, p).sum()
    p.clone().zero_()
    assert not p.adapt_scale_()
    p.detach(), p.largest(), p.dequantize().zero_(), repr(p), p.expanded_scale().sum()
    loss.backward()
    assert torch.equal(x.grad, p.dequantize().sum(0).expand(3, 64))


@each("activation", [None, "E5M2"])
@each("storage", ["grid", "fp8"])
@each("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_between_forward_and_backward_is_an_error(make: Any, storage: Any, activation: Any) -> None:
    """The first step, which is planned, and the next, which repeats it."""
    if make is OPTIMIZERS["fused"] and storage == "grid":
        pytest.skip("torch's own fused kernels say nothing of what they write into ordinary tensors")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    spec = fm.LayerSpec("E4M3", activation=activation, gradient=activation)
    fm.quantize_model(model, spec, storage)
    optimizer = make(model.parameters())
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        loss = model(normal(3, 8)).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_master_weights_have_the_gradient_of_the_forward_pass() -> None:
    """A product takes a tensor of its own there, which a step leaves alone."""
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "E4M3", "master")
    x, gradients = normal(3, 8), []
    for steps in (0, 1):
        model.zero_grad()
        loss = model(x).square().sum()
        for _ in range(steps):
            with torch.no_grad():
                model[1].weight.mul_(2.0)
        loss.backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_stepping_in_hooks_of_the_gradient() -> None:
    """Each parameter is stepped as soon as its gradient is there, when nothing else needs its values."""
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "E4M3", "fp8")
    before = [layer.weight.codes.clone() for layer in model]
    for i, p in enumerate(model.parameters()):
        step = fm.optim.StiffnessAdamW([p], lr=0.1, seed=i).step
        p.register_post_accumulate_grad_hook(lambda _, step=step: step())
    model(normal(3, 8)).square().sum().backward()
    assert all(not torch.equal(layer.weight.codes, old) for layer, old in zip(model, before, strict=True))


def test_inference_has_no_versions() -> None:
    with torch.inference_mode():
        p = parameter(rounding="nearest")
        p.mul_(0.5)
    assert isinstance(p, Tensor)
    assert p.is_inference()
