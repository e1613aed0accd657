"""What is going to be run: rows of the table, their seeds, and the settings of every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.compare.demonstration import (
    DEFAULT_FORMATS,
    DEFAULT_RULES,
    REFERENCE,
    RELATIVE_COST,
    Demonstration,
)
from nanogpt_bench.config.rules import RULES, available_rules, check_available
from nanogpt_bench.config.schema import WITHOUT_FORMATS
from nanogpt_bench.report.rows import Row, row_label
from nanogpt_bench.system.errors import BenchError, unknown

#: of a comparison or a sweep: to check the settings of that many takes a minute, its page many megabytes
MOST_RUNS = 10_000


def check_count(runs: int, source: str) -> None:
    """Refuse more runs than are planned, before any is.

    Raises:
        BenchError: more than `MOST_RUNS`; names `source`, which asks for them.
    """
    if runs > MOST_RUNS:
        count = f"{runs:,}" if runs < 10**15 else f"about 10^{math.log10(runs):.0f}"
        raise BenchError(f"{source} asks for {count} runs; at most {MOST_RUNS:,} are planned")


@dataclass(frozen=True)
class PlannedRun:
    """One training: a row of the table at one seed, its folder's name and its settings by dotted key."""

    label: str
    rule: str
    format: str
    seed: int
    name: str
    settings: dict[str, Any]
    #: whether it is no row of the table: it helps to choose the settings of those that are
    aside: bool = field(default=False, kw_only=True)

    @property
    def lr(self) -> float | None:
        """The peak learning rate that was asked for, else the rule's own; None for settings that follow no rule."""
        given: float | None = self.settings.get("optimizer.lr")
        return RULES[self.rule].lr if given is None and self.rule in RULES else given

    @property
    def cost(self) -> float:
        return RELATIVE_COST.get(self.rule, 1.0)


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
    # Imported here because it brings torch along, which takes seconds that the default rows need not spend.
    from nanogpt_bench.setup.formats import format_name

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
    put: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> list[PlannedRun]:
    """Every row at every seed, in the order of the table; rows share seeds and, through them, the order of the data.

    `put` puts what was given beside into a run's settings.
    """
    planned = []
    for place, (rule_name, fmt) in enumerate(rows, start=1):
        label = row_label(rule_name, fmt)
        for seed in range(demonstration.first_seed, demonstration.first_seed + seeds):
            name = f"{place:02d}-{label.replace(' ', '-')}" + (f"-seed{seed}" if seeds > 1 else "")
            settings = demonstration.settings(
                rule_name, fmt, seed=seed, max_steps=max_steps, data_dir=data_dir.as_posix()
            )
            planned.append(PlannedRun(label, rule_name, fmt, seed, name, put(settings)))
    return planned


def baseline_of(reference: Mapping[str, Any] | str | None, planned: Sequence[PlannedRun | Row]) -> str | None:
    """Return the label of the row to measure against, None for the first BF16 one.

    `planned` begins with those of settings given as reference. A name is that of a row, or of the first with that rule
    and format.

    Raises:
        BenchError: no such row; names the nearest one.
    """
    if not isinstance(reference, str):
        return None if reference is None else planned[0].label
    labels = [run.label for run in planned]
    if reference in labels:
        return reference
    short = [row_label(run.rule, run.format) for run in planned]
    if reference not in short:
        raise unknown("reference", reference, list(dict.fromkeys(labels)))
    return labels[short.index(reference)]


def longest_first(planned: Sequence[PlannedRun]) -> list[int]:
    """Indices of the runs in the order to start them, so that no long run is left for the end."""
    return sorted(range(len(planned)), key=lambda index: -planned[index].cost)
