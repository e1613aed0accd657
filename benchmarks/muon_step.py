"""The cost of one step of StiffnessMuon, as a ratio to ``torch.optim.Muon`` over the
same float32 matrices.

    python benchmarks/muon_step.py [--sizes 0.86M 10M] [--pairs 15] [--processes 3]
    [--markdown | --json] [--record]

One thread. The matrices are those of the hidden layers of a GPT: 4 blocks of width 128,
and 6 of width 384. Each contender runs in fresh processes of its own, its steps taken
in turn with torch's; the ratio is the median over the pairs, of process CPU time, and
the table shows the median of the processes with the smallest and the largest. Our steps
include the check that every gradient is finite. Bytes are those of weights and state
after the steps.

torch's products are always in bfloat16; ours only if the machine has it, otherwise in
float32, and a row says which.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from _forms import add_form_options, text_table
from _record import Cell, add_option, record
from _timing import live_bytes, paired_seconds
from torch import Tensor, nn

import fp8manifold as fm

WARM_UP: Final = 2
OPTIONS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adjust_lr_fn": "match_rms_adamw",
}
SIZES: Final = {"0.86M": (4, 128), "10M": (6, 384)}
#: label, format of the weights (None: float32), options
CONTENDERS: Final[dict[str, tuple[str | None, dict[str, Any]]]] = {
    "float32": (None, {}),
    "float32, products in bfloat16": (None, {"ns_dtype": torch.bfloat16}),
    "float32, products in float32": (None, {"ns_dtype": torch.float32}),
    "E4M3 stochastic": ("E4M3", {}),
    "E4M3 stochastic, 8-bit momentum": ("E4M3", {"moments": "8bit"}),
    "E4M3 residual8, 8-bit momentum": ("E4M3", {"writeback": "residual8", "moments": "8bit"}),
    "E4M3 nearest, 8-bit momentum": ("E4M3", {"writeback": "nearest", "moments": "8bit"}),
}
BAR, GOAL = 1.3, 1.1


def shapes(size: str) -> list[tuple[int, int]]:
    """The matrices of a GPT's blocks."""
    blocks, width = SIZES[size]
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * blocks


def weights(size: str, fmt: str | None) -> list[Tensor]:
    """Parameters with gradients, the same values for all."""
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for i, shape in enumerate(shapes(size)):
        values = torch.randn(shape, generator=generator) * 0.02
        weight = nn.Parameter(values) if fmt is None else fm.FP8Parameter(values, fmt, seed=i)
        weight.grad = torch.randn(shape, generator=generator) * 1e-3
        made.append(weight)
    return made


def measure(label: str, size: str, pairs: int) -> dict[str, float]:
    """One contender in this process."""
    fmt, options = CONTENDERS[label]
    ours, theirs = weights(size, fmt), weights(size, None)
    optimizer = fm.optim.StiffnessMuon(ours, **OPTIONS, **options)
    peer = torch.optim.Muon([p for p in theirs if isinstance(p, nn.Parameter)], **OPTIONS)
    for _ in range(WARM_UP):
        optimizer.step()
        peer.step()
    times = paired_seconds(_step(optimizer), _step(peer), pairs, torch.device("cpu"))
    for weight in ours:
        weight.grad = None
    return {
        "ratio": statistics.median(mine / other for mine, other in times),
        "step_ms": 1e3 * statistics.median(mine for mine, _ in times),
        "peer_ms": 1e3 * statistics.median(other for _, other in times),
        "bytes": live_bytes(ours, optimizer.state_dict()) / sum(weight.numel() for weight in ours),
    }


def _step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return lambda: optimizer.step()


def in_fresh_process(label: str, size: str, pairs: int) -> dict[str, float]:
    """Call :func:`measure` in a fresh process."""
    command = [sys.executable, __file__, "--worker", label, "--sizes", size, "--pairs", str(pairs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{label}, {size}: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender and size; every contender once in each round."""
    names = [(size, label) for size in options.sizes for label in CONTENDERS]
    found: dict[tuple[str, str], list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.processes):
        for size, label in names:
            print(
                f"process {turn + 1} of {options.processes}: {label}, {size}",
                file=sys.stderr,
                flush=True,
            )
            found[size, label].append(in_fresh_process(label, size, options.pairs))
    return [_row(size, label, each) for (size, label), each in found.items()]


def _row(size: str, label: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [each["ratio"] for each in runs]
    return {
        "size": size,
        "label": label,
        "bytes": runs[-1]["bytes"],
        "ratio": (statistics.median(ratios), min(ratios), max(ratios)),
        "step_ms": statistics.median(each["step_ms"] for each in runs),
        "peer_ms": statistics.median(each["peer_ms"] for each in runs),
    }


def verdict(ratio: float) -> str:
    """Say which of bar and goal is met.

    >>> verdict(1.05), verdict(1.2), verdict(1.5)
    ('goal met', 'bar met', 'bar not met')
    """
    return "goal met" if ratio <= GOAL else "bar met" if ratio <= BAR else "bar not met"


HEADER: Final = (
    "matrices",
    "StiffnessMuon",
    "bytes per weight",
    "ratio (processes)",
    f"bar {BAR}x, goal {GOAL}x",
)
RECORDED: Final = ("matrices", "StiffnessMuon", "bytes per weight", "ratio", "bar and goal")


def table(rows: list[dict[str, Any]], markdown: bool) -> str:
    """The rows as Markdown or in columns."""
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        middle, low, high = row["ratio"]
        ratio = f"{middle:.2f}x ({low:.2f} .. {high:.2f})"
        lines.append((row["size"], row["label"], f"{row['bytes']:.2f}", ratio, verdict(middle)))
    return text_table(lines, ("---", "---", "---:", "---:", "---"), markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description="StiffnessMuon's step beside torch.optim.Muon's.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_form_options(parser)
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        print(json.dumps(measure(options.worker, options.sizes[0], options.pairs)))
        return 0
    rows = run(options)
    if options.json:
        print(json.dumps(rows))
    else:
        print(
            f"torch {torch.__version__}; {options.processes} processes of {options.pairs} pairs, "
            f"process CPU time"
        )
        print(table(rows, options.markdown))
    if options.record:
        cells: list[tuple[Cell, ...]] = [
            (
                row["size"],
                row["label"],
                round(row["bytes"], 2),
                row["ratio"],
                verdict(row["ratio"][0]),
            )
            for row in rows
        ]
        record("torch.optim.Muon, float32 weights, products in bfloat16", RECORDED, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
