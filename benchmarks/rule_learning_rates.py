"""The learning rate of every update rule of the bench, by short trainings.

    python benchmarks/rule_learning_rates.py [--rules A,B|all] [--format E4M3]
                                             [--max-steps 150] [--points 5] [--seed 42]
                                             [--workers 2] [--out runs/learning-rates]

Model, corpus, batches and schedule are those of ``nanogpt-bench compare``. Every rule
gets the same grid around the usual learning rate of its optimizer, a factor of two
apart. While the best of a rule is at an end, the grid grows by one point on that side,
so that no rule's best is cut off. A rule's separate learning rate of float parameters
does not change.

Every training has a folder below ``--out`` and is not repeated: interrupted, or given
more rules, the same command continues where it was. Prints the table, the best in bold,
and writes it to ``table.md``. The learning rates in ``nanogpt_bench/config/rules.py``
come from here.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nanogpt_bench.config.metrics import WATCHED
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.data.text import prepare_stdlib
from nanogpt_bench.report.rows import row_label
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.sweep.comparison import row_settings
from nanogpt_bench.sweep.workers import Pool
from nanogpt_bench.system.errors import BenchError

#: where the grid of an optimizer is centred, in its own unit
CENTRES = {
    "adamw": 1e-3,
    "torchao_adamw8bit": 1e-3,
    "torchao_adamwfp8": 1e-3,
    "sgd": 1e-1,
    "stiffness_adamw": 1e-3,
    "stiffness_sgd": 1e-1,
    "stiffness_lion": 2.5e-4,
    "stiffness_muon": 2e-3,
    "stiffness_adafactor": 1e-1,
    "riemannian_adam": 0.5,
    "riemannian_sgd": 2e4,
    "fisher": 1e-3,
}
#: how far the grid may grow beyond the first points, on either side, in powers of two
MOST_POWERS = 8


@dataclass(frozen=True)
class Search:
    """The settings that all trainings of a search share."""

    out: Path
    fmt: str = "E4M3"
    max_steps: int = 150
    seed: int = 42
    points: int = 5

    @property
    def corpus(self) -> Path:
        return self.out / "corpus"

    def folder(self, rule: str, power: int) -> Path:
        """Return the folder of the training of `rule` at 2^power times its centre."""
        steps = f"{self.max_steps}-steps-seed-{self.seed}"
        label = row_label(rule, self.format_of(rule)).replace(" ", "-")
        return self.out / steps / label / f"{lr_at(rule, power):.6g}"

    def format_of(self, rule: str) -> str:
        return "none" if RULES[rule].storage == "float32" else self.fmt

    def job(self, rule: str, power: int) -> dict[str, object]:
        """Return everything a worker process needs to train."""
        settings = row_settings(
            rule,
            self.format_of(rule),
            seed=self.seed,
            max_steps=self.max_steps,
            data_dir=self.corpus.as_posix(),
        )
        watched = [name for name in WATCHED if name not in ("stall", "zones")]
        settings |= {
            "optimizer.lr": lr_at(rule, power),
            "monitor.watch": watched,
            "eval.interval": self.max_steps,
        }
        return {"settings": settings, "run_dir": str(self.folder(rule, power)), "argv": sys.argv}

    def loss(self, rule: str, power: int) -> float | None:
        """Return the final validation loss.

        It is infinite where the training failed, and None where it has not ended.
        """
        path = self.folder(rule, power) / "summary.json"
        if not path.exists():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary.get("status") == "failed":
            return math.inf
        return summary["final_val_loss"] if summary.get("status") == "finished" else None


def lr_at(rule: str, power: int) -> float:
    """Return 2^power times the usual learning rate of the rule's optimizer."""
    return CENTRES[RULES[rule].optimizer] * 2.0**power


def next_powers(losses: Mapping[int, float], points: int) -> list[int]:
    """Return the powers to try next.

    They are those of the first grid, then one beyond an end that is the best so far.

    >>> next_powers({}, 3), next_powers({-1: 2.0, 0: 1.0, 1: 2.0}, 3)
    ([-1, 0, 1], [])
    >>> next_powers({-1: 2.0, 0: 1.5, 1: 1.0}, 3)
    [2]
    """
    first_grid = [power - points // 2 for power in range(points)]
    untried = [power for power in first_grid if power not in losses]
    if untried:
        return untried
    best = best_power(losses)
    beyond_an_end = {min(losses): min(losses) - 1, max(losses): max(losses) + 1}
    power = beyond_an_end.get(best)
    if power is None or abs(power) > MOST_POWERS or math.isinf(losses[best]):
        return []
    return [power]


def best_power(losses: Mapping[int, float]) -> int:
    """Return the power with the lowest loss, the smaller one of equals."""
    return min(sorted(losses), key=lambda power: losses[power])


class Training(NamedTuple):
    """A rule, and the power of two of its learning rate."""

    rule: str
    power: int

    def __str__(self) -> str:
        """Return the rule and its rate."""
        return f"{self.rule} at lr {lr_at(self.rule, self.power):g}"


def known_losses(search: Search, rule: str) -> dict[int, float]:
    """Return the losses of a rule's trainings that have ended, by power.

    They may be of an earlier run of the command.
    """
    losses: dict[int, float] = {}
    while True:
        powers = next_powers(losses, search.points)
        results = {power: search.loss(rule, power) for power in powers}
        ended = {power: loss for power, loss in results.items() if loss is not None}
        losses |= ended
        # Nothing new has ended, or some of these have not: the grid grows no further.
        if not ended or len(ended) < len(powers):
            return losses


def run_trainings(search: Search, rules: Sequence[str], workers: int) -> None:
    """Do the trainings that are left, in rounds.

    A grid grows only when its points are known.
    """
    trainings = next_trainings(search, rules)
    if not trainings:
        return
    with Pool(min(workers, len(trainings))) as pool:
        while trainings:
            for rule, power in trainings:
                # It may have begun and not ended.
                shutil.rmtree(search.folder(rule, power), ignore_errors=True)
            _train_in_pool(search, trainings, pool)
            trainings = next_trainings(search, rules)


def next_trainings(search: Search, rules: Sequence[str]) -> list[Training]:
    """Return the trainings that can be done now."""
    trainings = []
    for rule in rules:
        for power in next_powers(known_losses(search, rule), search.points):
            if search.loss(rule, power) is None:
                trainings.append(Training(rule, power))
    return trainings


def _train_in_pool(search: Search, trainings: Sequence[Training], pool: Pool) -> None:
    jobs = [search.job(rule, power) for rule, power in trainings]
    ended = 0
    for event in pool.run(jobs, range(len(jobs))):
        if event.kind not in ("done", "failed") or event.job is None:
            continue
        training = trainings[event.job]
        if event.kind == "failed":
            raise BenchError(f"{training}: {event.data['error']['message']}")
        ended += 1
        loss = search.loss(*training)
        print(f"{ended} of {len(jobs)}: {training}: {loss:.3f}", file=sys.stderr, flush=True)


def rates_table(search: Search, rules: Iterable[str]) -> str:
    """Return the losses as Markdown, with a column for each multiple of the centre.

    The best of a row is in bold.
    """
    losses = {rule: known_losses(search, rule) for rule in rules}
    powers = sorted(set().union(*losses.values()))
    header = ["rule", "centre", *(f"x {2.0**power:g}" for power in powers), "best lr", "default lr"]
    lines = [header, ["---"] * len(header)]
    for rule, loss_by_power in losses.items():
        best = best_power(loss_by_power) if loss_by_power else None
        line = [rule, f"{lr_at(rule, 0):g}"]
        for power in powers:
            text = _loss_text(loss_by_power.get(power))
            line.append(f"**{text}**" if power == best else text)
        best_lr = "-" if best is None else f"{lr_at(rule, best):g}"
        lines.append([*line, best_lr, f"{RULES[rule].lr:g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _loss_text(loss: float | None) -> str:
    if loss is None:
        return ""
    return "failed" if math.isinf(loss) else f"{loss:.3f}"


def main(words: Sequence[str] | None = None) -> int:
    """Train what is left, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", default="all")
    parser.add_argument("--format", default="E4M3")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/learning-rates"))
    args = parser.parse_args(words)
    rules = available_rules() if args.rules == "all" else args.rules.split(",")
    try:
        for name in rules:
            check_available(name)
        search = Search(
            args.out, format_name(args.format, "--format"), args.max_steps, args.seed, args.points
        )
    except BenchError as error:
        parser.error(str(error))
    if not search.corpus.exists():
        prepare_stdlib(search.corpus)
    interrupted = False
    try:
        run_trainings(search, rules, args.workers)
    except KeyboardInterrupt:
        interrupted = True
    text = rates_table(search, rules)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    # 130 is the exit code of a shell's command that Ctrl-C ended.
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
