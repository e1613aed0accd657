"""Parallel coordinates: every run as a line across its settings and its outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.report.results import mean_cosine
from nanogpt_bench.report.rows import Row, flat
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import finite

MOST_SETTINGS = 5
# Settings that follow from format, rule and learning rate, or say where rather than what.
LEFT_OUT = frozenset(
    {"rule", "seed", "data.seed", "model.seed", "data.dir", "optimizer.lr", "optimizer.float_lr", "runtime.threads"}
)
NOTHING = 1.08  # where a line passes when its run has no value: above the axis


@dataclass(frozen=True)
class ParallelAxis:
    """One vertical axis: its name, the places (0 to 1) of its marks, and where each run crosses it."""

    name: str
    marks: list[tuple[float, str]]
    places: list[float]


@dataclass(frozen=True)
class Parallel:
    """All axes from left to right, and per line the row and the run it belongs to."""

    axes: list[ParallelAxis]
    rows: list[str]
    runs: list[Run]


def parallel(rows: Sequence[Row]) -> Parallel | None:
    """The axes on which the runs differ; None with fewer than two runs or three such axes."""
    lines = [(row, run) for row in rows for run in row.runs]
    runs = [run for _, run in lines]
    columns: dict[str, list[Any]] = {
        "format": [run.format for run in runs],
        "rule": [run.rule for run in runs],
        "learning rate": [run.summary.get("lr") for run in runs],
        **_varying(runs),
        **{name: [outcome(run) for run in runs] for name, outcome in OUTCOMES.items()},
    }
    axes = [axis for name, values in columns.items() if (axis := _axis(name, values)) is not None]
    if len(runs) < 2 or len(axes) < 3:
        return None
    return Parallel(axes, [row.label for row, _ in lines], runs)


OUTCOMES: dict[str, Callable[[Run], float | None]] = {
    "bytes/param": lambda run: run.number("bytes_per_parameter"),
    "tokens/s": lambda run: run.number("tokens_per_s"),
    "stall": lambda run: run.stall,
    "arrived": lambda run: run.number("arrived"),
    "grad cosine": mean_cosine,
    "final val loss": lambda run: run.at_end("final_val_loss"),
}


def _varying(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs of the same rule and format differ, by the last word of their key."""
    configs = [flat(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key not in LEFT_OUT]
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run, config in zip(runs, configs, strict=True):
        by_kind.setdefault((run.rule, run.format), []).append(config)
    chosen = [key for key in keys if any(_differ(group, key) for group in by_kind.values())]
    return {key.rsplit(".", 1)[-1]: [c.get(key) for c in configs] for key in chosen[:MOST_SETTINGS]}


def _differ(configs: Sequence[Mapping[str, Any]], key: str) -> bool:
    return len({str(config.get(key)) for config in configs}) > 1


def _axis(name: str, values: Sequence[Any]) -> ParallelAxis | None:
    """An axis of numbers where all values are numbers, of words otherwise; None where nothing differs."""
    known = [value for value in values if value is not None]
    if len({str(value) for value in known}) < 2:
        return None
    if all(finite(value) is not None for value in known):
        return _number_axis(name, [None if value is None else float(value) for value in values])
    words = list(dict.fromkeys(str(value) for value in known))
    place = {word: i / (len(words) - 1) for i, word in enumerate(words)}
    return ParallelAxis(
        name, [(place[word], word) for word in words], [NOTHING if v is None else place[str(v)] for v in values]
    )


def _number_axis(name: str, values: Sequence[float | None]) -> ParallelAxis:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    logarithmic = low > 0 and high / low >= 30
    bend: Callable[[float], float] = math.log if logarithmic else float
    width = bend(high) - bend(low)
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
    marks = [((bend(value) - bend(low)) / width, _shown(value)) for value in (low, middle, high)]
    return ParallelAxis(
        name, marks, [NOTHING if value is None else (bend(value) - bend(low)) / width for value in values]
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
