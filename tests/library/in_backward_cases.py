"""Cases of steps in the backward pass: a network, optimizers by name, a loop, everything as lists."""

import torch
from optimizer_cases import frozen
from torch import nn

import fp8manifold as fm
from fp8manifold import optim

TOKENS = torch.arange(10)
OPTIMIZERS = {
    "muon": lambda m: optim.StiffnessMuon.for_model(m, 1e-2, moments="8bit"),
    "muon_residual8": lambda m: optim.StiffnessMuon.for_model(m, 1e-2, writeback="residual8"),
    "adamw": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, moments="8bit"),
    "adamw_residual8": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, writeback="residual8"),
    "adamw_annealed": lambda m: optim.StiffnessAdamW(m.parameters(), 1e-2, stiffness=optim.anneal(1.0, 0.0, 3)),
    "lion": lambda m: optim.StiffnessLion(m.parameters(), 1e-3),
    "sgd": lambda m: optim.StiffnessSGD(m.parameters(), 1e-2, momentum=0.9),
    "riemannian": lambda m: optim.RiemannianAdam(m.parameters(), 0.1, float_lr=1e-3),
    "madam": lambda m: optim.Madam(m.parameters(), 1e-2),
}


def network(storage):
    torch.manual_seed(0)
    layers = [nn.Embedding(10, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    return model if storage is None else fm.quantize_model(model, "E4M3", storage=storage)


def stepping(name="adamw", storage="fp8", *, measured=False, **options):
    """A network, its optimizer, and the handle of steps in the backward pass, whose norm is measured on request."""
    model = network(storage)
    optimizer = OPTIMIZERS[name](model)
    handle = optim.step_in_backward(optimizer, **options)
    if measured:
        measure(model, handle)
    return model, optimizer, handle


def measure(model, handle):
    with handle.measure():
        loss(model).backward()


def ordinary(name="adamw", storage="fp8"):
    model = network(storage)
    return model, OPTIMIZERS[name](model)


def loss(model):
    return model(TOKENS).square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def everything(model, optimizer):
    return [frozen(dict(model.state_dict())), frozen(optimizer.state_dict())]
