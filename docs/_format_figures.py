"""Figures of the formats: where their values lie, and what their codes stand for."""

import math

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import fp8manifold as fm

TABLED = tuple(name for name in fm.NAMED_FORMATS if not name.startswith("P3109"))
MAPPED = ("E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0", "E4M3FNUZ")
NOT_A_NUMBER = "#D55E00"
INFINITE = "#E69F00"
SUBNORMAL = "#E69F00"
NORMAL = "#0072B2"


def number_lines() -> Figure:
    """Draw the positive values of every tabled format, on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for row, name in enumerate(TABLED):
        fmt = fm.FloatFormat.from_string(name)
        positive = [value for value in fmt.values if value > 0]
        values_by_color = {
            SUBNORMAL: [value for value in positive if value < fmt.min_normal],
            NORMAL: [value for value in positive if value >= fmt.min_normal],
        }
        for color, values in values_by_color.items():
            axes.vlines(values, -row - 0.34, -row + 0.34, color=color, linewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.set(
        yticks=range(0, -len(TABLED), -1),
        yticklabels=TABLED,
        xlabel="positive value (zero is off to the left)",
    )
    axes.set_xticks([2.0**e for e in range(-64, 65, 16)])
    axes.set_title("every positive value: subnormal in orange, normal in blue")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def code_maps() -> Figure:
    """Draw the codes of eight formats, a square each.

    The high half of the byte goes down and the low half across. The colour is the size
    of the value.
    """
    figure, grid = plt.subplots(2, 4, figsize=(9, 5.6), layout="constrained")
    for axes, name in zip(grid.flat, MAPPED, strict=True):
        image = _code_map(axes, fm.FloatFormat.from_string(name))
    bar = figure.colorbar(image, ax=grid, shrink=0.8, extend="both")
    bar.set_label("log₂ |value|")
    kinds = {"NaN": NOT_A_NUMBER, "infinity": INFINITE, "zero": "#ffffff"}
    patches = [
        Patch(facecolor=color, edgecolor="#555555", label=kind) for kind, color in kinds.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def _code_map(axes: Axes, fmt: fm.FloatFormat) -> object:
    values = np.array([fmt.decode_code(code) for code in range(256)]).reshape(16, 16)
    finite = np.isfinite(values) & (values != 0)
    log2_sizes = np.full(values.shape, np.nan)
    log2_sizes[finite] = np.log2(np.abs(values[finite]))
    image = axes.imshow(
        log2_sizes, cmap="cividis", norm=Normalize(-10, 10), interpolation="nearest"
    )
    special = {NOT_A_NUMBER: np.isnan(values), INFINITE: np.isinf(values)}
    for color, mask in special.items():
        for row, column in np.argwhere(mask):
            axes.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, color=color, linewidth=0))
    axes.axhline(7.5, color="white", linewidth=1.2)
    ticks = range(0, 16, 4)
    axes.set(
        xticks=ticks,
        yticks=ticks,
        xticklabels=[f"_{digit:X}" for digit in ticks],
        yticklabels=[f"{digit:X}_" for digit in ticks],
    )
    axes.tick_params(labelsize=8, length=2)
    axes.set_title(f"{fmt.name}: to {_short_text(fmt.max)}", fontsize=9.5)
    return image


def _short_text(value: float) -> str:
    """Return the value, with a power of two where its digits would be many."""
    if value < 1e6:
        return f"{value:g}"
    fraction, exponent = math.frexp(value)
    factor = "" if fraction == 0.5 else f"{2 * fraction:g}·"
    return f"{factor}$2^{{{exponent - 1}}}$"
