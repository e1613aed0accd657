"""A process that has the bench imported and used, and forks a child for every command line it is given.

What the child does is watched by an audit hook, and how far its memory grows by the kernel. One JSON object a line:
{"words": [...], "folder": PATH} in, {"code", "said", "executions", "grown"} out; `grown` in bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

#: audit events that mean a program is run, or a class looked up by what a file says
RUNS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pickle.find_class"}
RUNS |= {"ctypes.dlopen", "socket.connect", "os.putenv", "cpython.run_command", "cpython.run_file"}
#: what torch opens, where it is built for GPUs, to ask the driver how many there are
DRIVER = ("ctypes.dlopen", ("libnvidia-ml.so.1",))


def serve() -> None:
    """Warm up with the command lines of the first line, then answer one after the other."""
    sys.path.append(str(Path(__file__).parent.parent))
    import torch
    from forked import without_drawing

    from nanogpt_bench.cli import main

    torch.set_num_threads(1)
    without_drawing()  # which the children could not go on with
    for job in json.loads(sys.stdin.readline()):
        os.chdir(job["folder"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(job["words"])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_forked(main, json.loads(line))), flush=True)


def _forked(main: Any, job: dict[str, Any]) -> dict[str, Any]:
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(start, "w") as answer:
            answer.write(json.dumps(_attacked(main, job)))
            answer.flush()
            os._exit(0)
    os.close(start)
    with os.fdopen(end) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"code": -status, "said": "died", "executions": [], "grown": 0}


def _attacked(main: Any, job: dict[str, Any]) -> dict[str, Any]:
    os.chdir(job["folder"])
    executions: list[str] = []
    watching = True

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if not watching or (event, details) == DRIVER:
            return
        if event in RUNS or _runs_text(event, details):
            executions.append(f"{event} {str(details)[:200]}")

    sys.addaudithook(hook)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here on
    before = _kibibytes("VmRSS")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(job["words"])
        except BaseException:  # whatever comes out of a command is what is to be shown
            code, _ = 1, traceback.print_exc()
    watching = False
    grown = 1024 * (_kibibytes("VmHWM") - before)
    return {"code": code, "said": errors.getvalue(), "executions": executions, "grown": grown}


def _runs_text(event: str, details: tuple[Any, ...]) -> bool:
    """Whether code is made or run that does not come from a module's own file."""
    if event not in ("exec", "compile"):
        return False
    name = getattr(details[0], "co_filename", "") if event == "exec" else str(details[1])
    return not (name.startswith("<frozen") or (name.endswith(".py") and os.path.isabs(name) and os.path.isfile(name)))


def _kibibytes(key: str) -> int:
    with open("/proc/self/status") as file:
        found = re.search(rf"^{key}:\s+(\d+) kB", file.read(), re.MULTILINE)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    serve()
