"""Every optimizer around its steps.

Signatures and options, torch's own harness, hooks, groups, states, schedulers, and counts
of skipped steps.
"""

import copy
import inspect
import io
import math
import pickle
import pkgutil
import re
import warnings
from typing import NamedTuple

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

# torch's harness takes this permission from every test of the process.
torch.backends.__allow_nonbracketed_mutation_flag = True
by_name = pytest.mark.parametrize("name", NAMES)


def test_the_matrix_is_the_registry():
    steps = {name for name in optim.__all__ if hasattr(getattr(optim, name), "step")}
    assert set(NAMES) == steps - {"StiffnessWrapper"} == set(OPTIONS) == {c[0] for c in VALID}
    assert len(COMBINATIONS) == len(optim.WRITEBACKS) * len(MOMENTS) * len(NAMES)
    assert len(COMBINATIONS) == len(VALID) + len(INVALID)
    assert len(VALID) >= 75


@by_name
def test_a_signature_has_every_option_and_so_have_groups(name):
    signature = inspect.signature(getattr(optim, name))
    assert inspect.Parameter.empty not in {p.annotation for p in signature.parameters.values()}
    no_options = {"params", "flags", "stabilize", "model", "loader", "logits"}
    options = signature.parameters.keys() - no_options
    assert make(name, [nn.Parameter(torch.eye(3))]).defaults.keys() == options


def test_a_subclass_may_have_options_of_its_own():
    class Mine(optim.StiffnessLion):
        def __init__(self, params, speed=2.0):
            super().__init__(params, 1e-3 * speed, writeback="nearest")

    (group,) = Mine([nn.Parameter(torch.ones(3))]).param_groups
    assert (group["lr"], group["writeback"], group["moments"]) == (2e-3, "nearest", "float32")


@pytest.mark.parametrize(("name", "writeback", "moments"), INVALID)
def test_an_invalid_combination_is_refused(name, writeback, moments):
    """In the constructor, a group, and a group that is added later.

    The message says what does not go together, why, and what does.
    """
    options = {"writeback": writeback, "moments": moments}
    optimizer = make(name, zoo().values())
    groups = len(optimizer.param_groups)
    pair = rf"writeback='{writeback}' does not go with (moments='{moments}'|{name})"
    message = pair + r": .{20,}(one of|use) "
    with pytest.raises(ValueError, match=message):
        make(name, zoo().values(), **options)
    with pytest.raises(ValueError, match=message):
        make(name, [{"params": list(zoo().values()), **options}])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [stored_weight(seed=30)], **options})
    assert len(optimizer.param_groups) == groups


#: Options for gradients some ten times larger than those that OPTIONS are for.
RATES = OPTIONS | {
    "RiemannianSGD": {"lr": 30.0, "float_lr": 0.01, "momentum": 0.9},
    "StiffnessSGD": {"lr": 0.005},
}
#: The models of torch's harness have vectors.
ALWAYS = {"StiffnessMuon": {"direction": "adam"}}
#: Configurations that all optimizers have. A number or tensor `lr` is a factor of RATES.
SHARED = {
    "default": {},
    "lr": {"lr": 0.5},
    "lr tensor": {"lr": torch.tensor(0.5)},
    "decay, maximize": {"weight_decay": 0.1, "maximize": True},
    "residual8, 8bit": {"writeback": "residual8", "moments": "8bit"},
    "bfloat16": {"moments": "bfloat16"},
    "nearest, periods": {
        "writeback": "nearest",
        "refresh_every": 2,
        "stabilize_every": 3,
        "reset_every": 4,
    },
}
#: Configurations that one optimizer has.
SPECIAL = {
    "RiemannianAdam": {
        "amsgrad": {"amsgrad": True},
        "momentum": {"writeback": "momentum"},
        "betas, eps": {"betas": (0.8, 0.9), "eps": 1e-6},
    },
    "RiemannianSGD": {"dampening": {"dampening": 0.5}, "nesterov": {"nesterov": True}},
    "StiffnessAdamW": {
        "annealed": {"stiffness": optim.anneal(1.0, 0.0, 8)},
        "stiffness": {"stiffness": 0.3},
        "betas": {"betas": (0.8, 0.9)},
    },
    "StiffnessSGD": {
        "dampening": {"dampening": 0.5},
        "nesterov": {"nesterov": True},
        "momentum": {"writeback": "momentum"},
    },
    "StiffnessLion": {"betas": {"betas": (0.5, 0.9)}},
    "StiffnessAdafactor": {
        "beta2_decay, d": {"beta2_decay": -0.5, "d": 2.0},
        "eps": {"eps": (1e-4, 1e-2)},
        "flatten, stiffness": {"matrix_shape": "flatten", "stiffness": 0.5},
    },
    "StiffnessMuon": {"betas": {"betas": (0.8, 0.9)}, "adam_eps": {"adam_eps": 1e-6}},
    "FisherNaturalGradient": {
        "diagonal": {"representation": "diagonal"},
        "ekfac": {"representation": "ekfac"},
        "not normalized": {"normalize": False},
    },
}


def configurations():
    """Yield a case for every optimizer and configuration."""
    for name in NAMES:
        for label, options in (SHARED | SPECIAL[name]).items():
            yield pytest.param(name, options, id=f"{name}-{label}")


configured = pytest.mark.parametrize(("name", "options"), list(configurations()))


def options_of(name, options):
    """Return a copy of a configuration with its lr in the measure of the optimizer."""
    options = copy.deepcopy(options) | ALWAYS.get(name, {})
    if "lr" in options:
        options["lr"] = options["lr"] * RATES[name]["lr"]
    return RATES[name] | options


def model():
    """Return parameters and a loss of torch's harness.

    The loss is ``|W x + b|^2`` over a 10 x 5 weight and a vector; a third parameter has
    no gradient.
    """
    weight = fm.FP8Parameter(
        normal(10, 5, std=0.1), "E4M3", headroom=64.0, keep_remainder=True, seed=0
    )
    bias, x = nn.Parameter(normal(10, seed=1)), normal(5, seed=9)
    parameters = [weight, bias, nn.Parameter(normal(3, seed=2))]
    return parameters, lambda: (weight.mv(x) + bias).pow(2).sum()


def run(optimizer, loss, steps):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps):
        assert optimizer.step(closure).requires_grad


def construct(name, params, kwargs, weight=None):
    """Construct an optimizer as torch's harness does; a Fisher metric is of `weight`."""
    kind = getattr(optim, name)
    rates = {k: v for k, v in RATES[name].items() if k == "float_lr"} | kwargs
    if name != "FisherNaturalGradient":
        return kind(params, **rates, **ALWAYS.get(name, {}))
    layer = nn.Linear(5, 10, bias=False)
    if weight is not None:
        layer.weight = weight
    return kind(params, layer, [normal(4, 5)], **rates)


def bad_inputs():
    """Return bad input of torch's harness, by its description.

    A FutureWarning is none: by it a release of torch announces a change of its own classes.
    """
    inputs = get_error_inputs_for_all_optims("cpu", torch.float32)
    return {x.optimizer_error_input.desc: x for x in inputs if x.error_type is not FutureWarning}


@by_name
@pytest.mark.parametrize("description", bad_inputs())
def test_bad_input_of_torchs_harness_is_refused(name, description):
    bad = bad_inputs()[description]
    assert bad.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    inputs, error, message = bad.optimizer_error_input, bad.error_type, bad.error_regex
    if "one element" in message or "1-element" in message:
        message = "one element"
    elif error is UserWarning:  # torch warns of a duplicate parameter, and we raise
        error, message = ValueError, "twice"
    params = model()[0] if inputs.params is None else inputs.params
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=message):
            construct(name, params, inputs.kwargs)


@configured
@pytest.mark.parametrize("shape", [(), (1, 1)], ids=["0d", "1x1"])
def test_an_lr_may_be_a_tensor_of_one_element(name, options, shape):
    """It is as good as its number, and is not written to."""
    number = torch.tensor(float(options_of(name, options)["lr"]))
    results = []
    for lr in (float(number), number.view(shape).clone()):
        parameters, loss = model()
        optimizer = make(name, parameters, **options_of(name, options) | {"lr": lr})
        run(optimizer, loss, 4)
        assert float(optimizer.param_groups[0]["lr"]) == float(number)
        results.append(values(parameters))
    assert same_bits(*results)


def named(parameters):
    return [(f"p{i}", p) for i, p in enumerate(parameters)]


@by_name
@pytest.mark.parametrize("saved_names", [True, False], ids=["named", "plain"])
@pytest.mark.parametrize("names", [True, False], ids=["into named", "into plain"])
def test_states_of_numbers_and_of_names(name, saved_names, names):
    """A step count saved as a number, as in old files, counts on.

    Names of parameters may come, go or stay.
    """
    (parameters, loss), (twins, loss_of_twins) = model(), model()
    params = named(parameters) if saved_names else parameters
    optimizer = construct(name, params, {}, parameters[0])
    resumed = construct(name, named(twins) if names else twins, {}, twins[0])
    run(optimizer, loss, 3)
    state = through_disk(optimizer.state_dict())
    resumed.load_state_dict(state)
    assert frozen(optimizer.state_dict()["state"]) == frozen(resumed.state_dict()["state"])
    for entry in state["state"].values():
        entry["step"] = entry["step"].item()
    resumed.load_state_dict(state)
    run(resumed, loss_of_twins, 2)
    assert {float(entry["step"]) for entry in resumed.state_dict()["state"].values()} == {5.0}


def saved_and_loaded(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": saved_and_loaded,
}


@configured
def test_a_copy_steps_as_the_original(name, options):
    """Copies by deepcopy, by pickle and by torch.save."""
    parameters, loss = model()
    optimizer = make(name, parameters, **options_of(name, options))
    run(optimizer, loss, 3)
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    copies = {label: copy_of(optimizer) for label, copy_of in COPIES.items()}
    public = {
        attribute
        for attribute in vars(optimizer)
        if not attribute.startswith("_") and "hook" not in attribute
    }
    state = frozen(optimizer.state_dict())
    optimizer.step()
    for label, twin in copies.items():
        assert type(twin) is type(optimizer), label
        assert public <= vars(twin).keys(), label
        assert frozen(twin.state_dict()) == state, label
        twins = twin.param_groups[0]["params"]
        for p, gradient in zip(twins, gradients, strict=True):
            p.grad = gradient
        twin.step()
        assert same_bits(values(parameters), values(twins)), label


def after_a_step(name, **options):
    p = stored_weight("E4M3", (3, 8), seed=1)
    optimizer = make(name, [p], **options)
    put_gradients([p], 0)
    optimizer.step()
    return p, optimizer


def average_of(state):
    """Return the name of the first tensor of a state that is elementwise."""
    entry = state["state"][0]
    return next(k for k, v in entry.items() if isinstance(v, Tensor) and v.shape == (3, 8))


def hook_that_sets(key, value, *, returns):
    """Return a hook that changes an average and a count, in place or in what it returns."""

    def hook(_, state):
        changed = copy.deepcopy(state) | {"skipped_steps": 7}
        changed["state"][0][key] = value
        if returns:
            return changed
        state.update(changed)
        return None

    return hook


@by_name
def test_a_state_that_a_hook_breaks_is_not_loaded(name):
    p, optimizer = after_a_step(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key = average_of(saved)
    average = saved["state"][0][key].clone()
    hook = hook_that_sets(key, torch.ones(2), returns=False)
    optimizer.register_load_state_dict_pre_hook(hook)
    with pytest.raises(ValueError, match=f"has {key} of shape"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[p][key], average)
    assert optimizer.skipped_steps == 0


@by_name
@pytest.mark.parametrize("returns", [True, False], ids=["returned", "in place"])
def test_a_state_that_a_hook_mends_is_loaded(name, returns):
    p, optimizer = after_a_step(name)
    state = copy.deepcopy(optimizer.state_dict())
    key = average_of(state)
    average = state["state"][0][key].clone()
    state["state"][0][key] = torch.ones(2)
    hook = hook_that_sets(key, 2 * average, returns=returns)
    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[p][key], 2 * average)
    assert optimizer.skipped_steps == 7


@by_name
def test_a_hook_may_change_a_state_that_was_loaded(name):
    p, optimizer = after_a_step(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key = average_of(saved)
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[p][key].zero_())
    optimizer.load_state_dict(saved)
    assert optimizer.state[p][key].count_nonzero() == 0


@by_name
def test_hooks_of_steps_and_of_saving_are_called_in_order(name):
    """Hooks of one optimizer and of all; removed, they are called no more."""
    _, optimizer = after_a_step(name)
    called = []
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
    wrapper = optim.StiffnessWrapper(torch.optim.SGD([nn.Parameter(normal(2, 2))], lr=0.1))
    calls = []
    wrapper.register_state_dict_pre_hook(lambda o: calls.append(type(o)))
    wrapper.register_state_dict_post_hook(lambda _, state: state | {"steps_taken": 3})
    wrapper.register_load_state_dict_pre_hook(
        lambda _, state: state | {"steps_taken": state["steps_taken"] + 1}
    )
    wrapper.register_load_state_dict_post_hook(lambda o: calls.append(o.steps_taken))
    saved = wrapper.state_dict()
    wrapper.load_state_dict(saved)
    assert saved["steps_taken"] == 3
    assert calls == [optim.StiffnessWrapper, 4]


FLAT = {"options": StateDictOptions(flatten_optimizer_state_dict=True)}


def as_in_old_files(state):
    """Return a state as it used to be saved: its format in a tuple, without some counts."""
    old = copy.deepcopy(state)
    del old["streams_begun"], old["skipped_in_row"]
    for entry in old["state"].values():
        if "grid" in entry:
            entry["grid"] = tuple(entry["grid"].tolist())
    return old


class Training(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, t):
        put_gradients(self.model.parameters(), t)
        self.optimizer.step()


def go_on_flat(source, target):
    flat = get_optimizer_state_dict(*source, **FLAT)
    set_optimizer_state_dict(*target, flat, **FLAT)


def go_on_from_disk(source, target):
    target.optimizer.load_state_dict(through_disk(source.optimizer.state_dict()))


def go_on_from_an_old_file(source, target):
    target.optimizer.load_state_dict(as_in_old_files(source.optimizer.state_dict()))


every_training = pytest.mark.parametrize("kind", OPTIMIZERS)
every_storage = pytest.mark.parametrize("storage", ["codes", "grid"])


@every_training
@every_storage
@pytest.mark.parametrize("go_on", [go_on_flat, go_on_from_disk, go_on_from_an_old_file])
def test_a_state_goes_on_to_the_bit(kind, storage, go_on):
    """By name, as torch's distributed checkpoints have it; through a file; from an old file.

    A file has None for a schedule.
    """
    source, target = (Training(*ordinary(kind, storage)) for _ in "ab")
    for t in range(3):
        source.step(t)
    go_on(source, target)
    target.model.load_state_dict(copy.deepcopy(source.model.state_dict()))
    for t in range(3, 5):
        source.step(t)
        target.step(t)
    assert all(map(torch.equal, source.model.parameters(), target.model.parameters()))
    is_scheduled = kind == "adamw_annealed"
    for group in target.optimizer.param_groups:
        assert callable(group.get("stiffness")) == is_scheduled


@every_training
@every_storage
def test_a_flat_state_consists_of_numbers_and_tensors(kind, storage):
    training = Training(*ordinary(kind, storage))
    training.step(0)
    flat = get_optimizer_state_dict(*training, **FLAT)
    kinds = {type(value) for name, value in flat.items() if name.startswith("state.")}
    assert kinds <= {int, float, Tensor}


@every_training
@every_storage
def test_an_old_state_of_another_format_is_refused(kind, storage):
    training = Training(*ordinary(kind, storage))
    training.step(0)
    state = as_in_old_files(training.optimizer.state_dict())
    entry = next(entry for entry in state["state"].values() if "grid" in entry)
    entry["grid"] = (5, 2, 15, 0, 1)
    with pytest.raises(ValueError, match="was made for E5M2"):
        training.optimizer.load_state_dict(state)


@every_storage
def test_a_state_with_a_schedule_is_refused_by_an_optimizer_without_one(storage):
    training = Training(*ordinary("adamw_annealed", storage))
    training.step(0)
    constant = StiffnessAdamW(training.model.parameters(), stiffness=1.0)
    with pytest.raises(ValueError, match="stiffness"):
        constant.load_state_dict(training.optimizer.state_dict())


def two_parameters():
    return [nn.Parameter(normal(4, 4, seed=i)) for i in range(2)]


MAKES = {
    "default": lambda lr: StiffnessAdamW([{"params": [p]} for p in two_parameters()], lr=lr),
    "sgd": lambda lr: StiffnessSGD([{"params": [p]} for p in two_parameters()], lr=lr),
    "riemannian": lambda lr: RiemannianAdam([{"params": [p]} for p in two_parameters()], lr=lr),
    "in groups": lambda lr: StiffnessAdamW(
        [{"params": [p], "lr": lr} for p in two_parameters()], lr=1e-3
    ),
    "muon": lambda lr: StiffnessMuon.for_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lr),
}


@pytest.mark.parametrize("origin", ["constructed", "loaded", "added"])
@pytest.mark.parametrize("name", MAKES)
def test_a_scheduler_divides_each_learning_rate_once(name, origin):
    """Even if groups were given one tensor, or share it in a state."""
    optimizer = MAKES[name](torch.tensor(0.5))
    if origin == "added":
        group = {"params": [nn.Parameter(normal(4))], "direction": "adam"}
        if "param_names" in optimizer.param_groups[0]:
            group["param_names"] = ["late"]
        optimizer.add_param_group(group)
    if origin == "loaded":
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["lr"] = saved["param_groups"][0]["lr"]
        optimizer.load_state_dict(through_disk(saved))
    old_rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert len(old_rates) > 1
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [lr / 4 for lr in old_rates]


def test_the_tensor_of_a_single_group_stays_the_users():
    lr = torch.tensor(0.5)
    optimizer = StiffnessAdamW(two_parameters(), lr=lr)
    lr.fill_(0.25)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@by_name
def test_a_scheduler_begins_from_the_lr_of_the_moment(name):
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = make(name, [stored_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    assert torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0).base_lrs == [0.05]


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        ({"draws": "dither"}, {"draws": "independent"}),
        ({"moments": "8bit"}, {"moments": "float32"}),
        ({"writeback": "nearest", "seed": 3}, {"writeback": "stochastic", "seed": 4}),
        ({"stiffness": 0.0}, {"stiffness": 1.0}),
        ({"clip": 8.0, "damping": 0.25}, {"clip": 16.0, "damping": 0.5}),
    ],
    ids=str,
)
def test_other_options_of_a_loaded_state_are_warned_of_once(saved, current):
    """But not what schedules change: lr, betas and weight decay."""
    scheduled = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    _, first = after_a_step("StiffnessAdamW", **scheduled, **saved)
    _, second = after_a_step("StiffnessAdamW", **current)
    first.param_groups[0]["lr"] = 1e-4
    differences = [
        f"{name}={saved[name]!r} in place of {current[name]!r}" for name in sorted(saved)
    ]
    start = "^StiffnessAdamW goes on with options of the loaded state, .* made with: "
    message = start + re.escape(", ".join(differences)) + r"( \(optim.adopted_state|$)"
    with pytest.warns(UserWarning, match=message) as caught:
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {name: second.param_groups[0][name] for name in saved} == saved
    second.load_state_dict(first.state_dict())  # a warning would be an error


def test_another_schedule_of_a_loaded_state_is_not_warned_of():
    (_, first), (_, second) = (
        after_a_step("StiffnessAdamW", stiffness=lambda t, n=n: 1 / (n + t)) for n in (1, 2)
    )
    second.load_state_dict(first.state_dict())


def two_layers():
    torch.manual_seed(0)
    return fm.quantize_model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), "E4M3", "codes")


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
    net = two_layers()
    optimizer = make(name, net.named_parameters())
    parameter = r"parameter 2 of group 0 \('1\.weight', shape \(2, 6\)\)"
    message = rf"10 steps in a row.*{parameter}.*on_nonfinite='raise'"
    for t in range(30):
        if t == 9:
            with pytest.warns(RuntimeWarning, match=message):
                step_with(net, optimizer, bad)
        else:
            step_with(net, optimizer, bad)
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (30, 30)
    assert optimizer.state_dict()["skipped_in_row"] == 30


def test_the_count_is_saved_and_begins_anew_with_a_step():
    """The number of skips before a warning is an option.

    Without names parameters are told by position and shape, or counted.
    """
    net = two_layers()
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
    ("name", "peer"),
    [
        ("StiffnessAdamW", "torch.optim.AdamW"),
        ("StiffnessSGD", "torch.optim.SGD"),
        ("StiffnessMuon", "torch.optim.Muon"),
        ("StiffnessAdafactor", "torch.optim.Adafactor"),
        ("RiemannianAdam", "torch.optim.Adam"),
        ("RiemannianSGD", "geoopt.optim.RiemannianSGD"),
    ],
)
def test_options_that_torch_or_geoopt_has_too_have_its_defaults_and_places(name, peer):
    """But for the lr of a Riemannian optimizer, which has a default of its own."""
    if peer == "torch.optim.Muon" and torch.__version__ < (2, 9):
        pytest.skip("torch has Muon since 2.9")
    original = inspect.signature(pkgutil.resolve_name(peer)).parameters
    parameters = inspect.signature(getattr(optim, name)).parameters
    shared = [option for option in original if option in parameters]
    assert {"params", "lr", "weight_decay"} < {*shared}
    for option in shared:
        if not (option == "lr" and name in RIEMANNIAN_NAMES):
            assert parameters[option].default == original[option].default, option
    positional = [
        option
        for option in shared
        if original[option].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert [*parameters][: len(positional)] == positional
