"""Whether a file system has room for what is about to be written."""

from __future__ import annotations

from pathlib import Path

from nanogpt_bench.checkpoint.contents import Contents
from nanogpt_bench.checkpoint.disk import Disk
from nanogpt_bench.system.errors import BenchError

#: for headers, state.json, the manifest and the file system's own bookkeeping
OVERHEAD = 1 << 20


def bytes_of(contents: Contents) -> int:
    """Return the bytes that a checkpoint's tensors take on disk, without headers and state.json."""
    tensors = [tensor for file in contents.tensors.values() for tensor in file.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_room(folder: Path, needed: int, what: str, disk: Disk | None = None) -> None:
    """Refuse to begin what would not fit: `needed` bytes for `what` below a folder that may not exist yet.

    Raises:
        BenchError: too little room is left; nothing has been written.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = (disk or Disk()).free(there)
    if free < needed + OVERHEAD:
        raise BenchError(
            f"{what} needs {megabytes(needed + OVERHEAD)} below {str(folder)!r}, {megabytes(free)} are free; "
            "make room or choose another folder"
        )


def megabytes(size: int) -> str:
    """Return a size in words.

    >>> megabytes(1_250_000)
    '1.2 MB'
    """
    return f"{size / 1e6:,.1f} MB"
