"""Figures of weights in motion: write-backs, geodesics, and the stiffness field that
training leaves.
"""

import math

import torch
from _looks import EXACT, LOOKS, NEAREST, STOCHASTIC
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import fp8manifold as fm

WRITEBACKS = {
    "nearest": (NEAREST, "-"),
    "stochastic": (STOCHASTIC, "-"),
    "residual8": ("#009E73", (0, (6, 1.5))),
    "momentum": ("#CC79A7", (0, (3, 1.2))),
}


def walk() -> Figure:
    """E4M3 weights that SGD asks to grow by 0.04 ULP per step: six under stochastic
    rounding, one under each other.
    """
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    steps, update = 200, 0.005
    axes.plot(
        [0, steps], [1, 1 + steps * update], color=EXACT, linestyle=":", label="without rounding"
    )
    for name, (color, linestyle) in WRITEBACKS.items():
        paths = _walk(name, steps, update, 6 if name == "stochastic" else 1)
        width = 0.8 if name == "stochastic" else 1.5
        lines = axes.plot(paths, color=color, linestyle=linestyle, linewidth=width)
        lines[0].set_label(name)
    axes.set(xlabel="steps of StiffnessSGD, k = 0", ylabel="weight", ylim=(0.93, 2.3))
    axes.set_title("200 updates of +0.005, each 0.04 ULP at first")
    axes.legend(loc="upper left")
    return figure


def _walk(writeback: str, steps: int, update: float, weights: int) -> torch.Tensor:
    """The paths, a column each, of weights whose gradient is -1 throughout."""
    weight = fm.FP8Parameter(torch.ones(1, weights), "E4M3", scale=1.0, seed=1)
    momentum = 0.9 if writeback == "momentum" else 0.0
    lr = update * (1 - momentum)
    options = {"momentum": momentum, "stiffness": 0.0, "writeback": writeback, "seed": 3}
    optimizer = fm.optim.StiffnessSGD([weight], lr=lr, **options)
    path = [weight.dequantize()]
    for _ in range(steps):
        weight.grad = torch.full_like(path[0], -1.0)
        optimizer.step()
        path.append(weight.dequantize())
    return torch.cat(path)


def geodesic() -> Figure:
    """From one weight to another: along the straight line, and along the geodesics of
    two formats.
    """
    figure, (value, codes) = plt.subplots(1, 2, figsize=(9, 4.0), layout="constrained")
    start, end = torch.tensor(-0.25), torch.tensor(4.0)
    t = torch.linspace(0, 1, 801)
    line = start + t * (end - start)
    value.plot(t, line, color=EXACT, linestyle=":", label="straight line")
    for name in ("E4M3", "E5M2", "E7M0"):
        manifold = fm.StiffnessManifold(name)
        curve = manifold.expmap(start, t * manifold.logmap(start, end))
        value.plot(t, curve, label=f"geodesic of {name}", **LOOKS[name])
        codes.plot(t, manifold.to_chart(line), label=f"straight line, in {name}", **LOOKS[name])
        ends = manifold.to_chart(torch.stack((start, end)))
        codes.plot([0, 1], ends, color=LOOKS[name]["color"], linewidth=0.7)
    value.set(xlabel="share of the way", ylabel="weight")
    value.set_title("in value")
    codes.set(xlabel="share of the way", ylabel="code φ(w)")
    codes.set_title("in codes: geodesics are the thin straight lines")
    for axes in (value, codes):
        axes.legend(loc="upper left" if axes is value else "lower right", handlelength=3.2)
    return figure


def field() -> Figure:
    """One ULP at each weight of a layer, before and after it has been trained in one
    byte per weight.
    """
    figure, grid = plt.subplots(1, 2, figsize=(9, 4.3), layout="constrained")
    before, after = _fields()
    both = torch.cat((before, after)).flatten()
    limits = (
        float(both.quantile(0.02)),
        float(both.max()),
    )  # the few nearest to zero would take all of the colours
    for axes, stiffness, title in zip(
        grid, (before, after), ("before training", "after training"), strict=True
    ):
        image = _field(axes, stiffness, title, limits)
    figure.colorbar(image, ax=grid, shrink=0.85, label="log₂ S", extend="min")
    return figure


def _field(axes: Axes, stiffness: Tensor, title: str, limits: tuple[float, float]) -> object:
    image = axes.imshow(
        stiffness.numpy(), cmap="cividis", vmin=limits[0], vmax=limits[1], interpolation="nearest"
    )
    axes.set(xlabel="input", ylabel="output", xticks=range(0, 33, 8), yticks=range(0, 33, 8))
    axes.set_title(f"{title}: warp {stiffness.std().item():.2f} binades")
    return image


def _fields(steps: int = 300) -> tuple[Tensor, Tensor]:
    """log2 S of the hidden layer of a network that learns a sine."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1)
    )
    model = fm.quantize_model(model, "E4M3", storage="fp8", granularity="tensor")
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    x = torch.linspace(-1, 1, 128)[:, None]
    before = _stiffness(model[2])
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - torch.sin(2 * math.pi * x)).square().mean().backward()
        optimizer.step()
    return before, _stiffness(model[2])


def _stiffness(layer: nn.Module) -> Tensor:
    weight = layer.weight.detach()
    return layer.weight.manifold.stiffness(weight.dequantize()).log2()
