"""How a run can end, and which of these ends the training brought about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
