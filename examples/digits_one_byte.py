"""
Digits in one byte per weight
=============================

A small MLP learns scikit-learn's handwritten digits (1,797 real images of 8 x 8 pixels)
three ways: AdamW on float32 weights, and StiffnessAdamW on weights that are E4M3
numbers with no other copy, with float32 and with 8-bit averages. The last column counts
all bytes of the weight matrices: weights, scales and optimizer state.

Needs scikit-learn (``pip install 'fp8manifold[examples]'``).  Expected output::

    float32, AdamW                            test accuracy 0.975   bytes per weight 12.0
    E4M3, StiffnessAdamW                      test accuracy 0.978   bytes per weight 9.1
    E4M3, StiffnessAdamW, 8-bit averages      test accuracy 0.975   bytes per weight 3.2
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fp8manifold as fm

EPOCHS, BATCH = 20, 64


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pixels in [0, 1] and labels, to train on and to test with.

    A fifth of the images, drawn once, is for the test.
    """
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return x[train], y[train], x[test], y[test]


def network() -> nn.Sequential:
    """Return the network, with the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train on shuffled batches and return the accuracy on the test images."""
    x, y, test_x, test_y = data()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(test_x).argmax(1) == test_y).float().mean().item()


def bytes_per_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of the weight matrices and their state, per weight."""
    total, count = 0, 0
    for weight in model.parameters():
        if weight.ndim != 2:
            continue
        if isinstance(weight, fm.FP8Tensor):
            total += weight.codes.nbytes + weight.scale.nbytes
        else:
            total += weight.nbytes
        state = optimizer.state[weight].values()
        total += sum(value.nbytes for value in state if isinstance(value, Tensor))
        count += weight.numel()
    return total / count


def report(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train and print one line."""
    accuracy = train(model, optimizer)
    size = bytes_per_weight(model, optimizer)
    print(f"{name:<42}test accuracy {accuracy:.3f}   bytes per weight {size:.1f}")


if __name__ == "__main__":
    model = network()
    report("float32, AdamW", model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    names = {"float32": "E4M3, StiffnessAdamW", "8bit": "E4M3, StiffnessAdamW, 8-bit averages"}
    for moments, name in names.items():
        model = fm.quantize_model(network(), "E4M3", storage="codes")
        optimizer = fm.optim.StiffnessAdamW(
            model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, moments=moments
        )
        report(name, model, optimizer)
