"""Nothing is remembered from one step to the next but what the state shows.

An optimizer plans its first steps. Then it keeps a steady plan, by which later steps go
without being planned. Whatever a user edits between two steps either drops that plan or
is read in every step, so that an optimizer with such a plan and one that forgets
everything agree bit for bit.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from optimizer_cases import everyone, frozen, normal, with_factors
from paths import PATHS, as_on_a_card, on_path
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


def make(
    kind="adamw", granularity="channel", *, path="native", factors=False, keeps=True, **options
):
    """Make an optimizer of two groups.

    The first has two weights of one byte, one of which soon reaches the end of its range,
    and a vector, the second a matrix. Without `keeps` all steps are planned.
    """
    parameters = [nn.Parameter(normal(33, seed=3)), nn.Parameter(normal(4, 3, seed=4))]
    for i, fmt in ((1, "E5M2"), (0, "E4M3")):
        p = fm.FP8Parameter(
            normal(4, 64, seed=i), fmt, seed=i, granularity=granularity, headroom=1.0
        )
        parameters.insert(0, with_factors(p, factors))
    cls, defaults = KINDS[kind]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": defaults["lr"] / 2}]
    optimizer = on_path(path, cls(groups, **{"refresh_every": 1000, **defaults, **options}))
    optimizer.keeps_plan = keeps
    return optimizer


def put_gradients(optimizer, t, bad=None):
    """Give every parameter a gradient; `bad` becomes an entry of the second one's."""
    for i, p in enumerate(everyone(optimizer)):
        p.grad = normal(*p.shape, seed=100 * t + i)
        if bad is not None and i == 1:
            p.grad[0, 0] = bad


def take_steps(optimizer, steps):
    for t in range(steps):
        put_gradients(optimizer, t)
        optimizer.step()


def bits(optimizer):
    parts = [
        (p.codes, p.scale) if isinstance(p, fm.FP8Tensor) else p.detach()
        for p in everyone(optimizer)
    ]
    return frozen([parts, optimizer.state_dict()])


#: By which path an optimizer steps, and a method that an edit may replace.
PATH_AND_EDIT = {"_run", "_numbers"}
COUNTS = {"_skipped_steps", "_skipped_in_row", "_widened_scales"}


def forget(optimizer):
    """Delete all private attributes but torch's and the counts that `state_dict` has."""
    known = PATH_AND_EDIT | COUNTS | vars(torch.optim.SGD([torch.zeros(1)])).keys()
    for name in list(vars(optimizer)):
        if name.startswith("_") and not name.startswith("_optimizer_") and name not in known:
            del vars(optimizer)[name]


@pytest.fixture
def served(monkeypatch):
    """Return a list with a bool for each look-up of a steady plan: whether it could be used."""
    serves, answers = SteadyPlan.serves, list[bool]()

    def recorded(plan, optimizer):
        answers.append(serves(plan, optimizer))
        return answers[-1]

    monkeypatch.setattr(SteadyPlan, "serves", recorded)
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block", "square"])
@pytest.mark.parametrize("factors", [False, True])
def test_steps_have_the_bits_of_steps_that_are_planned(kind, granularity, factors, served):
    """With steps that are left out, a schedule of the lr, and scales that double."""
    steady, planned = (
        make(kind, granularity, factors=factors, keeps=keeps) for keeps in (True, False)
    )
    bad_entries = {4: torch.inf, 5: torch.inf, 7: 2.0**70}
    for t in range(STEPS):
        for optimizer in (steady, planned):
            put_gradients(optimizer, t, bad_entries.get(t))
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        assert bits(steady) == bits(planned)
        assert [p.filled is None for p in everyone(steady)[:2]] == [
            p.filled is None for p in everyone(planned)[:2]
        ]
    assert steady.skipped_steps == planned.skipped_steps == len(bad_entries)
    # Of other scales native code reads copies, and a steady plan can't.
    is_read_in_place = granularity in ("channel", "tensor") or (granularity == "block" and factors)
    assert any(served) == is_read_in_place
    if kind == "adamw" and is_read_in_place:
        assert served == [True] * (STEPS - 2)
    if kind == "adamw-8bit":
        assert steady.widened_scales > 0


def average_of(state):
    return next(name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in state)


def away_and_back(x):
    """Offload: into other memory and out of it again."""
    away = x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    x.data = torch.empty(0, dtype=x.dtype)
    return away.to(x.dtype, copy=True)


def replaced_method(optimizer):
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
ADDED = (
    "extra = nn.Parameter(torch.ones(5)); extra.grad = torch.full((5,), 0.5); "
    "o.add_param_group({'params': [extra]})"
)
OPTIONS = {
    "weight_decay": 0.3,
    "damping": 0.5,
    "clip": 1.0,
    "seed": 3,
    "maximize": True,
    "refresh_every": 3,
}
OPTIONS |= {"writeback": "nearest", "draws": "dither"}
#: Statements between two steps after which the steady plan can't be used. They name the
#: parameters p, the optimizer o, its groups and the states s of the parameters.
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
    # What is missing is made anew, S_ref and random bits included.
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
    "a method of its own": "o._numbers = replaced_method(o)",
}
#: Statements as in EDITS that need StiffnessAdamW with float32 moments.
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
#: Statements after which the steady plan can be used: what they change is read in every step.
READERS = {
    "lr": "for group in groups: group['lr'] *= 0.7",
    "lr, a tensor": "groups[0]['lr'] = torch.tensor(1e-4)",
    "gradients elsewhere": "for q in p: q.grad = q.grad.clone()",
    "gradients written": "for q in p: q.grad.mul_(2)",
    "a gradient that is not finite": "p[2].grad[3] = torch.nan",
    "a gradient too large": "p[1].grad[0, 0] = 1e30",
    "a step hook": "o.register_step_pre_hook(three_times)",
    "read": "o.state_dict(); [q.detach().clone() for q in p]",
}
#: Statements after which the next step is planned and refused, with its message.
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


def apply_edit(edit, optimizer):
    parameters = everyone(optimizer)
    names = {"copy": copy, "p": parameters, "o": optimizer, "groups": optimizer.param_groups}
    exec(edit, {**globals(), **names, "s": [optimizer.state[p] for p in parameters]})


def edits_and_kinds():
    """Yield every edit with AdamW, and most of them with one more of KINDS, in turn."""
    for edit in [*EDITS, *OF_ADAMW, *READERS]:
        yield edit, "adamw"
    for i, edit in enumerate(EDITS | READERS):
        kind = [*KINDS][i % len(KINDS)]
        if kind != "adamw":
            yield edit, kind


def assert_equal_steps(optimizer, forgetful, steps, *, edit="", edited_step=-1, bad_at=-1):
    """Step both and compare them after every step; one forgets everything in between."""
    for t in range(steps):
        for stepping in (optimizer, forgetful):
            put_gradients(stepping, t, torch.nan if t == bad_at else None)
            if t == edited_step:
                apply_edit(edit, stepping)
            if stepping is forgetful:
                forget(forgetful)
            stepping.step()
        assert bits(optimizer) == bits(forgetful), t


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("edit", "kind"), list(edits_and_kinds()))
def test_the_next_step_starts_from_what_the_state_holds(edit, kind, path):
    """The bits are those of plain PyTorch in an optimizer that forgets everything."""
    # Roots of numbers below 0 have no definition: there both go by one path.
    plain = path if edit == "moments under other names" else "eager"
    optimizer, forgetful = make(kind, path=path), make(kind, path=plain, keeps=False)
    assert_equal_steps(
        optimizer, forgetful, 8, edit=(EDITS | OF_ADAMW | READERS)[edit], edited_step=4
    )
    skips = edit in ("a gradient that is not finite", "a gradient too large")
    assert optimizer.skipped_steps == skips


@pytest.mark.parametrize("edit", [*EDITS, *OF_ADAMW, *READERS])
def test_an_edit_drops_the_steady_plan_or_is_read(edit, served):
    optimizer = make()
    take_steps(optimizer, 4)
    put_gradients(optimizer, 4)
    apply_edit((EDITS | OF_ADAMW | READERS)[edit], optimizer)
    optimizer.step()
    # A dropped plan is refused when it is looked up, or is not there to be looked up.
    assert served in (
        [[True, True, True]] if edit in READERS else [[True, True, False], [True, True]]
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edit", FORGED)
def test_what_cannot_be_stepped_is_refused_as_without_a_steady_plan(edit, path):
    statement, message = FORGED[edit]
    optimizer = make(path=path)
    take_steps(optimizer, 4)
    put_gradients(optimizer, 4)
    apply_edit(statement, optimizer)
    old_state = frozen([(p.detach(), optimizer.state[p]["step"]) for p in everyone(optimizer)])
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert (
        frozen([(p.detach(), optimizer.state[p]["step"]) for p in everyone(optimizer)]) == old_state
    )


PERIODS = {
    "stabilize and reset": {"stabilize_every": 3, "reset_every": 4},
    "schedule and refresh": {"stiffness": lambda t: 1 / (1 + t), "refresh_every": 5},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", PERIODS.values(), ids=PERIODS)
def test_what_is_due_is_done(options, path):
    optimizer = make(path=path, **options)
    forgetful = make(path="eager", keeps=False, **options)
    assert_equal_steps(optimizer, forgetful, 12, bad_at=2)


def test_a_steady_step_raises_under_on_nonfinite_raise():
    optimizer = make(on_nonfinite="raise")
    take_steps(optimizer, 3)
    old_bits = bits(optimizer)
    put_gradients(optimizer, 3, torch.nan)
    with pytest.raises(FloatingPointError, match="is not finite"):
        optimizer.step()
    assert bits(optimizer) == old_bits


@pytest.mark.parametrize("moves", [True, False])
def test_rows_that_a_step_leaves_at_zero_have_their_scale_fitted(moves, served):
    steady, planned = (
        make(weight_decay=1.0, stiffness=0.0, keeps=keeps) for keeps in (True, False)
    )
    for t in range(7):
        for optimizer in (steady, planned):
            put_gradients(optimizer, t)
            if t < 5 or not moves:
                everyone(optimizer)[0].grad[1] = 0.0
            for group in optimizer.param_groups:
                group["lr"] = 1.0 if t == 3 else 1e-3
            optimizer.step()
            if t == 3:
                assert not everyone(optimizer)[0][1].any()
        assert bits(steady) == bits(planned)
    assert (steady.fitted_scales > 0) == moves
    assert served == [True, True, False]


def test_steps_of_several_processes_are_planned(served, monkeypatch):
    optimizer = make()
    for t in range(4):
        monkeypatch.setattr(_steady, "is_distributed", lambda t=t: t == 3)
        put_gradients(optimizer, t)
        optimizer.step()
    assert served == [True, False]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("i", [0, 2])
def test_a_parameter_taken_out_is_let_go(i, path):
    optimizer = make("adamw-8bit", path=path)
    take_steps(optimizer, 4)
    p, plan = everyone(optimizer)[i], optimizer._steady_plan
    parts = [p, p.grad, *optimizer.state[p].values(), *([p.codes, p.kept_scale] if i == 0 else [])]
    references = [weakref.ref(x) for x in parts if isinstance(x, Tensor)]
    optimizer.param_groups[0]["params"].pop(i)
    optimizer.state.pop(p)
    del p, parts
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert (plan is None) == (path == "eager")
    assert plan is None or not plan.serves(optimizer)


def test_a_gradient_that_is_aligned_otherwise_is_planned(served, monkeypatch):
    as_on_a_card(monkeypatch)
    idle = type("Idle", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})
    monkeypatch.setattr(launch, "_kernels", lambda: (idle(),) * 3)
    monkeypatch.setattr(launch, "options", dict)
    optimizer = make()
    for t in range(5):
        put_gradients(optimizer, t)
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
    with_entry, plain = make(kind), make(kind)
    for t in range(6):
        with_entry.param_groups[0]["mine"] = OF_USERS[entry]()
        for optimizer in (with_entry, plain):
            put_gradients(optimizer, t)
            optimizer.step()
    saved = copy.deepcopy(with_entry.state_dict())
    with_entry.defaults["mine"] = None
    with_entry.load_state_dict(saved)
    for group in with_entry.param_groups:
        group.pop("mine", None)
    assert bits(with_entry) == bits(plain)
