"""The largest stable learning rates of a file whose runs were a search for them.

The rates of a rule that a search has tried, for one seed:

    stable   stable   stable   unstable   stable
                      largest stable      luck, which does not count
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from _markdown import markdown

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.read import finite

FormatRule = tuple[str, str]
"""Format and rule of a row."""
TOLERANCE = 0.1
"""A stable run's final loss exceeds the best of its validations by at most this share."""


class Limit(NamedTuple):
    """The two rates between which a rule becomes unstable."""

    #: the largest stable rate below every unstable one
    stable: float | None
    #: the smallest unstable rate
    unstable: float | None

    def __str__(self) -> str:
        """Return the two ends.

        >>> str(Limit(0.5, 1.0)), str(Limit(None, 0.25)), str(Limit(64.0, None))
        ('0.5 to 1', 'below 0.25', 'above 64')
        """
        if self.stable is None and self.unstable is None:
            return "not found"
        if self.stable is None:
            return f"below {self.unstable:g}"
        if self.unstable is None:
            return f"above {self.stable:g}"
        return f"{self.stable:g} to {self.unstable:g}"


def is_search(file: Exported) -> bool:
    """Return whether the rows are rates tried by a search, which has no baseline."""
    return file.baseline is None and all(" lr=" in row.label for row in file.rows)


def tuned_rates(files: Sequence[Exported]) -> dict[FormatRule, float]:
    """Return the best rate that was found, by format and rule.

    Where several files have one, the first file's counts.
    """
    rates: dict[FormatRule, float] = {}
    for file in files:
        for search in file.tuning:
            key = (str(search["format"]), str(search["rule"]))
            rates.setdefault(key, float(search["best"]["optimizer.lr"]))
    return rates


def limits_by_seed(rows: Sequence[Row]) -> dict[FormatRule, dict[int, Limit]]:
    """Return the limits by format and rule, then by seed."""
    tried: dict[FormatRule, dict[int, dict[float, bool]]] = {}
    for row in rows:
        for run in row.runs:
            if run.seed is not None:
                seeds = tried.setdefault((row.format, row.rule), {})
                rate = float(run.config["optimizer"]["lr"])
                seeds.setdefault(run.seed, {})[rate] = is_stable(run.summary)
    limits = {}
    for key, seeds in tried.items():
        limits[key] = {seed: limit_of(stable_by_rate) for seed, stable_by_rate in seeds.items()}
    return limits


def is_stable(summary: Mapping[str, Any]) -> bool:
    """Return whether a run ended well.

    Its final loss is below the untrained model's, and near the best of its validations.
    """
    first = finite(summary.get("first_val_loss"))
    best = finite(summary.get("best_val_loss"))
    final = finite(summary.get("final_val_loss"))
    if summary.get("status") == "failed" or first is None or best is None or final is None:
        return False
    return final < first and final <= best * (1 + TOLERANCE)


def limit_of(stable_by_rate: Mapping[float, bool]) -> Limit:
    """Return the limit of the rates that were tried.

    >>> limit_of({1.0: True, 2.0: True, 4.0: False, 8.0: True})
    Limit(stable=2.0, unstable=4.0)
    """
    unstable = min((rate for rate, stable in stable_by_rate.items() if not stable), default=None)
    stable_rates = [rate for rate, stable in stable_by_rate.items() if stable]
    if unstable is not None:
        stable_rates = [rate for rate in stable_rates if rate < unstable]
    return Limit(max(stable_rates, default=None), unstable)


def near_best(rows: Sequence[Row]) -> dict[FormatRule, dict[int, float]]:
    """Return the largest rate whose loss is within TOLERANCE of the best rate's.

    It is by format and rule, then by seed.
    """
    losses: dict[FormatRule, dict[int, dict[float, float]]] = {}
    for row in rows:
        for run in row.runs:
            loss = run.number("final_val_loss")
            if run.seed is not None and loss is not None:
                seeds = losses.setdefault((row.format, row.rule), {})
                seeds.setdefault(run.seed, {})[float(run.config["optimizer"]["lr"])] = loss
    largest: dict[FormatRule, dict[int, float]] = {}
    for key, seeds in losses.items():
        for seed, loss_by_rate in seeds.items():
            bound = (1 + TOLERANCE) * min(loss_by_rate.values())
            near = [rate for rate, loss in loss_by_rate.items() if loss <= bound]
            largest.setdefault(key, {})[seed] = max(near)
    return largest


def limit_table(file: Exported, tuned: Mapping[FormatRule, float]) -> str:
    """Return a line per rule and format.

    It has the limits by seed, the tuned rate, the smallest limit over it, and the
    largest rates near the best.
    """
    header = (
        "rule",
        "held; did not, by seed",
        "tuned rate",
        "smallest limit over it",
        "largest near the best",
    )
    near = near_best(file.rows)
    lines = []
    for (fmt, rule), limits in limits_by_seed(file.rows).items():
        tuned_rate = tuned.get((fmt, rule))
        stable = [limit.stable for limit in limits.values() if limit.stable is not None]
        margin = f"{min(stable) / tuned_rate:.1f}" if tuned_rate and stable else "-"
        largest_near = [f"{rate:g}" for rate in near.get((fmt, rule), {}).values()]
        lines.append(
            (
                f"`{rule}`" if fmt == "none" else f"`{fmt} {rule}`",
                "; ".join(map(str, limits.values())),
                "-" if tuned_rate is None else f"{tuned_rate:g}",
                margin,
                "; ".join(largest_near) or "-",
            )
        )
    return markdown(header, lines)
