"""Checkpoints from disk: every byte is checked against the digest beside it before any of it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanogpt_bench.checkpoint.format import BrokenCheckpoint, Contents, read_head, step_file, step_of, steps, sum_file
from nanogpt_bench.system.errors import one_line
from nanogpt_bench.system.untrusted import open_file, read_text


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return a run's newest checkpoint that verifies, and one line for each newer one that does not, newest first.

    Example:
        >>> newest(Path("no such run"))
        (None, [])
    """
    skipped: list[str] = []
    for step in reversed(steps(run_dir)):
        path = step_file(run_dir, step)
        try:
            verify(path)
        except BrokenCheckpoint as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def best(paths: Sequence[Path]) -> Path | None:
    """Return the last of some checkpoints whose header says that no validation loss had been lower, None without."""
    return next(filter(says_best, reversed(paths)), None)


def says_best(path: Path) -> bool:
    """Whether a checkpoint says that no validation loss had been lower at its step; its other bytes are not checked."""
    try:
        return read_facts(path).get("best") is True
    except BrokenCheckpoint:
        return False


def verify(path: Path) -> None:
    """Check that every byte of a checkpoint is the one that was written; takes little memory, whatever its size.

    Raises:
        BrokenCheckpoint: the file or its digest is missing, changed, cut off or unreadable, or no checkpoint of ours.
    """
    read(path, only=())


def read(path: Path, only: Collection[str] | None = None) -> Contents:
    """Return what a checkpoint holds, once all of it has been checked; `only` are the parts whose tensors are wanted.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from nanogpt_bench.checkpoint import commit
        >>> with TemporaryDirectory() as run_dir:
        ...     path = commit(Path(run_dir), Contents(3, {"model": {"w": torch.ones(2)}}), keep_last=1)
        ...     read(path).tensors
        {'model': {'w': tensor([1., 1.])}}

    Raises:
        BrokenCheckpoint: as `verify` does.
    """
    with _named(path), open_file(path, links=False) as file:
        _check_digest(file, path)
        contents = _head(file, path)
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                part, _, rest = name.partition("/")
                if only is None or part in only:
                    contents.tensors.setdefault(part, {})[rest] = opened.get_tensor(name).clone()
        return contents


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint's header, read without the rest of its bytes.

    Raises:
        BrokenCheckpoint: it can't be read, or is no checkpoint of ours.
    """
    with _named(path), open_file(path, links=False) as file:
        return _head(file, path).facts


def read_sum(path: Path) -> str:
    """Return the SHA-256 that is written beside a checkpoint.

    Raises:
        BrokenCheckpoint: there is none.
    """
    with _named(path):
        return read_text(sum_file(path), 500, links=False).partition(" ")[0]


def _head(file: BufferedReader, path: Path) -> Contents:
    file.seek(0)
    contents = read_head(file)
    if step_of(path.name) not in (None, contents.step):
        raise ValueError(f"it is that of step {contents.step}")
    return contents


def _check_digest(file: BufferedReader, path: Path) -> None:
    size, beside = os.fstat(file.fileno()).st_size, sum_file(path)
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"has {size:,} bytes, more than this machine's memory")
    if read_text(beside, 500, links=False) != sum_line(hashlib.file_digest(file, "sha256").hexdigest(), path):
        raise ValueError(f"does not have the sha256 that {beside.name} gives: one of them was cut off or changed")


def sum_line(digest: str, path: Path) -> str:
    """Return what a checkpoint's digest is written as: a line of `sha256sum`."""
    return f"{digest}  {path.name}\n"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a checkpoint into one line that names it."""
    try:
        yield
    except OSError as error:
        other = Path(error.filename).name if error.filename else path.name
        what = "" if other == path.name else f"{other}: "
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: {what}{error.strerror or one_line(error)}") from None
    except MemoryError:
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: more than this machine's memory") from None
    except (ValueError, SafetensorError, RuntimeError) as error:
        raise BrokenCheckpoint(f"checkpoint {str(path)!r}: {one_line(error)}") from None
