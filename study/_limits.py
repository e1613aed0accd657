"""The largest stable learning rates of a file whose runs were a search for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from _markdown import markdown

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.read import finite

Tuned = Mapping[tuple[str, str], float]
"""The best rate by format and rule."""
TOLERANCE = 0.1
"""A stable run's final loss exceeds the best of its validations by at most this share."""


def is_search(file: Exported) -> bool:
    """Return whether the rows are rates tried by a search for the largest stable one,
    which has no baseline.
    """
    return file.baseline is None and all(" lr=" in row.label for row in file.rows)


def tuned_rates(files: Sequence[Exported]) -> dict[tuple[str, str], float]:
    """The best rate that was found, by format and rule; where several files have one,
    the first file's.
    """
    found: dict[tuple[str, str], float] = {}
    for row in (row for file in files for row in file.tuning):
        found.setdefault((str(row["format"]), str(row["rule"])), float(row["best"]["optimizer.lr"]))
    return found


def limits_by_seed(
    rows: Sequence[Row],
) -> dict[tuple[str, str], dict[int, tuple[float | None, float | None]]]:
    """The largest stable rate and the smallest unstable one, by format and rule, then
    by seed.
    """
    tried: dict[tuple[str, str], dict[int, dict[float, bool]]] = {}
    for row in rows:
        for run in row.runs:
            if run.seed is not None:
                of = tried.setdefault((row.format, row.rule), {}).setdefault(run.seed, {})
                of[float(run.config["optimizer"]["lr"])] = is_stable(run.summary)
    return {
        place: {seed: limits(rates) for seed, rates in seeds.items()}
        for place, seeds in tried.items()
    }


def is_stable(summary: Mapping[str, Any]) -> bool:
    """Return whether a run ended below the loss of the untrained model, and near the
    best of its validations.
    """
    first, best, final = (
        finite(summary.get(f"{name}_val_loss")) for name in ("first", "best", "final")
    )
    if summary.get("status") == "failed" or first is None or best is None or final is None:
        return False
    return final < first and final <= best * (1 + TOLERANCE)


def limits(tried: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """The largest stable rate below every unstable one, and the smallest unstable one.

    >>> limits({1.0: True, 2.0: True, 4.0: False, 8.0: True})
    (2.0, 4.0)
    """
    unstable = min((lr for lr, stable in tried.items() if not stable), default=None)
    stable = max(
        (lr for lr, well in tried.items() if well and (unstable is None or lr < unstable)),
        default=None,
    )
    return stable, unstable


def near_best(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, float]]:
    """The largest rate whose loss is within TOLERANCE of the best rate's, by format and
    rule, then by seed.
    """
    ended: dict[tuple[str, str], dict[int, dict[float, float]]] = {}
    for row in rows:
        for run in row.runs:
            if run.seed is not None and (loss := run.number("final_val_loss")) is not None:
                of = ended.setdefault((row.format, row.rule), {}).setdefault(run.seed, {})
                of[float(run.config["optimizer"]["lr"])] = loss
    bound = 1 + TOLERANCE
    return {
        place: {
            seed: max(lr for lr, loss in of.items() if loss <= bound * min(of.values()))
            for seed, of in seeds.items()
        }
        for place, seeds in ended.items()
    }


def limit_table(file: Exported, tuned: Tuned) -> str:
    """A line per rule and format: limits by seed, tuned rate, smallest limit over it,
    largest rates near the best.
    """
    lines, near = [], near_best(file.rows)
    for (fmt, rule), seeds in limits_by_seed(file.rows).items():
        best = tuned.get((fmt, rule))
        held = [stable for stable, _ in seeds.values() if stable is not None]
        lines.append(
            (
                f"`{rule}`" if fmt == "none" else f"`{fmt} {rule}`",
                "; ".join(_between(*ends) for ends in seeds.values()),
                "-" if best is None else f"{best:g}",
                f"{min(held) / best:.1f}" if best and held else "-",
                "; ".join(f"{lr:g}" for lr in near.get((fmt, rule), {}).values()) or "-",
            )
        )
    return markdown(
        (
            "rule",
            "held; did not, by seed",
            "tuned rate",
            "smallest limit over it",
            "largest near the best",
        ),
        lines,
    )


def _between(stable: float | None, unstable: float | None) -> str:
    """The two ends of a limit.

    >>> _between(0.5, 1.0), _between(None, 0.25), _between(64.0, None)
    ('0.5 to 1', 'below 0.25', 'above 64')
    """
    if stable is None:
        return "not found" if unstable is None else f"below {unstable:g}"
    return f"above {stable:g}" if unstable is None else f"{stable:g} to {unstable:g}"
