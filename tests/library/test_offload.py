"""Steps on the host of weights that live elsewhere: between two homes on the CPU, the step of one home to the bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import HostOptimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 7))
    return fm.quantize_model(model, "E4M3", storage="fp8", embeddings="E4M3", keep_remainder=True)


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.02},
    "adamw8": {"lr": 0.02, "moments": "8bit"},
    "residual": {"lr": 0.02, "writeback": "residual8"},
    "lion": {"lr": 0.02},
    "muon": {"lr": 0.05, "moments": "8bit"},
}
CLASSES = {"lion": optim.StiffnessLion, "muon": optim.StiffnessMuon}


def groups_of(kind: str, model: nn.Module) -> Any:
    if kind == "muon":
        groups = optim.StiffnessMuon.for_model(model, **KINDS[kind]).param_groups
        return [{**group} for group in groups]
    return model.parameters()


def here(kind: str, model: nn.Module) -> Any:
    return CLASSES.get(kind, optim.StiffnessAdamW)(groups_of(kind, model), **KINDS[kind])


def there(kind: str, model: nn.Module, **more: Any) -> HostOptimizer:
    return HostOptimizer(groups_of(kind, model), CLASSES.get(kind, optim.StiffnessAdamW), **KINDS[kind], **more)


def loss_of(model: nn.Module, number: int) -> Tensor:
    rows = torch.randint(0, 30, (6, 4), generator=torch.Generator().manual_seed(number))
    loss: Tensor = 40 * model(rows).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, steps: range, before: Callable[[], Any] = lambda: None) -> list[float]:
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        before()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x.codes, y.codes) and torch.equal(x.scale, y.scale)
        if isinstance(x, fm.FP8Tensor) and isinstance(y, fm.FP8Tensor)
        else torch.equal(x, y)
        for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("in_backward", [None, {}], ids=["step", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_step_of_one_home(kind: str, in_backward: Any) -> None:
    one, two = net(), net()
    first, second = here(kind, one), there(kind, two, in_backward=in_backward)
    own = [p for p in two.parameters() if isinstance(p, fm.FP8Tensor)]
    memory = [(p.codes.data_ptr(), p.kept_scale.data_ptr()) for p in own]
    assert train(one, first, range(8)) == train(two, second, range(8))
    assert same(one, two)
    assert memory == [(p.codes.data_ptr(), p.kept_scale.data_ptr()) for p in own]
    held = {id(p) for p in two.parameters()}
    assert not any(id(p) in held for group in second.param_groups for p in group["params"])
    if in_backward is not None:
        assert all(p.grad is None for p in two.parameters())


def test_scales_that_widen_go_to_the_device() -> None:
    codes = torch.full((4, 32), 100, dtype=torch.uint8)
    codes[1, 3] = 125
    p = fm.FP8Parameter.from_codes(codes, torch.ones(4, 1), "E4M3", requires_grad=True, seed=1)
    optimizer = HostOptimizer([p], optim.StiffnessAdamW, lr=64.0, weight_decay=0.0)
    for _ in range(2):
        p.grad = -torch.ones(4, 32)
        optimizer.step()
    assert p.scale.flatten().tolist() == [1.0, 2.0, 1.0, 1.0]
    assert optimizer.inner.widened_scales == 1


def test_clipping_is_that_of_the_gradients_on_the_device() -> None:
    one, two = net(), net()
    losses = [
        train(model, made, range(5), lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for model, made in ((one, here("adamw", one)), (two, there("adamw", two)))
    ]
    assert losses[0] == losses[1]
    assert same(one, two)


@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_clipping_in_the_backward_pass(clip: str) -> None:
    one, two = net(), net()
    first, second = here("adamw8", one), there("adamw8", two, in_backward={"clip": clip, "max_norm": 0.5})
    handle = optim.step_in_backward(first, clip=clip, max_norm=0.5)
    for number in range(4):
        for model, optimizer, measure in ((one, first, handle.measure), (two, second, second.measure)):
            optimizer.zero_grad()
            if clip == "exact" or not number:
                with measure():
                    loss_of(model, number).backward()
            loss_of(model, number).backward()
            optimizer.step()
    assert same(one, two)


def test_accumulation_in_the_backward_pass() -> None:
    one, two = net(), net()
    first, second = here("adamw8", one), there("adamw8", two, in_backward={"accumulate": "bfloat16"})
    optim.step_in_backward(first, accumulate="bfloat16")
    for number in range(3):
        for model, optimizer in ((one, first), (two, second)):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 3 * number + part).backward()
            optimizer.step()
    assert same(one, two)


def test_a_state_goes_from_home_to_home() -> None:
    one, two = net(), net()
    first, second = here("adamw8", one), there("adamw8", two)
    train(one, first, range(3))
    train(two, second, range(3))
    for saved_model, saved, other in ((one, first, there), (two, second, here)):
        file = io.BytesIO()
        torch.save({"model": saved_model.state_dict(), "optimizer": saved.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        model = net()
        taken_up = other("adamw8", model)
        model.load_state_dict(state["model"])
        taken_up.load_state_dict(state["optimizer"])
        whole = copy.deepcopy(saved_model)
        goes_on = here("adamw8", whole)
        goes_on.load_state_dict(saved.state_dict())
        assert train(model, taken_up, range(3, 6)) == train(whole, goes_on, range(3, 6))
        assert same(model, whole)


def test_schedulers_see_its_groups() -> None:
    model = net()
    optimizer = there("adamw", model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, range(1))
    schedule.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.01


def test_what_is_not_finite_leaves_all_out() -> None:
    model = net()
    optimizer, before = there("adamw", model), net()
    loss_of(model, 0).backward()
    model[1].weight.grad[0, 0] = torch.nan  # type: ignore[index]
    optimizer.step()
    assert same(model, before)
    assert optimizer.inner.skipped_steps == 1
