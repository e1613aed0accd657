"""
Muon, in two bytes per weight
=============================

A small convolutional network learns scikit-learn's handwritten digits (1,797 real
images of 8 x 8 pixels) three ways: AdamW and Muon on float32 weights, and Muon on
linear layers whose weights are E4M3 numbers with no other copy, with a momentum of one
byte. ``for_model`` leaves all parameters that are not hidden matrices, the head and the
biases, to Adam. The third run steps in the backward pass: no two gradients need memory
at once.

The last column counts all bytes (weights, scales and optimizer state) per weight of all
layers. The kernels of the convolutions, which stay floats, count too.

Needs scikit-learn (``pip install 'fp8manifold[examples]'``).  Expected output::

    float32, AdamW                            test accuracy 0.983   bytes per weight 12.0
    float32, Muon                             test accuracy 0.986   bytes per weight 8.0
    E4M3, Muon, 8-bit averages                test accuracy 0.983   bytes per weight 2.4
"""

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fp8manifold as fm

EPOCHS, BATCH, RATE = 10, 64, 3e-3


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pixels in [0, 1] and labels, to train on and to test with.

    A fifth of the images, drawn once, is for the test.
    """
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return x[train], y[train], x[test], y[test]


def network() -> nn.Sequential:
    """Return two convolutions, a hidden layer and a head, with the same weights every time."""
    torch.manual_seed(0)
    layers = {
        "first": nn.Conv2d(1, 32, 3, padding=1),
        "relu1": nn.ReLU(),
        "second": nn.Conv2d(32, 64, 3, stride=2, padding=1),
        "relu2": nn.ReLU(),
        "flat": nn.Flatten(),
        "hidden": nn.Linear(1024, 128),
        "relu3": nn.ReLU(),
        "head": nn.Linear(128, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train on shuffled batches and return the accuracy on the test images."""
    x, y, test_x, test_y = data()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            # Under step_in_backward the weights are stepped already; this ends the step.
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(test_x).argmax(1) == test_y).float().mean().item()


def bytes_per_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights and their state, per weight; biases are left out."""
    total, count = 0, 0
    for weight in model.parameters():
        if weight.ndim == 1:
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
    report("float32, AdamW", model, torch.optim.AdamW(model.parameters(), lr=RATE))

    model = network()
    report("float32, Muon", model, fm.optim.StiffnessMuon.for_model(model, lr=RATE))

    model = fm.quantize_model(network(), "E4M3", storage="codes")
    optimizer = fm.optim.StiffnessMuon.for_model(model, lr=RATE, moments="8bit")
    fm.optim.step_in_backward(optimizer)
    report("E4M3, Muon, 8-bit averages", model, optimizer)
