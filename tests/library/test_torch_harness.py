"""torch's own optimizer harness, driven over every optimizer of the registry.

``torch.testing._internal.common_optimizers`` is what torch tests its optimizers with: an ``OptimizerInfo`` lists the
configurations of one, and ``optims`` runs a test over each.  The checks are torch's generic ones that make sense here;
the model is theirs, with its weight in one byte a value.
"""

from __future__ import annotations

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
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
    optim_db,
    optims,
)
from torch.testing._internal.common_utils import TestCase

import fp8manifold as fm

torch.backends.__allow_nonbracketed_mutation_flag = True  # the harness takes that from every test of the process
THEIRS = {info.name: info for info in optim_db}
RATES = OPTIONS | {"RiemannianSGD": {"lr": 30.0, "float_lr": 0.01, "momentum": 0.9}, "StiffnessSGD": {"lr": 0.005}}
"""For gradients some ten times larger than those that the options were chosen for."""
CLIQUEY = ("foreach", "fused", "differentiable")
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


def inputs_of(name: str) -> Callable[..., list[OptimizerInput]]:
    """The configurations, with rates scaled to what suits the optimizer."""

    def inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
        made = []
        for options in [*_SHARED, *_OWN[name]]:
            kwargs = copy.deepcopy(options) | _ALWAYS.get(name, {})
            if "lr" in kwargs:
                kwargs["lr"] = kwargs["lr"] * RATES[name]["lr"]
            made.append(OptimizerInput(params=None, kwargs=kwargs, desc=", ".join(options) or "default"))
        return made

    return inputs


INFOS = [
    OptimizerInfo(
        getattr(fm.optim, name),
        optim_inputs_func=inputs_of(name),
        optim_error_inputs_func=get_error_inputs_for_all_optims,
        scheduler_inputs=THEIRS["AdamW"].scheduler_inputs,
        supported_impls=(),
        supports_complex=False,
    )
    for name in NAMES
]


def model(seed: int = 0, *, contiguous: bool = True) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """torch's: ``|W x + b|^2`` over a 10 x 5 weight, a vector and a spectator without a gradient."""
    weight = fm.FP8Parameter(normal(10, 5, seed=seed, std=0.1), "E4M3", headroom=64.0, keep_remainder=True, seed=seed)
    bias = (
        nn.Parameter(normal(10, 2, seed=seed + 1, std=0.3)[:, 0])
        if not contiguous
        else nn.Parameter(normal(10, seed=seed + 1))
    )
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


def configurations(info: OptimizerInfo) -> list[dict[str, Any]]:
    found = _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    return [copy.deepcopy(each.kwargs) for each in found]


class TestFamily(TestCase):
    """Each runs over every configuration of every optimizer."""

    @optims(INFOS)
    def test_infos_leave_flags_to_the_harness(self, device: str, dtype: Any, optim_info: Any) -> None:
        """Each flag of torch's that we don't have is refused in every configuration."""
        for kwargs in configurations(optim_info):
            assert not set(kwargs) & set(CLIQUEY)
            for flag in (*CLIQUEY, "capturable"):
                with pytest.raises(ValueError, match=f"{flag}=True is not supported by {optim_info.name}"):
                    made(optim_info.name, model()[0], **{**kwargs, flag: True})

    @optims(INFOS)
    def test_errors(self, device: str, dtype: Any, optim_info: Any) -> None:
        """torch's own bad input."""
        for bad in optim_info.optim_error_inputs_func(device, dtype):
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
                    construct(optim_info.name, params, given.kwargs)

    @optims(INFOS)
    def test_forloop_goes_right_direction(self, device: str, dtype: Any, optim_info: Any) -> None:
        for kwargs, contiguous in itertools.product(configurations(optim_info), (True, False)):
            parameters, loss = model(contiguous=contiguous)
            sign = -1 if kwargs.get("maximize") else 1
            optimizer = made(optim_info.name, parameters, **kwargs)
            before = loss().item()
            run(optimizer, loss, 12)
            assert sign * loss().item() < sign * before, str(kwargs)

    @optims(INFOS)
    def test_forloop_goes_right_direction_with_lrsched(self, device: str, dtype: Any, optim_info: Any) -> None:
        for schedulers in optim_info.scheduler_inputs:
            parameters, loss = model()
            optimizer = made(optim_info.name, parameters)
            schedules = [scheduler(optimizer) for scheduler in schedulers]
            before = loss().item()
            for _ in range(12):
                value = run(optimizer, loss, 1)
                for scheduler in schedules:
                    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        scheduler.step(value)
                    else:
                        scheduler.step()
            assert loss().item() < before

    @optims(INFOS)
    def test_tensor_lr(self, device: str, dtype: Any, optim_info: Any) -> None:
        """Any tensor of one element is as good as its number, and is not written to."""
        for kwargs in configurations(optim_info):
            number = float(kwargs.pop("lr", RATES[optim_info.name]["lr"]))
            results = []
            for lr in (float(torch.tensor(number)), torch.tensor(number), torch.tensor([[number]])):
                parameters, loss = model()
                optimizer = made(optim_info.name, parameters, lr=lr, **copy.deepcopy(kwargs))
                run(optimizer, loss, 4)
                assert float(optimizer.param_groups[0]["lr"]) == float(torch.tensor(number))
                results.append(values(parameters))
            assert same_bits(results[0], results[1]), str(kwargs)
            assert same_bits(results[0], results[2]), str(kwargs)

    @optims(INFOS)
    def test_param_groups_lr(self, device: str, dtype: Any, optim_info: Any) -> None:
        """A group's lr of 0 holds its parameters still."""
        for kwargs in configurations(optim_info):
            kwargs.pop("lr", None)
            parameters, loss = model()
            still = {"lr": 0.0} | ({"float_lr": None} if optim_info.name in RIEMANNIAN_NAMES else {})
            still |= {"float_lr": 0.0} if optim_info.name == "Madam" else {}
            groups = [{"params": parameters[:1]}, {"params": parameters[1:], **still}]
            optimizer = made(optim_info.name, groups, **kwargs)
            before = values(parameters)
            run(optimizer, loss, 3)
            after = values(parameters)
            assert not torch.equal(before[0], after[0])
            assert same_bits(before[1:], after[1:])

    @optims(INFOS)
    def test_step_is_noop_when_params_have_no_grad(self, device: str, dtype: Any, optim_info: Any) -> None:
        for kwargs in configurations(optim_info):
            parameters, _ = model()
            before = values(parameters)
            optimizer = made(optim_info.name, parameters, **kwargs)
            optimizer.step()
            assert same_bits(before, values(parameters))
            assert not any("step" in entry for entry in optimizer.state_dict()["state"].values())

    @optims(INFOS)
    def test_load_nontensor_step(self, device: str, dtype: Any, optim_info: Any) -> None:
        """A step count saved as a number, as old files have it, counts on."""
        parameters, loss = model()
        optimizer = made(optim_info.name, parameters)
        run(optimizer, loss, 3)
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"] = entry["step"].item()
        optimizer.load_state_dict(state)
        run(optimizer, loss, 2)
        assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {5.0}

    @optims(INFOS)
    def test_can_load_to_and_from_named_state_dict(self, device: str, dtype: Any, optim_info: Any) -> None:
        for named in itertools.product((True, False), repeat=2):
            pairs = [model(), model()]
            both = []
            for use, (parameters, _) in zip(named, pairs, strict=True):
                given = [(f"p{i}", p) for i, p in enumerate(parameters)] if use else parameters
                both.append(construct(optim_info.name, given, {}, parameters))
            run(both[0], pairs[0][1], 2)
            both[1].load_state_dict(through_disk(both[0].state_dict()))
            assert frozen(both[0].state_dict()["state"]) == frozen(both[1].state_dict()["state"])

    @optims(INFOS)
    def test_hooks(self, device: str, dtype: Any, optim_info: Any) -> None:
        """Of steps, for one and for all optimizers, and of states; what a hook returns is taken."""
        parameters, loss = model()
        optimizer = made(optim_info.name, parameters)
        called: list[str] = []
        handles = [
            register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
            optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append("pre")),
            optimizer.register_step_post_hook(lambda o, args, kwargs: called.append("post")),
            register_optimizer_step_post_hook(lambda *_: called.append("global post")),
            optimizer.register_state_dict_pre_hook(lambda o: called.append("saving")),
            optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": 1}),
            optimizer.register_load_state_dict_pre_hook(
                lambda o, state: {k: v for k, v in state.items() if k != "note"}
            ),
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

    @optims(INFOS)
    def test_deepcopy_and_pickle(self, device: str, dtype: Any, optim_info: Any) -> None:
        """Public attributes, parameters, state and functions; both go on as the original does."""
        for kwargs in configurations(optim_info):
            parameters, loss = model()
            optimizer = made(optim_info.name, parameters, **kwargs)
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

    @optims(INFOS)
    def test_add_param_group_and_printing(self, device: str, dtype: Any, optim_info: Any) -> None:
        for kwargs in configurations(optim_info):
            parameters, loss = model()
            optimizer = made(optim_info.name, parameters[:1], **copy.deepcopy(kwargs))
            given = {k: v for k, v in kwargs.items() if k != "lr"}
            optimizer.add_param_group({"params": parameters[1:], **given})
            before = values(parameters)
            run(optimizer, loss, 2)
            moved = [not torch.equal(a, b) for a, b in zip(before, values(parameters), strict=True)]
            assert moved == [True, True, False]
            assert f"{optim_info.name} (" in repr(optimizer)
            assert "Parameter Group 1" in repr(optimizer)


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


instantiate_device_type_tests(TestFamily, globals(), only_for="cpu")
