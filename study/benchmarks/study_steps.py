"""Milliseconds of a training step for each rule and format of the study, alone on the
machine, and its peak memory.

    python study/benchmarks/study_steps.py [--sweeps study_q14_size,...] [--data-dir DIR]
                                     [--steps 40] [--turns 2] [--smoke] [--record]

The study's own runs share a GPU, so their times say nothing; these do. Settings are
those of the study's sweeps, each in its ``data.dir`` unless one is given; learning
rates are the rules' defaults. A time is the median of the steps after two that warm up,
averaged over turns through all rows. The peak is known on a GPU only.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.sweep.file import read_sweep

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _record import Cell, add_option, record

FOLDER = Path(__file__).parent.parent / "sweeps"
SWEEPS = ("study_q14_size", "study_q14_tokens", "study_q9_length")
WARMUP_STEPS = 2
COLUMNS = ("sweep", "rule", "ms a step", "peak MiB")


def rows_of(sweep: str, *, smoke: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The label and settings of every rule and format of a sweep; float rules have no
    format.
    """
    file = read_sweep(FOLDER / f"{sweep}.yaml", smoke=smoke)
    axes = {axis.key: axis.values for axis in file.axes}
    for rule in axes["rule"]:
        for fmt in [None] if RULES[rule].storage == "float32" else axes["model.format"]:
            chosen = {"rule": rule} if fmt is None else {"rule": rule, "model.format": fmt}
            yield " ".join(filter(None, (fmt, rule))), {**file.base, **chosen}


def measured(settings: Mapping[str, Any], steps: int) -> tuple[float, float | None]:
    """Milliseconds of a step, and MiB at the peak on a GPU."""
    config = resolve(build_config(dict(settings)))
    with runtime(config) as device:
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        trainer = Trainer(config, open_corpus(config), device)
        seconds = [
            timed(trainer, number, on_gpu=on_gpu) for number in range(1, WARMUP_STEPS + steps + 1)
        ]
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None
    return 1e3 * statistics.median(seconds[WARMUP_STEPS:]), peak


def timed(trainer: Trainer, number: int, *, on_gpu: bool) -> float:
    """Seconds of one step."""
    begun = perf_counter()
    trainer.train_step(trainer.new_step(number, last=False), ())
    if on_gpu:
        torch.cuda.synchronize(trainer.device)
    return perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sweeps", default=",".join(SWEEPS), help="sweeps of the study, without .yaml"
    )
    parser.add_argument("--data-dir", help="prepared text in place of each sweep's own")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--smoke", action="store_true", help="the tiny models of the sweeps' section smoke"
    )
    add_option(parser)
    options = parser.parse_args()
    if min(options.steps, options.turns) < 1:
        parser.error(f"--steps {options.steps} --turns {options.turns}: at least 1 each")
    own = {} if options.data_dir is None else {"data.dir": options.data_dir}
    cases = [
        (sweep, *row)
        for sweep in options.sweeps.split(",")
        for row in rows_of(sweep, smoke=options.smoke)
    ]
    found: dict[int, list[tuple[float, float | None]]] = {}
    for _ in range(options.turns):
        for number, (sweep, label, settings) in enumerate(cases):
            found.setdefault(number, []).append(measured({**settings, **own}, options.steps))
            print(f"{sweep} {label}: {found[number][-1][0]:.2f} ms", flush=True)
    rows: list[list[Cell]] = []
    for number, (sweep, label, _) in enumerate(cases):
        times, peaks = zip(*found[number], strict=True)
        peak = None if peaks[0] is None else round(peaks[0])
        rows.append([sweep, label, round(statistics.fmean(times), 1), peak])
    if options.record:
        print(
            record(
                "",
                COLUMNS,
                rows,
                "cuda" if torch.cuda.is_available() else "cpu",
                ("geoopt", "triton"),
            )
        )


if __name__ == "__main__":
    main()
