"""The cost of a checkpoint: time and bytes of a commit, beside ``torch.save``.

    python benchmarks/checkpoint.py [--elements 10000000] [--repeats 9] [--folder PATH]
                                    [--record]

Both save the same state in the same run: a model of linear layers in E4M3, one byte per
weight, with the two float32 averages of AdamW, and then the same in float32. A commit
hashes and writes a file, waits until all of it is on the disk, and renames it.
``torch.save`` is timed twice: as it is mostly called, and with the steps that make a
file whole and durable (a temporary name, fsync, rename). The three take turns in one
folder, on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from _record import Cell, add_option, record
from _timing import CPU, Ratio, Step, wall_seconds
from torch import Tensor

from nanogpt_bench.checkpoint import Contents, commit_checkpoint, read_checkpoint, step_file

#: weights of a layer
LAYER = 1_000_000


def state_of(elements: int, weights: str) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint, with two float32 averages for each weight.

    Weights are codes with a scale per layer, or float32.
    """
    generator = torch.Generator().manual_seed(0)
    model: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for layer, start in enumerate(range(0, elements, LAYER)):
        # The last layer takes what is left.
        size = min(elements - start, LAYER)
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
    """Save as a commit does: temporary name, fsync, rename, fsync of the folder."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def times_in_turn(functions: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Return the times of functions that take turns, after one unmeasured call of each.

    They are wall-clock times, because process time would leave out the disk's.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(wall_seconds(function, CPU))
    return times


def ratio_in_turns(times: dict[str, list[float]], name: str, peer: str) -> Ratio:
    """Return the ratios of two contenders' times in the same turns."""
    pairs = zip(times[name], times[peer], strict=True)
    return Ratio.of(time / peer_time for time, peer_time in pairs)


def measure_states(
    elements: int, weights: str, repeats: int, folder: Path
) -> list[tuple[Cell, ...]]:
    """Print the rows of one kind of weights, and return them as numbers."""
    tensors = state_of(elements, weights)
    run_folder = folder / "run"
    run_folder.mkdir()
    torch_file, commit_file = folder / "state.pt", step_file(run_folder, 1)
    contents = Contents(1, tensors, facts={"best": True})
    saving = times_in_turn(
        {
            "commit": lambda: commit_checkpoint(run_folder, contents, keep_last=1),
            "torch.save": lambda: torch.save(tensors, torch_file),
            "durable": lambda: durable_save(tensors, torch_file),
        },
        repeats,
    )
    loading = times_in_turn(
        {
            "read": lambda: read_checkpoint(commit_file),
            "torch.load": lambda: torch.load(torch_file, weights_only=True),
        },
        repeats,
    )
    ratios = {
        "commit / torch.save": ratio_in_turns(saving, "commit", "torch.save"),
        "commit / torch.save, fsync and rename": ratio_in_turns(saving, "commit", "durable"),
        "read with its hashes / torch.load": ratio_in_turns(loading, "read", "torch.load"),
    }
    size = 0
    for part in tensors.values():
        size += sum(tensor.nbytes for tensor in part.values())
    print(f"{weights}, {elements:,} weights, {size / 1e6:,.1f} MB of tensors")
    for name, ratio in ratios.items():
        print(f"  {name:40s} {ratio}")
    torch_bytes = torch_file.stat().st_size
    share = f"{commit_file.stat().st_size / torch_bytes:.4f}x of {torch_bytes:,}"
    name = "bytes / torch.save's"
    print(f"  {name:40s} {share}")
    milliseconds = 1e3 * statistics.median(saving["commit"])
    print(f"  {'commit, median':40s} {milliseconds:,.0f} ms", flush=True)
    return [(f"{weights}, {elements:,}", name, ratio) for name, ratio in ratios.items()]


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
            rows += measure_states(options.elements, weights, options.repeats, folder)
        finally:
            shutil.rmtree(folder)
    if options.record:
        record("the second of the two named", ("weights", "what", "ratio"), rows)


if __name__ == "__main__":
    main()
