"""The cost of a checkpoint: time and bytes of a commit, as ratios to ``torch.save`` of
the same state in the same run.

    python benchmarks/checkpoint.py [--elements 10000000] [--repeats 9] [--folder PATH]
    [--record]

The state is a model of linear layers in E4M3, one byte per weight, with the two float32
averages of AdamW, and the same in float32. A commit hashes and writes a file, waits
until all of it is on the disk, and renames it. ``torch.save`` is timed twice: as it is
mostly called, and with the steps that make a file whole and durable (a temporary name,
fsync, rename). The three take turns in one folder, on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import Cell, add_option, record
from torch import Tensor

from nanogpt_bench.checkpoint import Contents, commit, read, step_file

LAYER = 1_000_000


def state_of(elements: int, weights: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: weights as codes with a scale per layer, or float32,
    and two float32 averages.
    """
    generator = torch.Generator().manual_seed(0)
    model: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for layer in range(max(1, elements // LAYER)):
        size = min(elements, LAYER)
        if weights == "float32":
            model[f"{layer}.weight"] = torch.randn(size, generator=generator)
        else:
            model[f"{layer}.codes"] = torch.randint(
                0, 256, (size,), dtype=torch.uint8, generator=generator
            )
            model[f"{layer}.scale"] = torch.ones(1)
        for name in ("exp_avg", "exp_avg_sq"):
            moments[f"{layer}.{name}"] = torch.randn(size, generator=generator)
    return {"model": model, "optimizer": moments}


def durable_save(state: Any, path: Path) -> None:
    """``torch.save`` to a temporary name, fsync, rename, fsync of the folder."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call: process time would leave out the disk's."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def in_turn(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The times of functions that take turns, after one unmeasured call of each."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


def ratio(times: dict[str, list[float]], name: str, peer: str) -> tuple[float, float, float]:
    """Median ratio of two contenders' times in the same turn, the smallest and the
    largest.
    """
    ratios = [mine / theirs for mine, theirs in zip(times[name], times[peer], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def measure(elements: int, weights: str, repeats: int, folder: Path) -> list[tuple[Cell, ...]]:
    """Print the rows of one kind of weights, and return them as numbers."""
    tensors = state_of(elements, weights)
    path, made = folder / "state.pt", step_file(folder / "run", 1)
    (folder / "run").mkdir()
    contents = Contents(1, tensors, facts={"best": True})
    saving = in_turn(
        {
            "commit": lambda: commit(folder / "run", contents, keep_last=1),
            "torch.save": lambda: torch.save(tensors, path),
            "durable": lambda: durable_save(tensors, path),
        },
        repeats,
    )
    loading = in_turn(
        {"read": lambda: read(made), "torch.load": lambda: torch.load(path, weights_only=True)},
        repeats,
    )
    held = sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
    print(f"{weights}, {elements:,} weights, {held / 1e6:,.1f} MB of tensors")
    ratios = {
        "commit / torch.save": ratio(saving, "commit", "torch.save"),
        "commit / torch.save, fsync and rename": ratio(saving, "commit", "durable"),
        "read with its hashes / torch.load": ratio(loading, "read", "torch.load"),
    }
    for name, (median, low, high) in ratios.items():
        print(f"  {name:40s} {median:.2f}x ({low:.2f} .. {high:.2f})")
    ours, theirs = made.stat().st_size, path.stat().st_size
    print(f"  bytes / torch.save's                     {ours / theirs:.4f}x of {theirs:,}")
    print(
        f"  commit, median                           "
        f"{statistics.median(saving['commit']) * 1e3:,.0f} ms",
        flush=True,
    )
    return [(f"{weights}, {elements:,}", name, found) for name, found in ratios.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to be measured",
    )
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, one thread, median of {options.repeats} turns (smallest .. "
        f"largest)"
    )
    rows: list[tuple[Cell, ...]] = []
    for weights in ("E4M3", "float32"):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            rows += measure(options.elements, weights, options.repeats, folder)
        finally:
            shutil.rmtree(folder)
    if options.record:
        record("the second of the two named", ("weights", "what", "ratio"), rows)


if __name__ == "__main__":
    main()
