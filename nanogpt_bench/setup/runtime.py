"""Threads, seed and device of a run, which hold while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError


@contextmanager
def runtime(config: Config) -> Iterator[torch.device]:
    """Set threads and seeds for the run, and put back what was there.

    Raises:
        BenchError: a GPU is asked for and there is none.
    """
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BenchError("runtime.device: 'cuda' is not available on this machine; allowed: auto, cpu")
    device = torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.runtime.threads or threads)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)  # dropout
            yield device
    finally:
        torch.set_num_threads(threads)
