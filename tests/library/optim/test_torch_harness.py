"""What torch asks of its own optimizers, of every optimizer of the registry in every configuration.

On a model of theirs with its weight in one byte a value; and on ordinary parameters ours take the steps of torch's.
"""

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import NAMES, OPTIONS, RIEMANNIAN_NAMES, make
from optimizer_cases import frozen, normal, same_bits, through_disk, values
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, get_error_inputs_for_all_optims, optim_db

import fp8manifold as fm

torch.backends.__allow_nonbracketed_mutation_flag = True  # the harness takes that from every test of the process
RATES = OPTIONS | {"RiemannianSGD": {"lr": 30.0, "float_lr": 0.01, "momentum": 0.9}, "StiffnessSGD": {"lr": 0.005}}
"""For gradients some ten times larger than those that the options were chosen for."""
_SHARED: list[dict[str, Any]] = [
    {},
    {"lr": 0.5},
    {"lr": torch.tensor(0.5)},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"writeback": "residual8", "moments": "8bit"},
    {"moments": "bfloat16"},
    {"writeback": "nearest", "refresh_every": 2, "stabilize_every": 3, "reset_every": 4},
]
_ALWAYS = {"StiffnessMuon": {"direction": "adam"}}  # their models have vectors
_OWN: dict[str, list[dict[str, Any]]] = {
    "RiemannianAdam": [{"amsgrad": True}, {"writeback": "momentum"}, {"betas": (0.8, 0.9), "eps": 1e-6}],
    "RiemannianSGD": [{"dampening": 0.5}, {"nesterov": True}],
    "StiffnessAdamW": [{"stiffness": fm.optim.anneal(1.0, 0.0, 8)}, {"stiffness": 0.3}, {"betas": (0.8, 0.9)}],
    "StiffnessSGD": [{"dampening": 0.5}, {"nesterov": True}, {"writeback": "momentum"}],
    "StiffnessLion": [{"betas": (0.5, 0.9)}],
    "StiffnessMuon": [{"betas": (0.8, 0.9)}, {"adam_eps": 1e-6}],
    "Madam": [{"max_direction": 2.0, "escape": 0.5}],
    "FisherNaturalGradient": [{"representation": "diagonal"}, {"representation": "ekfac"}, {"normalize": False}],
}


by_name = pytest.mark.parametrize("name", NAMES)


def configurations(name: str) -> list[dict[str, Any]]:
    """With rates scaled to what suits the optimizer."""
    made = [copy.deepcopy(options) | _ALWAYS.get(name, {}) for options in [*_SHARED, *_OWN[name]]]
    for kwargs in made:
        if "lr" in kwargs:
            kwargs["lr"] = kwargs["lr"] * RATES[name]["lr"]
    return made


def model(seed: int = 0) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """torch's: ``|W x + b|^2`` over a 10 x 5 weight, a vector and a spectator without a gradient."""
    weight = fm.FP8Parameter(normal(10, 5, seed=seed, std=0.1), "E4M3", headroom=64.0, keep_remainder=True, seed=seed)
    bias = nn.Parameter(normal(10, seed=seed + 1))
    spectator = nn.Parameter(normal(3, seed=seed + 2))
    x = normal(5, seed=9)

    def loss() -> Tensor:
        return (weight.mv(x) + bias).pow(2).sum()

    return [weight, bias, spectator], loss


def run(optimizer: Any, loss: Callable[[], Tensor], steps: int) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return [optimizer.step(closure).item() for _ in range(steps)][-1]


def made(name: str, parameters: list[Any], **options: Any) -> Any:
    return make(name, parameters, **RATES[name] | options)


@by_name
def test_errors(name: str) -> None:
    """torch's own bad input."""
    for bad in get_error_inputs_for_all_optims("cpu", torch.float32):
        if bad.error_type is FutureWarning:  # not bad input: what a release of torch announces of its own classes
            continue
        assert bad.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        given = bad.optimizer_error_input
        params = model()[0] if given.params is None else given.params
        kind = ValueError if bad.error_type is UserWarning else bad.error_type
        own = "one element" in bad.error_regex or "1-element" in bad.error_regex
        regex = "one element" if own else "twice" if bad.error_type is UserWarning else bad.error_regex
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(kind, match=regex):
                construct(name, params, given.kwargs)


@by_name
def test_tensor_lr(name: str) -> None:
    """Any tensor of one element is as good as its number, and is not written to."""
    for kwargs in configurations(name):
        number = float(kwargs.pop("lr", RATES[name]["lr"]))
        results = []
        for lr in (float(torch.tensor(number)), torch.tensor(number), torch.tensor([[number]])):
            parameters, loss = model()
            optimizer = made(name, parameters, lr=lr, **copy.deepcopy(kwargs))
            run(optimizer, loss, 4)
            assert float(optimizer.param_groups[0]["lr"]) == float(torch.tensor(number))
            results.append(values(parameters))
        assert same_bits(results[0], results[1]), str(kwargs)
        assert same_bits(results[0], results[2]), str(kwargs)


@by_name
def test_param_groups_lr(name: str) -> None:
    """A group's lr of 0 holds its parameters still."""
    for kwargs in configurations(name):
        kwargs.pop("lr", None)
        parameters, loss = model()
        still = {"lr": 0.0} | ({"float_lr": None} if name in RIEMANNIAN_NAMES else {})
        still |= {"float_lr": 0.0} if name == "Madam" else {}
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], **still}]
        optimizer = made(name, groups, **kwargs)
        before = values(parameters)
        run(optimizer, loss, 3)
        after = values(parameters)
        assert not torch.equal(before[0], after[0])
        assert same_bits(before[1:], after[1:])


@by_name
def test_load_nontensor_step(name: str) -> None:
    """A step count saved as a number, as old files have it, counts on."""
    parameters, loss = model()
    optimizer = made(name, parameters)
    run(optimizer, loss, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = entry["step"].item()
    optimizer.load_state_dict(state)
    run(optimizer, loss, 2)
    assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {5.0}


@by_name
def test_can_load_to_and_from_named_state_dict(name: str) -> None:
    for named in itertools.product((True, False), repeat=2):
        pairs = [model(), model()]
        both = []
        for use, (parameters, _) in zip(named, pairs, strict=True):
            given = [(f"p{i}", p) for i, p in enumerate(parameters)] if use else parameters
            both.append(construct(name, given, {}, parameters))
        run(both[0], pairs[0][1], 2)
        both[1].load_state_dict(through_disk(both[0].state_dict()))
        assert frozen(both[0].state_dict()["state"]) == frozen(both[1].state_dict()["state"])


@by_name
def test_hooks(name: str) -> None:
    """Of steps, for one and for all optimizers, and of states; what a hook returns is taken."""
    parameters, loss = model()
    optimizer = made(name, parameters)
    called: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append("pre")),
        optimizer.register_step_post_hook(lambda o, args, kwargs: called.append("post")),
        register_optimizer_step_post_hook(lambda *_: called.append("global post")),
        optimizer.register_state_dict_pre_hook(lambda o: called.append("saving")),
        optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": 1}),
        optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "note"}),
        optimizer.register_load_state_dict_post_hook(lambda o: called.append("loaded")),
    ]
    run(optimizer, loss, 1)
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    for handle in handles:
        handle.remove()
    run(optimizer, loss, 1)
    assert called == ["global pre", "pre", "post", "global post", "saving", "loaded"]


@by_name
def test_deepcopy_and_pickle(name: str) -> None:
    """Public attributes, parameters, state and functions; both go on as the original does."""
    for kwargs in configurations(name):
        parameters, loss = model()
        optimizer = made(name, parameters, **kwargs)
        run(optimizer, loss, 3)
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), torch.load(file, weights_only=False)]
        public = {name for name in vars(optimizer) if not name.startswith("_") and "hook" not in name}
        for other in copies:
            assert type(other) is type(optimizer)
            assert public <= vars(other).keys()
            assert frozen(other.state_dict()) == frozen(optimizer.state_dict())
        optimizer.step()
        for other in copies:
            others = other.param_groups[0]["params"]
            for p, gradient in zip(others, gradients, strict=True):
                p.grad = gradient
            other.step()
            assert same_bits(values(parameters), values(others)), str(kwargs)


def construct(name: str, params: Any, kwargs: dict[str, Any], tensors: list[nn.Parameter] | None = None) -> Any:
    """As :func:`make`, for arguments that are no list of tensors."""
    kind = getattr(fm.optim, name)
    rates = {k: v for k, v in RATES[name].items() if k == "float_lr"} | kwargs
    if name != "FisherNaturalGradient":
        return kind(params, **rates, **_ALWAYS.get(name, {}))
    layer = nn.Linear(5, 10, bias=False)
    if tensors is not None:
        layer.weight = tensors[0]
    return kind(params, layer, [normal(4, 5)], **rates)


THEIRS = {info.name: info for info in optim_db}
#: Ours, on ordinary parameters alone, and the one of torch's that it then is.
SAME = {
    "StiffnessAdamW": "AdamW",
    "StiffnessSGD": "SGD",
    "RiemannianAdam": "Adam",
    "RiemannianSGD": "SGD",
    "Madam": "AdamW",
}


def translated(name: str, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """torch's options in our words; None where ours means another thing by them."""
    decoupled = name == "StiffnessSGD" and kwargs.get("weight_decay")
    if decoupled or (kwargs.get("amsgrad") and name != "RiemannianAdam"):
        return None
    options = {"lr": 1e-3, **copy.deepcopy(kwargs)}
    if name == "StiffnessSGD":
        options.setdefault("momentum", 0.0)
    if SAME[name] == "AdamW":
        options.setdefault("weight_decay", 1e-2)
        options.setdefault("betas", (0.9, 0.999))
    if name == "Madam":
        options["float_lr"] = float(options["lr"])
    return options


@pytest.mark.parametrize("name", SAME)
def test_ordinary_parameters_take_torchs_steps(name: str) -> None:
    """In float64, over every configuration that torch tests its own optimizer with."""
    theirs, compared = THEIRS[SAME[name]], 0
    for given in theirs.optim_inputs_func("cpu", torch.float64):
        if (options := translated(name, given.kwargs)) is None:
            continue
        pair = [
            [nn.Parameter(normal(4, 3, dtype=torch.float64)), nn.Parameter(normal(5, seed=1, dtype=torch.float64))]
            for _ in "ab"
        ]
        made = [theirs.optim_cls(pair[0], **copy.deepcopy(given.kwargs)), getattr(fm.optim, name)(pair[1], **options)]
        for t in range(10):
            for parameters, optimizer in zip(pair, made, strict=True):
                for i, p in enumerate(parameters):
                    p.grad = normal(*p.shape, seed=10 * t + i, dtype=torch.float64)
                optimizer.step()
        for p, q in zip(*pair, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12, msg=f"{name}, {given.desc}")
        compared += 1
    assert compared >= 4
