"""Children forked from the test itself, which has imported everything.

Each runs a function in a folder of its own.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: here once, rather than in each child
import torch.distributed.tensor

from nanogpt_bench.report import page, svg_figures


def start(folder: Path, command: Callable[[], int], *, own_group: bool = False) -> int:
    """Run a command in a forked process and return the process's id, or its group's.

    Its output goes to output.txt.

    In a group of its own Ctrl-C raises KeyboardInterrupt in it, also where the tests
    run in the background and ignore Ctrl-C.
    """
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.chdir(folder)
            if own_group:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Not the test session's own capture, which would take what is printed.
            sys.stdout, sys.stderr = (
                open(file, "w", buffering=1, closefd=False)  # noqa: SIM115
                for file in (1, 2)
            )
            torch.set_num_threads(1)
            without_drawing()
            code = command()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return pid


def without_drawing() -> None:
    """Draw empty pictures from here on.

    What draws them does not survive a fork, and may have drawn before.
    """
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"></svg>'
    svg_figures.svg, page.javascript = lambda spec: empty, lambda code: ""


def finish(pid: int) -> int:
    """Wait for a process's end and return its exit code, -N if signal N ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        finish(group)


def output_of(folder: Path) -> str:
    return (folder / "output.txt").read_text(encoding="utf-8")
