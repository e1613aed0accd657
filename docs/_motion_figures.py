"""Figures of weights in motion.

They show write-backs, geodesics, and the stiffness field that training leaves.
"""

import math
from typing import Any

import torch
from _looks import EXACT, LOOKS, NEAREST, STOCHASTIC
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn

import fp8manifold as fm

#: colour and line style of each write-back
WRITEBACK_LOOKS: dict[str, dict[str, Any]] = {
    "nearest": {"color": NEAREST, "linestyle": "-"},
    "stochastic": {"color": STOCHASTIC, "linestyle": "-"},
    "residual8": {"color": "#009E73", "linestyle": (0, (6, 1.5))},
    "momentum": {"color": "#CC79A7", "linestyle": (0, (3, 1.2))},
}


def walk() -> Figure:
    """Draw E4M3 weights that SGD asks to grow by 0.04 ULP per step, by write-back.

    Six are under stochastic rounding, and one is under each other write-back.
    """
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    steps, update = 200, 0.005
    axes.plot(
        [0, steps], [1, 1 + steps * update], color=EXACT, linestyle=":", label="without rounding"
    )
    for name, look in WRITEBACK_LOOKS.items():
        weights, width = (6, 0.8) if name == "stochastic" else (1, 1.5)
        paths = _walk_paths(name, steps, update, weights)
        lines = axes.plot(paths, **look, linewidth=width)
        lines[0].set_label(name)
    axes.set(xlabel="steps of StiffnessSGD, k = 0", ylabel="weight", ylim=(0.93, 2.3))
    axes.set_title("200 updates of +0.005, each 0.04 ULP at first")
    axes.legend(loc="upper left")
    return figure


def _walk_paths(writeback: str, steps: int, update: float, weights: int) -> torch.Tensor:
    """Return the paths, a column each, of weights whose gradient is -1 throughout."""
    weight = fm.FP8Parameter(torch.ones(1, weights), "E4M3", scale=1.0, seed=1)
    momentum = 0.9 if writeback == "momentum" else 0.0
    optimizer = fm.optim.StiffnessSGD(
        [weight],
        lr=update * (1 - momentum),
        momentum=momentum,
        stiffness=0.0,
        writeback=writeback,
        seed=3,
    )
    path = [weight.dequantize()]
    for _ in range(steps):
        weight.grad = torch.full_like(path[0], -1.0)
        optimizer.step()
        path.append(weight.dequantize())
    return torch.cat(path)


def geodesic() -> Figure:
    """Draw the straight line from one weight to another, and the geodesics of formats."""
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
    value.legend(loc="upper left", handlelength=3.2)
    codes.legend(loc="lower right", handlelength=3.2)
    return figure


def field() -> Figure:
    """Draw one ULP at each weight of a layer, before and after training in one byte."""
    figure, grid = plt.subplots(1, 2, figsize=(9, 4.3), layout="constrained")
    before, after = _fields_of_training()
    both = torch.cat((before, after)).flatten()
    # The few weights nearest to zero would take all of the colours.
    colors = Normalize(float(both.quantile(0.02)), float(both.max()))
    _draw_field(grid[0], before, "before training", colors)
    image = _draw_field(grid[1], after, "after training", colors)
    figure.colorbar(image, ax=grid, shrink=0.85, label="log₂ S", extend="min")
    return figure


def _draw_field(axes: Axes, stiffness: Tensor, title: str, colors: Normalize) -> object:
    image = axes.imshow(stiffness.numpy(), cmap="cividis", norm=colors, interpolation="nearest")
    axes.set(xlabel="input", ylabel="output", xticks=range(0, 33, 8), yticks=range(0, 33, 8))
    axes.set_title(f"{title}: warp {stiffness.std().item():.2f} binades")
    return image


def _fields_of_training(steps: int = 300) -> tuple[Tensor, Tensor]:
    """Return log2 S of a hidden layer before and after its network has learnt a sine."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1)
    )
    model = fm.quantize_model(model, "E4M3", storage="codes", granularity="tensor")
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    x = torch.linspace(-1, 1, 128)[:, None]
    before = _log2_stiffness(model[2])
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - torch.sin(2 * math.pi * x)).square().mean().backward()
        optimizer.step()
    return before, _log2_stiffness(model[2])


def _log2_stiffness(layer: nn.Module) -> Tensor:
    weight = layer.weight.detach()
    return layer.weight.manifold.stiffness(weight.dequantize()).log2()
