"""The figures of the page on geometry, computed by the library as they are drawn."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from _format_figures import code_maps, number_lines
from _looks import EXACT, LOOKS, NEAREST, STOCHASTIC, STYLE
from _motion_figures import field, geodesic, walk
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fp8manifold as fm
from nanogpt_bench.monitors.stall import update_lost


def normal_weights(sd: float, n: int = 20_000) -> torch.Tensor:
    """Return the normally distributed weights of a layer, the same in every figure."""
    return torch.randn(n, generator=torch.Generator().manual_seed(0)) * sd


def grid_manifold(weights: torch.Tensor, name: str) -> fm.FP8Manifold:
    """Return the manifold on which quantize_model would store these weights.

    Its scale is a power of two with headroom.
    """
    return fm.FP8Manifold(name, fm.storage_scale(weights, name, "tensor"))


def number_line() -> Figure:
    """Draw the values of four formats on a line, and the chart that numbers them."""
    figure, (line, chart) = plt.subplots(
        1, 2, figsize=(9, 4.2), width_ratios=(1.25, 1), layout="constrained"
    )
    names = ("E1M6", "E4M3", "E5M2", "E7M0")
    x = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    for row, name in enumerate(names):
        fmt = fm.FloatFormat.from_string(name)
        values = [value for value in fmt.values if 0 <= value <= 4]
        line.vlines(values, -row - 0.32, -row + 0.32, color=LOOKS[name]["color"], linewidth=0.9)
        chart.plot(x, fm.to_chart(x, fmt), label=name, **LOOKS[name])
    line.set(
        yticks=range(0, -len(names), -1), yticklabels=names, xlabel="value", xlim=(-0.05, 4.05)
    )
    line.set_title("representable values from 0 to 4: one tick each")
    line.spines["left"].set_visible(False)
    line.tick_params(left=False)
    chart.set(xlabel="value w", ylabel="code φ(w)", xticks=range(-4, 5, 2))
    chart.set_title("the chart: value to signed code")
    chart.legend(loc="upper left", handlelength=3.2)
    return figure


def stiffness() -> Figure:
    """Draw the spacing as a staircase, and its spread over the weights of a layer."""
    figure, (stairs, bars) = plt.subplots(
        1, 2, figsize=(9, 4.0), width_ratios=(1.25, 1), layout="constrained"
    )
    weights = normal_weights(0.05)
    names = ("E1M6", "E3M4", "E4M3", "E5M2", "E7M0")
    x = torch.logspace(-4.5, 0.15, 3000, dtype=torch.float64)
    spreads = []
    for name in names:
        manifold = grid_manifold(weights, name)
        stairs.plot(x, manifold.stiffness(x), label=name, **LOOKS[name])
        spreads.append(manifold.stiffness(weights).log2().std().item())
    stairs.set(xscale="log", yscale="log", xlabel="size of the weight |w|", ylabel="one ULP, S(w)")
    stairs.set_title("stiffness: the spacing at a weight")
    stairs.legend(loc="lower right", handlelength=3.2)
    colors = [LOOKS[name]["color"] for name in names]
    patches = bars.barh(names, spreads, color=colors, height=0.6)
    bars.bar_label(patches, [f"{spread:.2f}" for spread in spreads], padding=4)
    bars.invert_yaxis()
    bars.set(xlabel="standard deviation of log₂ S, in binades", xlim=(0, 1.2 * max(spreads)))
    bars.set_title("warp over weights from N(0, 0.05²)")
    return figure


def moving() -> Figure:
    """Draw the probability of moving, and the way of a weight under small updates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.0), layout="constrained")
    _draw_probability(left)
    _draw_drift(right)
    return figure


def _draw_probability(axes: Axes) -> None:
    """Draw the share of write-backs that change a weight, over the update in ULPs."""
    sizes = torch.linspace(0, 1.2, 121)
    weight = 1.25
    ulp = fm.ulp(torch.tensor(weight), "E4M3").item()
    targets = weight + ulp * sizes
    axes.plot(
        sizes,
        (fm.round_to_grid(targets, "E4M3") != weight).float(),
        color=NEAREST,
        label="nearest",
    )
    # Below a power of two the spacing is half of the ULP at it.
    shrunk = 1 - fm.ulp(torch.tensor(1.0), "E4M3").item() * sizes
    axes.plot(
        sizes,
        (fm.round_to_grid(shrunk, "E4M3") != 1).float(),
        color=NEAREST,
        linestyle=":",
        label="nearest, shrinking from a power of two",
    )
    repeated = targets.expand(4000, -1)
    moved = fm.round_to_grid(repeated, "E4M3", "stochastic", seed=0) != weight
    axes.plot(
        sizes, moved.float().mean(0), color=STOCHASTIC, linestyle=(0, (6, 1.5)), label="stochastic"
    )
    axes.set(
        xlabel="requested update |u| / S, in ULPs",
        ylabel="probability of moving",
        ylim=(-0.04, 1.45),
    )
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_title("one step of an E4M3 weight")
    axes.legend(loc="upper left")


def _draw_drift(axes: Axes, steps: int = 200, update: float = 0.005, copies: int = 400) -> None:
    """Draw a weight at 1 that is asked to grow by 0.005 (0.04 ULP) two hundred times."""
    paths = torch.ones(steps + 1, copies)
    nearest = torch.ones(steps + 1)
    for t in range(steps):
        paths[t + 1] = fm.round_to_grid(paths[t] + update, "E4M3", "stochastic", seed=0, step=t)
        nearest[t + 1] = fm.round_to_grid(nearest[t : t + 1] + update, "E4M3")
    axes.plot(
        paths[:, 0], color=STOCHASTIC, linewidth=1, alpha=0.75, label="stochastic, one weight"
    )
    axes.plot(
        paths.mean(1),
        color=STOCHASTIC,
        linestyle=(0, (6, 1.5)),
        label=f"stochastic, mean of {copies}",
    )
    axes.plot(
        [0, steps], [1, 1 + steps * update], color=EXACT, linestyle=":", label="without rounding"
    )
    axes.plot(nearest, color=NEAREST, label="nearest")
    axes.set(xlabel="steps", ylabel="weight", ylim=(0.93, 2.55))
    axes.set_title("200 updates of +0.005, each 0.04 ULP")
    axes.legend(loc="upper left")


def stalled() -> Figure:
    """Draw the share of a layer's weights that nearest rounding freezes, by rate."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    weights = normal_weights(0.05)
    rates = torch.logspace(-4.5, -0.9, 181)
    for name in ("E3M4", "E4M3", "E5M2", "E7M0"):
        manifold = grid_manifold(weights, name)
        before = manifold.projx(weights)
        shares = [_lost_share(manifold, before, lr) for lr in rates.tolist()]
        axes.plot(rates, shares, label=name, **LOOKS[name])
    axes.axvline(1e-3, color="#999999", linewidth=0.8)
    axes.text(1.06e-3, 1.055, "lr 10⁻³", color="#555555", fontsize=9)
    axes.set(
        xscale="log", xlabel="learning rate (Adam-like direction of size 1)", ylim=(-0.03, 1.12)
    )
    axes.set_ylabel("share of updates lost")
    axes.set_title("nearest write-back, weights from N(0, 0.05²)")
    axes.legend(loc="lower left", handlelength=3.2)
    return figure


def _lost_share(manifold: fm.FP8Manifold, before: torch.Tensor, lr: float) -> float:
    """Return the share of the updates by lr, up or down at random, that are lost."""
    signs = torch.randint(2, before.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    target = before - lr * signs
    return update_lost(before, target, manifold.projx(target))


def crossing() -> Figure:
    """Draw a weight that has to change sign in E7M0, by the lower bound on its stiffness."""
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    axes.plot(
        _path_through_zero(damping=2.0**-8),
        color=STOCHASTIC,
        linestyle="-",
        label="S / S_ref at least 2⁻⁸ (the default)",
    )
    axes.plot(
        _path_through_zero(damping=0.0),
        color=NEAREST,
        linestyle=(0, (4, 1.5)),
        label="no lower bound",
    )
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=2.0**-40, base=2)
    positive = {2.0**-2: "¼", 2.0**-14: "2⁻¹⁴", 2.0**-26: "2⁻²⁶"}
    negative = {-value: f"\u2212{label}" for value, label in positive.items()}
    ticks = positive | {0.0: "0"} | negative
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set(
        xlabel="steps of StiffnessAdamW, k = 1",
        ylabel="weight (signed log scale)",
        ylim=(-1, 2**12),
    )
    axes.set_title("a weight pulled from +¼ to \u2212¼ in E7M0")
    axes.legend(loc="upper right")
    return figure


def _path_through_zero(damping: float, steps: int = 300) -> list[float]:
    """Return the path of one weight of 64 that is pulled from +1/4 to -1/4.

    The goal of the others is 1/4, where they begin.
    """
    import geoopt

    goal = torch.full((64,), 0.25)
    manifold = fm.FP8Manifold("E7M0", fm.storage_scale(goal, "E7M0", "tensor"))
    weight = geoopt.ManifoldParameter(manifold.projx(goal), manifold=manifold)
    optimizer = fm.optim.StiffnessAdamW(
        [weight], lr=0.05, betas=(0.9, 0.95), weight_decay=0.0, stiffness=1.0, damping=damping
    )
    goal[0] = -0.25
    path = [0.25]
    for _ in range(steps):
        optimizer.zero_grad()
        (weight - goal).abs().sum().backward()
        optimizer.step()
        path.append(weight[0].item())
    return path


FIGURES: dict[str, Callable[[], Figure]] = {
    "number-line": number_line,
    "stiffness": stiffness,
    "moving": moving,
    "stalled": stalled,
    "crossing": crossing,
    "number-lines": number_lines,
    "code-maps": code_maps,
    "walk": walk,
    "geodesic": geodesic,
    "field": field,
}


def draw_all(folder: Path, suffix: str = "svg") -> None:
    """Draw every figure into the folder."""
    matplotlib.use("Agg")
    # A date would change an SVG file from day to day.
    metadata = {"Date": None} if suffix == "svg" else None
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=110, facecolor="white", metadata=metadata)
            plt.close(figure)
