"""`sweep --lr-limits`: the largest stable learning rate of every point, by bisection on a logarithmic scale."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.settings import build_config
from nanogpt_bench.runs.read import finite
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import LrLimits, SweepFile
from nanogpt_bench.sweep.plan import PlannedRun, plan_point, plan_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

KEY = "optimizer.lr"
FILE = "lr_limits.json"
#: while only one side is known, the next learning rate is this many times further out
FIRST_FACTOR = 4.0


def is_stable(summary: Mapping[str, Any], tolerance: float) -> bool:
    """Return whether a run learned and kept what it had learned.

    It ended with a finite loss, below that of the untrained model, and at most `tolerance` (a share) above the best
    of its validations.

    >>> is_stable({"status": "finished", "first_val_loss": 5.6, "best_val_loss": 2.0, "final_val_loss": 2.1}, 0.1)
    True
    >>> is_stable({"status": "finished", "first_val_loss": 5.6, "best_val_loss": 2.0, "final_val_loss": 2.3}, 0.1)
    False
    """
    first, best, final = (finite(summary.get(f"{name}_val_loss")) for name in ("first", "best", "final"))
    if summary.get("status") == "failed" or first is None or best is None or final is None:
        return False
    return final < first and final <= best * (1.0 + tolerance)


def next_lr(tried: Mapping[float, bool], options: LrLimits, first: float) -> float | None:
    """Return the learning rate to try next, None when the limit is known as well as asked for.

    `tried` maps learning rates to whether they were stable. The limit is sought below the smallest unstable one, so
    that a lucky run above it does not count.

    >>> options = LrLimits(resolution=2.0, span=64.0)
    >>> next_lr({}, options, 1.0), next_lr({1.0: True}, options, 1.0), next_lr({1.0: True, 4.0: False}, options, 1.0)
    (1.0, 4.0, 2.0)
    """
    if not tried:
        return first
    stable, unstable = limits(tried)
    if unstable is None:
        return _within(max(tried) * FIRST_FACTOR, options, first)
    if stable is None:
        return _within(min(tried) / FIRST_FACTOR, options, first)
    if unstable / stable <= options.resolution * (1 + 1e-9):
        return None
    return rounded(math.sqrt(stable * unstable))


def limits(tried: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return (largest stable learning rate below every unstable one, smallest unstable one).

    >>> limits({1.0: True, 2.0: True, 4.0: False, 8.0: True})
    (2.0, 4.0)
    """
    unstable = min((lr for lr, stable in tried.items() if not stable), default=None)
    stable = max((lr for lr, well in tried.items() if well and (unstable is None or lr < unstable)), default=None)
    return stable, unstable


def _within(lr: float, options: LrLimits, first: float) -> float | None:
    slack = 1 + 1e-9
    return rounded(lr) if first / options.span / slack <= lr <= first * options.span * slack else None


def rounded(lr: float) -> float:
    """Return a learning rate with four digits, which is what its folder's name can show."""
    return float(f"{lr:.4g}")


@dataclass
class Search:
    """The search at one point of the axes."""

    base: Mapping[str, Any]
    point: PlannedRun
    options: LrLimits
    tried: dict[float, PlannedRun] = field(default_factory=dict)
    stable: dict[float, bool] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """The learning rate that the point's own settings give."""
        return rounded(resolve(build_config(self.point.settings)).optimizer.lr or 0.0)

    def next(self) -> PlannedRun | None:
        """The next run, None when the search is over."""
        lr = next_lr(self.stable, self.options, self.first)
        if lr is None:
            return None
        self.tried[lr] = plan_point(self.base, {**self.point.axes, KEY: lr})
        return self.tried[lr]

    def learn(self, run: PlannedRun, summary: Mapping[str, Any]) -> None:
        """Record how a run ended."""
        self.stable[run.axes[KEY]] = is_stable(summary, self.options.tolerance)


class Searches:
    """All searches; tells which run follows from one that has ended, and writes lr_limits.json."""

    def __init__(self, sweep: SweepFile, record: SweepRecord) -> None:
        if sweep.axis(KEY) is not None:
            raise BenchError(f"--lr-limits looks for {KEY} itself; take it out of the axes of {sweep.path.name}")
        if sweep.reference is not None:
            raise BenchError(f"--lr-limits measures no gaps; take the reference out of {sweep.path.name}")
        self._record = record
        self.searches = [Search(sweep.base, point, sweep.lr_limits) for point in plan_sweep(sweep)]
        self._by_name: dict[str, Search] = {}

    def first(self) -> list[PlannedRun]:
        """The runs to begin with, one a search."""
        return [run for search in self.searches for run in self._next(search)]

    def _next(self, search: Search) -> Iterable[PlannedRun]:
        run = search.next()
        if run is not None:
            self._by_name[run.name] = search
            yield run

    def after(self, run: PlannedRun) -> Iterable[PlannedRun]:
        """The run that follows from one that has ended."""
        search = self._by_name[run.name]
        search.learn(run, self._record.summary(run))
        self.write()
        return list(self._next(search))

    def write(self) -> Path:
        """Write lr_limits.json as things stand."""
        content = {"rows": self.rows()}
        return write_text(self._record.folder / FILE, json.dumps(content, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """One row a search: its point, the two limits (null: not found within the span), and every run of it."""
        return [self._row(search) for search in self.searches]

    def _row(self, search: Search) -> dict[str, Any]:
        stable, unstable = limits(search.stable)
        return {
            "format": search.point.format,
            "rule": search.point.rule,
            "seed": search.point.seed,
            "axes": dict(search.point.axes),
            "largest_stable_lr": stable,
            "smallest_unstable_lr": unstable,
            "tried": [self._tried(search, lr) for lr in sorted(search.stable)],
        }

    def _tried(self, search: Search, lr: float) -> dict[str, Any]:
        run = search.tried[lr]
        summary = self._record.summary(run)
        told = {key: summary.get(key) for key in ("status", "final_val_loss", "best_val_loss")}
        return {"lr": lr, "stable": search.stable[lr], "run": run.name, **told}


def limits_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the limits as a Markdown table."""
    lines = [
        "| format | rule | seed | largest stable lr | smallest unstable lr | runs |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        stable, unstable = (_lr(row[key]) for key in ("largest_stable_lr", "smallest_unstable_lr"))
        others = [f"{key}={value}" for key, value in row["axes"].items() if key not in ("rule", "model.format", "seed")]
        rule = " ".join([row["rule"], *others])
        lines.append(f"| {row['format']} | {rule} | {row['seed']} | {stable} | {unstable} | {len(row['tried'])} |")
    return "\n".join(lines) + "\n"


def _lr(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
