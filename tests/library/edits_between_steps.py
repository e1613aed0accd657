"""Optimizers over a few weights, and edits of all that a user may reach between two steps.

An edit is a statement about the optimizer ``o``, its groups, its parameters ``p`` and the
states ``s`` of these.
"""

import copy
import pickle

import torch
from optimizer_cases import frozen, normal, parameters_of, with_factors
from paths import on_path
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim

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
    "muon": (optim.StiffnessMuon, {"lr": 1e-2}),
    "muon-8bit": (optim.StiffnessMuon, {"lr": 3.0, "moments": "8bit", "nesterov": False}),
    "adafactor": (optim.StiffnessAdafactor, {"lr": 0.1}),
    "adafactor-8bit": (
        optim.StiffnessAdafactor,
        {"lr": 0.3, "momentum": 0.9, "moments": "8bit", "weight_decay": 0.1},
    ),
    "riemannian": (optim.RiemannianAdam, {"lr": 1.0, "float_lr": 1e-2, "weight_decay": 0.1}),
    "riemannian-sgd": (
        optim.RiemannianSGD,
        {"lr": 1e-2, "float_lr": 1e-2, "momentum": 0.9, "moments": "8bit"},
    ),
    "riemannian-codes": (
        optim.RiemannianAdam,
        {"lr": 1.0, "float_lr": 1e-2, "moments": "8bit", "writeback": "residual8"},
    ),
    "riemannian-sgd-codes": (
        optim.RiemannianSGD,
        {"lr": 1e-1, "float_lr": 1e-2, "momentum": 0.9, "clip": 2.0},
    ),
}
#: All parameters of these are of one byte a weight.
OF_CODES_ALONE = ("riemannian-codes", "riemannian-sgd-codes")
#: These are tried with every edit, the others with some in turn.
ALWAYS = ("adamw", "muon", "muon-8bit", "adafactor", "riemannian")


def make(
    kind="adamw", granularity="channel", *, path="native", factors=False, keeps=True, **options
):
    """Make an optimizer of two groups.

    The first has two weights of one byte, one of which soon reaches the end of its range,
    and a column, the second a matrix, both mostly of floats. Without `keeps` it keeps no plan, so that every step
    is planned anew.
    """
    parameters = [nn.Parameter(normal(33, 1, seed=3)), nn.Parameter(normal(4, 3, seed=4))]
    if kind in OF_CODES_ALONE:
        parameters = [fm.FP8Parameter(p.detach(), "E4M3", seed=2) for p in parameters]
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
    """Give every parameter a gradient; `bad` becomes an entry of the second gradient."""
    for i, p in enumerate(parameters_of(optimizer)):
        p.grad = normal(*p.shape, seed=100 * t + i)
        if bad is not None and i == 1:
            p.grad[0, 0] = bad


def take_steps(optimizer, steps):
    for t in range(steps):
        put_gradients(optimizer, t)
        optimizer.step()


def optimizer_bits(optimizer):
    parts = [
        (p.codes, p.scale) if isinstance(p, fm.FP8Tensor) else p.detach()
        for p in parameters_of(optimizer)
    ]
    return frozen([parts, optimizer.state_dict()])


#: What `on_path` sets on an optimizer, and the method that the edit "a method of its own"
#: replaces. Both have to outlive `forget`.
PATH_AND_EDIT = {"_run", "_numbers"}
COUNTS = {"_skipped_steps", "_skipped_in_row", "_widened_scales"}


def forget(optimizer):
    """Delete all private attributes but torch's and the counts that `state_dict` has."""
    known = PATH_AND_EDIT | COUNTS | vars(torch.optim.SGD([torch.zeros(1)])).keys()
    for name in list(vars(optimizer)):
        if name.startswith("_") and not name.startswith("_optimizer_") and name not in known:
            del vars(optimizer)[name]


def average_of(state):
    return next(
        name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq", "row_var") if name in state
    )


def away_and_back(x):
    """Offload: into other memory and out of it again."""
    away = x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    x.data = torch.empty(0, dtype=x.dtype)
    return away.to(x.dtype, copy=True)


def replaced_method(optimizer):
    numbers = optimizer._numbers
    return lambda slot: numbers(slot) | {"rate": 0.0}


def three_times(optimizer, *_):
    parameters_of(optimizer)[0].grad.mul_(3)


class Labelled(Tensor):
    """A gradient of another class."""


class Renamed(optim.StiffnessAdamW):
    """An optimizer of another class."""


#: An average of the first parameter, as edits write it.
A = "s[0][average_of(s[0])]"
REMOVED = "del groups[0]['params'][1]; o.state.pop(p[1])"
ADDED = (
    "extra = nn.Parameter(torch.ones(5, 1)); extra.grad = torch.full((5, 1), 0.5); "
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
    "a moment in another order": f"{A}.data = {A}.data.t().contiguous().view({A}.shape)",
    "rounding of a weight": "p[0].rounding = 'nearest'",
    "draws of a weight": "p[0].draws = 'dither'",
    "retraction of a weight": "p[0].retraction = 'euclidean'",
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
#: Statements about copies, moves and memory, after which a plan may or may not be used.
MOVES = {
    "NumPy writes": "p[3].detach().numpy()[0] = 0.25; p[0].codes.numpy()[0, 0] ^= 1",
    "NumPy writes to a moment": f"{A}.numpy()[0] = 1",
    "inference mode": f"with torch.inference_mode(): p[3].mul_(0.5); {A}.copy_({A})",
    "a model moved to bfloat16 and back": "m = nn.ParameterList(p); m.bfloat16(); m.float()",
    "a copy": "o = copy.deepcopy(o)",
    "a pickle": "o = pickle.loads(pickle.dumps(o))",
    "an expanded gradient": "p[3].grad = p[3].grad[:1].expand(p[3].shape)",
    "an empty parameter": "extra = nn.Parameter(torch.empty(0, 3)); "
    "extra.grad = torch.empty(0, 3); o.add_param_group({'params': [extra]})",
    "one gradient": "for q in p[1:]: q.grad = None",
    "no gradients": "for q in p: q.grad = None",
}
#: Statements after which the steady plan can be used: what they change is read in every step.
EDITS_THAT_ARE_READ = {
    "lr": "for group in groups: group['lr'] *= 0.7",
    "lr, a tensor": "groups[0]['lr'] = torch.tensor(1e-4)",
    "gradients elsewhere": "for q in p: q.grad = q.grad.clone()",
    "gradients written": "for q in p: q.grad.mul_(2)",
    "a gradient that is not finite": "p[2].grad[3] = torch.nan",
    "a gradient too large": "p[1].grad[0, 0] = 1e30",
    "a step hook": "o.register_step_pre_hook(three_times)",
    "read": "o.state_dict(); [q.detach().clone() for q in p]",
}


def apply_edit(edit, optimizer):
    """Run a statement, and return the optimizer that is stepped from then on."""
    parameters = parameters_of(optimizer)
    names = {
        "copy": copy,
        "pickle": pickle,
        "p": parameters,
        "o": optimizer,
        "groups": optimizer.param_groups,
    }
    names["s"] = [optimizer.state[p] for p in parameters]
    scope = {**globals(), **names}
    exec(edit, scope)
    return scope["o"]
