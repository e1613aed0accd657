"""Which seed a run is of, and of several runs of one seed the one that counts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from nanogpt_bench.runs.earlier import has_ended
from nanogpt_bench.runs.load import Run

# The configuration keys in which the seeds of one row may differ.
SEED_KEYS = frozenset({"seed", "data.seed", "model.seed"})


def seed_of(run: Run) -> Hashable | None:
    """Return what tells the seeds of one setting apart: the run's, the data's and the model's; None if it is not known.

    >>> from pathlib import Path
    >>> seed_of(Run(Path("a"), summary={"seed": 3})) == seed_of(Run(Path("b"), {"seed": 3, "data": {"seed": 3}}))
    True
    """
    if run.seed is None:
        return None
    own = (run.config.get(section) for section in ("data", "model"))
    given = (part.get("seed") if isinstance(part, Mapping) else None for part in own)
    return (run.seed, *(run.seed if seed is None else _plain(seed) for seed in given))


def _plain(seed: object) -> Hashable:
    """Return a seed as a file has it, as something that can be compared."""
    return seed if isinstance(seed, int) else repr(seed)


def one_a_seed(runs: Iterable[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return the runs of one setting that count, one a seed, and those left aside.

    It is the one that went furthest, of several that went as far the first: a run made again is no second seed.
    """
    found: dict[Hashable, list[Run]] = {}
    for run in runs:
        seed = seed_of(run)
        found.setdefault(("unknown", id(run)) if seed is None else seed, []).append(run)
    counted = tuple(max(group, key=_went) for group in found.values())
    kept = set(map(id, counted))
    return counted, tuple(run for group in found.values() for run in group if id(run) not in kept)


def _went(run: Run) -> tuple[bool, bool, int]:
    return run.status == "finished", has_ended(run.summary), run.last_step or 0


def left_aside(label: str, counted: Sequence[Run], aside: Sequence[Run]) -> list[str]:
    """Return a line for each run that is not counted: of which seed it is, which run counts and why."""
    lines = []
    for run in aside:
        other = next(each for each in counted if seed_of(each) == seed_of(run))
        why = "went further" if _went(other) > _went(run) else "went as far and comes first"
        lines.append(f"{label}: {run.path} is not counted, since seed {run.seed} is there in {other.path}, which {why}")
    return lines
