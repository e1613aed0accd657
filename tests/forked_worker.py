"""A pool's worker that is forked from the tests, where torch has been imported: a start of its own takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import IO, Any

from nanogpt_bench.workers import worker

PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired


class Popen:
    """As much of `subprocess.Popen` as a pool asks for."""

    def __init__(self, _: Any, *, stderr: IO[bytes], env: Mapping[str, str], **options: Any) -> None:
        jobs, answers = os.pipe(), os.pipe()
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            _serve(jobs[0], answers[1], stderr.fileno(), env)
        os.close(jobs[0])
        os.close(answers[1])
        self.stdin = os.fdopen(jobs[1], "w", encoding="utf-8")
        self.stdout = os.fdopen(answers[0], encoding="utf-8")

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if end is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise TimeoutExpired("worker", timeout)
            else:
                time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(jobs: int, answers: int, errors: int, environment: Mapping[str, str]) -> None:
    code = 1
    try:
        for source, target in ((jobs, 0), (answers, 1), (errors, 2)):
            os.dup2(source, target)
        os.closerange(3, 1024)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        os.environ.update(environment)
        warnings.resetwarnings()
        code = worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
