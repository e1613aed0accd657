"""A model and what is done with it, without an import of geoopt before it is asked for.

Tests call these functions here, and in processes that have not imported geoopt.
"""

import copy
import hashlib
import importlib
import io
import pickle
import sys
from pathlib import Path

import torch
from torch import nn

import fp8manifold as fm

#: geoopt's optimizers, and their learning rates
RATES = {"RiemannianAdam": 0.7, "RiemannianSGD": 50.0}


def imported():
    """Return which of the packages that nobody has asked for are imported."""
    return sorted({"geoopt", "scipy"} & sys.modules.keys())


def model(**options):
    """Return a model of two layers, in codes unless an option says otherwise."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))
    return fm.quantize_model(layers, "E4M3", **options)


def gradients(net):
    """Give the parameters of a model gradients."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    net(x).square().mean().backward()


def step(net, optimizer):
    """Take a step."""
    optimizer.zero_grad()
    gradients(net)
    optimizer.step()


def word_of(weights):
    """Return codes, scales and counts as one word."""
    digest = hashlib.sha256()
    for weight in weights:
        for part in (weight.codes, weight.kept_scale, weight.counter):
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def word_after_steps(net, kind, count=3):
    """Take steps of an optimizer, and return the word of the weights."""
    optimizer = kind(net.parameters(), lr=RATES[kind.__name__])
    for _ in range(count):
        step(net, optimizer)
    return word_of(net.parameters())


def word_after_geoopt(net, name):
    """Take steps of geoopt's optimizer of a name, and return the word of the weights."""
    return word_after_steps(net, getattr(importlib.import_module("geoopt.optim"), name))


def train_and_save():
    """Do with a model in codes what most users do."""
    net = model()
    parameters = list(net.parameters())
    optimizers = [
        fm.optim.StiffnessAdamW(parameters, moments="8bit"),
        fm.optim.StiffnessMuon(parameters),
        fm.optim.RiemannianAdam(parameters),
        torch.optim.AdamW(parameters),
    ]
    for optimizer in optimizers:
        step(net, optimizer)
        optimizer.load_state_dict(through_file(optimizer.state_dict()))
    net.load_state_dict(through_file(net.state_dict()))
    copy.deepcopy(net), pickle.loads(pickle.dumps(net)), fm.averaged_model(net)
    str(net), repr(parameters[0]), fm.quantization_report(net)
    net.to(torch.bfloat16)


def through_file(state):
    """Save a state, and load it as tensors alone."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def write_files(folder):
    """Write a model in the ways of Python and of torch."""
    net = model()
    folder = Path(folder)
    (folder / "model.pickle").write_bytes(pickle.dumps(net))
    (folder / "weight.pickle").write_bytes(pickle.dumps(net[0].weight))
    torch.save(net, folder / "model.pt")
    torch.save(net[0].weight, folder / "weight.pt")
    torch.save(net.state_dict(), folder / "state.pt")


def read(path):
    """Return what is in a pickle."""
    return pickle.loads(Path(path).read_bytes())


def words_of_files(folder):
    """Read what `write_files` wrote; return words of three models, and of two weights."""
    folder = Path(folder)
    net = model()
    nn.init.zeros_(net[0].weight)
    net.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    models = [read(folder / "model.pickle"), torch.load(folder / "model.pt", weights_only=False)]
    weights = [
        read(folder / "weight.pickle"),
        torch.load(folder / "weight.pt", weights_only=True),
    ]
    assert {type(weight) for weight in weights} == {fm.FP8Parameter}
    words = [word_of(net.parameters()) for net in (*models, net)]
    return words + [word_of([weight]) for weight in weights]
