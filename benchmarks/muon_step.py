"""The cost of one step of StiffnessMuon, as a ratio to ``torch.optim.Muon``.

    python benchmarks/muon_step.py [--sizes 0.86M 10M] [--pairs 15] [--processes 3]
                                   [--markdown | --json] [--record]

One thread. torch's Muon steps the same matrices in float32. They are those of the
hidden layers of a GPT: 4 blocks of width 128, or 6 of width 384. Each contender runs in
fresh processes, its steps taken in turn with torch's. A process has one ratio, the
median over its pairs of process CPU time. The table shows the median of the processes,
the smallest and the largest. Our steps include the check that every gradient is finite.
Bytes are those of weights and state after the steps.

torch's products are always in bfloat16. Ours are only if the machine has it, and
otherwise in float32. A row says which.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from _timing import Ratio, live_bytes, paired_seconds
from torch import Tensor, nn

import fp8manifold as fm

WARM_UP_PAIRS: Final = 2
OPTIONS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adjust_lr_fn": "match_rms_adamw",
}


class GPTSize(NamedTuple):
    """The size of a GPT."""

    blocks: int
    width: int


GPT_SIZES: Final = {"0.86M": GPTSize(4, 128), "10M": GPTSize(6, 384)}


class MuonContender(NamedTuple):
    """StiffnessMuon over some kind of weights."""

    #: format of the weights; None for float32
    fmt: str | None
    options: dict[str, Any]


MUON_CONTENDERS: Final = {
    "float32": MuonContender(None, {}),
    "float32, products in bfloat16": MuonContender(None, {"ns_dtype": torch.bfloat16}),
    "float32, products in float32": MuonContender(None, {"ns_dtype": torch.float32}),
    "E4M3 stochastic": MuonContender("E4M3", {}),
    "E4M3 stochastic, 8-bit momentum": MuonContender("E4M3", {"moments": "8bit"}),
    "E4M3 residual8, 8-bit momentum": MuonContender(
        "E4M3", {"writeback": "residual8", "moments": "8bit"}
    ),
    "E4M3 nearest, 8-bit momentum": MuonContender(
        "E4M3", {"writeback": "nearest", "moments": "8bit"}
    ),
}
#: largest ratios: the one that has to be met, and the one that is aimed at
MUON_BAR, MUON_GOAL = 1.3, 1.1


def shapes(size: str) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a GPT's blocks."""
    blocks, width = GPT_SIZES[size]
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * blocks


def hidden_matrices(size: str, fmt: str | None) -> list[Tensor]:
    """Return parameters with gradients, the same values for all contenders."""
    generator = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = []
    for i, shape in enumerate(shapes(size)):
        values = torch.randn(shape, generator=generator) * 0.02
        weight = nn.Parameter(values) if fmt is None else fm.FP8Parameter(values, fmt, seed=i)
        weight.grad = torch.randn(shape, generator=generator) * 1e-3
        parameters.append(weight)
    return parameters


def measure_muon(label: str, size: str, pairs: int) -> dict[str, float]:
    """Measure one contender in this process."""
    contender = MUON_CONTENDERS[label]
    parameters = hidden_matrices(size, contender.fmt)
    optimizer = fm.optim.StiffnessMuon(parameters, **OPTIONS, **contender.options)
    peer = torch.optim.Muon(hidden_matrices(size, None), **OPTIONS)
    for _ in range(WARM_UP_PAIRS):
        optimizer.step()
        peer.step()
    times = paired_seconds(_step(optimizer), _step(peer), pairs, torch.device("cpu"))
    for weight in parameters:
        weight.grad = None
    count = sum(weight.numel() for weight in parameters)
    return {
        "ratio": Ratio.of_pairs(times).median,
        "step_ms": 1e3 * statistics.median(pair.measured for pair in times),
        "peer_ms": 1e3 * statistics.median(pair.reference for pair in times),
        "bytes": live_bytes(parameters, optimizer.state_dict()) / count,
    }


def _step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return lambda: optimizer.step()


def measure_muon_in_fresh_process(label: str, size: str, pairs: int) -> dict[str, float]:
    """Measure one contender in a process of its own."""
    command = [sys.executable, __file__, "--worker", label, "--sizes", size, "--pairs", str(pairs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1]
        raise SystemExit(f"{label}, {size}: exit code {process.returncode}: {reason}")
    figures: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return figures


def run_muon_contenders(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each contender and size.

    Every contender runs once in each round, so that a drift of the machine affects all.
    """
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for turn in range(options.processes):
        for size, label in itertools.product(options.sizes, MUON_CONTENDERS):
            name = f"process {turn + 1} of {options.processes}: {label}, {size}"
            print(name, file=sys.stderr, flush=True)
            figures = measure_muon_in_fresh_process(label, size, options.pairs)
            runs.setdefault((size, label), []).append(figures)
    return [_row(size, label, figures) for (size, label), figures in runs.items()]


def _row(size: str, label: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "size": size,
        "label": label,
        "bytes": runs[-1]["bytes"],
        "ratio": Ratio.of(run["ratio"] for run in runs),
        "step_ms": statistics.median(run["step_ms"] for run in runs),
        "peer_ms": statistics.median(run["peer_ms"] for run in runs),
    }


def muon_verdict(ratio: float) -> str:
    """Say which of bar and goal a ratio meets.

    >>> muon_verdict(1.05), muon_verdict(1.2), muon_verdict(1.5)
    ('goal met', 'bar met', 'bar not met')
    """
    if ratio <= MUON_GOAL:
        return "goal met"
    return "bar met" if ratio <= MUON_BAR else "bar not met"


MUON_HEADER: Final = (
    "matrices",
    "StiffnessMuon",
    "bytes per weight",
    "ratio (processes)",
    f"bar {MUON_BAR}x, goal {MUON_GOAL}x",
)
MUON_COLUMNS: Final = ("matrices", "StiffnessMuon", "bytes per weight", "ratio", "bar and goal")


def muon_table(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Return the rows as Markdown or in columns."""
    lines: list[tuple[str, ...]] = [MUON_HEADER]
    for row in rows:
        lines.append(
            (
                row["size"],
                row["label"],
                f"{row['bytes']:.2f}",
                str(row["ratio"]),
                muon_verdict(row["ratio"].median),
            )
        )
    return text_table(lines, ("---", "---", "---:", "---:", "---"), markdown)


def muon_cells(row: dict[str, Any]) -> tuple[Cell, ...]:
    """Return a row as numbers, for the site."""
    ratio: Ratio = row["ratio"]
    size = round(row["bytes"], 2)
    return (row["size"], row["label"], size, ratio, muon_verdict(ratio.median))


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(GPT_SIZES), default=list(GPT_SIZES))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_form_options(parser)
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        print(json.dumps(measure_muon(options.worker, options.sizes[0], options.pairs)))
        return 0
    rows = run_muon_contenders(options)
    if options.json:
        print(json.dumps(rows))
    else:
        print(
            f"torch {torch.__version__}; {options.processes} processes of {options.pairs} pairs, "
            f"process CPU time"
        )
        print(muon_table(rows, options.markdown))
    if options.record:
        peer = "torch.optim.Muon, float32 weights, products in bfloat16"
        record(peer, MUON_COLUMNS, map(muon_cells, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
