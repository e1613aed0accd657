"""What happens in a worker process: it is made ready once, and then trains one run after another.

A job is {"settings": {dotted key: value}, "run_dir": path, "argv": [...], "resume": bool}.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from nanogpt_bench.system.signals import SIGNALS, stop_requests_once

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def begin(threads: int, output: str) -> None:
    """Make a process ready: its threads, its signals, what it prints to the file `output`, and the imports of a run.

    SIGTERM ends it, with a run as soon as that has been put by. Ctrl-C reaches the whole group, and the parent decides.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    from nanogpt_bench.loop import train  # noqa: F401  (imported before the first job comes, to be ready for it)


def _end_with_parent() -> None:
    """Without its parent nobody hands out a job, and a run is better put by than lost."""
    if (parent := parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(job: Mapping[str, Any], numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> dict[str, Any]:
    """Train a run and return its end: {"kind": "done"}, or {"kind": "failed", "error": {...}}.

    One of the signals ends it after the step at hand, with a checkpoint.
    """
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.loop.train import run
    from nanogpt_bench.system.errors import BenchError

    sys.argv = list(job["argv"])  # the command that environment.json records is the one that was typed
    try:
        with stop_requests_once(numbers) as stop:
            config, run_dir = build_config(job["settings"]), Path(job["run_dir"])
            ended = run(config, run_dir, resume=job.get("resume", False), stop=stop)["stop"] or {}
    except Exception as error:  # whatever it is, it ends this row and not the others
        trace = "" if isinstance(error, BenchError) else traceback.format_exc()
        return {"kind": "failed", "error": {"kind": type(error).__name__, "message": str(error), "traceback": trace}}
    finally:
        _leave_without_parent()
    # A full disk, too, is a failure, and the run resumes at the next start.
    return {"kind": "failed", "error": ended} if ended.get("kind") in ("disk", "signal") else {"kind": "done"}


def _leave_without_parent() -> None:
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(128 + SIGNALS[0])


def failed(message: str, kind: str = "killed") -> dict[str, Any]:
    """Return the end of a run whose worker could not tell it."""
    return {"kind": "failed", "error": {"kind": kind, "message": message}}
