"""Run folders that a command is given: those named, or all below a folder, and how far an earlier start came."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanogpt_bench.runs.load import RUN_FILES, is_run_folder
from nanogpt_bench.system.errors import BenchError, counted, printable
from nanogpt_bench.system.untrusted import read_json

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


#: of a run among many: what it has found counts, its state does not once it has finished
PASSING = {"checkpoint.last": False}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    content: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return content


def make_ready(run_dir: Path) -> bool:
    """Return whether an unfinished run goes on from a checkpoint; without one, remove what it left.

    Raises:
        BenchError: the folder is a symbolic link, through which nothing is written or removed.
    """
    if run_dir.is_symlink():
        raise BenchError(f"{str(run_dir)!r} is a symbolic link, which is no place for a run; remove it")
    if not run_dir.exists():
        return False
    from nanogpt_bench.checkpoint import steps  # brings torch along

    if steps(run_dir):
        (run_dir / "traceback.txt").unlink(missing_ok=True)  # it spoke of the end of what goes on now
        return True
    shutil.rmtree(run_dir)
    return False


def drop_checkpoints(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Remove the checkpoints of a run that has finished: nothing goes on from them.

    `checkpoint.last` keeps them, and so does `checkpoint.best`.

    Those of a run that failed stay, for whoever wants to know why.
    """
    folder, gone = run_dir / "checkpoints", run_dir / ".checkpoints.removed"
    asked = settings.get("checkpoint.last") or settings.get("checkpoint.best")
    if asked or summary_of(run_dir).get("status") != "finished":
        return
    with suppress(OSError):  # the next start tries again
        if folder.is_dir() and not gone.exists():
            folder.rename(gone)  # at once: some of them would look like those of a run that goes on
        if gone.is_dir():
            shutil.rmtree(gone)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} while there is none."""
    try:
        content = read_json(run_dir / "summary.json", links=False)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


#: kinds of `failure` that the same settings would bring about again; all others (a crash, a file that is gone, too
#: little memory) came from outside
OF_TRAINING = ("nan", "divergence")
#: kinds of `stop` that the settings asked for; all others (a signal, a full disk, a kill) came from outside
AS_ASKED = ("plateau", "time")


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Return whether a summary is of a run that the training itself ended, so that nothing is left to do.

    A run that was ended from outside, or whose summary is not there ({}), is to be tried again.

    >>> nan, gone = ({"status": "failed", "failure": {"kind": kind}} for kind in ("nan", "FileNotFoundError"))
    >>> has_ended(nan), has_ended(gone), has_ended({"status": "stopped", "stop": {"kind": "signal"}}), has_ended({})
    (True, False, False, False)
    """
    status = summary.get("status")
    if status == "failed":
        return _kind(summary.get("failure")) in OF_TRAINING
    return status == "finished" or (status == "stopped" and _kind(summary.get("stop")) in AS_ASKED)


def _kind(end: Any) -> Any:
    return end.get("kind") if isinstance(end, Mapping) else None
