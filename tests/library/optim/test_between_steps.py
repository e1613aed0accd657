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
from torch import Tensor, nn

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


def forget(optimizer: Any) -> None:
    """Take away all that is neither torch's, nor a count that ``state_dict`` has; it is no part of any result."""
    known = {"state", "param_groups", "defaults", "skipped_steps", "skipped_in_row", "widened_scales", "streams_begun"}
    known |= {"fitted_scales", "_run"}  # the last says by which path it steps
    for name in [name for name in vars(optimizer) if name not in known and not name.startswith("_optimizer_")]:
        if name.startswith("_") and name not in torch.optim.SGD([torch.zeros(1)]).__dict__:
            del optimizer.__dict__[name]


def compare(name: str, path: str, event: str, steps: int, at: int, **options: Any) -> Any:
    """The bits of plain PyTorch in an optimizer that forgets everything before each step; the two optimizers."""
    ours, plain = (build(name, by_which, **options) for by_which in (path, "eager"))
    for t in range(steps):
        for parameters, optimizer in (ours, plain):
            put(parameters, t)
            if t == at and event:
                happens(event, parameters, optimizer)
            if optimizer is plain[1]:
                forget(optimizer)
            optimizer.step()
        assert same(everything(*ours), everything(*plain)), t
    return ours[1], plain[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{"stabilize_every": 3}, {"reset_every": 4}, {"stiffness": lambda t: 1 / (1 + t)}])
def test_what_is_due_is_done(options: dict[str, Any], path: str) -> None:
    compare("adamw", path, "", steps=12, at=-1, **options)


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


def average_of(state: dict[str, Any]) -> str:
    return next(name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in state)


def away_and_back(x: Tensor) -> Tensor:
    """What offloading does, into other memory and out of it again."""
    away = x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    x.data = torch.empty(0, dtype=x.dtype)
    return away.to(x.dtype, copy=True)


REMOVED = "del groups[1]['params'][0]; o.state.pop(p[1])"
ADDED = (
    "extra = nn.Parameter(torch.ones(5)); extra.grad = torch.full((5,), 0.5); o.add_param_group({'params': [extra]})"
)
HARMLESS = ("strided gradient", "strided average", "away and back", "reload", "new group")
#: what is done between steps to the parameters p, the optimizer o, its groups and the states s of the parameters
EVENTS = {
    "lower lr": "for group in groups: group['lr'] *= 0.7",
    "new option": "groups[1]['weight_decay'] = 0.3",
    "no gradient": "p[1].grad = None",
    "strided gradient": "p[0].grad = p[0].grad.repeat_interleave(2, dim=1)[:, ::2]",
    "nan gradient": "p[2].grad[3] = math.nan",
    "huge gradient": "p[1].grad[0, 0] = 1e30",
    "reload": "o.load_state_dict(copy.deepcopy(o.state_dict()))",
    "other codes": "p[0].codes.fill_(33)",
    "other scale": "p[0].rescale_(p[0].scale * 2)",
    "new state": "name = average_of(s[2]); s[2][name] = torch.zeros_like(s[2][name])",
    "other count": "s[3]['step'].fill_(1)",
    "new group": ADDED,
    "moved data": "p[2].data = p[2].data.clone() + 1",
    "average data": "for x in (each[average_of(each)] for each in s): x.data = (x.double() * 2).to(x.dtype)",
    "strided average": "x = s[3][average_of(s[3])]; x.data = x.t().contiguous().t()",
    "flat average": "x = s[0][average_of(s[0])]; x.data = x.data.t().contiguous().view(x.shape)",
    "away and back": "for d in s: d.update({k: away_and_back(x) for k, x in d.items() if getattr(x, 'ndim', 0)})",
    "cleared": "o.state.clear()",
    "another state": "o.state = defaultdict(dict)",
    "plain state": "o.state = {}",
    "popped": "o.state.pop(p[0]); o.state.pop(p[3])",
    "replaced": "for i in (1, 2): o.state[p[i]] = {k: 2 * x if 'exp' in k else copy.copy(x) for k, x in s[i].items()}",
    # what is missing is made anew, S_ref and random bits included
    "only a count": "for i in (0, 2): o.state[p[i]] = {'step': torch.tensor(3.0)}",
    "codes data": "p[0].codes.data = p[0].codes.clone().fill_(33); p[1].scale.data = p[1].scale * 2",
    "removed": REMOVED,
    "removed and added": f"{REMOVED}; {ADDED}",
    "group removed": "del groups[0]",
    "group made anew": "groups[1] = dict(groups[1], eps=0.1)",
}


def happens(event: str, parameters: list[Tensor], optimizer: Any) -> None:
    states = [optimizer.state[p] for p in parameters]
    named = {"p": parameters, "o": optimizer, "groups": optimizer.param_groups, "s": states}
    known = {"average_of": average_of, "away_and_back": away_and_back, "defaultdict": defaultdict}
    exec(EVENTS[event], {"copy": copy, "math": math, "nn": nn, "torch": torch, **known, **named})


@pytest.mark.covering(2)
@by_path
@pytest.mark.parametrize("event", EVENTS)
def test_the_next_step_starts_from_what_the_state_holds(name: str, path: str, event: str) -> None:
    """It is one of an optimizer that forgets."""
    optimizers = compare(name, path, event, steps=9, at=3)
    for optimizer in optimizers:
        assert optimizer.skipped_steps == (event in ("nan gradient", "huge gradient"))


def test_the_events_matter() -> None:
    """Each makes a difference to the run, but for those that put back what was there."""
    results = {}
    for event in ("", *EVENTS):
        parameters, optimizer = build("adamw")
        for t in range(6):
            put(parameters, t)
            if t == 3 and event:
                happens(event, parameters, optimizer)
            optimizer.step()
        results[event] = everything(parameters, optimizer)
    assert [event for event in EVENTS if same(results[event], results[""])] == [e for e in EVENTS if e in HARMLESS]


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
