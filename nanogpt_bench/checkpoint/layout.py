"""Where a run's checkpoints are, how they are named, and what an interruption leaves beside them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
#: a file of tensors; nothing else may lie in a checkpoint beside MANIFEST and STATE
TENSOR_FILE = re.compile(r"[a-z][a-z0-9_]{0,31}\.safetensors")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LITTER = re.compile(rf"\.({_STEP.pattern})\.(partial|aside)")


def step_folder(run_dir: Path, step: int) -> Path:
    """Return where the checkpoint of a step belongs."""
    return run_dir / CHECKPOINTS / f"step-{step}"


def partial_folder(folder: Path) -> Path:
    """Return where a checkpoint is while it is written, or while it is removed."""
    return folder.with_name(f".{folder.name}.partial")


def aside_folder(folder: Path) -> Path:
    """Return where a checkpoint waits while another takes its place."""
    return folder.with_name(f".{folder.name}.aside")


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, None for any other name.

    >>> step_of("step-100"), step_of("step-007"), step_of(".step-1.partial")
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint by its name, whole or not, in increasing order."""
    return sorted(step for name in _names(run_dir) if (step := step_of(name)) is not None)


def clean(run_dir: Path) -> None:
    """Remove what an interrupted save or removal left behind; a checkpoint that had stepped aside steps back.

    Raises:
        OSError: the litter can't be removed.
    """
    parent = run_dir / CHECKPOINTS
    for name in _names(run_dir):
        match = _LITTER.fullmatch(name)
        if match is None:
            continue
        if match[3] == "aside" and not os.path.lexists(parent / match[1]):
            os.rename(parent / name, parent / match[1])
        elif (parent / name).is_symlink() or not (parent / name).is_dir():
            (parent / name).unlink()
        else:
            shutil.rmtree(parent / name)


def _names(run_dir: Path) -> list[str]:
    try:
        return sorted(os.listdir(run_dir / CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        return []
