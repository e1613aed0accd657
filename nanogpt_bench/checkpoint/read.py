"""Checkpoints from disk: every byte is checked against the manifest before any of it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from nanogpt_bench.checkpoint.format import (
    HEADER,
    MANIFEST,
    MANIFEST_LIMIT,
    PREFIX,
    STATE,
    BrokenCheckpoint,
    Contents,
    Entry,
    Manifest,
    decompose,
    from_bytes,
    parse,
    read_header,
    step_folder,
    step_of,
    steps,
)
from nanogpt_bench.system.errors import one_line
from nanogpt_bench.system.untrusted import open_file

#: bytes hashed at a time
CHUNK = 1 << 20
#: bytes of state.json
STATE_LIMIT = 1 << 25


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return a run's newest checkpoint that verifies, and one line for each newer one that does not, newest first.

    Example:
        >>> newest(Path("no such run"))
        (None, [])
    """
    skipped: list[str] = []
    for step in reversed(steps(run_dir)):
        folder = step_folder(run_dir, step)
        try:
            verify(folder)
        except BrokenCheckpoint as error:
            skipped.append(str(error))
        else:
            return folder, skipped
    return None, skipped


def verify(folder: Path) -> None:
    """Check that every byte of a checkpoint is the one that was written; takes little memory, whatever its size.

    Raises:
        BrokenCheckpoint: a file is missing, added, changed, cut off or unreadable, or no checkpoint of ours.
    """
    with _named(folder):
        manifest = read_manifest(folder)
        for name, entry in manifest.files.items():
            with _about(name), _opened(folder / name, entry.size) as file:
                if name == STATE:
                    _check_state(_whole(file, entry), manifest)
                else:
                    _check_tensors(file, entry, folder / name)


def read(folder: Path, only: Collection[str] | None = None) -> Contents:
    """Return what a checkpoint holds, parsed from the very bytes that were checked.

    `only` names the files of tensors that are wanted, by stem; the others are then neither read nor checked.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from nanogpt_bench.checkpoint import commit
        >>> with TemporaryDirectory() as run_dir:
        ...     folder = commit(Path(run_dir), Contents(3, {"model": {"w": torch.ones(2)}}), keep_last=1)
        ...     read(folder).tensors
        {'model': {'w': tensor([1., 1.])}}

    Raises:
        BrokenCheckpoint: as `verify` does.
    """
    with _named(folder):
        manifest = read_manifest(folder)
        contents = Contents(manifest.step, {})
        for name, entry in manifest.files.items():
            stem = name.partition(".")[0]
            if only is not None and name != STATE and stem not in only:
                continue
            with _about(name), _opened(folder / name, entry.size) as file:
                data = _whole(file, entry)
                if name == STATE:
                    contents.facts = _check_state(data, manifest)
                    continue
                contents.tensors[stem], metadata = from_bytes(data)
                contents.metadata |= {stem: metadata} if metadata else {}
        return contents


def read_manifest(folder: Path) -> Manifest:
    """Return a folder's manifest if the folder has exactly its files and is named after its step.

    Raises:
        ValueError, OSError: it has not.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError("is a symbolic link" if folder.is_symlink() else "is no folder")
    with _about(MANIFEST), _opened(folder / MANIFEST) as file:
        manifest = decompose(file.read(MANIFEST_LIMIT + 1))
    with os.scandir(folder) as items:
        extra = next((item.name for item in items if item.name not in manifest.files and item.name != MANIFEST), None)
    if extra is not None:
        raise ValueError(f"{extra[:80]!r} is not in its manifest")
    if step_of(folder.name) not in (None, manifest.step):
        raise ValueError(f"it is that of step {manifest.step}")
    return manifest


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn whatever is wrong with a checkpoint into one line that names it."""
    try:
        yield
    except OSError as error:
        what = f"{Path(error.filename).name}: " if error.filename else ""
        raise BrokenCheckpoint(f"checkpoint {str(folder)!r}: {what}{error.strerror or error}") from None
    except MemoryError:
        raise BrokenCheckpoint(f"checkpoint {str(folder)!r}: more than this machine's memory") from None
    except ValueError as error:
        raise BrokenCheckpoint(f"checkpoint {str(folder)!r}: {one_line(error)}") from None


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@contextmanager
def _opened(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """Open an ordinary file, not through a link, if it has the size it should have and the machine could hold it."""
    with open_file(path, links=False) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            raise ValueError(f"has {found:,} bytes, its manifest says {size:,}")
        if found > _memory():
            raise ValueError(f"has {found:,} bytes, more than this machine's memory")
        yield file


def _whole(file: BinaryIO, entry: Entry) -> bytes:
    data = file.read(entry.size)
    _check_digest(hashlib.sha256(data), entry)
    return data


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_digest(digest: Any, entry: Entry) -> None:
    if digest.hexdigest() != entry.sha256:
        raise ValueError("does not have the sha256 that its manifest gives")


def _check_state(data: bytes, manifest: Manifest) -> dict[str, Any]:
    facts = parse(data, limit=STATE_LIMIT)
    if not isinstance(facts, dict) or facts.get("step") != manifest.step:
        raise ValueError(f"is not that of step {manifest.step}")
    return facts


def _check_tensors(file: BinaryIO, entry: Entry, path: Path) -> None:
    """Hash a file piece by piece and check that its header fits its length."""
    data = file.read(CHUNK)
    digest, begun = hashlib.sha256(data), data
    while data := file.read(CHUNK):
        digest.update(data)
        begun += data if len(begun) < PREFIX + HEADER else b""
    _check_digest(digest, entry)
    read_header(begun)
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(one_line(error)) from None
