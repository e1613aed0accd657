"""A command as one of the processes that torchrun started: joined before it, and left together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from nanogpt_bench.system.ranks import ALONE, Ranks

#: what is said by whoever outlives a process, and what the command ends with then
LOST = "nanogpt-bench: error: another process of the run has ended; what is whole on disk stays, --resume goes on there"
LOST_CODE = 1
#: how long a process that failed waits for others, which may be about to fail alike: torchrun ends them otherwise
PATIENCE_S = 5.0
#: in what gloo and torch say once the other end of a connection is gone
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "onnection refused", "NCCL")
_joined: list[Ranks] = []


def is_worker() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def joined() -> Ranks:
    """Return this process among those that torchrun started; alone where it did not."""
    return _joined[0] if _joined else ALONE


def as_rank(command: Callable[[], int]) -> int:
    """Join the other processes, run a command, and end when all have; what others than the first print is dropped.

    A process that has ended on the way ends the others, with one line.
    """
    store, rank, size = _join()
    ranks = Ranks(rank, size, store)
    _joined[:] = [ranks]
    try:
        with _silenced(not ranks.first):
            code = command()
    except RuntimeError as error:
        if size == 1 or not _is_lost(error):
            raise
        ranks.say_once(LOST)
        sys.stdout.flush()
        os._exit(LOST_CODE)  # nothing that waits for the others may hold the exit up
    finally:
        _joined.clear()
    _leave(store, size, code)
    return code


def _join() -> tuple[Any, int, int]:
    """Return the store, this process' number and how many there are, once the group stands."""
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    on_gpu = torch.cuda.is_available() and distributed.is_nccl_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if on_gpu and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store, rank, size = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    return PrefixStore("nanogpt_bench", store), rank, size


@contextmanager
def _silenced(silent: bool) -> Iterator[None]:
    if not silent:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _is_lost(error: RuntimeError) -> bool:
    from torch import distributed

    return isinstance(error, distributed.DistError) or any(words in str(error) for words in _GONE)


def _leave(store: Any, size: int, code: int) -> None:
    """Wait until all processes are here: torchrun ends those that remain when one ends with an error."""
    from torch import distributed

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    deadline = time.monotonic() + PATIENCE_S
    store.add("left", 1)
    while store.add("left", 0) < size:
        if code and time.monotonic() > deadline:
            return
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first to be gone has torchrun end the others, which are going
    distributed.destroy_process_group()
