"""The cost of a linear layer with one-byte weights, as a ratio to ``nn.Linear``.

    python benchmarks/linear_forward.py [--storage codes] [--tokens 64 256 1024 4096]
                                        [--modes eager compiled] [--pairs 25]
                                        [--seconds 5] [--device cpu]
                                        [--markdown | --json] [--record]

Both layers have one shape and dtype. One thread. "forward" runs without gradients;
"forward and backward" leaves gradients of the input, the weight and the bias. The two
layers are timed in turn (on the CPU: process CPU time), and the ratio is the median
over the pairs with the smallest and the largest; under ``compiled`` both are compiled.
Cells that take long get fewer pairs, at least 3. With storage codes the last lines give
the decoding of the weight alone, as a ratio to ``clone`` of the decoded weight.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch
from _forms import add_form_options, print_titled, text_table
from _record import add_option, record
from _timing import Ratio, Step, paired_seconds
from torch import Tensor, nn

import fp8manifold as fm

FEWEST_PAIRS: Final = 3
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LayerSize(NamedTuple):
    """The sizes of a layer."""

    inputs: int
    outputs: int

    def __str__(self) -> str:
        """Return the sizes as the command line has them."""
        return f"{self.inputs}x{self.outputs}"


@dataclass(frozen=True)
class PassTimes:
    """One measurement: where it was taken and what came out."""

    inputs: int
    outputs: int
    tokens: int
    mode: str
    backward: bool
    pairs: int
    linear_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float

    @property
    def ratios(self) -> Ratio:
        """The median ratio, the smallest and the largest."""
        return Ratio(self.ratio, self.ratio_min, self.ratio_max)


@dataclass(frozen=True)
class CellPair:
    """The measurements of one layer, mode and batch."""

    forward: PassTimes
    both_passes: PassTimes

    @property
    def layer(self) -> str:
        """The layer's sizes."""
        return str(LayerSize(self.forward.inputs, self.forward.outputs))


def step_of(
    layer: nn.Module, tokens: int, size: LayerSize, backward: bool, example: Tensor
) -> Step:
    """Return a function that runs the layer once over a fixed batch."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, size.inputs, generator=generator).to(example).requires_grad_(backward)
    gradient = torch.randn(tokens, size.outputs, generator=generator).to(example)

    def forward() -> object:
        with torch.no_grad():
            return layer(x)

    def forward_and_backward() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(gradient)

    return forward_and_backward if backward else forward


def measure_passes(
    options: argparse.Namespace, size: LayerSize, tokens: int, mode: str, backward: bool
) -> PassTimes:
    """Measure one layer, batch and mode."""
    example = torch.empty(0, dtype=DTYPES[options.dtype], device=options.device)
    linear = nn.Linear(size.inputs, size.outputs, dtype=example.dtype, device=example.device)
    quantized = fm.QuantizedLinear(
        copy.deepcopy(linear), fm.LayerSpec(options.format), options.storage
    )
    layers: list[nn.Module] = [quantized, linear]
    if mode == "compiled":
        torch._dynamo.reset()
        layers = [torch.compile(layer, dynamic=False, fullgraph=True) for layer in layers]
    steps = [step_of(layer, tokens, size, backward, example) for layer in layers]
    for step in steps:
        step()
    (trial,) = paired_seconds(*steps, 1, example.device)
    affordable = int(options.seconds / (sum(trial) + 1e-9))
    pairs = max(FEWEST_PAIRS, min(options.pairs, affordable))
    times = paired_seconds(*steps, pairs, example.device)
    linear_ms = 1e3 * statistics.median(pair.reference for pair in times)
    return PassTimes(*size, tokens, mode, backward, pairs, linear_ms, *Ratio.of_pairs(times))


def measure_layers(options: argparse.Namespace) -> Iterator[CellPair]:
    """Measure every combination of the command line."""
    for size, mode, tokens in itertools.product(options.sizes, options.modes, options.tokens):
        cells = []
        for backward in (False, True):
            name = f"{size}, {tokens} tokens, {mode}, backward={backward}"
            print(name, file=sys.stderr, flush=True)
            cells.append(measure_passes(options, size, tokens, mode, backward))
        yield CellPair(*cells)


def measure_decoding(options: argparse.Namespace, size: LayerSize) -> dict[str, Any]:
    """Return the ratio of ``dequantize`` to ``clone``.

    Both write the same float tensor once.
    """
    values = torch.randn(
        size.outputs, size.inputs, dtype=DTYPES[options.dtype], device=options.device
    )
    weight = fm.FP8Parameter(values, options.format)
    times = paired_seconds(weight.dequantize, values.clone, 1 + options.pairs, values.device)
    # The first pair warms up.
    ratio = Ratio.of_pairs(times[1:])
    return {
        "layer": str(size),
        "ratio": ratio.median,
        "ratio_min": ratio.smallest,
        "ratio_max": ratio.largest,
    }


def layer_cells(measured: list[CellPair]) -> list[tuple[object, ...]]:
    """Return the table's rows as numbers, for the site."""
    rows = []
    for pair in measured:
        cell = pair.forward
        rows.append(
            (pair.layer, cell.mode, cell.tokens, pair.forward.ratios, pair.both_passes.ratios)
        )
    return rows


LAYER_HEADER: Final = (
    "layer",
    "mode",
    "tokens",
    "forward",
    "forward and backward",
    "nn.Linear, ms",
)
LAYER_RULE: Final = ("---", "---", "---:", "---:", "---:", "---:")


def layer_rows(measured: list[CellPair]) -> list[tuple[str, ...]]:
    """Return the table's rows, the header first."""
    rows: list[tuple[str, ...]] = [LAYER_HEADER]
    for pair in measured:
        forward, both_passes = pair.forward, pair.both_passes
        rows.append(
            (
                pair.layer,
                forward.mode,
                str(forward.tokens),
                str(forward.ratios),
                str(both_passes.ratios),
                f"{forward.linear_ms:.2f}, {both_passes.linear_ms:.2f}",
            )
        )
    return rows


def size_of(text: str) -> LayerSize:
    """Parse the sizes of a layer, such as ``512x2048``."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form inputs x outputs, such as 512x2048"
        )
    return LayerSize(*map(int, parts))


def _decoding_remark(facts: dict[str, Any]) -> str:
    ratio = Ratio(facts["ratio"], facts["ratio_min"], facts["ratio_max"])
    return f"decoding {facts['layer']}: {ratio} clone"


def layer_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", choices=("codes", "grid", "master"), default="codes")
    parser.add_argument("--format", choices=fm.NAMED_FORMATS, default="E4M3")
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", default=[LayerSize(512, 2048), LayerSize(2048, 8192)]
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"]
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--pairs", type=int, default=25, help="pairs of a cell, where there is time"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time for a cell's pairs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_form_options(parser)
    add_option(parser)
    return parser


def main() -> None:
    """Print the table."""
    parser = layer_parser()
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is at hand")
    if min(options.tokens) < 1:
        parser.error(f"--tokens {min(options.tokens)}: at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = list(measure_layers(options))
    decoding = []
    if options.storage == "codes":
        decoding = [measure_decoding(options, size) for size in options.sizes]
    device = "CPU, one thread, process CPU time"
    if options.device == "cuda":
        device = torch.cuda.get_device_name()
    storage = f"{options.storage} {options.format}, {options.dtype}"
    title = f"torch {torch.__version__}, {storage}, {device}"
    if options.json:
        cells = []
        for pair in measured:
            cells += [asdict(pair.forward), asdict(pair.both_passes)]
        print(json.dumps({"title": title, "cells": cells, "decoding": decoding}, indent=1))
    else:
        table = text_table(layer_rows(measured), LAYER_RULE, options.markdown)
        remarks = [_decoding_remark(facts) for facts in decoding]
        print_titled(title, table, *remarks, markdown=options.markdown)
    if options.record:
        record(
            "`nn.Linear` of the same shape",
            LAYER_HEADER[:-1],
            layer_cells(measured),
            options.device,
        )


if __name__ == "__main__":
    main()
