"""
Natural gradients with nngeometry
=================================

``FisherNaturalGradient`` measures the Fisher matrix of each layer with nngeometry and
takes natural gradients (in the coordinates of the codes with ``stiffness=1.0``). It
trains for two epochs on scikit-learn's digits, with weights in E4M3, one byte each.
StiffnessAdamW takes as many steps for comparison, with the same learning rate.

Needs scikit-learn and nngeometry (``pip install 'fp8manifold[examples,fisher]'``).
Expected output::

    StiffnessAdamW                    loss after 1 epoch 0.497, after 2 epochs 0.212
    FisherNaturalGradient, diagonal   loss after 1 epoch 0.395, after 2 epochs 0.192
    FisherNaturalGradient, kfac       loss after 1 epoch 0.278, after 2 epochs 0.135
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fp8manifold as fm

LR, BATCH = 1e-2, 64
Batches = list[tuple[Tensor, Tensor]]
MakeOptimizer = Callable[[nn.Module, Batches], torch.optim.Optimizer]


def data() -> tuple[Batches, Tensor, Tensor]:
    """Return shuffled training batches, and the images and labels of the test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    batches = [(x[batch], y[batch]) for batch in train.split(BATCH)]
    return batches, x[test], y[test]


def network() -> nn.Module:
    """Return a network in one byte per weight, with the same weights every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return fm.quantize_model(model, "E4M3", storage="codes")


def train(make_optimizer: MakeOptimizer) -> list[float]:
    """Return the test loss after each of two epochs."""
    batches, test_x, test_y = data()
    model = network()
    optimizer = make_optimizer(model, batches)
    losses = []
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(test_x), test_y).item())
    return losses


def adamw(model: nn.Module, batches: Batches) -> torch.optim.Optimizer:
    """Return StiffnessAdamW, which needs no batches."""
    return fm.optim.StiffnessAdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)


def fisher(representation: str) -> MakeOptimizer:
    """Return natural gradients by one form of the Fisher matrix.

    The matrix is measured again in every tenth step, on two batches.
    """

    def make_optimizer(model: nn.Module, batches: Batches) -> torch.optim.Optimizer:
        return fm.optim.FisherNaturalGradient(
            model.parameters(),
            model,
            batches,
            lr=LR,
            representation=representation,
            refresh=10,
            batches=2,
        )

    return make_optimizer


if __name__ == "__main__":
    optimizers = {
        "StiffnessAdamW": adamw,
        "FisherNaturalGradient, diagonal": fisher("diagonal"),
        "FisherNaturalGradient, kfac": fisher("kfac"),
    }
    for name, make_optimizer in optimizers.items():
        first, second = train(make_optimizer)
        print(f"{name:<34}loss after 1 epoch {first:.3f}, after 2 epochs {second:.3f}")
