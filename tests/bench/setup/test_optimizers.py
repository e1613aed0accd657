"""Parameter groups and the optimizers they go to."""

import sys

import pytest
import torch
from bench_runs import refusal, resolved
from laws import each

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.setup.optimizers import build_optimizer, parameter_groups
from nanogpt_bench.setup.surgery import quantize

SHAPE = GPTShape(1, 2, 8, 16, vocab_size=11, bias=True, tie_weights=True)
ONE_BYTE = ("--model.n_layer=1", "--model.format=E4M3", "--model.storage=fp8")
UNTIED = GPTShape(1, 2, 8, 16, vocab_size=11)


def test_matrices_decay_and_vectors_do_not_and_tied_weights_count_once():
    model = GPT(SHAPE)
    assert len(parameter_groups(torch.nn.Linear(3, 3, bias=False), 0.1)) == 1  # none without parameters
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_options_reach_the_optimizer():
    options = ["--optimizer.lr=0.5", "--optimizer.beta1=0.8", "--optimizer.beta2=0.7"]
    optimizer = build_optimizer(GPT(SHAPE), resolved(options))
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.7), 1e-8)


def on_one_byte(name: str, *arguments: str) -> torch.optim.Optimizer:
    config = resolved([*ONE_BYTE, "--optimizer.name", name, *arguments])
    return build_optimizer(quantize(GPT(UNTIED), config), config)


BUILT = {
    "adamw": fm.optim.StiffnessAdamW,
    "stiffness_adamw": fm.optim.StiffnessAdamW,
    "sgd": fm.optim.StiffnessSGD,
    "stiffness_sgd": fm.optim.StiffnessSGD,
    "stiffness_lion": fm.optim.StiffnessLion,
    "madam": fm.optim.Madam,
    "riemannian_adam": fm.optim.RiemannianAdam,
    "riemannian_sgd": fm.optim.RiemannianSGD,
}


def test_what_all_of_the_library_s_optimizers_take_reaches_them():
    options = ["--optimizer.lr=0.5", "--optimizer.writeback=residual8", "--optimizer.moments=bfloat16", "--seed=7"]
    for name, built in BUILT.items():
        optimizer = on_one_byte(name, *options)
        assert type(optimizer) is built
        for group in optimizer.param_groups:
            assert [group[key] for key in ("lr", "writeback", "moments", "seed")] == [0.5, "residual8", "bfloat16", 7]


@each(
    ("name", "option", "value"),
    [
        *((name, "momentum", 0.5) for name in ("stiffness_sgd", "riemannian_sgd")),
        *((name, "float_lr", 0.25) for name in ("riemannian_sgd", "madam")),
        ("stiffness_lion", "stiffness", 0.5),
        *((name, "stiffness", 0.0) for name in ("sgd", "stiffness_sgd")),  # that of their own
    ],
)
def test_options_of_their_own_reach_the_library_s_optimizers(name, option, value):
    words = [f"--optimizer.{option}={value}"] if value else []
    assert {group[option] for group in on_one_byte(name, *words).param_groups} == {value}


@each(
    ("name", "arguments", "parts"),
    [
        ("madam", ["--optimizer.writeback=momentum"], ["writeback='momentum'", "Madam"]),
        ("stiffness_lion", ["--optimizer.writeback=momentum"], ["writeback='momentum'", "StiffnessLion"]),
        ("adamw", ["--optimizer.writeback=momentum", "--optimizer.moments=8bit"], ["momentum", "8bit"]),
        ("sgd", ["--optimizer.writeback=momentum", "--optimizer.momentum=0"], ["momentum"]),
    ],
)
def test_a_combination_the_library_refuses_is_one_line(name, arguments, parts):
    with refusal() as caught:
        on_one_byte(name, *arguments)
    for part in ("optimizer: ", *parts):
        assert part in str(caught.value)


def test_fisher_names_its_package_where_it_is_missing(monkeypatch):
    config = resolved([*ONE_BYTE, "--optimizer.name=fisher"])
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    with refusal(r"optimizer: .*nngeometry"):
        build_optimizer(quantize(GPT(UNTIED), config), config, lambda step: [])


@pytest.mark.extra("nngeometry")
def test_fisher_takes_its_options():
    config = resolved([*ONE_BYTE, "--optimizer.name=fisher", "--optimizer.momentum=0.5"])
    optimizer = build_optimizer(quantize(GPT(UNTIED), config), config, lambda step: [])
    assert type(optimizer) is fm.optim.FisherNaturalGradient
    for group in optimizer.param_groups:
        assert (group["momentum"], group["refresh"], group["damping"], group["eps"]) == (0.5, 10, 0.1, 1e-8)


@each("name", ["stiffness_adamw", "stiffness_muon", "riemannian_adam", "adamw", "madam"])
def test_draws_reach_the_optimizer_and_are_its_own_unless_asked_for(name):
    asked = on_one_byte(name, "--optimizer.draws=dither")
    assert {group["draws"] for group in asked.param_groups} == {"dither"}
    assert {group["draws"] for group in on_one_byte(name).param_groups} <= {"independent", None}
