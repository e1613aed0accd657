"""The page of a run while it trains, drawn by a process of its own: `python -m nanogpt_bench.report.follow RUN`.

The process ends, after a last page, when its standard input does: with the run, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanogpt_bench.report.build import PAGE, PAGE_SHARE, SECONDS_BETWEEN_PAGES, report
from nanogpt_bench.system.errors import BenchError

#: of a run's folder, where its page and figures go
FOLDER = "report"
#: how long the last page may take after the run's end
_PATIENCE = 120.0


@contextmanager
def followed(run_dir: Path) -> Iterator[Path]:
    """Yield the path of a page of a run that is kept up to date until the context ends."""
    command = [sys.executable, "-m", "nanogpt_bench.report.follow", str(run_dir)]
    drawing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert drawing.stdin is not None
    try:
        yield run_dir / FOLDER / PAGE
    finally:
        drawing.stdin.close()
        try:
            drawing.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            drawing.kill()
            drawing.wait()


def follow(run_dir: Path, least: float = SECONDS_BETWEEN_PAGES) -> None:
    """Draw the page of a run again and again until standard input ends, and then once more."""
    drawn, ended, pause = None, threading.Event(), least

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(pause):
        records = run_dir / "metrics.jsonl"
        size = records.stat().st_size if records.is_file() else 0
        if size and size != drawn:
            begun, drawn = time.monotonic(), size
            _draw(run_dir, running=True)
            pause = max(least, (time.monotonic() - begun) / PAGE_SHARE)
    _draw(run_dir, running=False)


def _draw(run_dir: Path, *, running: bool) -> None:
    try:
        report([run_dir], out=run_dir / FOLDER, running=running)
    except (BenchError, OSError) as error:  # a disk that is full, say: the run is what counts
        print(f"nanogpt-bench: no page of {run_dir}: {error}", file=sys.stderr)


if __name__ == "__main__":
    getattr(os, "nice", int)(10)  # the training comes first
    follow(Path(sys.argv[1]))
