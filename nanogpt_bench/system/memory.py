"""The memory that is free, and a refusal that comes before it is needed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from nanogpt_bench.system.errors import BenchError

_GIB = 2**30


def free_memory() -> int | None:
    """Return the bytes that this process can still have, by the system and by its group's limit; None if unknown."""
    found = []
    with suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found.append(1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1]))  # type: ignore[index]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        found.append(int(limit) - int(used))
    return min(found, default=None)


def check_memory(needed: float, what: str) -> None:
    """Refuse what does not fit.

    Raises:
        BenchError: `what` needs more bytes than there are.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise BenchError(f"{what} needs about {needed / _GIB:.1f} GiB of memory, {free / _GIB:.1f} GiB are free")
