"""A call in a forked child, watched.

What it returns, what a file has it run, and how far its memory grows.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
#: audit events that mean a program is run, or a class looked up by what a file says
RUNS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
}
RUNS |= {"ctypes.dlopen", "socket.connect", "os.putenv", "cpython.run_command", "cpython.run_file"}
#: what torch opens, where it is built for GPUs, to ask the driver how many there are
DRIVER = ("ctypes.dlopen", ("libnvidia-ml.so.1",))
#: the report's own templates, which Jinja compiles
TEMPLATES = Path(__file__).parents[1] / "nanogpt_bench" / "report" / "templates"


@dataclass
class Watched:
    """The value or the traceback of a call; `grown` in bytes."""

    returned: Any
    raised: str
    executions: list[str]
    grown: int


def watched(call: Callable[[], Any], forbidden: Collection[str] = ()) -> Watched:
    """Make a call in a child of this process.

    Audit events that are `forbidden` count as executions too.
    """
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(start, "w") as answer:
                answer.write(json.dumps(_called(call, forbidden)))
        finally:
            # an error would go on as a second session of the tests
            os._exit(0)
    os.close(start)
    with os.fdopen(end) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Watched(None, f"the child died of {status}", [], 0)
    return Watched(*json.loads(text))


def _called(call: Callable[[], Any], forbidden: Collection[str]) -> tuple[Any, str, list[str], int]:
    executions: list[str] = []
    watching = True

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if not watching or (event, details) == DRIVER:
            return
        if event in RUNS or event in forbidden or _runs_text(event, details):
            executions.append(f"{event} {str(details)[:200]}")

    sys.addaudithook(hook)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here on
    old_size, returned, raised = kibibytes("VmRSS"), None, ""
    try:
        returned = call()
    except BaseException:  # whatever comes out of a reader is what is to be shown
        raised = traceback.format_exc()
    watching = False
    return returned, raised, executions, 1024 * (kibibytes("VmHWM") - old_size)


def _runs_text(event: str, details: tuple[Any, ...]) -> bool:
    """True where code is made or run that does not come from a module's own file."""
    if event not in ("exec", "compile"):
        return False
    name = getattr(details[0], "co_filename", "") if event == "exec" else str(details[1])
    is_module = name.endswith(".py") and os.path.isabs(name) and os.path.isfile(name)
    is_template = Path(name).parent == TEMPLATES and os.path.isfile(name)
    return not (name.startswith("<frozen") or is_module or is_template)


def kibibytes(key: str) -> int:
    """Return the present resident set of this process (VmRSS), or the largest (VmHWM)."""
    with open("/proc/self/status") as file:
        match = re.search(rf"^{key}:\s+(\d+) kB", file.read(), re.MULTILINE)
    assert match is not None
    return int(match[1])
