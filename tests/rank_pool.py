"""Processes that stand ready as the ranks of a group.

They are forked once from the test, fed with cases, and ended at a hang.
"""

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp8manifold as fm

LIMIT = 120.0  # seconds that a case may take


class Pool:
    """Ranks of one group, which run function after function.

    Functions are known by name in the test's modules.
    """

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        self.size, self.folder, self.backend = size, folder, backend
        self.ends: list[Connection] = []
        self.children: list[int] = []
        self.begun = 0

    def run(
        self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` in every rank; what each returns.

        A rank that raises, dies or is not done in time ends all of them, and the test.
        """
        if not self.children:
            self._start()
        for end in self.ends:
            end.send((function, args, kwargs))
        results: dict[int, Any] = {}
        failed, deadline = "", time.monotonic() + limit
        while len(results) < self.size and time.monotonic() < deadline:
            open_ends = [end for rank, end in enumerate(self.ends) if rank not in results]
            for end in wait(open_ends, timeout=max(deadline - time.monotonic(), 0)):
                rank = self.ends.index(end)  # type: ignore[arg-type]
                try:
                    ok, results[rank] = self.ends[rank].recv()
                except EOFError:
                    ok, results[rank] = False, "died"
                if not ok:
                    failed += f"rank {rank}: {results[rank]}\n"
                    deadline = min(deadline, time.monotonic() + 1)
        if failed or len(results) < self.size:
            late = sorted(set(range(self.size)) - set(results))
            self.end()
            raise AssertionError(failed or f"ranks {late} were not done after {limit:g} s")
        return [results[rank] for rank in range(self.size)]

    def end(self) -> None:
        for end in self.ends:
            end.close()
        for child in self.children:
            os.kill(child, 9)
            os.waitpid(child, 0)
        self.ends, self.children = [], []

    def _start(self) -> None:
        self.begun += 1
        _warm_up()
        store = self.folder / f"store-{self.size}-{self.begun}"
        for rank in range(self.size):
            parent_end, child_end = Pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    parent_end.close()
                    torch.set_num_threads(1)
                    _serve(child_end, self.backend, rank, self.size, store)
                    code = 0
                finally:
                    os._exit(code)
            child_end.close()
            self.ends.append(parent_end)
            self.children.append(child)


def _warm_up() -> None:
    """Load here what every rank would load by itself.

    Some modules of torch's come with the first use only.
    """
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.optim

    layer = fm.quantize_model(torch.nn.Sequential(torch.nn.Linear(32, 2)), "E4M3", "codes")
    optimizer = fm.optim.StiffnessMuon.for_model(layer, moments="8bit")
    layer(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def _serve(end: Connection, backend: str, rank: int, size: int, store: Path) -> None:
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT), **options)
    while True:
        try:
            function, args, kwargs = end.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        end.send(answer)
