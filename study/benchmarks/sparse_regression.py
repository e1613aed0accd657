"""Sparse linear regression in the geometry of a format: Q25 of the study.

    python study/benchmarks/sparse_regression.py [--steps 1000] [--seeds 5] [--rates 9]
    [--json] [--record]

Of 1,000 weights 100 are not 0. Their magnitudes are spread evenly over ten binades, from
1/1024 to 1, and their signs are random. There are 300 rows of normal features, and targets with
noise of deviation 0.01. Each optimizer starts from the same normal weights of deviation
1/1024 and takes full-batch steps at a constant rate. Shown is the squared error on new
rows, relative to that of zeros: ``|w - w*|^2 / |w*|^2``, the geometric mean over seeds,
at the best of nine rates a factor of two apart. `ratio` is that error over the error of
the plain optimizer (Adam for RiemannianAdam, SGD for RiemannianSGD) at its own best
rate, with the 95% t-interval of the mean of its logarithm, paired by seed.

`metric` is float32 under the metric of the format, `codes` its numbers, rounded
stochastically. The scale is the power of two by which the largest number of the format is
2 or just above.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import geoopt
import torch
from torch import Tensor

import fp8manifold as fm

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, add_option, record

WEIGHTS, SPARSE, SAMPLES, BINADES, NOISE = 1000, 100, 300, 10, 0.01
#: deviation of the first weights
START: Final = 2.0**-10
#: the largest number that every format has here, or a little less than its largest
GRID_END: Final = 2.0
REGRESSION_FORMATS: Final = ("E1M6", "E4M3", "E5M2", "E7M0")
#: the smallest rate of nine: of Adam in value and in ULPs, and of SGD in value
ADAM, ADAM_ULPS, SGD = 2.0**-13, 2.0**-8, 2.0**-10
#: the smallest rate of RiemannianSGD over that of SGD at the spacing of 1, where its
#: steps are longest
SGD_ABOVE = 4
REGRESSION_HEADER: Final = (
    "optimizer",
    "weights",
    "format",
    "best rate",
    "error",
    "ratio",
    "from",
    "to",
)
#: the steps between two looks at the weights' mean spacing
REFRESH = 10


@dataclass(frozen=True)
class Arm:
    """An optimizer, what its weights are, and their format; both are "" for floats."""

    optimizer: str
    weights: str = ""
    fmt: str = ""

    @property
    def plain(self) -> "Arm":
        """The optimizer that it is measured against."""
        return Arm(self.optimizer.removeprefix("Riemannian"))


@dataclass(frozen=True)
class Problem:
    """The problems of all seeds."""

    #: (seeds, rows, weights)
    features: Tensor
    #: (seeds, rows)
    targets: Tensor
    #: (seeds, weights) each
    solution: Tensor
    start: Tensor

    @classmethod
    def draw(cls, seeds: int) -> "Problem":
        """Draw the problems of seeds from 0."""
        parts: list[list[Tensor]] = [[], [], [], []]
        for seed in range(seeds):
            draw = torch.Generator().manual_seed(seed)
            features = torch.randn(SAMPLES, WEIGHTS, generator=draw)
            solution = torch.zeros(WEIGHTS)
            places = torch.randperm(WEIGHTS, generator=draw)[:SPARSE]
            magnitudes = torch.exp2(-BINADES * torch.rand(SPARSE, generator=draw))
            signs = 2.0 * torch.randint(2, (SPARSE,), generator=draw) - 1
            solution[places] = magnitudes * signs
            targets = features @ solution + NOISE * torch.randn(SAMPLES, generator=draw)
            start = START * torch.randn(WEIGHTS, generator=draw)
            for part, value in zip(parts, (features, targets, solution, start), strict=True):
                part.append(value)
        return cls(*(torch.stack(part) for part in parts))

    def gradients(self, weights: Tensor) -> Tensor:
        """Return the gradient of half the mean square, for weights (seeds, rates, n)."""
        residuals = weights @ self.features.mT - self.targets[:, None]
        return residuals @ self.features / SAMPLES

    def errors(self, weights: Tensor) -> Tensor:
        """Return the errors on new rows, (seeds, rates)."""
        away = (weights - self.solution[:, None]).double().square().sum(-1)
        return away / self.solution.double().square().sum(-1, keepdim=True)


def arms() -> Iterator[Arm]:
    """Yield the plain optimizers, then those of every format."""
    for name in ("Adam", "SGD"):
        yield Arm(name)
    for name in ("RiemannianAdam", "RiemannianSGD"):
        for fmt in REGRESSION_FORMATS:
            for weights in ("metric", "codes"):
                yield Arm(name, weights, fmt)


def scale_of(fmt: str) -> float:
    """Return the power of two by which the format's largest number reaches the end.

    >>> scale_of("E4M3"), scale_of("E1M6")
    (0.0078125, 1.0)
    """
    return float(2.0 ** math.ceil(math.log2(GRID_END / fm.FloatFormat.from_string(fmt).max)))


def rates_of(arm: Arm, count: int) -> list[float]:
    """Return the rates of an arm, a factor of two apart.

    The Riemannian step of SGD is its step times ``S^2``, so its rates are some times
    those of SGD over the square of the spacing at 1.
    """
    if arm.optimizer == "Adam":
        first = ADAM
    elif arm.optimizer == "SGD":
        first = SGD
    elif arm.optimizer == "RiemannianAdam":
        first = ADAM_ULPS
    else:
        scale = scale_of(arm.fmt)
        spacing = fm.ulp(torch.tensor(1.0 / scale), arm.fmt).item() * scale
        first = SGD_ABOVE * SGD / spacing**2
    return [first * 2.0**number for number in range(count)]


def parameter(arm: Arm, start: Tensor) -> Any:
    """Return new weights of an arm."""
    if not arm.fmt:
        return torch.nn.Parameter(start.clone())
    if arm.weights == "metric":
        manifold = fm.StiffnessManifold(arm.fmt, scale_of(arm.fmt))
        return geoopt.ManifoldParameter(manifold.projx(start), manifold=manifold)
    grid = fm.FP8Manifold(arm.fmt, scale_of(arm.fmt), rounding="stochastic")
    return geoopt.ManifoldParameter(grid.projx(start), manifold=grid)


def regression_errors(arm: Arm, problem: Problem, rates: Sequence[float], steps: int) -> Tensor:
    """Train an arm at every rate on every problem; return the errors, (seeds, rates)."""
    groups = []
    for start in problem.start:
        groups += [{"params": [parameter(arm, start)], "lr": rate} for rate in rates]
    options = {"refresh_every": REFRESH} if arm.fmt else {}
    library: Any = fm.optim if arm.fmt else torch.optim
    optimizer = getattr(library, arm.optimizer)(groups, lr=rates[0], **options)
    all_weights = [group["params"][0] for group in groups]

    def stacked() -> Tensor:
        values = torch.stack([weight.detach() for weight in all_weights])
        return values.view(len(problem.start), len(rates), -1)

    for _ in range(steps):
        gradients = problem.gradients(stacked()).flatten(0, 1)
        for weight, gradient in zip(all_weights, gradients, strict=True):
            # a rate that is too high leaves the range of float32; its error is none
            weight.grad = gradient.nan_to_num(0.0, 1e30, -1e30)
        optimizer.step()
    errors = problem.errors(stacked())
    return torch.where(errors.isfinite(), errors, math.inf)


def best(errors: Tensor) -> int:
    """Return the place of the rate with the lowest geometric mean over the seeds."""
    return int(errors.log().mean(0).argmin())


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and its 95% t-interval."""
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in ratios]
    half = 0.0
    if len(logs) > 1:
        half = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def regression_rows(problem: Problem, rate_count: int, steps: int) -> Iterator[list[Cell]]:
    """Yield a row for every arm."""
    plain: dict[Arm, Tensor] = {}
    for arm in arms():
        print(arm, file=sys.stderr, flush=True)
        rates = rates_of(arm, rate_count)
        errors = regression_errors(arm, problem, rates, steps)
        place = best(errors)
        of_best = errors[:, place]
        plain.setdefault(arm, of_best)
        ratio: list[Cell] = [None, None, None]
        if arm.fmt:
            ratio = [*interval((of_best / plain[arm.plain]).tolist())]
        at_edge = place in (0, rate_count - 1)
        yield [
            arm.optimizer,
            arm.weights or "float32",
            arm.fmt or "-",
            f"{rates[place]:.3g}" + ", the last tried" * at_edge,
            of_best.log().mean().exp().item(),
            *ratio,
        ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=int, default=9, help="rates, a factor of two apart")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    add_option(parser)
    options = parser.parse_args()
    for name in ("steps", "seeds", "rates"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    torch.set_num_threads(1)
    rows = list(regression_rows(Problem.draw(options.seeds), options.rates, options.steps))
    if options.json:
        print(json.dumps(rows))
    else:
        texts = [tuple(_text(cell) for cell in row) for row in rows]
        print(
            text_table(
                [REGRESSION_HEADER, *texts],
                ("---", *["---:"] * (len(REGRESSION_HEADER) - 1)),
                markdown=True,
            )
        )
    if options.record:
        record("", REGRESSION_HEADER, rows)
    return 0


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


if __name__ == "__main__":
    sys.exit(main())
