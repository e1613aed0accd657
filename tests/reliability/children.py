"""Children of a parent that has imported torch and the bench, and nothing else.

Each runs one command line.
"""

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from typing import Any

import bench_child

#: what the parent imports before its first child; a name that is missing is left out
_PRELOAD = (
    *("pytest", "_pytest.config", "pydantic", "rich.console", "rich.progress", "safetensors.torch"),
    *(
        "nanogpt_bench.cli",
        "nanogpt_bench.loop.train",
        "nanogpt_bench.commands.run",
        "nanogpt_bench.checkpoint",
    ),
    # what torch imports when a run makes its first parameter: most of a short run's
    # time
    *("torch._dynamo", "torch.distributed.tensor"),
    "bench_child",
)
_FORKSERVER = multiprocessing.get_context("forkserver")
#: Starting a process asks after all others; of two threads that ask after one at once,
#: one is told 255.
_ONE_AT_A_TIME = Lock()
#: a child that takes longer hangs
PATIENCE_S = 120.0


def start(
    folder: Path, words: Sequence[str], before_operation: bench_child.BeforeOperation | None = None
) -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _FORKSERVER.set_forkserver_preload(list(_PRELOAD))
    child = _FORKSERVER.Process(
        target=bench_child.command, args=(str(folder), list(words), before_operation), daemon=True
    )
    with _ONE_AT_A_TIME:
        child.start()
    return child


def wait_for(child: Any, seconds: float) -> int | None:
    """Return a child's exit code, -N if signal N ended it.

    None means that it goes on after `seconds`.
    """
    wait([child.sentinel], seconds)
    with _ONE_AT_A_TIME:
        code: int | None = child.exitcode
    return code


def finish(child: Any, folder: Path) -> int:
    """Wait for a child's end and return its exit code.

    One that hangs is killed and fails the test.
    """
    code = wait_for(child, PATIENCE_S)
    if code is None:
        child.kill()
        raise AssertionError(f"a child hung: {output(folder)}")
    return code


def output(folder: Path) -> str:
    path = folder / "output.txt"
    return (
        "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        if path.exists()
        else ""
    )
