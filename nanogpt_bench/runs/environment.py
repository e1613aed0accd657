"""What a result depends on beside its configuration: versions, machine, corpus and the command typed."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nanogpt_bench.data.batches import Corpus

#: of meta.json, what the losses depend on
_OF_CORPUS = ("splits", "labels")
_LIBRARIES = ("fp8manifold", "torch", "geoopt", "numpy")


def environment(corpus: Corpus, threads: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json."""
    return {
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(threads),
        "corpus": {"source": corpus.meta.get("source")} | {k: v for k, v in corpus.meta.items() if k in _OF_CORPUS},
        "tokenizer": corpus.meta["tokenizer"],
    }


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return what a result depends on that is the same for all runs of a machine: versions and processors."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": commit(),
        "libraries": {name: _version(name) for name in _LIBRARIES} | {"torch": torch.__version__},
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
    }


def command_line() -> str:
    """Return the running command as it would be typed, the program by its name only."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def commit() -> str | None:
    """Return the commit that this package is of: as it was installed, or as it is checked out; None if unknown.

    One behind which files were changed ends in `+`.
    """
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError, AttributeError):
        told = json.loads(metadata.distribution("fp8manifold").read_text("direct_url.json") or "{}")
        if found := told.get("vcs_info", {}).get("commit_id"):
            return str(found)
    here = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        # An installed copy may lie inside a checkout of something else: that one's commit says nothing.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], **options)
        said = subprocess.run([*here, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"], **options)
        return str(said.stdout).strip() or None
    return None


def cpu_model() -> str:
    """Return the processor's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
