"""Gradients of several backward passes, summed up in bfloat16 while they are freed."""

import math
from typing import Any

import pytest
import torch
from in_backward_cases import OPTIMIZERS, everything, ordinary, stepping, train
from laws import each
from torch import Tensor, nn

from fp8manifold import optim
from fp8manifold.optim._in_backward.gradients import FOR_SUMS, GradientSum
from fp8manifold.optim._streams import twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import Stream, draw_range

BATCHES = [torch.arange(10), torch.arange(5, 10), torch.arange(3)]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean() / len(BATCHES)


def pass_all(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for tokens in BATCHES:
            loss(model, tokens).backward()
        optimizer.step()


def rounded_sums(model: nn.Module, optimizer: Any) -> dict[Tensor, Tensor]:
    """The readable definition: each gradient added to the sum before, which is rounded with draws of its own."""
    sums: dict[Tensor, Tensor] = {}
    streams = {p: state["stream"] for p, state in optimizer.state.items()}
    for count, tokens in enumerate(BATCHES):
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p, gradient in zip(parameters, torch.autograd.grad(loss(model, tokens), parameters), strict=True):
            step = int(optimizer.state[p]["step"]) + 1
            draws = draw_range(0, p.numel(), Stream((0, step, streams[p], FOR_SUMS, count)), p.device).view(p.shape)
            wide = gradient.float() + sums.get(p, torch.zeros(())).float()
            sums[p] = to_half(wide, torch.bfloat16, draws)
    return sums


@each("clips", [False, True])
@each("storage", ["fp8", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_are_the_gradients_of_an_ordinary_step(name: str, storage: str | None, clips: bool) -> None:
    (plain, whole), (model, optimizer) = ordinary(name, storage), ordinary(name, storage)
    train(plain, whole, 1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    for _ in range(2):
        sums = rounded_sums(plain, whole)
        for p, held in sums.items():
            p.grad = held.to(p.dtype)
        optimizer.zero_grad()
        for tokens in BATCHES:
            loss(model, tokens).backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(isinstance(g, GradientSum) and g.held.dtype is torch.bfloat16 for g in gradients)
        assert all(map(torch.equal, [g.float() for g in gradients if g is not None], map(Tensor.float, sums.values())))
        if clips:
            norms = [nn.utils.clip_grad_norm_(net.parameters(), 1e-3) for net in (plain, model)]
            assert torch.equal(*norms)
        whole.step()
        optimizer.step()
        assert repr(model[1].weight.grad).startswith("SpentGradient")
    assert everything(model, optimizer) == everything(plain, whole)


def test_sums_are_right_on_average() -> None:
    weight = nn.Parameter(torch.zeros(4000))
    optimizer = optim.StiffnessAdamW([weight])
    optim.step_in_backward(optimizer, accumulate="bfloat16")
    weight.sum().backward()
    for _ in range(8):
        (weight * 2.0**-10).sum().backward()
    assert isinstance(weight.grad, GradientSum)
    assert abs(float(weight.grad.float().mean()) - (1 + 2.0**-7)) < 4 * 2.0**-7 * 0.33 / math.sqrt(4000)
    assert set(weight.grad.held.tolist()) <= {1 + k * 2.0**-7 for k in range(9)}


def test_draws_before_the_first_step_are_those_of_the_stream_to_come() -> None:
    model, optimizer, _ = stepping(accumulate="bfloat16")
    loss(model, BATCHES[0]).backward()
    words = {p: p.grad.words for p in model.parameters() if isinstance(p.grad, GradientSum)}
    assert not optimizer.state
    optimizer.step()
    assert {p: (0, 1, state["stream"]) for p, state in optimizer.state.items()} == words
    assert len(set(words.values())) == len(words) == len(twins(model.parameters()))


def test_zero_grad_drops_a_sum_and_a_state_is_saved_without_it() -> None:
    (model, *ours), (other, *its) = (stepping(accumulate="bfloat16") for _ in "ab")
    optimizers = [ours[0], its[0]]
    loss(model, BATCHES[1]).backward()
    saved = optimizers[0].state_dict()  # as without step_in_backward: gradients are no part of it
    assert not saved["state"]
    for net, optimizer in zip((model, other), optimizers, strict=True):
        pass_all(net, optimizer)
    assert everything(model, optimizers[0]) == everything(other, optimizers[1])
    optimizers[0].zero_grad()
    loss(model, BATCHES[1]).backward()
    optimizers[0].zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_sum_that_is_not_finite_leaves_out_all_steps() -> None:
    model, optimizer, _ = stepping("muon", accumulate="bfloat16")
    before = everything(model, optimizer)
    hook = model[3].weight.register_hook(lambda g: g * math.nan)
    optimizer.warn_after = 1
    with pytest.warns(RuntimeWarning, match=r"has skipped 1 steps in a row.*'3.weight'"):
        pass_all(model, optimizer)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (1, 1)
    hook.remove()
    optimizer.skipped_steps = optimizer.skipped_in_row = 0
    assert everything(model, optimizer) == before
    pass_all(model, optimizer)
    assert optimizer.skipped_in_row == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_what_a_sum_cannot_do_is_refused() -> None:
    model, optimizer, _ = stepping(accumulate="bfloat16")
    loss(model, BATCHES[0]).backward()
    gradient = model[1].weight.grad
    assert repr(gradient) == "GradientSum(shape=(16, 16), dtype=torch.float32)"
    assert float(gradient.norm()) > 0
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.clamp_(-1, 1)
    with pytest.raises(RuntimeError, match="sum in bfloat16"):
        gradient.mul_(torch.ones(16))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="scaled already, and another gradient comes: clip after the last"):
        loss(model, BATCHES[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="used and freed"):
        loss(model, BATCHES[0]).backward()
