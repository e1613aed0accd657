"""Files replaced whole, hashes, and folders for one process at a time.

A reader of a replaced file sees the old or the new content, never a part.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from nanogpt_bench.system.errors import BenchError, refused
from nanogpt_bench.system.untrusted import read_json

#: flags that open a file only if it is no link
NO_LINKS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
#: how many characters of a file's name the name of its unfinished copy begins with
LONGEST_STEM = 100
_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield an open file that replaces `path` when the block ends without an error.

    The file is in the folder of `path`. Its name can't be foreseen, and it is created
    only if the name is free, so that a link planted in the folder can't redirect the
    writing. A link at `path` itself is replaced, and its target stays as it is.
    """
    part = path.with_name(f".{path.name[:LONGEST_STEM]}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=_open_no_link) as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | NO_LINKS, 0o666)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def remove_parts(folder: Path) -> None:
    """Remove the parts of files that killed processes left in a folder."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            path.unlink()


def write_text(path: Path, text: str) -> Path:
    """Replace the file at `path` by `text` in UTF-8.

    On an OSError, which names `path`, the old file stays.
    """
    try:
        with replacing(path) as file:
            # Half a surrogate pair, as in a folder's name that is not UTF-8, can't be
            # encoded in UTF-8.
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_place(option: str, path: Path) -> None:
    """Refuse the path of an output, file or folder, where nothing can be written.

    That is below a file, behind a link to nothing, or where nothing may be written.
    Called before anything is computed that would be lost otherwise.
    """
    # The nearest part of the path that exists decides.
    for place in (path, *path.parents):
        if not os.path.lexists(place):
            continue
        if not place.exists():
            raise BenchError(
                f"{option} {str(path)!r}: {str(place)!r} is a broken link; remove it, or give "
                "another name"
            )
        if not place.is_dir() and place != path:
            raise BenchError(
                f"{option} {str(path)!r}: {str(place)!r} is a file, not a folder; give another name"
            )
        folder = place if place.is_dir() else place.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BenchError(
                f"{option} {str(path)!r}: no permission to write in {str(folder)!r}; give another "
                "name"
            )
        return


def refuse_to_replace(
    option: str, path: Path, is_replaceable: Callable[[Path], bool], instead: str
) -> None:
    """Refuse a place where nothing can be written, and to replace a foreign file.

    An empty file is replaced, and one that `is_replaceable` recognises as an earlier
    one of the same command.
    """
    check_place(option, path)
    if not path.exists():
        return
    if not path.is_file():
        raise BenchError(
            f"{option} {str(path)!r} exists and is not an ordinary file; give {instead}"
        )
    if path.stat().st_size and not is_replaceable(path):
        raise BenchError(
            f"{option} {str(path)!r} exists, and this command did not write it; give {instead}"
        )


def json_test(has_shape: Callable[[Any], bool]) -> Callable[[Path], bool]:
    """Return a test whether a file is JSON whose content passes `has_shape`."""

    def is_replaceable(path: Path) -> bool:
        with suppress(OSError, ValueError):
            return has_shape(read_json(path, times=8))
        return False

    return is_replaceable


def rows_with(*names: str) -> Callable[[Any], bool]:
    """Return a test whether a content is a list of mappings that all have these names.

    >>> rows_with("a")([{"a": 1, "b": 2}]), rows_with("a")([]), rows_with("a")({"a": 1})
    (True, False, False)
    """
    is_row = mapping_with(*names)

    def has_shape(content: Any) -> bool:
        return isinstance(content, list) and bool(content) and all(map(is_row, content))

    return has_shape


def mapping_with(*names: str) -> Callable[[Any], bool]:
    """Return a test whether a content is a mapping that has these names.

    >>> mapping_with("a")({"a": 1, "b": 2}), mapping_with("a")(["a"])
    (True, False)
    """

    def has_names(content: Any) -> bool:
        return isinstance(content, Mapping) and set(names) <= content.keys()

    return has_names


#: an empty file in a folder; it exists while a process has the folder, and after that
#: process was killed
LOCK = ".lock"


@contextmanager
def locked(folder: Path, subject: str) -> Iterator[None]:
    """Make a folder and keep other processes out of it.

    A folder that was made and stays empty is removed. Where the file system has no
    locks, nobody is kept out. `subject` begins the error's line.
    """
    check_place(subject, folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(f"{subject} {str(folder)!r} can't be used", error) from None
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BenchError(
            f"{subject} {str(folder)!r} is in use by another process; wait until it ends"
        ) from None
    except (OSError, NotImplementedError):
        # If the folder is not usable, the first file written to it says why.
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                # a file with content is not the bench's
                if not (folder / LOCK).stat().st_size:
                    (folder / LOCK).unlink()
            lock.release()
        _remove_empty(missing)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, except those with content."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make `path`, or the first of PATH-2, PATH-3, … that does not exist.

    It is for this process alone: processes that do so at the same instant get different
    ones. A folder that was made and stays empty is removed.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    folder, number = path, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                folder.mkdir()
                break
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
    except OSError as error:
        raise refused(f"folder {str(folder)!r} can't be made", error) from None
    try:
        yield folder
    finally:
        _remove_empty([folder, *missing])


def is_unused(folder: Path) -> bool:
    """Return whether a folder is missing or has only a lock.

    The lock is this process', or one left by a killed process.
    """
    return not folder.exists() or all(path.name == LOCK for path in folder.iterdir())
