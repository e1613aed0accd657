"""Nothing is remembered from one step to the next but what the state shows, whatever way steps are run."""

import copy
import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paths import PATHS, by
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim

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
CASES = [(name, path) for name in OPTIMIZERS for path in PATHS]
by_path = pytest.mark.parametrize(("name", "path"), CASES, ids=["-".join(case) for case in CASES])


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    stored = [fm.FP8Parameter(torch.randn(6, 20) * 0.1, fmt, seed=i) for i, fmt in enumerate(("E4M3", "E5M2"))]
    return [*stored, torch.nn.Parameter(torch.randn(300)), torch.nn.Parameter(torch.randn(4, 3))]


def put(parameters: list[Tensor], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * 0.1


def build(name: str, path: str = "eager", **options: Any) -> tuple[list[Tensor], Any]:
    kind, defaults = OPTIMIZERS[name]
    parameters = weights()
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": defaults["lr"] / 2}]
    return parameters, by(path, kind(groups, **{"refresh_every": 5, **defaults, **options}))


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


def forget(optimizer: Any) -> None:
    """Take away all that is neither torch's, nor a count that ``state_dict`` has; it is no part of any result."""
    known = {"state", "param_groups", "defaults", "skipped_steps", "skipped_in_row", "widened_scales", "streams_begun"}
    known |= {"fitted_scales", "_run"}  # the last says by which path it steps
    for name in [name for name in vars(optimizer) if name not in known and not name.startswith("_optimizer_")]:
        if name.startswith("_") and name not in torch.optim.SGD([torch.zeros(1)]).__dict__:
            del optimizer.__dict__[name]


def compare(name: str, path: str, event: Callable[..., None] | None, steps: int, at: int, **options: Any) -> Any:
    """The bits of plain PyTorch in an optimizer that forgets everything before each step; the two optimizers."""
    ours, plain = (build(name, by_which, **options) for by_which in (path, "eager"))
    for t in range(steps):
        for parameters, optimizer in (ours, plain):
            put(parameters, t)
            if t == at and event is not None:
                event(parameters, optimizer)
            if optimizer is plain[1]:
                forget(optimizer)
            optimizer.step()
        assert same(everything(*ours), everything(*plain)), t
    return ours[1], plain[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{"stabilize_every": 3}, {"reset_every": 4}, {"stiffness": lambda t: 1 / (1 + t)}])
def test_what_is_due_is_done(options: dict[str, Any], path: str) -> None:
    compare("adamw", path, None, steps=12, at=-1, **options)


@pytest.mark.parametrize("path", PATHS)
def test_a_changed_weight_is_seen_by_autograd(path: str) -> None:
    """What a graph saved is no longer there after a step."""
    parameters, optimizer = build("adamw", path)
    plain = parameters[2]
    for t in range(4):
        loss = (plain * plain).sum()
        put(parameters, t)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def average_of(parameters: list[Tensor], optimizer: Any, i: int) -> tuple[dict[str, Any], str]:
    state = optimizer.state[parameters[i]]
    return state, next(name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in state)


def average_data(parameters: list[Tensor], optimizer: Any) -> None:
    for i in range(4):
        state, name = average_of(parameters, optimizer, i)
        state[name].data = (state[name].double() * 2).to(state[name].dtype)


def strided_average(parameters: list[Tensor], optimizer: Any) -> None:
    state, name = average_of(parameters, optimizer, 3)
    state[name].data = state[name].t().contiguous().t()


def flat_average(parameters: list[Tensor], optimizer: Any) -> None:
    state, name = average_of(parameters, optimizer, 0)
    state[name].data = state[name].data.t().contiguous().view(state[name].shape)


def away_and_back(parameters: list[Tensor], optimizer: Any) -> None:
    """What offloading does, into other memory and out of it again."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                away = value.detach().to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
                value.data = torch.empty(0, dtype=value.dtype)
                state[name].data = away.to(value.dtype, copy=True)


def cleared(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.state.clear()


def another_state(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def plain_state(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.state = {}


def popped(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.state.pop(parameters[0])
    optimizer.state.pop(parameters[3])


def replaced(parameters: list[Tensor], optimizer: Any) -> None:
    for i in (1, 2):
        old = optimizer.state[parameters[i]]
        optimizer.state[parameters[i]] = {k: v * 2 if k.startswith("exp") else copy.copy(v) for k, v in old.items()}


def only_a_count(parameters: list[Tensor], optimizer: Any) -> None:
    """What is missing is made anew, S_ref and random bits included."""
    for i in (0, 2):
        optimizer.state[parameters[i]] = {"step": torch.tensor(3.0)}


def codes_data(parameters: list[Tensor], optimizer: Any) -> None:
    parameters[0].codes.data = parameters[0].codes.clone().fill_(33)
    parameters[1].scale.data = parameters[1].scale * 2


def removed(parameters: list[Tensor], optimizer: Any) -> None:
    del optimizer.param_groups[1]["params"][0]
    optimizer.state.pop(parameters[1])


def removed_and_added(parameters: list[Tensor], optimizer: Any) -> None:
    removed(parameters, optimizer)
    new_group(parameters, optimizer)


def group_removed(parameters: list[Tensor], optimizer: Any) -> None:
    del optimizer.param_groups[0]


def group_made_anew(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.param_groups[1] = dict(optimizer.param_groups[1], eps=0.1)


EVENTS: list[Callable[[list[Tensor], Any], None]] = [
    lower_lr, new_option, no_gradient, strided_gradient, nan_gradient, huge_gradient, reload, other_codes, other_scale,
    new_state, other_count, new_group, moved_data, average_data, strided_average, flat_average, away_and_back, cleared,
    another_state, plain_state, popped, replaced, only_a_count, codes_data, removed, removed_and_added, group_removed,
    group_made_anew,
]  # fmt: skip


@pytest.mark.covering(2)
@by_path
@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.__name__)
def test_the_next_step_starts_from_what_the_state_holds(name: str, path: str, event: Callable[..., None]) -> None:
    """It is one of an optimizer that forgets."""
    optimizers = compare(name, path, event, steps=9, at=3)
    for optimizer in optimizers:
        assert optimizer.skipped_steps == (event in (nan_gradient, huge_gradient))


def test_the_events_matter() -> None:
    """Each makes a difference to the run, but for those that put back what was there."""
    harmless = {strided_gradient, strided_average, away_and_back, reload, new_group}
    results = []
    for event in (None, *EVENTS):
        parameters, optimizer = build("adamw")
        for t in range(6):
            put(parameters, t)
            if t == 3 and event is not None:
                event(parameters, optimizer)
            optimizer.step()
        results.append(everything(parameters, optimizer))
    for event, result in zip(EVENTS, results[1:], strict=True):
        assert same(result, results[0]) == (event in harmless), event.__name__


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.double(), "float64"),
        (lambda value: value.to("meta"), "on meta, but the parameter is on cpu"),
        (lambda value: value[:2].clone(), "of shape"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_an_average_that_cannot_be_stepped_is_refused(
    path: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    parameters, optimizer = build("adamw", path)
    for t in range(3):
        put(parameters, t)
        optimizer.step()
    before = [p.detach().clone() for p in parameters]
    counts = [int(optimizer.state[p]["step"]) for p in parameters]
    state = optimizer.state[parameters[3]]
    state["exp_avg"] = change(state["exp_avg"])
    put(parameters, 3)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert [int(optimizer.state[p]["step"]) for p in parameters] == counts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("i", [0, 2])
def test_a_parameter_taken_out_is_let_go(i: int, path: str) -> None:
    parameters, optimizer = build("adamw", path)
    for t in range(3):
        put(parameters, t)
        optimizer.step()
    dead = weakref.ref(parameters[i])
    memory = weakref.ref(optimizer.state[parameters[i]]["exp_avg"])
    group = optimizer.param_groups[int(i > 0)]
    group["params"] = [p for p in group["params"] if p is not parameters[i]]
    optimizer.state.pop(parameters[i])
    parameters[i] = torch.nn.Parameter(torch.ones(1))
    gc.collect()
    assert dead() is None
    assert memory() is None
