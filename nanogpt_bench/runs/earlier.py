"""What an earlier start of the same comparison or sweep left in its folder, and what of it is still to be done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.lock import is_unused
from nanogpt_bench.system.untrusted import read_json

MANIFEST = "compare.json"
DATE = "%Y-%m-%d %H:%M UTC"
#: of a run among many: what it has found counts, its state does not once it has finished
PASSING = {"checkpoint.last": False}
#: where the corpus lies changes no number; which one it is, its digests say
_PLACE = "data.dir"


@dataclass(frozen=True)
class Earlier:
    """What compare.json says was asked for, run by run, and the corpus's digests; None before it was prepared."""

    asked: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    corpus: Mapping[str, Any] | None
    started: datetime


def read_earlier(folder: Path) -> Earlier | None:
    """Return what a comparison's folder says of its earlier start; None for a folder that is empty or not there.

    Raises:
        BenchError: the folder can't be used, or holds something else than a comparison that can be gone on with.
    """
    path = folder / MANIFEST
    try:
        if not path.exists():
            if not is_unused(folder):
                raise BenchError(f"--out {str(folder)!r} is not empty and holds no comparison; give a new folder")
            return None
        content = read_json(path, times=8)
    except OSError as error:
        raise BenchError(f"--out {str(folder)!r} can't be used: {error.strerror or error}") from None
    except BenchError:
        raise
    except ValueError as error:
        raise BenchError(f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out") from None
    try:
        started = datetime.strptime(content["date"], DATE).replace(tzinfo=UTC)
        return Earlier(dict(content["asked"]), _by_name(content["settings"]), content["corpus_sha256"], started)
    except (KeyError, TypeError, ValueError):
        raise BenchError(f"{str(path)!r} does not say what was asked for; give a new folder with --out") from None


def _by_name(settings: Any) -> dict[str, dict[str, Any]]:
    return {str(name): dict(of_run) for name, of_run in settings.items()}


def check_same(
    folder: Path,
    before: Earlier,
    asked: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    corpus: Mapping[str, Any] | None,
) -> None:
    """Refuse to mix two comparisons: the runs that an earlier start planned have to be those planned now.

    Raises:
        BenchError: names the options that differ; the settings of the runs where no option does.
    """
    differing = list(_settings(before.settings, settings))
    if differing:
        named = list(_options(before.asked, asked)) or differing
        raise BenchError(f"--out {str(folder)!r} holds another comparison: {', '.join(named)}; give a new folder")
    if corpus is not None and before.corpus is not None and corpus != before.corpus:
        raise BenchError(
            f"--out {str(folder)!r} holds a comparison on another corpus: --data.dir was "
            f"{_shown(before.asked.get('--data.dir'))}, and its sha256 differs; give a new folder"
        )


def _options(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for option in {**before, **now}:
        then, new = before.get(option), now.get(option)
        if then != new:
            yield f"{option} was {_shown(then)}, is {_shown(new)}"


def _shown(value: Any) -> str:
    return "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in {**before, **now}:
        if name not in before or name not in now:
            yield f"{name} was {'not ' if name not in before else ''}in it"
            continue
        for key in {**before[name], **now[name]}:
            then, new = before[name].get(key), now[name].get(key)
            if key != _PLACE and then != new:
                yield f"{key} of {name} was {then!r}, is {new!r}"


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
    """Remove the checkpoints of a run that has finished: nothing goes on from them. `checkpoint.last` keeps them.

    Those of a run that failed stay, for whoever wants to know why.
    """
    folder, gone = run_dir / "checkpoints", run_dir / ".checkpoints.removed"
    if settings.get("checkpoint.last") or summary_of(run_dir).get("status") != "finished":
        return
    with suppress(OSError):  # the next start tries again
        if folder.is_dir() and not gone.exists():
            folder.rename(gone)  # at once: a checkpoint half removed would look like a broken one
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
    """Whether a summary tells of an end that the training itself brought about, so that nothing is left to do.

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
