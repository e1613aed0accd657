"""The rows of a comparison: formats x rules on one corpus, at the same seeds, and the settings given to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.config.schema import WITHOUT_FORMATS
from nanogpt_bench.config.settings import build_config, parse_overrides
from nanogpt_bench.report.rows import row_label
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.setup.parallel import refuse_parallel
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.plan import PlannedRun, applies
from nanogpt_bench.system.errors import BenchError

REFERENCE = "bf16-mixed"
# Rules tried on a format when only formats are asked for, and the format when only rules are.
DEFAULT_RULES = ("master", "nearest", "stochastic", "stiffness-anneal", "muon-stochastic", "muon-residual8")
DEFAULT_FORMATS = ("E4M3",)


@dataclass(frozen=True)
class Demonstration:
    """A GPT of about 0.8M parameters on the standard library's prose, long enough to tell the rules apart.

    `riemannian` is not among the rows: it leads after 300 steps and is behind after 2,000 (Q1 of docs/study.md). Muon
    has its row in E2M5 as well, where one byte costs it least (Q2).
    """

    # (rule, format) of every row, in the order of the table; the first is the reference.
    rows: tuple[tuple[str, str], ...] = (
        (REFERENCE, "none"),
        ("fp32", "none"),
        ("muon", "none"),
        ("master", "E4M3"),
        ("nearest", "E4M3"),
        ("stochastic", "E4M3"),
        ("stochastic-8bit", "E4M3"),
        ("stiffness-anneal", "E4M3"),
        ("muon-stochastic", "E4M3"),
        ("muon-stochastic", "E2M5"),
        ("nearest", "E7M0"),
        ("stochastic", "E7M0"),
    )
    size: str = "0.8M"
    max_steps: int = 300
    batch_size: int = 12
    eval_batches: int = 20
    # Arithmetic of the rows with 8-bit weights. bfloat16 costs as much as float32 on a CPU that has it and a third
    # more on one that has not (AVX2 only), so that just the reference pays for it.
    quantized_precision: str = "float32"
    first_seed: int = 42
    workers: int = 2

    def settings(self, rule: str, fmt: str, *, seed: int, max_steps: int, data_dir: str) -> dict[str, Any]:
        """The configuration of one run as {dotted key: value}; learning rates are the rule's own."""
        chosen: dict[str, Any] = {
            "rule": rule,
            "seed": seed,
            "data.dir": data_dir,
            "model.size": self.size,
            "train.max_steps": max_steps,
            "train.batch_size": self.batch_size,
            "optimizer.warmup_steps": min(100, max_steps // 10),
            # About ten validations and twenty looks, however long the run; every layer has three or four of them.
            "eval.interval": max(1, max_steps // 10),
            "eval.batches": self.eval_batches,
            "monitor.interval": max(1, max_steps // 20),
            "monitor.turns": 16,
            "monitor.dead_interval": 5,
            "runtime.threads": 1,
        }
        quantized = {
            "model.format": fmt,
            "train.precision": self.quantized_precision,
            "shadow.enabled": True,
            "shadow.interval": max(1, max_steps // 3),
        }
        return chosen if fmt == "none" else chosen | quantized


def choose_rows(
    formats: Sequence[str] | None, rules: Sequence[str] | None, demonstration: Demonstration
) -> tuple[tuple[str, str], ...]:
    """(rule, format) of every row: the demonstration's, or the reference and all formats x rules asked for.

    Rules that keep float weights have no format and give one row each; `all` stands for every rule whose packages are
    installed.

    Raises:
        BenchError: a rule or format does not exist (names the nearest one), or a rule's package is missing.
    """
    if formats is None and rules is None:
        return demonstration.rows
    names = _chosen(rules or DEFAULT_RULES)
    grids = _canonical(formats) if formats is not None else list(DEFAULT_FORMATS)
    floats = [(name, "none") for name in names if RULES[name].storage in WITHOUT_FORMATS]
    crossed = [(name, fmt) for fmt in grids for name in names if RULES[name].storage not in WITHOUT_FORMATS]
    return tuple(dict.fromkeys([(REFERENCE, "none"), *floats, *crossed]))


def _chosen(rules: Sequence[str]) -> list[str]:
    named = [name for name in rules if name != "all"]
    for name in named:
        check_available(name)
    return available_rules() if len(named) < len(rules) else named


def _canonical(formats: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(format_name(name, "--formats") for name in formats))
    if "none" in names:
        raise BenchError("--formats: 'none' is no format to compare; the reference row is there already")
    return names


def plan_runs(
    rows: Sequence[tuple[str, str]],
    demonstration: Demonstration,
    *,
    seeds: int,
    max_steps: int,
    data_dir: Path,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> list[PlannedRun]:
    """Every row at every seed, in the order of the table; rows share seeds and, through them, the order of the data.

    Of the settings `given` each row has those that mean something under its rule.
    """
    planned = []
    for place, (rule_name, fmt) in enumerate(rows, start=1):
        label = row_label(rule_name, fmt)
        for seed in range(demonstration.first_seed, demonstration.first_seed + seeds):
            name = f"{place:02d}-{label.replace(' ', '-')}" + (f"-seed{seed}" if seeds > 1 else "")
            settings = demonstration.settings(
                rule_name, fmt, seed=seed, max_steps=max_steps, data_dir=data_dir.as_posix()
            )
            planned.append(PlannedRun(label, rule_name, fmt, seed, name, put_into(settings, given)))
    return planned


def read_given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted key.

    Raises:
        BenchError: no such setting, or one that the rows differ in.
    """
    if not words:
        return {}
    given = parse_overrides(words)
    for key in given:
        if key in FIELDS and (option := FIELDS[key].facts["rows_by"]):
            raise BenchError(f"--{key}: the rows of a comparison differ in it; give {option}")
    config = build_config(given)
    return {key: get(config, key) for key in given}  # 1e-3 is a number


def steps_of(given: dict[str, Any], asked: int | None) -> int | None:
    """Return the steps of every run, taken out of what was given, since other settings follow from them.

    Raises:
        BenchError: two numbers of them.
    """
    steps: int | None = given.pop("train.max_steps", None)
    if None not in (steps, asked) and steps != asked:
        raise BenchError(f"--train.max_steps {steps} and --max-steps {asked} are two numbers of steps; give one")
    return asked if steps is None else steps


def as_typed(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line and their texts.

    >>> as_typed(["--optimizer.lr", "1e-3", "--seed=3"])
    {'--optimizer.lr': '1e-3', '--seed': '3'}
    """
    typed, queue = {}, list(words)
    while queue:
        option, equals, text = queue.pop(0).partition("=")
        typed[option] = text if equals else queue.pop(0)
    return typed


def put_into(settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's settings with those given that mean something for its rule."""
    rule = RULES[settings["rule"]]
    taken = {key: value for key, value in given.items() if applies(key, value, rule)}
    if taken.get("model.init_from") is not None:  # which has a size of its own
        settings = {key: value for key, value in settings.items() if key != "model.size"}
    return settings | taken


def check_given(given: Mapping[str, Any], planned: Sequence[PlannedRun], say: Callable[[str], None]) -> int:
    """Check every row's settings, say which rows a setting is for, and return the length of a block.

    Raises:
        BenchError: a setting that no row takes, or one that a row can't have; names the row.
    """
    rows = {run.label: run for run in planned}
    lines = list(_lines(given, rows))
    length = 0
    for label, run in rows.items():
        try:
            config = resolve(build_config(dict(run.settings)))
            refuse_parallel(config.train.parallel, "each row of a comparison")
            length = config.model.block_size or 0
        except BenchError as error:
            raise BenchError(f"{error} (in the row {label!r})") from None
    for line in lines:
        say(line)
    return length


def _lines(given: Mapping[str, Any], rows: Mapping[str, PlannedRun]) -> Iterator[str]:
    for key, value in given.items():
        takers = [label for label, run in rows.items() if applies(key, value, RULES[run.rule])]
        if not takers:
            raise BenchError(f"--{key} {value}: means nothing in any row ({', '.join(rows)}); leave it out")
        if key == "optimizer.lr":
            yield f"{key} {value} in every row, in the unit of its optimizer, in place of the rule's own"
        elif len(takers) < len(rows):
            yield f"{key} {value} in the rows that take it: {', '.join(takers)}"
