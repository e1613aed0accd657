"""The memory that this process can still get, and the refusal of what needs more."""

import re
from contextlib import suppress
from pathlib import Path

from nanogpt_bench.system.errors import BenchError

_GIB = 2**30
#: the most bytes that a message names: larger numbers may not fit a float
_ENDLESS = 10**300
_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
#: entries of a control group's memory that the system frees when needed: the cache of
#: files
_FILE_CACHE = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)


def free_memory() -> int | None:
    """Return the bytes that this process can still get; None if unknown.

    They are limited by the system and by the process' control group.
    """
    limits = []
    with suppress(OSError, ValueError):
        text = _MEMINFO.read_text(encoding="ascii")
        limits += [1024 * int(size) for size in re.findall(r"MemAvailable:\s+(\d+)", text)]
    with suppress(OSError, ValueError):
        limit = int(_of_control_group("memory.max"))
        used = int(_of_control_group("memory.current"))
        with suppress(OSError):
            used -= sum(map(int, _FILE_CACHE.findall(_of_control_group("memory.stat"))))
        limits.append(limit - used)
    return min(limits, default=None)


def _of_control_group(name: str) -> str:
    return (_CONTROL_GROUP / name).read_text(encoding="ascii")


def check_memory(needed: float, request: str) -> None:
    """Refuse a request, as the error calls it, for more bytes than are free."""
    free = free_memory()
    if free is not None and needed > free:
        asked = min(needed, _ENDLESS) / _GIB
        raise BenchError(
            f"{request} needs about {asked:.1f} GiB of memory; {free / _GIB:.1f} GiB are free"
        )
