"""The share of movements below one spacing that survives the write-back to one byte.

    python study/benchmarks/arrived_share.py [--movement 2] [--rows 256] [--seed 0]
                                             [--json] [--record]

Every weight is to move by the same small part of its ULP in every step, one half of the
weights up and one half down,

    w_t = write(read(w_{t-1}) + d)       d = +- step * ULP(w_0)
    share = mean((w_N - w_0) / (N d))

until the movements add up to ``movement`` ULPs, by steps of 0.02, 0.1 and 0.3 ULP. The
share is 1 for an unbiased write-back, and 0 for rounding to nearest. Weights are in the
subnormal range of their format, or in its lowest binade, whose spacing is the same; the
largest weight of every 32 is the format's largest number and never moves, so that no
scale changes. int8 has one range. Shown is the mean over the three steps, with the
smallest and the largest.

The library's weights are written by an optimizer whose gradients are the movements
(StiffnessSGD, k = 0). Those of other packages are written by copying into their tensors
what their optimizers copy there. SDNQ (GPL-3.0) and torchao take part where they are
installed.
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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.formats import as_format

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import check_at_least, text_table
from _record import Cell, add_option, record

STEP_SIZES: Final = (0.02, 0.1, 0.3)
MATRIX_COLUMNS: Final = 128
#: weights of which the first is the format's largest number and never moves
SCALE_GROUP: Final = 32
INTEGERS: Final = "int8"
SHARE_FORMATS: Final = ("E4M3", "E2M5", "E3M4", "E1M6", INTEGERS)
RANGES: Final = ("subnormal", "normal")


@dataclass(frozen=True)
class Weights:
    """Weights of some writer, and how to move them."""

    read: Callable[[], Tensor]
    #: takes the movement of every weight
    write: Callable[[Tensor], None]


@dataclass(frozen=True)
class Grid:
    """A format of some package, in units of the spacing of its small numbers."""

    mantissa_bits: int
    #: the largest number, over that spacing
    largest: float

    def start(self, span: str, rows: int, room: int, generator: torch.Generator) -> Tensor:
        """Return weights of both signs in a range.

        They are at least ``room`` spacings away from the range's ends.
        """
        steps = 2**self.mantissa_bits
        low = steps if span == "normal" else 0
        # Rounding cannot lead beyond the end of the format.
        high = min(low + steps - room, int(self.largest) - 8 * room)
        weights = torch.randint(
            low + room, high, (rows, MATRIX_COLUMNS), generator=generator
        ).float()
        weights *= torch.randint(0, 2, (rows, MATRIX_COLUMNS), generator=generator) * 2.0 - 1
        weights[:, ::SCALE_GROUP] = self.largest
        return weights


def grid_of(name: str, *, sdnq: bool) -> Grid:
    """Return the grid of a format, or of SDNQ's of that name.

    In more of SDNQ's formats the top code is a number.
    """
    if name == INTEGERS:
        return Grid(6, 127.0)
    fmt = as_format(name)
    has_finite_top = sdnq and fmt.layout == "ieee"
    largest = as_format(f"{fmt.name}FINITE").max if has_finite_top else fmt.max
    return Grid(fmt.mantissa_bits, largest / smallest_spacing(fmt))


def smallest_spacing(fmt: fm.FloatFormat) -> float:
    """Return the spacing of a format's small numbers."""
    return fmt.min_normal * 2.0**-fmt.mantissa_bits


BuildWeights = Callable[[str, Tensor, int], Weights]
"""Takes a format, the weights at the start in spacings, and a seed."""


def library_weights(draws: str) -> BuildWeights:
    """Return a builder of this library's weights, under stochastic rounding."""

    def build(fmt: str, start: Tensor, seed: int) -> Weights:
        spacing = smallest_spacing(as_format(fmt))
        scale = torch.full((len(start), 1), 1.0)
        weight = fm.FP8Parameter(start * spacing, fmt, scale=scale, seed=seed)
        optimizer = fm.optim.StiffnessSGD([weight], lr=1.0, momentum=0.0, draws=draws, seed=seed)

        def write(moves: Tensor) -> None:
            weight.grad = -moves * spacing
            optimizer.step()

        return Weights(lambda: weight.detach().dequantize() / spacing, write)

    return build


def copied_weights(tensor: Any, spacing: float) -> Weights:
    """Return another package's tensor, written as its optimizers write it."""
    weight = nn.Parameter(tensor, requires_grad=False)

    @torch.no_grad()
    def write(moves: Tensor) -> None:
        weight.copy_(weight.dequantize() + moves * spacing)

    return Weights(lambda: weight.dequantize() / spacing, write)


SDNQ_NAMES: Final = {
    "E4M3": "float8_e4m3fn",
    "E2M5": "float8_e2m5fn",
    "E3M4": "float8_e3m4fn",
    "E1M6": "float8_e1m6fn",
    INTEGERS: INTEGERS,
}


#: of the weights of other packages, whose scales adapt to it
OTHER_SPACING: Final = 2.0**-10


def sdnq_weights(fmt: str, start: Tensor, seed: int) -> Weights:
    """Return SDNQ's weights, with a float scale per 32."""
    from sdnq.training import SDNQTensor

    torch.manual_seed(seed)
    tensor = SDNQTensor.from_float(
        start * OTHER_SPACING, "Linear", weights_dtype=SDNQ_NAMES[fmt], skip_sr=True
    )
    return copied_weights(tensor, OTHER_SPACING)


def torchao_weights(fmt: str, start: Tensor, seed: int) -> Weights:
    """Return torchao's int8 weights, with a scale per row."""
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    torch.manual_seed(seed)
    tensor = Int8QuantizedTrainingLinearWeight.from_float(start * OTHER_SPACING)
    return copied_weights(tensor, OTHER_SPACING)


class Writer(NamedTuple):
    """A column of the table."""

    formats: tuple[str, ...]
    build: BuildWeights


FLOAT_FORMATS: Final = tuple(fmt for fmt in SHARE_FORMATS if fmt != INTEGERS)
WRITERS: Final = {
    "here": Writer(FLOAT_FORMATS, library_weights("independent")),
    "here, dithered draws": Writer(FLOAT_FORMATS, library_weights("dither")),
    "SDNQ": Writer(SHARE_FORMATS, sdnq_weights),
    "torchao": Writer((INTEGERS,), torchao_weights),
}


def share(writer: str, fmt: str, span: str, step: float, options: argparse.Namespace) -> float:
    """Return the share of a movement by steps of ``step`` ULP that survives."""
    generator = torch.Generator().manual_seed(options.seed)
    grid = grid_of(fmt, sdnq=writer == "SDNQ")
    start = grid.start(span, options.rows, options.movement, generator)
    signs = torch.randint(0, 2, start.shape, generator=generator) * 2.0 - 1
    signs[:, ::SCALE_GROUP] = 0.0
    weights = WRITERS[writer].build(fmt, start, options.seed)
    first = weights.read().clone()
    count = round(options.movement / step)
    for _ in range(count):
        weights.write(signs * step)
    moved = (weights.read() - first) * signs
    return float(moved.double().sum() / (step * count * signs.abs().sum()))


def cell(writer: str, fmt: str, span: str, options: argparse.Namespace) -> str | None:
    """Return the mean share over the steps, the smallest and the largest.

    Returns None for a format that the writer does not have.
    """
    if fmt not in WRITERS[writer].formats:
        return None
    shares = [share(writer, fmt, span, step, options) for step in STEP_SIZES]
    return f"{statistics.fmean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


def installed_writers() -> list[str]:
    """Return the writers whose packages are installed, and print which are not."""
    installed = []
    for name, writer in WRITERS.items():
        try:
            writer.build(writer.formats[0], torch.ones(1, MATRIX_COLUMNS), 0)
        except ImportError as error:
            print(f"{name}: missing: {error}", file=sys.stderr)
        else:
            installed.append(name)
    return installed


def share_rows(names: list[str], options: argparse.Namespace) -> list[tuple[Cell, ...]]:
    """Return a line for every format and range."""
    lines: list[tuple[Cell, ...]] = []
    for fmt in SHARE_FORMATS:
        for span in ("whole",) if fmt == INTEGERS else RANGES:
            lines.append((fmt, span, *(cell(name, fmt, span, options) for name in names)))
    return lines


def share_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--movement", type=int, default=2, help="ULPs that every weight is asked to move by in all"
    )
    parser.add_argument("--rows", type=int, default=256, help=f"rows of {MATRIX_COLUMNS} weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_option(parser)
    return parser


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = share_parser()
    options = parser.parse_args()
    if not 1 <= options.movement <= 3:
        parser.error(f"--movement {options.movement}: 1 to 3, half of the subnormal range of E4M3")
    check_at_least(parser, options, 1, "rows")
    os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = installed_writers()
    header = ("format", "range", *names)
    lines = share_rows(names, options)
    if options.json:
        print(json.dumps([dict(zip(header, line, strict=True)) for line in lines], indent=1))
    else:
        texts = [header]
        for line in lines:
            texts.append(tuple("" if part is None else str(part) for part in line))
        print(text_table(texts, ("---",) * len(header), markdown=False))
    if options.record:
        record("", header, lines, packages=("torchao", "sdnq"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
