"""`checkpoint.best`: one checkpoint of the lowest validation loss, apart from those that a run goes on from."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from nanogpt_bench.checkpoint import Contents, commit, steps
from nanogpt_bench.checkpoint.format import step_folder
from nanogpt_bench.runs.trained import BEST


def commit_best(run_dir: Path, contents: Contents) -> None:
    """Commit a checkpoint to best/checkpoints/step-N; the one before it is removed once this one is whole.

    Raises:
        CheckpointNotWritten: the disk does not take it; the one before it stays.
    """
    folder = run_dir / BEST
    folder.mkdir(exist_ok=True)
    commit(folder, contents, keep_last=1)


def withdraw_best(run_dir: Path, after: int) -> None:
    """Remove what was kept of steps after `after`, which are undone: the run may come to other weights there."""
    for step in steps(run_dir / BEST):
        if step > after:
            with suppress(OSError):
                shutil.rmtree(step_folder(run_dir / BEST, step))
