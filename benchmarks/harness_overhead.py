"""The cost of the bench's loop beside a plain one over the same model, and the cost of
its monitors.

    python benchmarks/harness_overhead.py [--steps 400] [--format E4M3] [--markdown |
    --json]

nanoGPT's CPU configuration (nanogpt_cpu.yaml: 4 layers, 128 wide, blocks of 64, batch
12) in float32 on one thread, on the standard library's prose by bytes. Each figure is a
ratio of speeds, in tokens/s:

    bench / plain loop the loop of ``run`` with its files and its check for Inf and NaN,
                                 but without monitors, over batch, forward, backward,
                                 clipping and step written out; goal >= 0.97
    with monitors / checked step every monitor that is on by default, at the default
                                 interval, with loop and files, over the bench's own
                                 step and its check of weights and optimizer state,
                                 which no flag turns off; once in float32, once with a
                                 master copy (--format); goal >= 0.95
    with monitors / step alone the same over the step without that check; no goal
    compare's looks a run of ``compare`` with its default monitors, shadow included,
    over its checked step:
                                 all its 300 steps but the first, one validation batch
                                 among them; goal >= 0.95

The two loops take their steps in turn in one process, so that whatever else the machine
does slows both; process CPU time. The ratio is that of the sums over all steps but the
first; beside it is the median over the pairs, which the few monitored steps do not
affect.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from _forms import add_form_options, text_table
from _record import add_option, record

from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.data.batches import Corpus, load_corpus
from nanogpt_bench.data.text import prepare_stdlib
from nanogpt_bench.loop.anomalies import Sentry
from nanogpt_bench.loop.outcome import Progress
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer, initial_model
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.comparison import row_settings, shipped

Step = Callable[[], object]
#: steps left out: first allocations
WARM_UP: Final = 20
LOOP, MONITORS, ALL = (
    "bench / plain loop",
    "with monitors / checked step",
    "with monitors / step alone",
)
LOOKS: Final = "compare's looks"
GOALS: Final = {LOOP: 0.97, MONITORS: 0.95, LOOKS: 0.95}
#: runs of ``compare``, with the storages whose monitors cost most and least
ROWS: Final = ("stochastic", "master")
UNWATCHED: Final = (
    "--monitor.watch=[trend]",
    "--alerts.enabled=false",
    "--alerts.save_on_anomaly=false",
)


@dataclass(frozen=True)
class Figure:
    """A ratio of speeds: of the sums over all pairs of steps, and the median over the
    pairs.
    """

    name: str
    run: str
    ratio: float
    median: float
    steps: int
    step_ms: float
    reference_ms: float


def config_of(corpus: Path, steps: int, *more: str) -> Config:
    """The configuration of a run of ``steps`` timed steps that validates only before
    and after them.
    """
    length = WARM_UP + steps + 1
    settings = (
        f"--data.dir={corpus}",
        f"--train.max_steps={length}",
        f"--eval.interval={length}",
        "--eval.batches=1",
    )
    return resolve(
        load_config(find_config("nanogpt_cpu.yaml"), [*settings, "--runtime.threads=1", *more])
    )


def row_of(corpus: Path, rule: str, fmt: str) -> Config:
    """The configuration of a run of ``compare``'s demonstration, which validates before
    its steps and at the last.
    """
    steps = shipped().base["train.max_steps"]
    settings = row_settings(rule, fmt, seed=42, max_steps=steps, data_dir=str(corpus))
    settings |= {"eval.interval": steps, "eval.batches": 1}
    return resolve(load_config(None, [f"--{key}={value}" for key, value in settings.items()]))


def plain_loop(config: Config, corpus: Corpus) -> Step:
    """A training step written out, with the bench's model and AdamW's settings."""
    train, settings, block = config.train, config.optimizer, config.model.block_size or 0
    model = initial_model(config, corpus)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (settings.beta1 or 0.0, settings.beta2 or 0.0)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr or 0.0, betas=betas, fused=True)
    data = torch.from_numpy(corpus.train.astype("int64"))

    def step() -> float:
        starts = torch.randint(len(data) - block, (train.batch_size,)).tolist()
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
    """The bench's own step without monitors and files; if `checked` with the loop's
    check for Inf and NaN.
    """
    trainer = Trainer(config, corpus, torch.device("cpu"))
    sentry = Sentry(trainer)
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        now = trainer.new_step(taken, last=False)
        if not checked:
            return trainer.train_step(now, [])
        sentry.copy_buffers()
        loss = trainer.train_step(now, [])
        sentry.check(now)
        return loss

    return step


def paired(config: Config, reference: Step, counted: range) -> list[tuple[float, float]]:
    """(run, reference) seconds of the counted steps: the reference takes one whenever
    the run reports one.
    """
    times: list[tuple[float, float]] = []
    left = time.process_time()

    def between(progress: Progress) -> None:
        nonlocal left
        entered, begun = time.process_time(), left
        reference()
        left = time.process_time()
        if progress.step in counted:
            times.append((entered - begun, left - entered))

    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", on_progress=between)
    return times


def figure(name: str, what: str, times: list[tuple[float, float]]) -> Figure:
    """The ratio of speeds: reference time over time of the run."""
    ours, theirs = (sum(column) for column in zip(*times, strict=True))
    median = statistics.median(reference / step for step, reference in times)
    step_ms, reference_ms = (1e3 * total / len(times) for total in (ours, theirs))
    return Figure(name, what, theirs / ours, median, len(times), step_ms, reference_ms)


def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    """All figures."""
    prepare_stdlib(folder)
    unwatched = config_of(folder, options.steps, *UNWATCHED)
    corpus = load_corpus(folder, unwatched.model.block_size or 0)
    counted = range(WARM_UP + 1, WARM_UP + options.steps + 1)  # the step after these validates
    figures = [figure(LOOP, "float32", paired(unwatched, plain_loop(unwatched, corpus), counted))]
    quantised = (
        "--rule=master",
        f"--model.format={options.format}",
        "--model.tied=leave",
        "--train.precision=float32",
    )
    for what, more in (("float32", ()), (f"{options.format} master", quantised)):
        watched = config_of(folder, options.steps, *more)
        for name, checked in ((MONITORS, True), (ALL, False)):
            print(f"{name}: {what}", file=sys.stderr, flush=True)
            figures.append(
                figure(
                    name,
                    what,
                    paired(watched, step_alone(watched, corpus, checked=checked), counted),
                )
            )
    for rule in ROWS:
        print(f"{LOOKS}: {options.format} {rule}", file=sys.stderr, flush=True)
        row = row_of(folder, rule, options.format)
        reference = step_alone(row, load_corpus(folder, row.model.block_size or 0), checked=True)
        times = paired(row, reference, range(2, (row.train.max_steps or 0) + 1))
        figures.append(figure(LOOKS, f"{options.format} {rule}", times))
    return figures


def table(figures: list[Figure], markdown: bool) -> str:
    """The figures as text or Markdown."""
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
    rows = [header] + [
        (
            *(one.name, one.run, f"{one.ratio:.3f}", f"{one.median:.3f}", str(one.steps)),
            *(f"{one.step_ms:.1f}", f"{one.reference_ms:.1f}", goal(one)),
        )
        for one in figures
    ]
    return text_table(rows, ("---",) * len(header), markdown)


def recorded(one: Figure) -> tuple[str | float, ...]:
    """A figure as numbers, for the site."""
    return (one.name, one.run, one.ratio, one.median, goal(one))


def goal(one: Figure) -> str:
    """The goal, and whether it is met."""
    least = GOALS.get(one.name)
    if least is None:
        return "none"
    return f">= {least}, {'met' if one.ratio >= least else 'NOT met'}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
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
    parser = build_parser()
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder) / "corpus")
    title = f"torch {torch.__version__}, CPU, one thread, process CPU time"
    if options.json:
        print(json.dumps({"title": title, "figures": [asdict(one) for one in figures]}, indent=1))
    else:
        print(title, table(figures, options.markdown), sep="\n" * (1 + options.markdown))
    if options.record:
        columns = ("ratio of speeds", "run", "of the sums", "median of the pairs", "goal")
        record("the second of the two named", columns, map(recorded, figures))


if __name__ == "__main__":
    main()
