"""Every optimizer around its steps: options, torch's own harness, hooks, groups, states
and counts.
"""

import copy
import inspect
import io
import itertools
import math
import pickle
import re
import warnings

import geoopt
import pytest
import torch
from family_cases import COMBINATIONS, INVALID, NAMES, OPTIONS, RIEMANNIAN_NAMES, VALID, make, zoo
from optimizer_cases import (
    frozen,
    normal,
    put_gradients,
    same_bits,
    stored_weight,
    through_disk,
    values,
)
from test_step_in_backward import OPTIMIZERS, ordinary
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    get_error_inputs_for_all_optims,
)

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import RiemannianAdam, StiffnessAdamW, StiffnessMuon, StiffnessSGD
from fp8manifold.optim._spec import MOMENTS

torch.backends.__allow_nonbracketed_mutation_flag = (
    True  # the harness takes that from every test of the process
)
by_name = pytest.mark.parametrize("name", NAMES)


def test_the_matrix_is_the_registry():
    steps = {name for name in optim.__all__ if hasattr(getattr(optim, name), "step")}
    assert set(NAMES) == steps - {"StiffnessWrapper"} == set(OPTIONS) == {c[0] for c in VALID}
    assert (
        len(COMBINATIONS)
        == len(optim.WRITEBACKS) * len(MOMENTS) * len(NAMES)
        == len(VALID) + len(INVALID)
    )
    assert len(VALID) >= 75


@by_name
def test_a_signature_has_every_option_and_so_have_groups(name):
    signature = inspect.signature(getattr(optim, name))
    assert inspect.Parameter.empty not in {p.annotation for p in signature.parameters.values()}
    options = signature.parameters.keys() - {
        "params",
        "flags",
        "stabilize",
        "model",
        "loader",
        "logits",
    }
    assert make(name, [nn.Parameter(torch.eye(3))]).defaults.keys() == options


def test_a_subclass_may_have_options_of_its_own():
    class Mine(optim.StiffnessLion):
        def __init__(self, params, speed=2.0):
            super().__init__(params, 1e-3 * speed, writeback="nearest")

    (group,) = Mine([nn.Parameter(torch.ones(3))]).param_groups
    assert (group["lr"], group["writeback"], group["moments"]) == (2e-3, "nearest", "float32")


@pytest.mark.parametrize(("name", "writeback", "moments"), INVALID)
def test_an_invalid_combination_is_refused(name, writeback, moments):
    """With what does not go together, the reason, and what does: in the constructor, a
    group, and one added later.
    """
    options = {"writeback": writeback, "moments": moments}
    optimizer = make(name, zoo().values())
    groups = len(optimizer.param_groups)
    said = rf"writeback='{writeback}' does not go with (moments='{moments}'|{name}): .{{20,}}(one of|use) "
    for refused in (
        lambda: make(name, zoo().values(), **options),
        lambda: make(name, [{"params": list(zoo().values()), **options}]),
        lambda: optimizer.add_param_group({"params": [stored_weight(seed=30)], **options}),
    ):
        with pytest.raises(ValueError, match=said):
            refused()
    assert len(optimizer.param_groups) == groups


RATES = OPTIONS | {
    "RiemannianSGD": {"lr": 30.0, "float_lr": 0.01, "momentum": 0.9},
    "StiffnessSGD": {"lr": 0.005},
}
"""For gradients some ten times larger than those that the options were chosen for."""
ALWAYS = {"StiffnessMuon": {"direction": "adam"}}  # torch's models have vectors
SHARED = [
    {},
    {"lr": 0.5},
    {"lr": torch.tensor(0.5)},
    {"weight_decay": 0.1, "maximize": True},
    {"writeback": "residual8", "moments": "8bit"},
    {"moments": "bfloat16"},
    {"writeback": "nearest", "refresh_every": 2, "stabilize_every": 3, "reset_every": 4},
]
OWN = {
    "RiemannianAdam": [
        {"amsgrad": True},
        {"writeback": "momentum"},
        {"betas": (0.8, 0.9), "eps": 1e-6},
    ],
    "RiemannianSGD": [{"dampening": 0.5}, {"nesterov": True}],
    "StiffnessAdamW": [
        {"stiffness": optim.anneal(1.0, 0.0, 8)},
        {"stiffness": 0.3},
        {"betas": (0.8, 0.9)},
    ],
    "StiffnessSGD": [{"dampening": 0.5}, {"nesterov": True}, {"writeback": "momentum"}],
    "StiffnessLion": [{"betas": (0.5, 0.9)}],
    "StiffnessMuon": [{"betas": (0.8, 0.9)}, {"adam_eps": 1e-6}],
    "FisherNaturalGradient": [
        {"representation": "diagonal"},
        {"representation": "ekfac"},
        {"normalize": False},
    ],
}


def configurations(name):
    made = [copy.deepcopy(options) | ALWAYS.get(name, {}) for options in [*SHARED, *OWN[name]]]
    return [
        kwargs | ({"lr": kwargs["lr"] * RATES[name]["lr"]} if "lr" in kwargs else {})
        for kwargs in made
    ]


def model():
    """torch's: ``|W x + b|^2`` over a 10 x 5 weight, a vector and a spectator without a
    gradient.
    """
    weight = fm.FP8Parameter(
        normal(10, 5, std=0.1), "E4M3", headroom=64.0, keep_remainder=True, seed=0
    )
    bias, x = nn.Parameter(normal(10, seed=1)), normal(5, seed=9)
    return [
        weight,
        bias,
        nn.Parameter(normal(3, seed=2)),
    ], lambda: (weight.mv(x) + bias).pow(2).sum()


def run(optimizer, loss, steps):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps):
        assert optimizer.step(closure).requires_grad


def construct(name, params, kwargs, tensors=None):
    kind = getattr(optim, name)
    rates = {k: v for k, v in RATES[name].items() if k == "float_lr"} | kwargs
    if name != "FisherNaturalGradient":
        return kind(params, **rates, **ALWAYS.get(name, {}))
    layer = nn.Linear(5, 10, bias=False)
    if tensors is not None:
        layer.weight = tensors[0]
    return kind(params, layer, [normal(4, 5)], **rates)


@by_name
def test_errors(name):
    for bad in get_error_inputs_for_all_optims("cpu", torch.float32):
        if (
            bad.error_type is FutureWarning
        ):  # not bad input: what a release of torch announces of its own classes
            continue
        assert bad.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        given, duplicate = bad.optimizer_error_input, bad.error_type is UserWarning
        own = "one element" in bad.error_regex or "1-element" in bad.error_regex
        regex = "one element" if own else "twice" if duplicate else bad.error_regex
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError if duplicate else bad.error_type, match=regex):
                construct(name, model()[0] if given.params is None else given.params, given.kwargs)


@by_name
def test_tensor_lr(name):
    """Any tensor of one element is as good as its number, and is not written to."""
    for kwargs in configurations(name):
        number = float(kwargs.pop("lr", RATES[name]["lr"]))
        results = []
        for lr in (float(torch.tensor(number)), torch.tensor(number), torch.tensor([[number]])):
            parameters, loss = model()
            optimizer = make(name, parameters, **RATES[name] | copy.deepcopy(kwargs) | {"lr": lr})
            run(optimizer, loss, 4)
            assert float(optimizer.param_groups[0]["lr"]) == float(torch.tensor(number))
            results.append(values(parameters))
        assert all(same_bits(results[0], other) for other in results[1:]), str(kwargs)


@by_name
def test_states_of_numbers_and_of_names(name):
    """A step count saved as a number, as old files have it, counts on; names may come,
    go or stay.
    """
    for named in itertools.product((True, False), repeat=2):
        pairs = [model(), model()]
        both = []
        for use, (parameters, _) in zip(named, pairs, strict=True):
            given = [(f"p{i}", p) for i, p in enumerate(parameters)] if use else parameters
            both.append(construct(name, given, {}, parameters))
        run(both[0], pairs[0][1], 3)
        state = through_disk(both[0].state_dict())
        both[1].load_state_dict(state)
        assert frozen(both[0].state_dict()["state"]) == frozen(both[1].state_dict()["state"])
        for entry in state["state"].values():
            entry["step"] = entry["step"].item()
        both[1].load_state_dict(state)
        run(both[1], pairs[1][1], 2)
        assert {float(entry["step"]) for entry in both[1].state_dict()["state"].values()} == {5.0}


@by_name
def test_deepcopy_and_pickle(name):
    for kwargs in configurations(name):
        parameters, loss = model()
        optimizer = make(name, parameters, **RATES[name] | kwargs)
        run(optimizer, loss, 3)
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        copies = [
            copy.deepcopy(optimizer),
            pickle.loads(pickle.dumps(optimizer)),
            torch.load(file, weights_only=False),
        ]
        public = {
            name for name in vars(optimizer) if not name.startswith("_") and "hook" not in name
        }
        optimizer_state = frozen(optimizer.state_dict())
        optimizer.step()
        for other in copies:
            assert type(other) is type(optimizer)
            assert public <= vars(other).keys()
            assert frozen(other.state_dict()) == optimizer_state
            others = other.param_groups[0]["params"]
            for p, gradient in zip(others, gradients, strict=True):
                p.grad = gradient
            other.step()
            assert same_bits(values(parameters), values(others)), str(kwargs)


def stepped(name, **options):
    p = stored_weight("E4M3", (3, 8), seed=1)
    optimizer = make(name, [p], **options)
    put_gradients([p], 0)
    optimizer.step()
    return p, optimizer


@by_name
def test_hooks_are_called_and_what_they_make_of_a_state_counts(name):
    """Hooks of steps, for one and for all optimizers, and of states; a hook's state is
    checked before it is loaded.
    """
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key, *_ = (
        k for k, v in saved["state"][0].items() if isinstance(v, Tensor) and v.shape == (3, 8)
    )
    kept = saved["state"][0][key].clone()
    called = []

    def put(value, returns):
        def hook(_, state):
            changed = copy.deepcopy(state) | {"skipped_steps": 7}
            changed["state"][0][key] = value
            state.update({} if returns else changed)
            return changed if returns else None

        return hook

    with optimizer.register_load_state_dict_pre_hook(put(torch.ones(2), False)):  # breaks it
        with pytest.raises(ValueError, match=f"has {key} of shape"):
            optimizer.load_state_dict(copy.deepcopy(saved))
        assert torch.equal(optimizer.state[p][key], kept)
        assert optimizer.skipped_steps == 0
    for returns in (True, False):  # mends it
        foreign = copy.deepcopy(saved)
        foreign["state"][0][key] = torch.ones(2)
        with optimizer.register_load_state_dict_pre_hook(put(2 * kept, returns)):
            optimizer.load_state_dict(foreign)
        assert torch.equal(optimizer.state[p][key], 2 * kept)
        assert optimizer.skipped_steps == 7
    with optimizer.register_load_state_dict_post_hook(lambda o: o.state[p][key].zero_()):
        optimizer.load_state_dict(saved)
    assert optimizer.state[p][key].count_nonzero() == 0
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append("pre")),
        optimizer.register_step_post_hook(lambda o, args, kwargs: called.append("post")),
        register_optimizer_step_post_hook(lambda *_: called.append("global post")),
        optimizer.register_state_dict_pre_hook(lambda o: called.append("saving")),
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1}),
    ]
    optimizer.step()
    assert optimizer.state_dict()["note"] == 1
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert "note" not in optimizer.state_dict()
    assert called == ["global pre", "pre", "post", "global post", "saving"]


def test_a_wrapper_has_hooks_of_its_own():
    wrapper, seen = (
        optim.StiffnessWrapper(torch.optim.SGD([nn.Parameter(normal(2, 2))], lr=0.1)),
        [],
    )
    wrapper.register_state_dict_pre_hook(lambda o: seen.append(type(o)))
    wrapper.register_state_dict_post_hook(lambda _, state: state | {"steps_taken": 3})
    wrapper.register_load_state_dict_pre_hook(
        lambda _, state: state | {"steps_taken": state["steps_taken"] + 1}
    )
    wrapper.register_load_state_dict_post_hook(lambda o: seen.append(o.steps_taken))
    saved = wrapper.state_dict()
    wrapper.load_state_dict(saved)
    assert (saved["steps_taken"], seen) == (3, [optim.StiffnessWrapper, 4])


FLAT = {"options": StateDictOptions(flatten_optimizer_state_dict=True)}


def in_a_tuple(state):
    """A state as it was saved before: its format in a tuple, and without some counts."""
    old = {
        k: v
        for k, v in copy.deepcopy(state).items()
        if k not in ("streams_begun", "skipped_in_row")
    }
    for entry in old["state"].values():
        entry |= {"grid": tuple(entry["grid"].tolist())} if "grid" in entry else {}
    return old


#: how a state goes from one optimizer into another of another model
WAYS = {
    "flat": lambda m, o, n, p: set_optimizer_state_dict(
        n, p, get_optimizer_state_dict(m, o, **FLAT), **FLAT
    ),
    "disk": lambda m, o, n, p: p.load_state_dict(through_disk(o.state_dict())),
    "old": lambda m, o, n, p: p.load_state_dict(in_a_tuple(o.state_dict())),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("storage", ["fp8", "grid"])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_goes_on_to_the_bit(kind, storage, way):
    """As torch's distributed checkpoints have it, by name; through a file, where
    schedules are None; and of old.
    """
    (net, optimizer), (other, resumed) = (ordinary(kind, storage) for _ in "ab")
    for t in range(5):
        if t == 3:
            flat = get_optimizer_state_dict(net, optimizer, **FLAT)
            assert {type(v) for k, v in flat.items() if k.startswith("state.")} <= {
                int,
                float,
                Tensor,
            }
            WAYS[way](net, optimizer, other, resumed)
            other.load_state_dict(copy.deepcopy(net.state_dict()))
        for m, o in ((net, optimizer), (other, resumed))[: 1 + (t >= 3)]:
            put_gradients(m.parameters(), t)
            o.step()
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    scheduled = kind == "adamw_annealed"
    assert all(callable(group.get("stiffness")) == scheduled for group in resumed.param_groups)
    old = in_a_tuple(optimizer.state_dict())
    next(entry for entry in old["state"].values() if "grid" in entry)["grid"] = (5, 2, 15, 0, 1)
    with pytest.raises(ValueError, match="was made for E5M2"):
        resumed.load_state_dict(old)
    if scheduled:
        with pytest.raises(ValueError, match="stiffness"):
            StiffnessAdamW(other.parameters(), stiffness=1.0).load_state_dict(
                optimizer.state_dict()
            )


def two():
    return [nn.Parameter(normal(4, 4, seed=i)) for i in range(2)]


MAKES = {
    "default": lambda lr: StiffnessAdamW([{"params": [p]} for p in two()], lr=lr),
    "sgd": lambda lr: StiffnessSGD([{"params": [p]} for p in two()], lr=lr),
    "riemannian": lambda lr: RiemannianAdam([{"params": [p]} for p in two()], lr=lr),
    "given": lambda lr: StiffnessAdamW([{"params": [p], "lr": lr} for p in two()], lr=1e-3),
    "muon": lambda lr: StiffnessMuon.for_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lr),
}


@pytest.mark.parametrize("way", ["made", "loaded", "added"])
@pytest.mark.parametrize("name", MAKES)
def test_a_scheduler_divides_each_learning_rate_once(name, way):
    """Though groups were given one tensor, or a state was written whose groups shared
    it.
    """
    optimizer = MAKES[name](torch.tensor(0.5))
    if way == "added":
        named = {"param_names": ["late"]} if "param_names" in optimizer.param_groups[0] else {}
        optimizer.add_param_group(
            {"params": [nn.Parameter(normal(4))], "direction": "adam", **named}
        )
    if way == "loaded":
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["lr"] = saved["param_groups"][0]["lr"]
        optimizer.load_state_dict(through_disk(saved))
    before = [float(group["lr"]) for group in optimizer.param_groups]
    assert len(before) > 1
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [lr / 4 for lr in before]


def test_the_tensor_of_a_single_group_stays_the_users():
    lr = torch.tensor(0.5)
    optimizer = StiffnessAdamW(two(), lr=lr)
    lr.fill_(0.25)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@by_name
def test_a_scheduler_begins_from_the_lr_of_the_moment(name):
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = make(name, [stored_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    assert torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0).base_lrs == [0.05]


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"draws": "dither"}, {"draws": "independent"}),
        ({"moments": "8bit"}, {"moments": "float32"}),
        ({"writeback": "nearest", "seed": 3}, {"writeback": "stochastic", "seed": 4}),
        ({"stiffness": 0.0}, {"stiffness": 1.0}),
        ({"clip": 8.0, "damping": 0.25}, {"clip": 16.0, "damping": 0.5}),
    ],
    ids=str,
)
def test_what_a_loaded_state_has_otherwise_is_said_once(saved, given):
    """But for what schedules change, and schedules themselves."""
    moving = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    (_, first), (_, second) = (
        stepped("StiffnessAdamW", **moving, **saved),
        stepped("StiffnessAdamW", **given),
    )
    first.param_groups[0]["lr"] = 1e-4
    text = ", ".join(
        f"{name}={saved[name]!r} in place of {given[name]!r}" for name in sorted(saved)
    )
    start = "^StiffnessAdamW goes on with options of the loaded state, .* made with: "
    with pytest.warns(
        UserWarning, match=start + re.escape(text) + r"( \(optim.adopted_state|$)"
    ) as told:
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert {name: second.param_groups[0][name] for name in saved} == saved
    second.load_state_dict(first.state_dict())  # a warning would be an error
    (_, one), (_, other) = (
        stepped("StiffnessAdamW", stiffness=lambda t, n=n: 1 / (n + t)) for n in (1, 2)
    )
    other.load_state_dict(one.state_dict())


def tagged():
    torch.manual_seed(0)
    return fm.quantize_model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), "E4M3", "fp8")


def step_with(net, optimizer, bad, everywhere=False):
    for p in net.parameters():
        p.grad = torch.full(p.shape, math.nan if everywhere else 0.1)
    if bad is not None:
        net[1].weight.grad[1, 3] = bad
    optimizer.step()


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e30])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("FisherNaturalGradient", "StiffnessMuon")]
)
def test_a_gradient_that_is_never_finite_is_warned_of_once(name, bad):
    """With the name of the parameter at fault; any other warning is an error."""
    net = tagged()
    optimizer = make(name, net.named_parameters())
    message = r"10 steps in a row.*parameter 2 of group 0 \('1\.weight', shape \(2, 6\)\).*on_nonfinite='raise'"
    for t in range(30):
        if t == 9:
            with pytest.warns(RuntimeWarning, match=message):
                step_with(net, optimizer, bad)
        else:
            step_with(net, optimizer, bad)
    assert (
        optimizer.skipped_steps
        == optimizer.skipped_in_row
        == optimizer.state_dict()["skipped_in_row"]
        == 30
    )


def test_the_count_is_saved_and_begins_anew_with_a_step():
    """The number of skips is an option; without names parameters are told by position
    and shape, or counted.
    """
    net = tagged()
    optimizer = StiffnessAdamW([{"params": [p]} for p in net.parameters()])
    for t in range(60):
        step_with(net, optimizer, math.nan if t % 10 else None)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (54, 9)
    resumed = StiffnessAdamW([{"params": [p]} for p in net.parameters()])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(
        RuntimeWarning, match=r"10 steps in a row.*parameter 0 of group 2 \(shape \(2, 6\)\)"
    ):
        step_with(net, optimizer, math.nan)
    with pytest.warns(RuntimeWarning, match=r"10 steps in a row.* and 1 more is not finite"):
        step_with(net, resumed, None, everywhere=True)
    resumed.load_state_dict(
        {k: v for k, v in optimizer.state_dict().items() if k != "skipped_in_row"}
    )
    assert (resumed.skipped_steps, resumed.skipped_in_row) == (55, 0)
    resumed.warn_after = 3
    step_with(net, resumed, math.nan)
    step_with(net, resumed, math.nan)
    with pytest.warns(RuntimeWarning, match="3 steps in a row"):
        step_with(net, resumed, math.nan)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        *(
            (f"Stiffness{rule}", getattr(torch.optim, rule, None))
            for rule in ("AdamW", "SGD", "Muon")
        ),
        *(("RiemannianAdam", torch.optim.Adam), ("RiemannianSGD", geoopt.optim.RiemannianSGD)),
    ],
)
def test_options_that_torch_or_geoopt_has_too_have_its_defaults_and_places(name, theirs):
    """Muon is in torch since 2.9; a Riemannian lr has a default of its own."""
    if theirs is None:
        return
    plain, own = (inspect.signature(kind).parameters for kind in (theirs, getattr(optim, name)))
    shared = [option for option in plain if option in own]
    assert {"params", "lr", "weight_decay"} < {*shared}
    alike = {*shared} - ({"lr"} if name in RIEMANNIAN_NAMES else {*()})
    assert {option: own[option].default for option in alike} == {
        option: plain[option].default for option in alike
    }
    by_place = [
        option for option in shared if plain[option].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert [*own][: len(by_place)] == by_place
