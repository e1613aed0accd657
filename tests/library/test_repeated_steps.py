"""A step that repeats the last one gives the bits of one that is planned, whatever happens between two steps."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim._repeated import RepeatedStep

OPTIMIZERS = {
    "adamw": (optim.StiffnessAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-8bit": (optim.StiffnessAdamW, {"lr": 1e-2, "moments": "8bit"}),
    "adamw-residual8": (optim.StiffnessAdamW, {"lr": 1e-2, "writeback": "residual8"}),
    "adamw-momentum": (optim.StiffnessAdamW, {"lr": 1e-2, "writeback": "momentum", "moments": "bfloat16"}),
    "sgd": (optim.StiffnessSGD, {"lr": 1e-1, "dampening": 0.5}),
    "sgd-8bit": (optim.StiffnessSGD, {"lr": 1e-1, "moments": "8bit"}),
    "lion": (optim.StiffnessLion, {"lr": 1e-3}),
    "lion-8bit": (optim.StiffnessLion, {"lr": 1e-3, "moments": "8bit"}),
    "madam": (optim.Madam, {"lr": 1e-2}),
}
by_name = pytest.mark.parametrize("name", OPTIMIZERS)


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    stored = [fm.FP8Parameter(torch.randn(6, 20) * 0.1, fmt, seed=i) for i, fmt in enumerate(("E4M3", "E5M2"))]
    return [*stored, torch.nn.Parameter(torch.randn(300)), torch.nn.Parameter(torch.randn(4, 3))]


def put(parameters: list[Tensor], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * 0.1


def build(name: str, **options: Any) -> tuple[list[Tensor], Any]:
    kind, defaults = OPTIMIZERS[name]
    parameters = weights()
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": defaults["lr"] / 2}]
    return parameters, kind(groups, **{"refresh_every": 5, "compile": False, **defaults, **options})


def everything(parameters: list[Tensor], optimizer: Any) -> list[Tensor]:
    values = [p.codes if isinstance(p, fm.FP8Tensor) else p.detach() for p in parameters]
    scales = [p.scale for p in parameters if isinstance(p, fm.FP8Tensor)]
    state = [x for p in parameters for _, x in sorted(optimizer.state[p].items()) if isinstance(x, Tensor)]
    return [x.clone() for x in (*values, *scales, *state)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def lower_lr(parameters: list[Tensor], optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def new_option(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.param_groups[1]["weight_decay"] = 0.3


def no_gradient(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[1].grad = None


def strided_gradient(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[0].grad = parameters[0].grad.repeat_interleave(2, dim=1)[:, ::2]


def nan_gradient(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[2].grad[3] = math.nan


def huge_gradient(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[1].grad[0, 0] = 1e30


def reload(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_codes(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[0].codes.fill_(33)


def other_scale(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[0].rescale_(parameters[0].scale * 2)


def new_state(parameters: list[Tensor], optimizer: Any) -> None:
    state = optimizer.state[parameters[2]]
    name = next(name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in state)
    state[name] = torch.zeros_like(state[name])


def other_count(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.state[parameters[3]]["step"].fill_(1)


def new_group(parameters: list[Tensor], optimizer: Any) -> None:
    extra = torch.nn.Parameter(torch.ones(5))
    extra.grad = torch.full((5,), 0.5)
    optimizer.add_param_group({"params": [extra]})


def moved_data(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[2].data = parameters[2].data.clone() + 1


EVENTS: list[Callable[[list[Tensor], Any], None]] = [
    lower_lr, new_option, no_gradient, strided_gradient, nan_gradient, huge_gradient, reload, other_codes, other_scale,
    new_state, other_count, new_group, moved_data,
]  # fmt: skip


@pytest.fixture
def never_repeats(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def plan_always(optimizer: Any) -> None:
        monkeypatch.setattr(optimizer, "_repeatable", lambda planned: None, raising=False)

    return plan_always


@by_name
@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.__name__)
def test_repeated_is_planned(name: str, event: Callable[..., None], never_repeats: Callable[[Any], None]) -> None:
    pairs = [build(name), build(name)]
    never_repeats(pairs[1][1])
    for t in range(9):
        for parameters, optimizer in pairs:
            put(parameters, t)
            if t == 3:
                event(parameters, optimizer)
            optimizer.step()
        assert same(everything(*pairs[0]), everything(*pairs[1])), t
    assert pairs[0][1].skipped_steps == pairs[1][1].skipped_steps == (event in (nan_gradient, huge_gradient))


@by_name
def test_most_steps_are_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = RepeatedStep.take
    monkeypatch.setattr(RepeatedStep, "take", lambda self, done: taken.append(done[0]) or take(self, done))
    parameters, optimizer = build(name)
    for t in range(12):
        put(parameters, t)
        optimizer.step()
    assert taken == [t for t in range(12) if t % 5]


@pytest.mark.parametrize("options", [{"stabilize_every": 3}, {"reset_every": 4}, {"stiffness": lambda t: 1 / (1 + t)}])
def test_what_is_due_is_done(options: dict[str, Any], never_repeats: Callable[[Any], None]) -> None:
    pairs = [build("adamw", **options), build("adamw", **options)]
    never_repeats(pairs[1][1])
    for t in range(12):
        for parameters, optimizer in pairs:
            put(parameters, t)
            optimizer.step()
        assert same(everything(*pairs[0]), everything(*pairs[1])), t


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit", "adamw-residual8"])
def test_repeated_is_planned_compiled(name: str, never_repeats: Callable[[Any], None]) -> None:
    pairs = [build(name, compile=True), build(name)]
    never_repeats(pairs[1][1])
    for t in range(9):
        for parameters, optimizer in pairs:
            put(parameters, t)
            if t == 3:
                nan_gradient(parameters, optimizer)
            optimizer.step()
        assert same(everything(*pairs[0]), everything(*pairs[1])), t
    assert pairs[0][1].skipped_steps == 1


def test_raising_on_a_repeated_step_changes_nothing() -> None:
    parameters, optimizer = build("adamw-8bit", on_nonfinite="raise")
    for t in range(3):
        put(parameters, t)
        optimizer.step()
    before = everything(parameters, optimizer)
    put(parameters, 3)
    nan_gradient(parameters, optimizer)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert same(everything(parameters, optimizer), before)


def test_a_changed_weight_is_seen_by_autograd() -> None:
    """What a graph saved is no longer there after a compiled step, repeated or not."""
    parameters, optimizer = build("adamw", compile=True)
    plain = parameters[2]
    for t in range(4):
        loss = (plain * plain).sum()
        put(parameters, t)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_observer_sees_every_step() -> None:
    parameters, optimizer = build("adamw")
    seen: list[Any] = []
    for t in range(6):
        put(parameters, t)
        optimizer.observer = seen.append if t in (3, 4) else None
        optimizer.step()
    assert len(seen) == 2 * 2
