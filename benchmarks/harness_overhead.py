"""The cost of the bench's loop beside a plain one, and the cost of its monitors.

    python benchmarks/harness_overhead.py [--steps 400] [--format E4M3]
                                          [--markdown | --json] [--record]

nanoGPT's CPU configuration (nanogpt_cpu.yaml: 4 layers, 128 wide, blocks of 64, batch
12) in float32 on one thread, on the standard library's prose by bytes. Each figure is a
ratio of speeds, in tokens/s:

    bench / plain loop            the loop of ``run`` with its files and its check for Inf
                                  and NaN, but without monitors, over batch, forward,
                                  backward, clipping and step written out; goal >= 0.97
    with monitors / checked step  every monitor that is on by default, at the default
                                  interval, with loop and files, over the bench's step
                                  and its check of weights and optimizer state, which no
                                  flag turns off; once in float32, once with a master
                                  copy (--format); goal >= 0.95
    with monitors / step alone    the same over the step without that check; no goal
    compare's looks               a run of ``compare`` with its default monitors, shadow
                                  included, over its checked step: all its 300 steps but
                                  the first, one validation batch among them;
                                  goal >= 0.95

A look is a measurement by the monitors. The two loops take their steps in turn in one
process, so that whatever else the machine does slows both; process CPU time. The ratio
is that of the sums over all steps but the first 20 and the last, which validates; for
compare's looks only the first is left out. Next to it is the median over the pairs,
which the few monitored steps do not affect.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from _forms import add_form_options, check_at_least, print_titled, text_table
from _record import add_option, record
from _timing import Pair, Step

from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.text import prepare_stdlib
from nanogpt_bench.loop.anomalies import Sentry
from nanogpt_bench.loop.outcome import Progress
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer, initial_model, trainer_inputs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.comparison import row_settings, shipped

#: steps left out, but for compare's looks: first allocations
UNCOUNTED_STEPS: Final = 20
LOOP: Final = "bench / plain loop"
MONITORS: Final = "with monitors / checked step"
MONITORS_AND_CHECK: Final = "with monitors / step alone"
COMPARE_LOOKS: Final = "compare's looks"
SPEED_GOALS: Final = {LOOP: 0.97, MONITORS: 0.95, COMPARE_LOOKS: 0.95}
#: runs of ``compare``, with the storages whose monitors cost most and least
TRAINED_RULES: Final = ("stochastic", "master")
WITHOUT_MONITORS: Final = (
    "--monitor.watch=[trend]",
    "--alerts.enabled=false",
    "--alerts.save_on_anomaly=false",
)


@dataclass(frozen=True)
class SpeedRatio:
    """Two ratios of speeds."""

    name: str
    run: str
    #: of the sums over all pairs of steps
    ratio: float
    #: over the pairs
    median: float
    steps: int
    step_ms: float
    reference_ms: float


def run_config(corpus: Path, steps: int, *overrides: str) -> Config:
    """Return the configuration of a run of ``steps`` timed steps.

    It validates only before and after them.
    """
    length = UNCOUNTED_STEPS + steps + 1
    settings = (
        f"--data.dir={corpus}",
        f"--train.max_steps={length}",
        f"--eval.interval={length}",
        "--eval.batches=1",
        "--runtime.threads=1",
    )
    return resolve(load_config(find_config("nanogpt_cpu.yaml"), [*settings, *overrides]))


def row_of(corpus: Path, rule: str, fmt: str) -> Config:
    """Return the configuration of a run of ``compare``'s demonstration.

    It validates before its steps and at the last.
    """
    steps = shipped().base["train.max_steps"]
    settings = row_settings(rule, fmt, seed=42, max_steps=steps, data_dir=str(corpus))
    settings |= {"eval.interval": steps, "eval.batches": 1}
    return resolve(load_config(None, [f"--{key}={value}" for key, value in settings.items()]))


def plain_loop(config: Config, corpus: Corpus) -> Step:
    """Return a training step written out, with the bench's model and AdamW's settings."""
    batch_size, settings = config.train.batch_size, config.optimizer
    block = config.model.block_size or 0
    model = initial_model(config, corpus)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (settings.beta1 or 0.0, settings.beta2 or 0.0)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr or 0.0, betas=betas, fused=True)
    data = torch.from_numpy(corpus.train.astype("int64"))

    def step() -> float:
        starts = torch.randint(len(data) - block, (batch_size,)).tolist()
        tokens = torch.stack([data[start : start + block] for start in starts])
        targets = torch.stack([data[start + 1 : start + 1 + block] for start in starts])
        loss = model.loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def step_alone(config: Config, corpus: Corpus, *, checked: bool) -> Step:
    """Return the bench's step without monitors and files.

    If it is `checked`, it has the loop's check for Inf and NaN.
    """
    trainer = Trainer(trainer_inputs(config, corpus, torch.device("cpu")))
    sentry = Sentry(trainer)
    numbers = itertools.count(1)

    def step() -> float:
        step_facts = trainer.new_step(next(numbers), last=False)
        if not checked:
            return trainer.train_step(step_facts, [])
        sentry.copy_buffers()
        loss = trainer.train_step(step_facts, [])
        sentry.check(step_facts)
        return loss

    return step


def paired(config: Config, reference: Step, counted: range) -> list[Pair]:
    """Return the seconds of the counted steps of a run and of the reference.

    The reference takes a step whenever the run reports one.
    """
    times: list[Pair] = []
    # when the run went on: the clock runs for it between two reports
    resumed = time.process_time()

    def take_reference_step(progress: Progress) -> None:
        nonlocal resumed
        reported = time.process_time()
        run_seconds = reported - resumed
        reference()
        resumed = time.process_time()
        if progress.step in counted:
            times.append(Pair(run_seconds, resumed - reported))

    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", on_progress=take_reference_step)
    return times


def figure(name: str, run_name: str, times: list[Pair]) -> SpeedRatio:
    """Return the ratio of speeds: reference time over time of the run."""
    count = len(times)
    run_seconds = sum(pair.measured for pair in times)
    reference_seconds = sum(pair.reference for pair in times)
    return SpeedRatio(
        name,
        run_name,
        ratio=reference_seconds / run_seconds,
        median=statistics.median(pair.reference / pair.measured for pair in times),
        steps=count,
        step_ms=1e3 * run_seconds / count,
        reference_ms=1e3 * reference_seconds / count,
    )


def measure_harness(options: argparse.Namespace, folder: Path) -> Iterator[SpeedRatio]:
    """Yield all figures."""
    prepare_stdlib(folder)
    config = run_config(folder, options.steps, *WITHOUT_MONITORS)
    corpus = load_corpus(folder, config.model.block_size or 0)
    # The step after these validates.
    counted = range(UNCOUNTED_STEPS + 1, UNCOUNTED_STEPS + options.steps + 1)
    yield figure(LOOP, "float32", paired(config, plain_loop(config, corpus), counted))

    master = (
        "--rule=master",
        f"--model.format={options.format}",
        "--model.tied=leave",
        "--train.precision=float32",
    )
    runs = {"float32": (), f"{options.format} master": master}
    for run_name, settings in runs.items():
        config = run_config(folder, options.steps, *settings)
        for name, checked in ((MONITORS, True), (MONITORS_AND_CHECK, False)):
            print(f"{name}: {run_name}", file=sys.stderr, flush=True)
            reference = step_alone(config, corpus, checked=checked)
            yield figure(name, run_name, paired(config, reference, counted))

    for rule in TRAINED_RULES:
        run_name = f"{options.format} {rule}"
        print(f"{COMPARE_LOOKS}: {run_name}", file=sys.stderr, flush=True)
        config = row_of(folder, rule, options.format)
        corpus = load_corpus(folder, config.model.block_size or 0)
        reference = step_alone(config, corpus, checked=True)
        steps = range(2, (config.train.max_steps or 0) + 1)
        yield figure(COMPARE_LOOKS, run_name, paired(config, reference, steps))


def speed_table(figures: list[SpeedRatio], markdown: bool) -> str:
    """Return the figures as text or Markdown."""
    header = (
        "ratio",
        "run",
        "of the sums",
        "median of the pairs",
        "steps",
        "step, ms",
        "reference, ms",
        "goal",
    )
    rows = [header]
    for one in figures:
        rows.append(
            (
                one.name,
                one.run,
                f"{one.ratio:.3f}",
                f"{one.median:.3f}",
                str(one.steps),
                f"{one.step_ms:.1f}",
                f"{one.reference_ms:.1f}",
                goal(one),
            )
        )
    return text_table(rows, ("---",) * len(header), markdown)


def speed_cells(one: SpeedRatio) -> tuple[str | float, ...]:
    """Return a figure as numbers, for the site."""
    return (one.name, one.run, one.ratio, one.median, goal(one))


def goal(one: SpeedRatio) -> str:
    """Return the goal, and whether it is met."""
    least = SPEED_GOALS.get(one.name)
    if least is None:
        return "none"
    return f">= {least}, {'met' if one.ratio >= least else 'NOT met'}"


def harness_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="timed steps of each comparison, a multiple of 100"
    )
    parser.add_argument("--format", default="E4M3", help="format of the run with a master copy")
    add_form_options(parser)
    add_option(parser)
    return parser


def main() -> None:
    """Print the table."""
    parser = harness_parser()
    options = parser.parse_args()
    check_at_least(parser, options, 1, "steps")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = list(measure_harness(options, Path(folder) / "corpus"))
    title = f"torch {torch.__version__}, CPU, one thread, process CPU time"
    if options.json:
        print(json.dumps({"title": title, "figures": list(map(asdict, figures))}, indent=1))
    else:
        print_titled(title, speed_table(figures, options.markdown), markdown=options.markdown)
    if options.record:
        columns = ("ratio of speeds", "run", "of the sums", "median of the pairs", "goal")
        record("the second of the two named", columns, map(speed_cells, figures))


if __name__ == "__main__":
    main()
