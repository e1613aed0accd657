"""Parameter groups and the optimizers they go to."""

from __future__ import annotations

import torch

from nanogpt_bench.model import GPT, GPTShape
from nanogpt_bench.optimizers import build_optimizer, parameter_groups, stiffness_at
from nanogpt_bench.resolve import resolve
from nanogpt_bench.settings import load_config

SHAPE = GPTShape(1, 2, 8, 16, vocab_size=11, bias=True, tie_weights=True)


def test_matrices_decay_and_vectors_do_not_and_tied_weights_count_once() -> None:
    model = GPT(SHAPE)
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_a_group_without_parameters_is_left_out() -> None:
    assert len(parameter_groups(torch.nn.Linear(3, 3, bias=False), 0.1)) == 1


def test_options_reach_the_optimizer() -> None:
    arguments = [
        "--optimizer.lr",
        "0.5",
        "--optimizer.beta1",
        "0.8",
        "--optimizer.beta2",
        "0.7",
        "--optimizer.eps=1e-6",
    ]
    optimizer = build_optimizer(GPT(SHAPE), resolve(load_config(None, arguments)))
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.7), 1e-6)


def test_sgd_has_its_momentum() -> None:
    optimizer = build_optimizer(GPT(SHAPE), resolve(load_config(None, ["--rule", "sgd", "--optimizer.momentum=0.5"])))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_float_rule_has_no_stiffness() -> None:
    assert stiffness_at(resolve(load_config(None, [])), 0) is None
