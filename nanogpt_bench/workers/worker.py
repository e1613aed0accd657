"""A worker process: reads jobs from standard input, trains, and reports on standard output, a JSON object a line.

Started as `python -m nanogpt_bench.workers.worker` and used for one run after another, so that importing torch is
paid once. A job is {"settings": {dotted key: value}, "run_dir": path, "argv": [...], "resume": bool}; the answers are
{"kind": "progress", ...} while it trains and {"kind": "done"} or {"kind": "failed", "error": {...}} at its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from nanogpt_bench.system.signals import RESUMABLE, stop_requests_once

SECONDS_BETWEEN_REPORTS = 0.4


def main() -> int:
    """Serve jobs until standard input closes; 75 when told to stop, once the run at hand has been put by."""
    answers = _take_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, _stop)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    try:
        from nanogpt_bench.loop import train  # noqa: F401  (imported before the first job comes, to be ready for it)

        for line in sys.stdin:
            _serve(json.loads(line), answers)
    except KeyboardInterrupt:
        return RESUMABLE
    return 0


def _take_stdout() -> TextIO:
    """The real standard output; what anything else prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _stop(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come twice: from the parent, and to the whole group
    raise KeyboardInterrupt


def _serve(job: dict[str, Any], answers: TextIO) -> None:
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.loop.train import run
    from nanogpt_bench.system.errors import BenchError

    sys.argv = job["argv"]  # the command that environment.json records is the one that was typed
    try:
        with stop_requests_once() as stop:
            config, run_dir, resume = build_config(job["settings"]), Path(job["run_dir"]), job.get("resume", False)
            summary = run(config, run_dir, resume=resume, on_progress=_reporter(answers), stop=stop)
        if stop.asked:
            raise KeyboardInterrupt
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is, it ends this row and not the others
        trace = "" if isinstance(error, BenchError) else traceback.format_exc()
        error_data = {"kind": type(error).__name__, "message": str(error), "traceback": trace}
        _send(answers, {"kind": "failed", "error": error_data})
    else:
        _send(answers, _answer(summary))


def _answer(summary: dict[str, Any]) -> dict[str, Any]:
    """The answer for a run that no signal ended.  A full disk is a failure, and the run resumes at the next start."""
    ended = summary["stop"] or {}
    return {"kind": "failed", "error": ended} if ended.get("kind") == "disk" else {"kind": "done"}


def _reporter(answers: TextIO) -> Callable[[Any], None]:
    """A progress callback that passes on what is new every so often, and always what a validation found."""
    last_sent, last_val = 0.0, None

    def report(progress: Any) -> None:
        nonlocal last_sent, last_val
        now = time.monotonic()
        if progress.val_loss == last_val and now - last_sent < SECONDS_BETWEEN_REPORTS:
            return
        last_sent, last_val = now, progress.val_loss
        _send(answers, {"kind": "progress", **dataclasses.asdict(progress)})

    return report


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
