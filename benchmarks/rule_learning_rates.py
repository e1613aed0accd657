"""The learning rate of every update rule of the bench: a short training at each of a
few rates, a factor of two apart.

    python benchmarks/rule_learning_rates.py [--rules A,B|all] [--format E4M3]
                                             [--max-steps 150] [--points 5] [--seed 42]
                                             [--workers 2] [--out runs/learning-rates]

Model, corpus, batches and schedule are those of ``nanogpt-bench compare``. Every rule
gets the same grid around the usual learning rate of its optimizer; while the best of a
rule is at an end, the grid grows by one point on that side, so that no rule's best is
cut off. A rule's separate learning rate of float parameters does not change.

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
        """Folder of the training of `rule` at 2^power times its centre."""
        steps = f"{self.max_steps}-steps-seed-{self.seed}"
        return (
            self.out
            / steps
            / row_label(rule, self.format_of(rule)).replace(" ", "-")
            / f"{lr_at(rule, power):.6g}"
        )

    def format_of(self, rule: str) -> str:
        return "none" if RULES[rule].storage == "float32" else self.fmt

    def job(self, rule: str, power: int) -> dict[str, object]:
        """Everything a worker process needs to train."""
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
        """The final validation loss; infinite where the training failed, None where it
        has not ended.
        """
        path = self.folder(rule, power) / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if summary.get("status") == "failed":
            return math.inf
        return summary["final_val_loss"] if summary.get("status") == "finished" else None


def lr_at(rule: str, power: int) -> float:
    """Two to the power times the usual learning rate of the rule's optimizer."""
    return CENTRES[RULES[rule].optimizer] * 2.0**power


def wanted(losses: Mapping[int, float], points: int) -> list[int]:
    """The powers still to be tried: the first grid, then one beyond an end that is the
    best so far.

    >>> wanted({}, 3), wanted({-1: 2.0, 0: 1.0, 1: 2.0}, 3), wanted({-1: 2.0, 0: 1.5, 1: 1.0}, 3)
    ([-1, 0, 1], [], [2])
    """
    first = [power - points // 2 for power in range(points)]
    missing = [power for power in first if power not in losses]
    if missing:
        return missing
    best, low, high = best_power(losses), min(losses), max(losses)
    grown = {low: low - 1, high: high + 1}.get(best)
    return [] if grown is None or abs(grown) > MOST_POWERS or math.isinf(losses[best]) else [grown]


def best_power(losses: Mapping[int, float]) -> int:
    """The power with the lowest loss, the smaller one of equals."""
    return min(sorted(losses), key=lambda power: losses[power])


def known(search: Search, rule: str) -> dict[int, float]:
    """The losses found so far for the powers that `wanted` returns, in this or an
    earlier run of the command.
    """
    losses: dict[int, float] = {}
    while True:
        found = {power: search.loss(rule, power) for power in wanted(losses, search.points)}
        ended = {power: loss for power, loss in found.items() if loss is not None}
        losses |= ended
        if not ended or len(ended) < len(found):
            return losses


def train(search: Search, rules: Sequence[str], workers: int) -> None:
    """Do the trainings that are left, in rounds, as a grid grows only when its points
    are known.
    """
    left = missing(search, rules)
    if not left:
        return
    with Pool(min(workers, len(left))) as pool:
        while left:
            for rule, power in left:
                shutil.rmtree(search.folder(rule, power), ignore_errors=True)  # begun and not ended
            _follow(search, left, pool)
            left = missing(search, rules)


def missing(search: Search, rules: Sequence[str]) -> list[tuple[str, int]]:
    """The trainings that can be done now, as (rule, power)."""
    left = [(rule, power) for rule in rules for power in wanted(known(search, rule), search.points)]
    return [(rule, power) for rule, power in left if search.loss(rule, power) is None]


def _follow(search: Search, left: Sequence[tuple[str, int]], pool: Pool) -> None:
    jobs = [search.job(rule, power) for rule, power in left]
    ended = 0
    for event in pool.run(jobs, range(len(jobs))):
        if event.kind not in ("done", "failed") or event.job is None:
            continue
        rule, power = left[event.job]
        if event.kind == "failed":
            raise BenchError(f"{rule} at {lr_at(rule, power):g}: {event.data['error']['message']}")
        ended += 1
        loss = search.loss(rule, power)
        print(
            f"{ended} of {len(jobs)}: {rule} at lr {lr_at(rule, power):g}: {loss:.3f}",
            file=sys.stderr,
            flush=True,
        )


def table(search: Search, rules: Iterable[str]) -> str:
    """The losses as Markdown: a column for each multiple of the centre, the best of a
    row in bold.
    """
    losses = {rule: known(search, rule) for rule in rules}
    powers = sorted({power for row in losses.values() for power in row})
    header = ["rule", "centre", *(f"x {2.0**power:g}" for power in powers), "best lr", "default lr"]
    lines = [header, ["---"] * len(header)]
    for rule, row in losses.items():
        best = best_power(row) if row else None
        cells = [
            ("**{}**" if power == best else "{}").format(_cell(row.get(power))) for power in powers
        ]
        found = "-" if best is None else f"{lr_at(rule, best):g}"
        lines.append([rule, f"{lr_at(rule, 0):g}", *cells, found, f"{RULES[rule].lr:g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(loss: float | None) -> str:
    return "" if loss is None else "failed" if math.isinf(loss) else f"{loss:.3f}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search the learning rate of every update rule.")
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
        train(search, rules, args.workers)
    except KeyboardInterrupt:
        interrupted = True
    text = table(search, rules)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
