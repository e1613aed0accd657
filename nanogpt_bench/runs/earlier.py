"""The remains of a run from an earlier start: whether it came to its end, and its folder if it did not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.untrusted import read_json

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


def why_again(summary: Mapping[str, Any]) -> str:
    """Return in a few words why a run that has not `has_ended` is left to be done; its summary is {} if it has none.

    >>> why_again({}), why_again({"stop": {"kind": "killed", "message": "its process was killed"}})
    ('its results are gone', 'its process was killed')
    """
    if not summary:
        return "its results are gone"
    end = summary.get("failure") or summary.get("stop")
    message = end.get("message") if isinstance(end, Mapping) else None
    return " ".join(str(message).split()) if message else "it was interrupted"
