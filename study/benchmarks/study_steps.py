"""Milliseconds of a training step for each rule and format of the study, and its memory.

    python study/benchmarks/study_steps.py [--sweeps study_q14_size,...]
                                           [--data-dir DIR] [--steps 40] [--turns 2]
                                           [--smoke] [--record]

The study's runs share a GPU, so their times say nothing. Here each step is alone on the
machine. Settings are
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
from typing import Any, NamedTuple

import torch

from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.trainer import Trainer, trainer_inputs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.runtime import runtime
from nanogpt_bench.sweep.file import read_sweep

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import check_at_least
from _record import Cell, add_option, record

SWEEPS_FOLDER = Path(__file__).parent.parent / "sweeps"
SWEEPS = ("study_q14_size", "study_q14_tokens", "study_q9_length")
WARMUP_STEPS = 2
STUDY_COLUMNS = ("sweep", "rule", "ms a step", "peak MiB")


def labelled_settings(sweep: str, *, smoke: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label and settings of every rule and format of a sweep.

    Float rules have no format.
    """
    file = read_sweep(SWEEPS_FOLDER / f"{sweep}.yaml", smoke=smoke)
    axes = {axis.key: axis.values for axis in file.axes}
    for rule in axes["rule"]:
        if RULES[rule].storage == "float32":
            yield rule, {**file.base, "rule": rule}
            continue
        for fmt in axes["model.format"]:
            yield f"{fmt} {rule}", {**file.base, "rule": rule, "model.format": fmt}


class MeasuredRule(NamedTuple):
    """What was measured of a rule and format."""

    #: of a step
    milliseconds: float
    #: MiB, known on a GPU only
    peak: float | None


def measure_rule(settings: Mapping[str, Any], steps: int) -> MeasuredRule:
    """Train for a few steps."""
    config = resolve(build_config(dict(settings)))
    with runtime(config) as device:
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        trainer = Trainer(trainer_inputs(config, open_corpus(config), device))
        numbers = range(1, WARMUP_STEPS + steps + 1)
        seconds = [step_seconds(trainer, number, on_gpu=on_gpu) for number in numbers]
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None
    return MeasuredRule(1e3 * statistics.median(seconds[WARMUP_STEPS:]), peak)


def step_seconds(trainer: Trainer, number: int, *, on_gpu: bool) -> float:
    """Return the seconds of one step."""
    begin = perf_counter()
    trainer.train_step(trainer.new_step(number, last=False), ())
    if on_gpu:
        torch.cuda.synchronize(trainer.device)
    return perf_counter() - begin


def main() -> None:
    """Measure, and print each time as it is known."""
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
    check_at_least(parser, options, 1, "steps", "turns")
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for sweep in options.sweeps.split(","):
        for label, settings in labelled_settings(sweep, smoke=options.smoke):
            if options.data_dir is not None:
                settings["data.dir"] = options.data_dir
            cases[sweep, label] = settings
    measured: dict[tuple[str, str], list[MeasuredRule]] = {case: [] for case in cases}
    for _ in range(options.turns):
        for (sweep, label), settings in cases.items():
            figures = measure_rule(settings, options.steps)
            measured[sweep, label].append(figures)
            print(f"{sweep} {label}: {figures.milliseconds:.2f} ms", flush=True)
    rows: list[list[Cell]] = []
    for (sweep, label), turns in measured.items():
        milliseconds = statistics.fmean(figures.milliseconds for figures in turns)
        peak = turns[0].peak
        rows.append([sweep, label, round(milliseconds, 1), None if peak is None else round(peak)])
    if options.record:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(record("", STUDY_COLUMNS, rows, device, ("geoopt", "triton")))


if __name__ == "__main__":
    main()
