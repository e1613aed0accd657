"""Nothing is remembered from one step to the next but what the state shows: plans, and
the table of a steady step.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from optimizer_cases import everyone, frozen, normal, with_factors
from paths import PATHS, as_on_a_card, by
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._triton import launch
from fp8manifold.optim import _steady
from fp8manifold.optim._steady import SteadyPlan

STEPS = 9
KINDS = {
    "adamw": (optim.StiffnessAdamW, {"lr": 1e-2, "weight_decay": 0.1, "stiffness": 0.5}),
    "adamw-8bit": (optim.StiffnessAdamW, {"lr": 3.0, "moments": "8bit", "draws": "dither"}),
    "adamw-residual8": (
        optim.StiffnessAdamW,
        {"lr": 1e-2, "writeback": "residual8", "moments": "bfloat16"},
    ),
    "annealed": (
        optim.StiffnessAdamW,
        {"lr": 1e-2, "stiffness": optim.anneal(1.0, 0.0, 6), "reset_every": 4},
    ),
    "sgd": (
        optim.StiffnessSGD,
        {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5, "writeback": "momentum"},
    ),
    "sgd-8bit": (optim.StiffnessSGD, {"lr": 1e-1, "momentum": 0.9, "moments": "8bit"}),
    "lion": (optim.StiffnessLion, {"lr": 1e-3, "moments": "8bit"}),
}


def made(
    kind="adamw", granularity="channel", *, path="native", factors=False, keeps=True, **options
):
    """Two groups: of two weights of one byte, one of which soon reaches its end, and a
    vector; and of a matrix.
    """
    parameters = [nn.Parameter(normal(33, seed=3)), nn.Parameter(normal(4, 3, seed=4))]
    for i, fmt in ((1, "E5M2"), (0, "E4M3")):
        p = fm.FP8Parameter(
            normal(4, 64, seed=i), fmt, seed=i, granularity=granularity, headroom=1.0
        )
        parameters.insert(0, with_factors(p, factors))
    cls, given = KINDS[kind]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": given["lr"] / 2}]
    optimizer = by(path, cls(groups, **{"refresh_every": 1000, **given, **options}))
    optimizer.keeps_plan = keeps
    return optimizer


def put(optimizer, t, bad=None):
    for i, p in enumerate(everyone(optimizer)):
        p.grad = normal(*p.shape, seed=100 * t + i)
        if bad is not None and i == 1:
            p.grad[0, 0] = bad


def stepped(optimizer, steps):
    for t in range(steps):
        put(optimizer, t)
        optimizer.step()
    return optimizer


def bits(optimizer):
    parts = [
        (p.codes, p.scale) if isinstance(p, fm.FP8Tensor) else p.detach()
        for p in everyone(optimizer)
    ]
    return frozen([parts, optimizer.state_dict()])


def forget(optimizer):
    """Take away all that is neither torch's, nor a count that ``state_dict`` has; it is
    no part of any result.
    """
    known = {
        "_run",
        "_numbers",
        *torch.optim.SGD([torch.zeros(1)]).__dict__,
    }  # by which path it steps, and an edit
    counts = [f"_{name}" for name in ("skipped_steps", "skipped_in_row", "widened_scales")]
    for name in [
        name
        for name in vars(optimizer)
        if name.startswith("_") and not name.startswith("_optimizer_")
    ]:
        if name not in known and name not in counts:
            del optimizer.__dict__[name]


@pytest.fixture
def served(monkeypatch):
    """For each table that was looked up, True where it could be used."""
    own, found = SteadyPlan.serves, list[bool]()

    def serves(table, optimizer):
        found.append(own(table, optimizer))
        return found[-1]

    monkeypatch.setattr(SteadyPlan, "serves", serves)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block", "square"])
@pytest.mark.parametrize("factors", [False, True])
def test_steps_have_the_bits_of_steps_that_are_planned(kind, granularity, factors, served):
    """With steps that are left out, a schedule of the learning rate, and scales that
    double.
    """
    served.clear()
    ours, planned = (
        made(kind, granularity, factors=factors, keeps=keeps) for keeps in (True, False)
    )
    for t in range(STEPS):
        for optimizer in (ours, planned):
            put(optimizer, t, torch.inf if t in (4, 5) else 2.0**70 if t == 7 else None)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        assert bits(ours) == bits(planned)
        assert [p.filled is None for p in everyone(ours)[:2]] == [
            p.filled is None for p in everyone(planned)[:2]
        ]
    assert ours.skipped_steps == planned.skipped_steps == 3
    read_in_place = (
        "channel",
        "tensor",
        "block" if factors else "",
    )  # of others native code reads copies
    assert any(served) == (granularity in read_in_place)
    if kind == "adamw" and granularity in read_in_place:
        assert served == [True] * (STEPS - 2)
    if kind == "adamw-8bit":
        assert ours.widened_scales > 0


def average_of(state):
    return next(name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in state)


def away_and_back(x):
    """Offload: into other memory and out of it again."""
    away = x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    x.data = torch.empty(0, dtype=x.dtype)
    return away.to(x.dtype, copy=True)


def own_method(optimizer):
    numbers = type(optimizer)._numbers
    return lambda slot: numbers(optimizer, slot) | {"rate": 0.0}


def three_times(optimizer, *_):
    everyone(optimizer)[0].grad.mul_(3)


class Labelled(Tensor):
    """A gradient of another class."""


class Renamed(optim.StiffnessAdamW):
    """An optimizer of another class."""


A = "s[0][average_of(s[0])]"
REMOVED = "del groups[0]['params'][1]; o.state.pop(p[1])"
ADDED = "extra = nn.Parameter(torch.ones(5)); extra.grad = torch.full((5,), 0.5); o.add_param_group({'params': [extra]})"
OPTIONS = {
    "weight_decay": 0.3,
    "damping": 0.5,
    "clip": 1.0,
    "seed": 3,
    "maximize": True,
    "refresh_every": 3,
}
OPTIONS |= {"writeback": "nearest", "draws": "dither"}
#: what is done between steps to the parameters p, the optimizer o, its groups and the
#: states s of the parameters, and drops the table; of the first moment, where it is
#: called so
EDITS = {
    "a moment written": f"{A}.copy_({A} * 2)",
    "a moment replaced": "name = average_of(s[2]); s[2][name] = torch.zeros_like(s[2][name])",
    "data of a moment": f"{A}.data = ({A}.double() * 2).to({A}.dtype)",
    "strides of a moment": "x = s[3][average_of(s[3])]; x.data = x.t().contiguous().t()",
    "a moment in another order": f"{A}.data = {A}.data.t().contiguous().view(4, 64)",
    "rounding of a weight": "p[0].rounding = 'nearest'",
    "draws of a weight": "p[0].draws = 'dither'",
    "states cleared": "o.state.clear()",
    "a plain state": "o.state = {}",
    "states popped": "o.state.pop(p[0]); o.state.pop(p[3])",
    "states replaced": "o.state[p[2]] = "
    "{k: 2 * x if 'exp' in k else copy.copy(x) for k, x in s[2].items()}",
    # what is missing is made anew, S_ref and random bits included
    "only a count": "for i in (0, 2): o.state[p[i]] = {'step': torch.tensor(3.0)}",
    "away and back": "for d in s: "
    "d.update({k: away_and_back(x) for k, x in d.items() if getattr(x, 'ndim', 0)})",
    "an entry more": "s[0]['since'] = 1",
    "codes written": "p[0].codes.fill_(33)",
    "codes replaced": "p[0].codes = p[0].codes ^ 1",
    "data of codes and scales": "p[0].codes.data = p[0].codes.clone().fill_(33); p[1].scale.data = "
    "p[1].scale * 2",
    "zeros written": "p[0].codes[1].zero_()",
    "an ordinary weight written": "p[3].detach().mul_(0.5)",
    "data of an ordinary weight": "p[2].data = p[2].data.clone() + 1",
    "a scale doubled": "p[0].kept_scale.mul_(2)",
    "a scale replaced": "p[0].scale = p[0].scale.clone() * 2",
    "rescaled": "p[0].rescale_(p[0].scale * 2)",
    "the step edited": "s[3]['step'].fill_(1)",
    "the step replaced": "s[0]['step'] = torch.tensor(50.0)",
    "S_ref edited": "s[0]['reference'] = 0.5",
    "the stream edited": "s[0]['stream'] = 12345",
    **{f"the option {name}": f"groups[0][{name!r}] = {value!r}" for name, value in OPTIONS.items()},
    "a parameter taken out": "del groups[0]['params'][2]; o.state.pop(p[2])",
    "taken out and added": f"{REMOVED}; {ADDED}",
    "parameters in another order": "groups[0]['params'].reverse()",
    "a parameter in another group": "groups[1]['params'].insert(0, groups[0]['params'].pop())",
    "a group more": ADDED,
    "a group less": "del groups[1]; o.state.pop(p[3])",
    "a group replaced": "groups[0] = dict(groups[0], lr=1e-4)",
    "a state loaded": "o.load_state_dict(copy.deepcopy(o.state_dict()))",
    "a step by another optimizer": "optim.StiffnessAdamW(p[:1], 1e-2).step()",
    "no gradient": "p[1].grad = None",
    "a gradient with strides": "p[3].grad = p[3].grad.t().contiguous().t()",
    "a gradient of another dtype": "p[3].grad_dtype = None; p[3].grad = p[3].grad.bfloat16()",
    "a gradient that is a negative view": "p[3].grad = torch._neg_view(p[3].grad)",
    "a gradient of another class": "p[3].grad = p[3].grad.as_subclass(Labelled)",
    "a remainder": "p[0].remainder = torch.zeros(4, 64, dtype=torch.int8)",
    "an observer": "o.observer = lambda view: None",
    "a method of its own": "o._numbers = own_method(o)",
}
#: of StiffnessAdamW with float32 moments
OF_ADAMW = {
    "strides in the same memory": "s[0]['exp_avg'].data = s[0]['exp_avg'].data.view(64, 4).t()",
    "moments under other names": "old = dict(s[0]); s[0].clear(); other = "
    "{'exp_avg': 'exp_avg_sq', 'exp_avg_sq': 'exp_avg'}; "
    "s[0].update({other.get(name, name): x for name, x in "
    "old.items()})",
    "another class": "o.__class__ = Renamed",
    "the option betas": "groups[0]['betas'] = (0.8, 0.9)",
    "the option stiffness": "groups[0]['stiffness'] = 1.0",
}
#: what does not drop it, as it is read in every step
KEPT = {
    "lr": "for group in groups: group['lr'] *= 0.7",
    "lr, a tensor": "groups[0]['lr'] = torch.tensor(1e-4)",
    "gradients elsewhere": "for q in p: q.grad = q.grad.clone()",
    "gradients written": "for q in p: q.grad.mul_(2)",
    "a gradient that is not finite": "p[2].grad[3] = torch.nan",
    "a gradient too large": "p[1].grad[0, 0] = 1e30",
    "a step hook": "o.register_step_pre_hook(three_times)",
    "read": "o.state_dict(); [q.detach().clone() for q in p]",
}
#: what drops it, and is refused by the step that is planned then
FORGED = {
    "a moment of fewer elements": ("s[0]['exp_avg'].data = s[0]['exp_avg'].data[:2]", "of shape"),
    "a moment of another dtype": (
        "s[0]['exp_avg'].data = s[0]['exp_avg'].data.view(torch.int32)",
        "int32",
    ),
    "a moment of more bits": ("s[3]['exp_avg'] = s[3]['exp_avg'].double()", "float64"),
    "a moment elsewhere": (
        "s[3]['exp_avg'] = s[3]['exp_avg'].to('meta')",
        "on meta, but the parameter is on cpu",
    ),
    "lr below 0": ("groups[0]['lr'] = -1.0", "lr=-1.0"),
    "betas": ("groups[0]['betas'] = (2.0, 0.9)", "betas"),
    "write-back": ("groups[0]['writeback'] = 'none'", "writeback"),
}


def happens(edit, optimizer):
    parameters = everyone(optimizer)
    named = {"copy": copy, "p": parameters, "o": optimizer, "groups": optimizer.param_groups}
    exec(edit, {**globals(), **named, "s": [optimizer.state[p] for p in parameters]})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adamw", "others"])
@pytest.mark.parametrize("edit", [*EDITS, *OF_ADAMW, *KEPT])
def test_the_next_step_starts_from_what_the_state_holds(edit, kind, path, served):
    """Its bits are of plain PyTorch in an optimizer that forgets everything; an edit
    drops the table, or is read.
    """
    if kind == "others":
        if edit in OF_ADAMW:
            return
        kind = [*KINDS][list(EDITS | KEPT).index(edit) % len(KINDS)]
    served.clear()
    plain = (
        path if edit == "moments under other names" else "eager"
    )  # roots of numbers below 0 have no definition
    ours, forgetful = made(kind, path=path), made(kind, path=plain, keeps=False)
    for t in range(8):
        for optimizer in (ours, forgetful):
            put(optimizer, t)
            if t == 4:
                happens((EDITS | OF_ADAMW | KEPT)[edit], optimizer)
            if optimizer is forgetful:
                forget(optimizer)
            optimizer.step()
        assert bits(ours) == bits(forgetful), t
        if t == 4 and path == "native" and kind == "adamw":
            assert served in ([True, True, edit in KEPT], [True, True] * (edit not in KEPT))
    assert ours.skipped_steps == (edit in ("a gradient that is not finite", "a gradient too large"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edit", FORGED)
def test_what_cannot_be_stepped_is_refused_as_without_a_table(edit, path, served):
    optimizer = stepped(made(path=path), 4)
    put(optimizer, 4)
    happens(FORGED[edit][0], optimizer)
    before = frozen([(p.detach(), optimizer.state[p]["step"]) for p in everyone(optimizer)])
    with pytest.raises(ValueError, match=FORGED[edit][1]):
        optimizer.step()
    assert frozen([(p.detach(), optimizer.state[p]["step"]) for p in everyone(optimizer)]) == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {"stabilize_every": 3, "reset_every": 4},
        {"stiffness": lambda t: 1 / (1 + t), "refresh_every": 5},
    ],
)
def test_what_is_due_is_done(options, path):
    ours, forgetful = made(path=path, **options), made(path="eager", keeps=False, **options)
    for t in range(12):
        for optimizer in (ours, forgetful):
            put(optimizer, t, torch.nan if t == 2 else None)
            if optimizer is forgetful:
                forget(optimizer)
            optimizer.step()
        assert bits(ours) == bits(forgetful)


def test_it_raises_where_it_is_asked_to():
    optimizer = stepped(made(on_nonfinite="raise"), 3)
    before = bits(optimizer)
    put(optimizer, 3, torch.nan)
    with pytest.raises(FloatingPointError, match="is not finite"):
        optimizer.step()
    assert bits(optimizer) == before


@pytest.mark.parametrize("moves", [True, False])
def test_rows_that_a_step_leaves_at_zero_have_their_scale_fitted(moves, served):
    ours, planned = (
        made(weight_decay=1.0, stiffness=0.0),
        made(weight_decay=1.0, stiffness=0.0, keeps=False),
    )
    for t in range(7):
        for optimizer in (ours, planned):
            put(optimizer, t)
            if t < 5 or not moves:
                everyone(optimizer)[0].grad[1] = 0.0
            for group in optimizer.param_groups:
                group["lr"] = 1.0 if t == 3 else 1e-3
            optimizer.step()
            if t == 3:
                assert not everyone(optimizer)[0][1].any()
        assert bits(ours) == bits(planned)
    assert (ours.fitted_scales > 0) == moves
    assert served == [True, True, False]


def test_steps_of_several_processes_are_planned(served, monkeypatch):
    optimizer = made()
    for t in range(4):
        monkeypatch.setattr(_steady, "is_distributed", lambda t=t: t == 3)
        put(optimizer, t)
        optimizer.step()
    assert served == [True, False]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("i", [0, 2])
def test_a_parameter_taken_out_is_let_go(i, path):
    optimizer = stepped(made("adamw-8bit", path=path), 4)
    p, table = everyone(optimizer)[i], optimizer._steady_plan
    parts = [p, p.grad, *optimizer.state[p].values(), *([p.codes, p.kept_scale] if i == 0 else [])]
    dead = [weakref.ref(x) for x in parts if isinstance(x, Tensor)]
    optimizer.param_groups[0]["params"].pop(i)
    optimizer.state.pop(p)
    del p, parts
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert (table is None) == (path == "eager")
    assert table is None or not table.serves(optimizer)


def test_a_gradient_that_is_aligned_otherwise_is_planned(served, monkeypatch):
    as_on_a_card(monkeypatch)
    idle = type("Idle", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})
    monkeypatch.setattr(launch, "_kernels", lambda: (idle(),) * 3)
    monkeypatch.setattr(launch, "options", dict)
    optimizer = made()
    for t in range(5):
        put(optimizer, t)
        if t == 4:
            p = everyone(optimizer)[0]
            p.grad = torch.cat([torch.zeros(1), p.grad.flatten()])[1:].view(p.shape)
        optimizer.step()
    assert served == [True, True, False]


OF_USERS = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "array": lambda: np.array([1.0, 2.0]),
    "list": lambda: [torch.ones(2), 3],
    "dict": lambda: {"deep": (np.ones(3),)},
    "shapes": lambda: torch.ones(torch.randint(2, 5, ()).item()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", OF_USERS)
def test_a_group_may_have_entries_that_are_not_compared(kind, entry):
    """Two tensors or arrays have no one truth value; a step used to raise."""
    ours, plain = made(kind), made(kind)
    for t in range(6):
        ours.param_groups[0]["mine"] = OF_USERS[entry]()
        for optimizer in (ours, plain):
            put(optimizer, t)
            optimizer.step()
    saved = copy.deepcopy(ours.state_dict())
    ours.defaults["mine"] = None
    ours.load_state_dict(saved)
    for optimizer in (ours, plain):
        for group in optimizer.param_groups:
            group.pop("mine", None)
    assert bits(ours) == bits(plain)
