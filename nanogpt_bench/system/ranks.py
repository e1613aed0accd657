"""Processes that train one run, started by torchrun.

`as_rank` joins them, runs the command in each, and ends them together. `Ranks` is this
process among them: it exchanges values with the others by collective operations, and
texts through torch's key-value store. An error in one process becomes one in all
(`Ranks.together`). When a process is gone, the others end with `LOST`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from nanogpt_bench.system.errors import BenchError, one_line

#: message of a process when another process of the run has ended
LOST = (
    "nanogpt-bench: error: another process of this run has ended; complete checkpoints are kept, "
    "and --resume continues from the newest"
)
#: seconds that a failed process waits for the others, which may be about to fail alike,
#: before torchrun ends them
PATIENCE_S = 5.0
#: parts of the messages of gloo, NCCL and torch when the other end of a connection is
#: gone
_LOST_CONNECTION = (
    "by peer",
    "Broken pipe",
    "onnection refused",
    "ocket closed",
    "Pair is not",
    "likely closed",
    "NCCL",
)


class Ranks:
    """This process among the processes of a run, which may be one.

    `store` is torch's key-value store, which all processes share and which outlives
    each of them.

    >>> alone = Ranks()
    >>> alone.first, alone.any(False), alone.mean(0.5), alone.broadcast("runs/a")
    (True, False, 0.5, 'runs/a')
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store = store
        #: number of keys used in the store, equal in all processes
        self._keys = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return itself: a process group can't be copied."""
        return self

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        return flag if self.size == 1 else bool(self.largest(int(flag)))

    def largest(self, number: float) -> float:
        return number if self.size == 1 else max(self.gathered(number))

    def mean(self, number: float) -> float:
        """Return the mean of the processes' numbers; NaN if one is NaN."""
        return number if self.size == 1 else sum(self.gathered(number)) / self.size

    def gathered(self, number: float) -> list[float]:
        """Return the processes' numbers, by rank."""
        numbers = [0.0] * self.size
        numbers[self.rank] = number
        return self.total(numbers)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over the processes, in float64, of each of the numbers."""
        if self.size == 1:
            return list(numbers)
        import torch

        sums = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        return [float(number) for number in sums]

    def broadcast(self, text: str) -> str:
        """Return the text of the first process, in all of them."""
        if self.size == 1:
            return text
        key = self._next_key("broadcast")
        if self.first:
            self._store.set(key, text)
        self._wait_for_all()
        return str(self._store.get(key).decode())

    @contextmanager
    def together(self, kind: type[BenchError] = BenchError) -> Iterator[None]:
        """Make an error in one process an error in all.

        The other processes raise the same OSError, or for a BenchError one of class
        `kind` with its message. The block must not wait for other processes.
        """
        failure: OSError | BenchError | None = None
        try:
            yield
        except (OSError, BenchError) as error:
            failure = error
        failed = [
            rank for rank, flag in enumerate(self.gathered(float(failure is not None))) if flag
        ]
        if failure is not None and self.size == 1:
            raise failure
        if failed:
            raise self._shared(failure, failed[0], kind)

    def _shared(
        self, failure: OSError | BenchError | None, source: int, kind: type[BenchError]
    ) -> Exception:
        """Return the error to raise in this process.

        It is the process' own, or else that of the first process that failed.
        """
        key = self._next_key("failed")
        if self.rank == source:
            if isinstance(failure, OSError):
                parts = [str(failure.errno), str(failure.strerror), str(failure.filename)]
            else:
                parts = [str(failure)]
            self._store.set(key, "\n".join(map(one_line, parts)))
        self._wait_for_all()
        if failure is not None:
            return failure
        lines = self._store.get(key).decode().split("\n")
        if len(lines) == 1:
            return kind(lines[0])
        number, reason, file = lines
        return OSError(int(number), reason, file)

    def _next_key(self, purpose: str) -> str:
        self._keys += 1
        return f"{purpose}/{self._keys}"

    def _wait_for_all(self) -> None:
        """Wait until all processes are here.

        The store itself would wait long for a process that has ended.
        """
        # An exchange of nothing: torch raises if a process is lost.
        self.any(False)

    def say_once(self, line: str) -> None:
        """Print a line to standard error, unless another process has printed one."""
        if self.size == 1:
            print(line, file=sys.stderr)
        elif self._store.add("said", 1) == 1:
            print(line, file=sys.__stderr__, flush=True)


ALONE = Ranks()

#: this process among those of torchrun, while they are joined
_joined: list[Ranks] = []


def is_worker() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def joined() -> Ranks:
    """Return this process among those of torchrun; `ALONE` without torchrun."""
    return _joined[0] if _joined else ALONE


def as_rank(command: Callable[[], int]) -> int:
    """Join the other processes, run a command, and end together.

    Only the first process prints. A lost process ends all.
    """
    store, rank, size = _join()
    ranks = Ranks(rank, size, store)
    _joined[:] = [ranks]
    try:
        with ExitStack() as stack:
            if not ranks.first:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            code = command()
    except RuntimeError as error:
        if size == 1 or not is_lost(error):
            raise
        ranks.say_once(LOST)
        sys.stdout.flush()
        # An ordinary exit could wait for the others.
        os._exit(1)
    finally:
        _joined.clear()
    _leave(store, size, code)
    return code


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error says that another process of the run has ended.

    >>> is_lost(RuntimeError("Socket closed [127.0.0.1]:40123")), is_lost(None)
    (True, False)
    >>> is_lost(RuntimeError("out of memory"))
    False
    """
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(part in str(error) for part in _LOST_CONNECTION)


def _join() -> tuple[Any, int, int]:
    """Return the store, this process' rank and their number, once all have joined."""
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


def _leave(store: Any, size: int, code: int) -> None:
    """Wait until all processes are done.

    When one ends with an error, torchrun ends the others.
    """
    from torch import distributed

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    deadline = time.monotonic() + PATIENCE_S
    store.add("left", 1)
    # Adding 0 reads the counter.
    while store.add("left", 0) < size:
        if code and time.monotonic() > deadline:
            return
        time.sleep(0.02)
    # When the first process has ended, torchrun terminates the others.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    distributed.destroy_process_group()
