"""What a result depends on beside its configuration: versions, machine, corpus and the command typed."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.data.batches import Corpus

_LIBRARIES = ("fp8manifold", "torch", "geoopt", "numpy")


def environment(corpus: Corpus, threads: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json."""
    return {
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES} | {"torch": torch.__version__},
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
        "corpus": {"source": corpus.meta.get("source"), "splits": corpus.meta["splits"]},
        "tokenizer": corpus.meta["tokenizer"],
    }


def command_line() -> str:
    """Return the running command as it would be typed, the program by its name only."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
