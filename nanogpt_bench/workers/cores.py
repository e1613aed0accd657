"""The number of runs at a time and of threads each, neither more than the cores take."""

from __future__ import annotations

import os

from nanogpt_bench.system.errors import BenchError


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_asked() -> int:
    """Return the threads that this process would compute with: OMP_NUM_THREADS, or what torch makes of the machine."""
    import torch

    return torch.get_num_threads()


def check_workers(workers: int | None, source: str, threads: int | None = None, there: int | None = None) -> None:
    """Refuse more runs at a time than there are cores, or than have the `threads` each that their settings ask for.

    `there` are the cores; those of this machine without.

    Raises:
        BenchError: names `source`, which asks for them, and how many there can be.

    >>> check_workers(1, "--workers"), check_workers(None, "--workers")
    (None, None)
    """
    there = cores() if there is None else there
    most = most_workers(threads, there)
    if workers is not None and workers > most:
        each = "" if threads in (None, 1) else f" with runtime.threads {threads}"
        raise BenchError(f"{source}: {workers} is more than the {there} cores take{each}; give at most {most}")


def divide(
    workers: int | None, runs: int, threads: int | None, asked: int, there: int | None = None
) -> tuple[int, int]:
    """Return (workers, threads of each): the cores shared out among as many workers as have something to do.

    A run gets the `threads` that the settings give; otherwise its share of the cores, and no more than `asked`, which
    is what this process computes with. Without `workers` there is one for every so many cores.

    >>> divide(1, 10, None, asked=1)
    (1, 1)
    """
    there = cores() if there is None else there
    count = max(1, min(workers or most_workers(threads, there), runs))
    return count, threads or max(1, min(there // count, asked))


def most_workers(threads: int | None, there: int) -> int:
    """Return how many runs of so many threads each the cores take at a time, at least one."""
    return max(1, there // (threads or 1))
