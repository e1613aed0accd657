"""An optimizer that was made before a surgery goes on, or is refused by name.

`quantize_model` keeps the objects of parameters where it can. Where one was replaced, the
optimizer would train nothing, and its next step raises.
"""

import copy
import weakref

import geoopt
import pytest
import torch
import transformers
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
    return fm.quantize_model(model, "E4M3", storage="codes")


def with_embeddings(model):
    return fm.quantize_model(model, "E4M3", storage="codes", embeddings="E4M3")


#: what leaves the objects of parameters as they are
SURGERIES = {
    "codes": in_codes,
    "grid": lambda m: fm.quantize_model(m, "E4M3", storage="grid"),
    "master": lambda m: fm.quantize_model(m, "E4M3", storage="master"),
    "embeddings": with_embeddings,
}


def conv1d():
    """A model whose square weight is transposed by the surgery."""
    model = nn.Sequential(nn.Embedding(10, 8), transformers.pytorch_utils.Conv1D(8, 8))
    nn.init.normal_(model[1].weight)
    return model


def in_codes_though_referenced(model):
    model.reference = weakref.ref(model[1].weight)
    return in_codes(model)


def in_codes_during_a_pass(model):
    model.loss = loss(model)
    return in_codes(model)


#: name: (a model, what replaces its parameters, the first names in the message)
REPLACING = {
    "dequantised": (lambda: in_codes(network()), fm.dequantize_model, "'1.weight', '3.weight'"),
    "there and back": (network, lambda m: fm.dequantize_model(in_codes(m)), "'1.weight', "),
    "untied": (
        shared,
        lambda m: fm.quantize_model(m, "E4M3", storage="codes", tied="untie"),
        "'2.weight'",
    ),
    "untied alone": (
        shared,
        lambda m: fm.quantize_model(m, {"2": "E4M3"}, storage="codes", tied="untie"),
        "'2.weight'",
    ),
    "transposed": (conv1d, in_codes, "'1.weight'"),
    "referenced": (network, in_codes_though_referenced, "'1.weight'"),
    "a pass": (network, in_codes_during_a_pass, "'1.weight', '3.weight'"),
}


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        result = loss(model)
        result.backward()
        return result

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def values(model):
    plain = [p.dequantize() if isinstance(p, fm.FP8Parameter) else p for p in model.parameters()]
    return [p.detach().clone() for p in plain]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("surgery", SURGERIES)
def test_one_that_was_made_before_steps_as_one_that_is_made_afterwards(kind, surgery):
    first, second = network(), network()
    objects = list(first.parameters())
    optimizer = MAKERS[kind](first)
    SURGERIES[surgery](first)
    SURGERIES[surgery](second)
    assert [*map(id, first.parameters())] == [*map(id, objects)]
    start = values(first)
    later = MAKERS[kind](second)
    for _ in range(3):
        step(first, optimizer)
        step(second, later)
    assert all(map(torch.equal, values(first), values(second)))
    assert not all(map(torch.equal, values(first), start))


# LBFGS is at its minimum after a step
@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - {"lbfgs"}))
def test_one_that_has_stepped_floats_goes_on_with_its_state(kind):
    model = network()
    optimizer = MAKERS[kind](model)
    for _ in range(2):
        step(model, optimizer)
    in_codes(model)
    before = float(loss(model))
    for _ in range(20):
        step(model, optimizer)
    assert float(loss(model)) < before
    assert isinstance(model[1].weight, fm.FP8Parameter)


def test_gradients_hooks_and_attributes_stay_with_the_object():
    model, heard = network(), []
    weight = model[1].weight
    weight.register_hook(lambda gradient: heard.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    weight.note = "kept"
    loss(model).backward()
    gradient = weight.grad.clone()
    in_codes(model)
    assert weight is model[1].weight
    assert isinstance(weight, fm.FP8Parameter)
    assert torch.equal(weight.grad, gradient)
    assert weight.note == "kept"
    heard.clear()
    loss(model).backward()
    assert heard == ["gradient", "accumulated"]
    assert not torch.equal(weight.grad, gradient)


def test_a_layer_that_is_the_model_stays_as_it_is():
    """Its caller has it, beside the new one."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    quantized = in_codes(layer)
    assert type(layer.weight) is nn.Parameter
    quantized(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="replaced 'weight' in the model"):
        optimizer.step()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("surgery", REPLACING)
def test_one_whose_parameters_had_to_be_replaced_is_refused(kind, surgery):
    make, replace, names = REPLACING[surgery]
    model = make()
    optimizer = MAKERS[kind](model)
    loss(model).backward()
    replace(model)
    line = f"was made before quantize_model.* replaced ({names}).* make a new optimizer"
    with pytest.raises(RuntimeError, match=line):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match=line):
        step(model, optimizer)
    step(model, MAKERS[kind](model))


def test_one_of_a_model_without_values_is_refused_once_it_is_loaded():
    with torch.device("meta"):
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fm.files.load_into(model, network().state_dict(), "E4M3")
    with pytest.raises(RuntimeError, match=r"'1.weight', '3.weight'|'0.weight', '1.weight'"):
        step(model, optimizer)


@pytest.mark.parametrize("has_handle", [False, True])
def test_steps_in_backward_are_refused_too(has_handle):
    """In the backward pass, which loops without ``step()`` have, or when they begin."""
    model = in_codes(network())
    optimizer = optim.StiffnessAdamW(model.parameters(), 1e-2)
    if not has_handle:
        fm.dequantize_model(model)
        with pytest.raises(RuntimeError, match=r"replaced '1.weight', '3.weight' in the model"):
            optim.step_in_backward(optimizer)
        return
    handle = optim.step_in_backward(optimizer)
    fm.dequantize_model(model)
    with pytest.raises(RuntimeError, match=r"replaced '1.weight', '3.weight' in the model"):
        loss(model).backward()
    handle.remove()


def test_steps_in_backward_go_on_in_codes():
    first, second = network(), network()
    optim.step_in_backward(optim.StiffnessAdamW(first.parameters(), 1e-2))
    in_codes(first)
    in_codes(second)
    optim.step_in_backward(optim.StiffnessAdamW(second.parameters(), 1e-2))
    for _ in range(3):
        loss(first).backward()
        loss(second).backward()
    assert all(map(torch.equal, values(first), values(second)))


def test_what_has_the_new_parameters_goes_on():
    """The groups may have been edited."""
    model = in_codes(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fm.dequantize_model(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    old_values = values(model)
    step(model, optimizer)
    assert not torch.equal(model[1].weight, old_values[1])


def test_frozen_parameters_may_be_replaced():
    model = network()
    model[1].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fm.dequantize_model(in_codes(model))
    step(model, optimizer)


def test_a_parameter_that_another_model_has_too_is_trained_there():
    model, sharing = network(), network()
    sharing[1].weight = model[1].weight
    optimizer = torch.optim.SGD(sharing.parameters(), 0.1)
    in_codes(model)
    # the object is the same in both, as after `Module.to`
    assert sharing[1].weight is model[1].weight
    fm.dequantize_model(model)
    old_weight = sharing[1].weight.dequantize()
    step(sharing, optimizer)
    assert not torch.equal(sharing[1].weight.dequantize(), old_weight)
    copied = in_codes(copy.deepcopy(sharing))
    step(copied, torch.optim.SGD(copied.parameters(), 0.1))
