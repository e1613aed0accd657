"""The cost of a linear layer with one-byte weights, as a ratio to ``nn.Linear`` of the
same shape and dtype.

    python benchmarks/linear_forward.py [--storage fp8] [--tokens 64 256 1024 4096]
                                        [--modes eager compiled] [--pairs 25] [--seconds
                                        5] [--device cpu] [--markdown | --json]
                                        [--record]

One thread. "forward" runs without gradients; "forward and backward" leaves gradients of
the input, the weight and the bias. The two layers are timed in turn (on the CPU:
process CPU time), and the ratio is the median over the pairs with the smallest and the
largest; under ``compiled`` both are compiled. Cells that take long get fewer pairs, at
least 3. With storage fp8 the last lines give the decoding of the weight alone, as a
ratio to ``clone`` of the decoded weight.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import torch
from _forms import add_form_options, text_table
from _record import add_option, record
from _timing import paired_seconds
from torch import Tensor, nn

import fp8manifold as fm

Step = Callable[[], object]
FEWEST_PAIRS: Final = 3
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cell:
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


def step_of(
    layer: nn.Module, tokens: int, inputs: int, outputs: int, backward: bool, like: Tensor
) -> Step:
    """A function that runs the layer once over a fixed batch."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator).to(like).requires_grad_(backward)
    gradient = torch.randn(tokens, outputs, generator=generator).to(like)

    def forward() -> object:
        with torch.no_grad():
            return layer(x)

    def both() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(gradient)

    return both if backward else forward


def measure(
    options: argparse.Namespace, size: tuple[int, int], tokens: int, mode: str, backward: bool
) -> Cell:
    """The ratio for one shape, batch and mode."""
    inputs, outputs = size
    like = torch.empty(0, dtype=DTYPES[options.dtype], device=options.device)
    linear = nn.Linear(inputs, outputs, dtype=like.dtype, device=like.device)
    quantized = fm.QuantizedLinear(
        copy.deepcopy(linear), fm.LayerSpec(options.format), options.storage
    )
    layers: list[nn.Module] = [quantized, linear]
    if mode == "compiled":
        torch._dynamo.reset()
        layers = [torch.compile(layer, dynamic=False, fullgraph=True) for layer in layers]
    steps = [step_of(layer, tokens, inputs, outputs, backward, like) for layer in layers]
    for step in steps:
        step()
    trial = paired_seconds(*steps, 1, like.device)[0]
    pairs = max(FEWEST_PAIRS, min(options.pairs, int(options.seconds / (sum(trial) + 1e-9))))
    times = paired_seconds(*steps, pairs, like.device)
    linear_ms = 1e3 * statistics.median(theirs for _, theirs in times)
    return Cell(inputs, outputs, tokens, mode, backward, pairs, linear_ms, *ratios_of(times))


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every combination asked for."""
    for size, mode, tokens, backward in itertools.product(
        options.sizes, options.modes, options.tokens, (False, True)
    ):
        print(
            f"{size[0]}x{size[1]}, {tokens} tokens, {mode}, backward={backward}",
            file=sys.stderr,
            flush=True,
        )
        yield measure(options, size, tokens, mode, backward)


def decoding(options: argparse.Namespace, size: tuple[int, int]) -> dict[str, float | str]:
    """The ratio of ``dequantize`` to ``clone``: both write the same float tensor once."""
    values = torch.randn(size[1], size[0], dtype=DTYPES[options.dtype], device=options.device)
    weight = fm.FP8Parameter(values, options.format)
    ratio, low, high = ratios_of(
        paired_seconds(weight.dequantize, values.clone, 1 + options.pairs, values.device)[1:]
    )
    return {"layer": f"{size[0]}x{size[1]}", "ratio": ratio, "ratio_min": low, "ratio_max": high}


def ratios_of(times: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, smallest and largest ratio of the pairs."""
    ratios = [ours / theirs for ours, theirs in times]
    return statistics.median(ratios), min(ratios), max(ratios)


def recorded(measured: list[Cell]) -> list[tuple[object, ...]]:
    """The table's rows as numbers, for the site."""
    pairs = zip(measured[::2], measured[1::2], strict=True)
    where = [(f"{one.inputs}x{one.outputs}", one.mode, one.tokens) for one in measured[::2]]
    return [
        (*place, *((c.ratio, c.ratio_min, c.ratio_max) for c in pair))
        for place, pair in zip(where, pairs, strict=True)
    ]


HEADER: Final = ("layer", "mode", "tokens", "forward", "forward and backward", "nn.Linear, ms")
RULE: Final = ("---", "---", "---:", "---:", "---:", "---:")


def lines(measured: list[Cell]) -> list[tuple[str, ...]]:
    """The table's rows: forward and backward of one combination side by side."""
    rows: list[tuple[str, ...]] = [HEADER]
    for forward, both in zip(measured[::2], measured[1::2], strict=True):
        ratios = [
            f"{c.ratio:.2f}x ({c.ratio_min:.2f} .. {c.ratio_max:.2f})" for c in (forward, both)
        ]
        where = (f"{forward.inputs}x{forward.outputs}", forward.mode, str(forward.tokens))
        rows.append((*where, *ratios, f"{forward.linear_ms:.2f}, {both.linear_ms:.2f}"))
    return rows


def size_of(text: str) -> tuple[int, int]:
    """``512x2048`` as (inputs, outputs)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form inputs x outputs, such as 512x2048"
        )
    return int(parts[0]), int(parts[1])


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", choices=("fp8", "grid", "master"), default="fp8")
    parser.add_argument("--format", choices=fm.NAMED_FORMATS, default="E4M3")
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[(512, 2048), (2048, 8192)])
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
    parser = build_parser()
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is at hand")
    if min(options.tokens) < 1:
        parser.error(f"--tokens {min(options.tokens)}: at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = list(cells(options))
    decoded = (
        [decoding(options, size) for size in options.sizes] if options.storage == "fp8" else []
    )
    device = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else "CPU, one thread, process CPU time"
    )
    title = (
        f"torch {torch.__version__}, {options.storage} {options.format}, {options.dtype}, {device}"
    )
    if options.json:
        print(
            json.dumps(
                {"title": title, "cells": [asdict(cell) for cell in measured], "decoding": decoded},
                indent=1,
            )
        )
    else:
        remarks = [
            f"decoding {d['layer']}: {d['ratio']:.2f}x ({d['ratio_min']:.2f} .. "
            f"{d['ratio_max']:.2f}) clone"
            for d in decoded
        ]
        print(
            title,
            text_table(lines(measured), RULE, options.markdown),
            *remarks,
            sep="\n" * (1 + options.markdown),
        )
    if options.record:
        record("`nn.Linear` of the same shape", HEADER[:-1], recorded(measured), options.device)


if __name__ == "__main__":
    main()
