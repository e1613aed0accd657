"""The share of small movements that survives the write-back, for weights of one byte
and movements below one spacing.

    python study/benchmarks/arrived_share.py [--movement 2] [--rows 256] [--seed 0] [--json]
    [--record]

Every weight is to move by the same small part of its ULP in every step, one half of the
weights up and one half down,

    w_t = write(read(w_{t-1}) + d), d = +- step * ULP(w_0), share = mean((w_N - w_0) /
    (N d))

until the movements add up to ``movement`` ULPs, by steps of 0.02, 0.1 and 0.3 ULP. The
share is 1 for an unbiased write-back, and 0 for rounding to nearest. Weights are in the
subnormal range of their format, or in its lowest binade, whose spacing is the same; the
largest weight of every 32 is the format's largest number and never moves, so that no
scale changes. int8 has one range. Shown is the mean over the three steps, with the
smallest and the largest.

Our weights are written by an optimizer whose gradients are the movements (StiffnessSGD,
k = 0), the others' by copying into their tensors what their optimizers copy there. SDNQ
(GPL-3.0) and torchao take part where they are installed.
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.formats import as_format

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, add_option, record

STEPS: Final = (0.02, 0.1, 0.3)
COLUMNS: Final = 128
GROUP: Final = 32
INTEGERS: Final = "int8"
FORMATS: Final = ("E4M3", "E2M5", "E3M4", "E1M6", INTEGERS)
RANGES: Final = ("subnormal", "normal")


@dataclass(frozen=True)
class Weights:
    """Weights of some writer, and how to move them."""

    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    """Takes the movement of every weight."""


@dataclass(frozen=True)
class Grid:
    """A format of some package, in units of the spacing of its small numbers."""

    mantissa_bits: int
    largest: float
    """The largest number, over that spacing."""

    def start(self, span: str, rows: int, room: int, generator: torch.Generator) -> Tensor:
        """Weights from ``room`` spacings above the range's lower end to as many below
        its upper one, of both signs.
        """
        steps = 2**self.mantissa_bits
        low = steps if span == "normal" else 0
        high = min(
            low + steps - room, int(self.largest) - 8 * room
        )  # where rounding can't lead beyond the end
        drawn = torch.randint(low + room, high, (rows, COLUMNS), generator=generator).float()
        drawn *= torch.randint(0, 2, (rows, COLUMNS), generator=generator) * 2.0 - 1
        drawn[:, ::GROUP] = self.largest
        return drawn


def grid_of(fmt: str, *, sdnq: bool) -> Grid:
    """The grid of our format, or of SDNQ's of that name: in more of SDNQ's formats the
    top code is a number.
    """
    if fmt == INTEGERS:
        return Grid(6, 127.0)
    own = as_format(fmt)
    widened = sdnq and own.layout == "ieee"
    largest = as_format(f"{own.name}FINITE").max if widened else own.max
    return Grid(own.mantissa_bits, largest / (own.min_normal * 2.0**-own.mantissa_bits))


def ours(draws: str) -> Callable[[str, Tensor, int], Weights]:
    """This library's weights, under stochastic rounding with draws of some kind."""

    def build(fmt: str, start: Tensor, seed: int) -> Weights:
        own = as_format(fmt)
        spacing = own.min_normal * 2.0**-own.mantissa_bits
        scale = torch.full((len(start), 1), 1.0)
        weight = fm.FP8Parameter(start * spacing, fmt, scale=scale, seed=seed)
        optimizer = fm.optim.StiffnessSGD([weight], lr=1.0, momentum=0.0, draws=draws, seed=seed)

        def write(moves: Tensor) -> None:
            weight.grad = -moves * spacing
            optimizer.step()

        return Weights(lambda: weight.detach().dequantize() / spacing, write)

    return build


def copied(made: Any, spacing: float) -> Weights:
    """Another package's tensor, written as its optimizers write it."""
    weight = nn.Parameter(made, requires_grad=False)

    @torch.no_grad()
    def write(moves: Tensor) -> None:
        weight.copy_(weight.dequantize() + moves * spacing)

    return Weights(lambda: weight.dequantize() / spacing, write)


SDNQ_NAMES: Final = {
    "E4M3": "float8_e4m3fn", "E2M5": "float8_e2m5fn", "E3M4": "float8_e3m4fn", "E1M6": "float8_e1m6fn",
    INTEGERS: INTEGERS,
}  # fmt: skip


def sdnq(fmt: str, start: Tensor, seed: int) -> Weights:
    """SDNQ's weights, with a float scale per 32."""
    from sdnq.training import SDNQTensor

    torch.manual_seed(seed)
    spacing = 2.0**-10
    return copied(
        SDNQTensor.from_float(
            start * spacing, "Linear", weights_dtype=SDNQ_NAMES[fmt], skip_sr=True
        ),
        spacing,
    )


def torchao(fmt: str, start: Tensor, seed: int) -> Weights:
    """torchao's int8 weights, with a scale per row."""
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    torch.manual_seed(seed)
    spacing = 2.0**-10
    return copied(Int8QuantizedTrainingLinearWeight.from_float(start * spacing), spacing)


#: a column of the table: its name, the formats it has, and how its weights are made
WRITERS: Final[dict[str, tuple[tuple[str, ...], Callable[[str, Tensor, int], Weights]]]] = {
    "here": (FORMATS[:-1], ours("independent")),
    "here, dithered draws": (FORMATS[:-1], ours("dither")),
    "SDNQ": (FORMATS, sdnq),
    "torchao": ((INTEGERS,), torchao),
}


def share(writer: str, fmt: str, span: str, step: float, options: argparse.Namespace) -> float:
    """The share of a movement by steps of ``step`` ULP that survives."""
    generator = torch.Generator().manual_seed(options.seed)
    grid = grid_of(fmt, sdnq=writer == "SDNQ")
    start = grid.start(span, options.rows, options.movement, generator)
    signs = torch.randint(0, 2, start.shape, generator=generator) * 2.0 - 1
    signs[:, ::GROUP] = 0.0
    weights = WRITERS[writer][1](fmt, start, options.seed)
    first, count = weights.read().clone(), round(options.movement / step)
    for _ in range(count):
        weights.write(signs * step)
    moved = (weights.read() - first) * signs
    return float(moved.double().sum() / (step * count * signs.abs().sum()))


def cell(writer: str, fmt: str, span: str, options: argparse.Namespace) -> str | None:
    """The mean share over the steps, the smallest and the largest; None for a format
    that the writer does not have.
    """
    if fmt not in WRITERS[writer][0]:
        return None
    found = [share(writer, fmt, span, step, options) for step in STEPS]
    return f"{statistics.fmean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def writers() -> list[str]:
    """The writers whose packages are installed; prints which are not."""
    found = []
    for writer, (formats, build) in WRITERS.items():
        try:
            build(formats[0], torch.ones(1, COLUMNS), 0)
            found.append(writer)
        except ImportError as error:
            print(f"{writer}: missing: {error}", file=sys.stderr)
    return found


def rows(names: list[str], options: argparse.Namespace) -> list[tuple[Cell, ...]]:
    """A line for every format and range."""
    spans = [(fmt, span) for fmt in FORMATS for span in (RANGES if fmt != INTEGERS else ("whole",))]
    return [(fmt, span, *(cell(name, fmt, span, options) for name in names)) for fmt, span in spans]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--movement", type=int, default=2, help="ULPs that every weight is asked to move by in all"
    )
    parser.add_argument("--rows", type=int, default=256, help=f"rows of {COLUMNS} weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_option(parser)
    return parser


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = build_parser()
    options = parser.parse_args()
    if not 1 <= options.movement <= 3:
        parser.error(f"--movement {options.movement}: 1 to 3, half of the subnormal range of E4M3")
    if options.rows < 1:
        parser.error(f"--rows {options.rows}: at least 1")
    os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = writers()
    header, found = ("format", "range", *names), rows(names, options)
    if options.json:
        print(json.dumps([dict(zip(header, line, strict=True)) for line in found], indent=1))
    else:
        lines = [
            header,
            *(tuple("" if part is None else str(part) for part in line) for line in found),
        ]
        print(text_table(lines, ("---",) * len(header), False))
    if options.record:
        record("", header, found, packages=("torchao", "sdnq"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
