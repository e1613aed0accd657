"""A table of whether the weights of trained layers are spread evenly over the codes.

Law 3 of docs/laws.md: where gradients have no mean, rounding alone would spread weights
evenly over the codes of a format, so that all binades above the subnormals have one
share. Near zero a normal distribution has twice the share in each next binade.

    python study/binades.py runs/q24-E5M2 runs/q24-E4M3
    python study/binades.py runs/q24-muon --format E5M2

For each run of weights on a grid, its last checkpoint gives the codes. With a format float
weights are looked at in units of the scales that they would have in it. The binades
between the first percentile and the median of the magnitudes count. Shown are, for the
quarter of layers with the least |mean gradient| over its deviation (over the last
quarter of the measurements) and the quarter with the most, the slope of log2 share
against binade: 0 is uniform over codes, 1 a normal distribution. `normal` is the same
slope of normal weights with each row's deviation, and `off by` the largest ratio of a
share to theirs.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent.parent / "docs")]

from _markdown import markdown  # noqa: E402

import fp8manifold as fm  # noqa: E402
from nanogpt_bench.monitors.gradients import GRAD_SNR  # noqa: E402
from nanogpt_bench.runs.load import Run, load_run  # noqa: E402
from nanogpt_bench.runs.trained import Trained, choose, load  # noqa: E402

#: the quantiles of the magnitudes between which binades count
FIRST, LAST = 0.01, 0.5
BINADES_HEADER = ("run", "layer", "mean over deviation", "binades", "slope", "normal", "off by")


@dataclass(frozen=True)
class Layer:
    """A layer's weights in units of their scales, their format, and its gradients.

    Of the gradients there is the ratio of mean to deviation.
    """

    name: str
    units: Tensor
    fmt: fm.FloatFormat
    snr: float


@dataclass(frozen=True)
class Binades:
    """Shares of magnitudes by binade, and those of normal weights."""

    exponents: tuple[int, ...]
    shares: tuple[float, ...]
    normal: tuple[float, ...]

    @property
    def slope(self) -> float:
        """Slope of log2 share against binade."""
        return slope(self.exponents, self.shares)

    @property
    def normal_slope(self) -> float:
        """The same of the normal weights."""
        return slope(self.exponents, self.normal)

    @property
    def off_by(self) -> float:
        """The largest ratio of a share to the normal one, or of that to it."""
        ratios = [a / b for a, b in zip(self.shares, self.normal, strict=True)]
        return max(max(ratio, 1 / ratio) for ratio in ratios)


def slope(exponents: Sequence[int], shares: Sequence[float]) -> float:
    """Return the slope of a straight line through log2 of shares.

    >>> slope([0, 1, 2], [0.1, 0.2, 0.4])
    1.0
    """
    return linear_regression(exponents, [math.log2(share) for share in shares]).slope


def binades(units: Tensor, fmt: fm.FloatFormat) -> Binades | None:
    """Return the shares of the whole binades between the two quantiles.

    None if fewer than two of them are above the subnormals and have weights.
    """
    magnitudes = units.double().abs()
    ends = torch.quantile(magnitudes.flatten(), torch.tensor([FIRST, LAST]).double())
    lowest = max(math.ceil(math.log2(max(ends[0].item(), 2.0**-200))), fmt.emin)
    highest = math.floor(math.log2(max(ends[1].item(), 2.0**-200))) - 1
    deviations = units.double().square().mean(-1, keepdim=True).sqrt()
    exponents, shares, normal = [], [], []
    for exponent in range(lowest, highest + 1):
        inside = (magnitudes >= 2.0**exponent) & (magnitudes < 2.0 ** (exponent + 1))
        share = inside.double().mean().item()
        if share > 0:
            edges = (2.0**exponent / deviations, 2.0 ** (exponent + 1) / deviations)
            low, high = (torch.special.erf(edge / math.sqrt(2)) for edge in edges)
            exponents.append(exponent)
            shares.append(share)
            normal.append((high - low).mean().item())
    if len(exponents) < 2:
        return None
    return Binades(tuple(exponents), tuple(shares), tuple(normal))


def layers_of(folder: Path, run: Run, fmt: str | None = None) -> list[Layer]:
    """Return the one-byte layers of a run that recorded their gradients.

    They are in the order of the ratio of mean to deviation. With a format float layers
    count too, under the scales that they would have in it.
    """
    weights = _state(load(choose(folder)))
    layers = []
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        snr = _late_mean(run, GRAD_SNR.layer_key(layer))
        if snr is None:
            continue
        if isinstance(weight, fm.FP8Tensor):
            units = weight.dequantize() / weight.scale
            layers.append(Layer(layer, units, weight.format, snr))
        elif fmt is not None:
            in_codes = fm.FP8Parameter(weight, fmt)
            layers.append(Layer(layer, weight / in_codes.scale, in_codes.format, snr))
    return sorted(layers, key=lambda layer: layer.snr)


def _state(trained: Trained) -> dict[str, Any]:
    state: dict[str, Any] = fm.files.unflatten(trained.tensors, trained.metadata)
    return state


def _late_mean(run: Run, name: str) -> float | None:
    """The mean of a metric over the last quarter of its measurements."""
    values = [value for value in run.curve(name)[1] if value is not None]
    return fmean(values[-max(1, len(values) // 4) :]) if values else None


def binades_table(layers: Mapping[str, Sequence[Layer]]) -> str:
    """A line for the quarter of each run's layers with the least and with the most mean."""
    lines = []
    for run, sorted_layers in layers.items():
        quarter = max(1, len(sorted_layers) // 4)
        for layer in (*sorted_layers[:quarter], *sorted_layers[-quarter:]):
            lines.append(_line(run, layer))
    return markdown(BINADES_HEADER, lines)


def _line(run: str, layer: Layer) -> tuple[str, ...]:
    levels = binades(layer.units, layer.fmt)
    start = (f"`{run}`", f"`{layer.name}`", f"{layer.snr:.3f}")
    if levels is None:
        return (*start, "-", "-", "-", "-")
    return (
        *start,
        str(len(levels.exponents)),
        f"{levels.slope:.2f}",
        f"{levels.normal_slope:.2f}",
        f"{levels.off_by:.2f}",
    )


def main() -> None:
    """Print the table of the runs in the given folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--format", help="format of float weights, which are left out without it")
    arguments = parser.parse_args()
    layers = {
        str(path): layers_of(path, load_run(path), arguments.format) for path in arguments.runs
    }
    print(binades_table(layers), end="")


if __name__ == "__main__":
    main()
