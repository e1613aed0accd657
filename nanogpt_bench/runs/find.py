"""The run folders in what a command is given: those named, or all that lie below a folder, and where they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from nanogpt_bench.runs.load import RUN_FILES, is_run_folder
from nanogpt_bench.system.errors import BenchError, printable
from nanogpt_bench.system.words import counted

#: what a sweep's folder holds, and where below it the trials of its tuning lie
SWEEP, TRIALS = "sweep.json", "trials"


def find_runs(paths: Iterable[Path], say: Callable[[str], None] | None = None) -> list[Path]:
    """The run folders among `paths`; a folder that is none stands for all run folders below it, however deep.

    Nothing is looked for inside a run folder, in hidden folders or behind links. `say` is told, where a folder stood
    for others, how many there are, how many links were left alone, and what can't be looked into.

    Raises:
        BenchError: a path does not exist, or neither is a run folder nor holds one.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise BenchError(f"run folder {str(path)!r} does not exist")
        if is_run_folder(path):
            found.setdefault(path.resolve(), path)
            continue
        below, left_out = _runs_below(path)
        if not below:
            files = ", ".join(RUN_FILES)
            raise BenchError(f"{str(path)!r} is not a run folder and holds none{left_out}: expected {files}")
        for run in below:
            found.setdefault(run.resolve(), run)
        if say is not None:
            places = len({run.parent for run in below})
            where = f" in {places} folders" if places > 1 else ""
            say(printable(f"{path}: {counted(len(below), 'run')} found{where}{left_out}"))
    return list(found.values())


def say_aside(line: str) -> None:
    """Print a line to standard error, where it does not mix with what a command answers."""
    print(line, file=sys.stderr)


def _runs_below(top: Path) -> tuple[list[Path], str]:
    """The run folders below one, those of a folder by name, then those further down; and what was not looked into."""
    found: list[Path] = []
    links, closed = 0, []
    for place, names, files in os.walk(top, onerror=lambda error: closed.append(error)):
        below = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        linked = [path for path in below if path.is_symlink()]
        runs = [path for path in below if path not in linked and is_run_folder(path)]
        links += len(linked)
        found += runs
        left = {*linked, *runs}
        left |= {Path(place, TRIALS)} if SWEEP in files else set()  # no rows of a sweep, unless they are asked for
        names[:] = [path.name for path in below if path not in left]
    said = [f"{links} link{'s' if links > 1 else ''} not followed"] if links else []
    said += [f"{len(closed)} folders could not be read"] if closed else []
    return found, f" ({', '.join(said)})" if said else ""
