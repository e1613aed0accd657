"""An optimizer that was made before its model's parameters were replaced trains nothing.

It is refused at its first step, with their names.
"""

import copy

import geoopt
import pytest
import torch
from torch import nn

import fp8manifold as fm
from fp8manifold import optim

TOKENS = torch.arange(10)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def shared():
    """A model whose head has the weight of its embedding."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False))
    model[2].weight = model[0].weight
    return model


def loss(model):
    return model(TOKENS).square().mean()


MAKERS = {
    "adamw": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2),
    "muon": lambda m: optim.StiffnessMuon.for_model(m, 1e-2),
    "torch": lambda m: torch.optim.AdamW(m.parameters()),
    "wrapper": lambda m: optim.StiffnessWrapper(torch.optim.SGD(m.parameters(), 0.1)),
    "geoopt": lambda m: geoopt.optim.RiemannianAdam(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters()),
}


def in_codes(model):
    return fm.quantize_model(model, "E4M3", storage="fp8")


#: name: (a model, what replaces its parameters, the first names in the message)
SURGERIES = {
    "codes": (network, in_codes, "'1.weight', '3.weight'"),
    "grid": (network, lambda m: fm.quantize_model(m, "E4M3", storage="grid"), "'1.weight', "),
    "embeddings": (
        network,
        lambda m: fm.quantize_model(m, "E4M3", storage="fp8", embeddings="E4M3"),
        "('[013].weight'(, )?){3}",
    ),
    "dequantised": (lambda: in_codes(network()), fm.dequantize_model, "'1.weight', '3.weight'"),
    "there and back": (network, lambda m: fm.dequantize_model(in_codes(m)), "'1.weight', "),
    "untied": (
        shared,
        lambda m: fm.quantize_model(m, "E4M3", storage="fp8", tied="untie"),
        "'1.weight', '2.weight'|'2.weight', '1.weight'",
    ),
    "untied alone": (
        shared,
        lambda m: fm.quantize_model(m, {"2": "E4M3"}, storage="fp8", tied="untie"),
        "'2.weight'",
    ),
}


def step(model, optimizer):
    optimizer.zero_grad()
    loss(model).backward()
    # LBFGS asks for a closure.
    optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("surgery", SURGERIES)
def test_an_optimizer_that_was_made_before_is_refused(kind, surgery):
    make, replace, names = SURGERIES[surgery]
    model = make()
    optimizer = MAKERS[kind](model)
    loss(model).backward()
    replace(model)
    line = f"was made before quantize_model.* replaced ({names}).* make the optimizer afterwards"
    with pytest.raises(RuntimeError, match=line):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match=line):
        step(model, optimizer)
    step(model, MAKERS[kind](model))


def test_one_of_a_model_without_values_is_refused_once_it_is_loaded():
    with torch.device("meta"):
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fm.load_quantized(model, network().state_dict(), "E4M3")
    with pytest.raises(RuntimeError, match=r"'1.weight', '3.weight'|'0.weight', '1.weight'"):
        step(model, optimizer)


@pytest.mark.parametrize("has_handle", [False, True])
def test_steps_in_backward_are_refused_too(has_handle):
    """In the backward pass, which loops without ``step()`` have, or when they begin."""
    model = network()
    optimizer = optim.StiffnessAdamW(model.parameters(), 1e-2)
    if not has_handle:
        in_codes(model)
        with pytest.raises(RuntimeError, match=r"replaced '1.weight', '3.weight' in the model"):
            optim.step_in_backward(optimizer)
        return
    handle = optim.step_in_backward(optimizer)
    in_codes(model)
    with pytest.raises(RuntimeError, match=r"replaced '1.weight', '3.weight' in the model"):
        loss(model).backward()
    handle.remove()


def test_what_has_the_new_parameters_goes_on():
    """The groups may have been edited."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    in_codes(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    old_values = model[1].weight.dequantize()
    step(model, optimizer)
    assert not torch.equal(model[1].weight.dequantize(), old_values)


def test_frozen_parameters_may_be_replaced():
    model = network()
    model[1].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    in_codes(model)
    step(model, optimizer)


def test_a_parameter_that_another_model_has_too_is_trained_there():
    model, sharing = network(), network()
    sharing[1].weight = model[1].weight
    optimizer = torch.optim.SGD(sharing.parameters(), 0.1)
    in_codes(model)
    old_weight = sharing[1].weight.detach().clone()
    step(sharing, optimizer)
    assert not torch.equal(sharing[1].weight.detach(), old_weight)
    copied = in_codes(copy.deepcopy(sharing))
    step(copied, torch.optim.SGD(copied.parameters(), 0.1))
