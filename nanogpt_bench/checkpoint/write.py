"""Write a checkpoint whole or not at all, where there is room, and remove those before it that are not kept."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from nanogpt_bench.checkpoint.format import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    BrokenCheckpoint,
    CheckpointNotWritten,
    Contents,
    Entry,
    Manifest,
    aside_folder,
    clean,
    compose,
    partial_folder,
    step_folder,
    steps,
    to_bytes,
)
from nanogpt_bench.checkpoint.read import STATE_LIMIT, read_manifest, verify
from nanogpt_bench.system.errors import BenchError, one_line


def commit(run_dir: Path, contents: Contents, *, keep_last: int, disk: Disk | None = None) -> Path:
    """Write a checkpoint and return its folder, `run_dir`/checkpoints/step-N; then remove older ones.

    The files are written to a temporary sibling, read back against their hashes, and get their name at once when all of
    them are on the disk: whatever happens on the way, the checkpoints before are as they were. Kept are the `keep_last`
    newest, this one included, and the newest whose `facts["best"]` is true; one that does not verify counts as neither.
    A checkpoint of the same step is replaced; those of later steps are left alone.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> with TemporaryDirectory() as run_dir:
        ...     for step in (1, 2, 3):
        ...         facts = {"best": step == 1}
        ...         contents = Contents(step, {"model": {"w": torch.ones(2)}}, facts=facts)
        ...         folder = commit(Path(run_dir), contents, keep_last=1)
        ...     sorted(path.name for path in folder.parent.iterdir())
        ['step-1', 'step-3']

    Raises:
        CheckpointNotWritten: the disk is full, can't be written or fails otherwise; no litter is left if that can be.
        ValueError: `keep_last` below 1, or contents that no file can hold.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} is not allowed; give 1 or more")
    disk = disk or Disk()
    folder = step_folder(run_dir, contents.step)
    state = _state(contents)
    try:
        clean(run_dir)
        _make_parent(run_dir, disk)
        check_room(folder.parent, bytes_of(contents) + len(state), "it", disk)
        _write(folder, contents, state, disk)
        with suppress(OSError):  # this checkpoint is safe; the next commit tries again
            _prune(run_dir, contents.step, keep_last, disk)
    except (OSError, BenchError) as error:
        reason = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise CheckpointNotWritten(
            f"checkpoint of step {contents.step} can't be written to {str(folder.parent)!r}: {one_line(reason)}; "
            "those before it are as they were"
        ) from None
    return folder


def _state(contents: Contents) -> bytes:
    facts = {**contents.facts, "step": contents.step}
    data = json.dumps(facts, allow_nan=False, indent=1).encode() + b"\n"
    if len(data) > STATE_LIMIT:
        raise ValueError(f"facts take {len(data):,} bytes, more than the {STATE_LIMIT:,} of {STATE}")
    return data


def _make_parent(run_dir: Path, disk: Disk) -> None:
    parent = run_dir / CHECKPOINTS
    if not parent.is_dir():
        disk.make_folder(parent)
        disk.sync_folder(run_dir)
        disk.sync_folder(run_dir.parent)


def _write(folder: Path, contents: Contents, state: bytes, disk: Disk) -> None:
    partial = partial_folder(folder)
    try:
        disk.make_folder(partial)
        _fill(partial, contents, state, disk)
        verify(partial)
        _put_in_place(partial, folder, disk)
    except BaseException:
        # What failed may fail again; the next start removes what is left.
        with suppress(OSError):
            clean(folder.parent.parent)
        raise


def _fill(partial: Path, contents: Contents, state: bytes, disk: Disk) -> None:
    entries = {}
    for name, data in _files(contents, state):
        entries[name] = Entry(len(data), hashlib.sha256(data).hexdigest())
        disk.write_file(partial / name, data)
    manifest = Manifest(contents.step, contents.facts.get("best") is True, entries)
    disk.write_file(partial / MANIFEST, compose(manifest))
    disk.sync_folder(partial)


def _files(contents: Contents, state: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every file, one at a time: a checkpoint may fill much of the memory."""
    for stem in sorted(contents.tensors.keys() | contents.metadata.keys()):
        tensors, metadata = contents.tensors.get(stem, {}), contents.metadata.get(stem, {})
        if tensors or metadata:
            yield f"{stem}.safetensors", to_bytes(tensors, metadata)
    yield STATE, state


def _put_in_place(partial: Path, folder: Path, disk: Disk) -> None:
    aside = aside_folder(folder)
    if folder.exists():
        # A folder with content can't be overwritten. Until the new one is in place, `clean` puts the old one back.
        disk.rename(folder, aside)
    disk.rename(partial, folder)
    disk.sync_folder(folder.parent)
    if aside.exists():
        _remove(aside, disk)


def _remove(folder: Path, disk: Disk) -> None:
    """Remove what is no longer needed; what can't be removed now is litter, which the next commit must remove."""
    with suppress(OSError):
        disk.remove(folder)


def _prune(run_dir: Path, step: int, keep_last: int, disk: Disk) -> None:
    """Remove the checkpoints before the one of `step`, which has just been verified, but the best and the last.

    Only whole ones count: a broken one is in the place of none, and is removed once it is older than those that stay.
    """
    before = [number for number in steps(run_dir) if number <= step]
    if len(before) <= keep_last:
        return
    whole = functools.cache(lambda number: number == step or _is_whole(step_folder(run_dir, number)))
    last = list(itertools.islice(filter(whole, reversed(before)), keep_last))
    if len(last) < keep_last:
        return
    kept = {*last, *_best(run_dir, before, whole)}
    for number in before:
        if number < last[-1] and number not in kept:
            folder = step_folder(run_dir, number)
            # Out of sight at once: a checkpoint half removed would look like a broken one.
            disk.rename(folder, partial_folder(folder))
            _remove(partial_folder(folder), disk)


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except BrokenCheckpoint:
        return False
    return True


def _best(run_dir: Path, numbers: list[int], whole: Callable[[int], bool]) -> list[int]:
    for number in reversed(numbers):
        with suppress(OSError, ValueError):
            if read_manifest(step_folder(run_dir, number)).best and whole(number):
                return [number]
    return []


#: bytes handed to the system at a time
CHUNK = 1 << 20


class Disk:
    """Files and folders of one file system; tests put one in its place that fails where they want it to."""

    def free(self, folder: Path) -> int:
        """Return the bytes that may still be written below a folder."""
        return shutil.disk_usage(folder).free

    def make_folder(self, folder: Path) -> None:
        """Make a folder that must not exist."""
        folder.mkdir()

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a new file and wait until it is on the disk.

        Raises:
            OSError: the file exists, or the disk takes no more.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(data)
            while len(rest):
                written = self.write(file, rest[:CHUNK])
                if written <= 0:
                    raise OSError(f"the system took {written} of {len(rest)} bytes")
                rest = rest[written:]
            self.sync(file)
        finally:
            os.close(file)

    def write(self, file: int, data: memoryview) -> int:
        """Write some of `data` and return how much."""
        return os.write(file, data)

    def sync(self, file: int) -> None:
        """Wait until a file, or a folder's list of names, is on the disk."""
        os.fsync(file)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(file)
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name, at once or not at all."""
        os.rename(old, new)

    def remove(self, folder: Path) -> None:
        """Remove a folder and what is in it."""
        shutil.rmtree(folder)


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
