"""`StiffnessWrapper` around an optimizer that swaps weights between two modes.

The stub has the protocol of the package `schedulefree`, which is tested where it is
installed.
"""

import pytest
import torch
from torch import nn

import fp8manifold as fm

X = torch.linspace(-1, 1, 32)[:, None].repeat(1, 8) * torch.arange(1, 9)


class Stub(torch.optim.Optimizer):
    """Schedule-free SGD: y is trained, x is their average, z takes the steps."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, group, weight):
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], weight)
        group["train_mode"] = not group["train_mode"]

    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["beta"])

    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["beta"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            share, beta = 1 / group["k"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                p.lerp_(state["z"], share)
                p.add_(p.grad, alpha=group["lr"] * (beta * (1 - share) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


def published(params):
    import schedulefree

    return schedulefree.AdamWScheduleFree(params, lr=0.02, foreach=False)


MAKERS = [
    Stub,
    pytest.param(published, marks=pytest.mark.extra("schedulefree")),
]
makers = pytest.mark.parametrize("make", MAKERS)
storages = pytest.mark.parametrize("storage", ["grid", "codes"])


def trained(make, storage, steps=30):
    torch.manual_seed(0)
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 1)), "E4M3", storage=storage)
    optimizer = fm.optim.StiffnessWrapper(make(model.parameters()))
    optimizer.train()
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def loss(model):
    return (model(X) - X.mean(-1, keepdim=True)).square().mean()


def step(model, optimizer):
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def values(model):
    weight = model[0].weight
    return (weight.dequantize() if isinstance(weight, fm.FP8Tensor) else weight).detach().clone()


@makers
def test_both_modes_are_on_the_grid(make):
    model, optimizer = trained(make, "grid")
    manifold = model[0].manifold
    in_training = values(model)
    optimizer.eval()
    assert torch.equal(manifold.projx(model[0].weight), model[0].weight)
    assert not torch.equal(values(model), in_training)
    optimizer.train()
    assert torch.equal(manifold.projx(model[0].weight), model[0].weight)


@makers
@storages
def test_training_goes_on_from_the_same_weights(make, storage):
    model, optimizer = trained(make, storage)
    for _ in range(3):
        in_training = values(model)
        optimizer.eval()
        optimizer.eval()
        optimizer.train()
        assert torch.equal(values(model), in_training)
    step(model, optimizer)


@makers
@storages
def test_weights_that_were_changed_in_evaluation_are_not_undone(make, storage):
    model, optimizer = trained(make, storage)
    in_training = values(model)
    optimizer.eval()
    with torch.no_grad():
        model[0].weight.copy_(-values(model))
    optimizer.train()
    assert not torch.equal(values(model), in_training)
    if storage == "grid":
        weight = model[0].weight
        assert torch.equal(model[0].manifold.projx(weight), weight)


@makers
@storages
def test_it_learns_and_its_sequence_is_in_floats(make, storage):
    model, optimizer = trained(make, storage, steps=200)
    optimizer.eval()
    untrained, _ = trained(make, storage, steps=0)
    assert float(loss(model)) < 0.2 * float(loss(untrained))
    state = optimizer.optimizer.state[model[0].weight]
    assert not isinstance(state["z"], fm.FP8Tensor)


def test_an_optimizer_without_modes_has_the_same_weights_in_both():
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 1)), "E4M3")
    optimizer = fm.optim.StiffnessWrapper(torch.optim.SGD(model.parameters(), 0.1))
    before = values(model)
    optimizer.eval()
    optimizer.train()
    assert torch.equal(values(model), before)
