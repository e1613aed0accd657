"""The run folders in what a command is given: those named, or all that lie below a folder, and where they are."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nanogpt_bench.runs.load import RUN_FILES, is_run_folder
from nanogpt_bench.system.errors import BenchError, printable

#: folders that are looked into below one that is given
MOST_FOLDERS = 100_000
#: places that are named
MOST_PLACES = 20
#: what a sweep's folder holds, and where below it the trials of its tuning lie
SWEEP, TRIALS = "sweep.json", "trials"


def find_runs(paths: Iterable[Path], say: Callable[[str], None] | None = None) -> list[Path]:
    """The run folders among `paths`; a folder that is none stands for all run folders below it, however deep.

    Nothing is looked for inside a run folder, in hidden folders or behind links. `say` is told, where a folder stood
    for others, how many there are in which folder, how many links were left alone, and what can't be looked into.

    Raises:
        BenchError: a path does not exist, or neither is a run folder nor holds one, or holds too many folders.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise BenchError(f"run folder {str(path)!r} does not exist")
        if is_run_folder(path):
            found.setdefault(path.resolve(), path)
            continue
        search = _Search(path)
        below = list(search.runs())
        if not below:
            files = ", ".join(RUN_FILES)
            raise BenchError(f"{str(path)!r} is not a run folder and holds none{search.left_out}: expected {files}")
        for run in below:
            found.setdefault(run.resolve(), run)
        if say is not None:
            _tell(below, search, say)
    return list(found.values())


def say_aside(line: str) -> None:
    """Print a line to standard error, where it does not mix with what a command answers."""
    print(line, file=sys.stderr)


class _Search:
    """A walk through the folders below one."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.links = 0
        self.closed: list[str] = []

    def runs(self) -> Iterator[Path]:
        """Yield the run folders: those of a folder by name, then those further down.

        Raises:
            BenchError: more folders than are looked into.
        """
        walk = os.walk(self.top, onerror=lambda error: self.closed.append(str(error.filename)))
        for looked_into, (place, names, files) in enumerate(walk):
            if looked_into >= MOST_FOLDERS:
                raise BenchError(
                    f"{str(self.top)!r} has more than {MOST_FOLDERS:,} folders below it; give those that hold the runs"
                )
            below = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
            links = [path for path in below if path.is_symlink()]
            self.links += len(links)
            runs = [path for path in below if path not in links and is_run_folder(path)]
            yield from runs
            left = {*links, *runs}
            left |= {Path(place, TRIALS)} if SWEEP in files else set()  # no rows of a sweep, unless they are asked for
            names[:] = [path.name for path in below if path not in left]

    @property
    def left_out(self) -> str:
        """What was not looked into, in words that can follow others."""
        links = f"{self.links} link{'s' if self.links > 1 else ''} not followed" if self.links else ""
        closed = f"{len(self.closed)} folders could not be read" if self.closed else ""
        said = ", ".join(part for part in (links, closed) if part)
        return f" ({said})" if said else ""


def _tell(runs: list[Path], search: _Search, say: Callable[[str], None]) -> None:
    """Say how many runs there are in which folder."""
    places = Counter(run.parent for run in runs)
    whole = f"{search.top}: {_count(len(runs))} found"
    if len(places) > 1:
        whole += f" in {len(places)} folders"
    say(printable(whole + search.left_out))
    if len(places) > 1:
        for place, number in list(places.items())[:MOST_PLACES]:
            say(printable(f"  {place}: {_count(number)}"))
        if len(places) > MOST_PLACES:
            say(f"  and {len(places) - MOST_PLACES} folders more")


def _count(number: int) -> str:
    return f"{number} run{'' if number == 1 else 's'}"
