"""The memory that this process can still get, and the refusal of what needs more."""

import re
from contextlib import suppress
from pathlib import Path

from nanogpt_bench.system.errors import BenchError

_GIB = 2**30
#: the most bytes that a message names: larger numbers may not fit a float
_ENDLESS = 10**300
_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
#: entries of a control group's memory that the system frees when needed: the cache of
#: files
_CACHE = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)


def free_memory() -> int | None:
    """Return the bytes that this process can still get, from the system and in its
    control group; None if unknown.
    """
    found = []
    with suppress(OSError, ValueError):
        text = _MEMINFO.read_text(encoding="ascii")
        found += [1024 * int(size) for size in re.findall(r"MemAvailable:\s+(\d+)", text)]
    with suppress(OSError, ValueError):
        limit, used = (int(_of_group(f"memory.{name}")) for name in ("max", "current"))
        with suppress(OSError):
            used -= sum(map(int, _CACHE.findall(_of_group("memory.stat"))))
        found.append(limit - used)
    return min(found, default=None)


def _of_group(name: str) -> str:
    return (_GROUP / name).read_text(encoding="ascii")


def check_memory(needed: float, what: str) -> None:
    """Refuse `what`, as the error calls it, if it needs more bytes than are free."""
    free = free_memory()
    if free is not None and needed > free:
        asked = min(needed, _ENDLESS) / _GIB
        raise BenchError(
            f"{what} needs about {asked:.1f} GiB of memory, {free / _GIB:.1f} GiB are free"
        )
