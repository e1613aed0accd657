"""One process at a time in a folder: a lock that the kernel holds, and lets go however its process ends."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nanogpt_bench.system.errors import BenchError, refused

#: an empty file in the folder; it is there while somebody works in it, and after one who was killed
LOCK = ".lock"


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Make a folder and keep other processes out of it; what was made and is still empty is gone afterwards.

    Where the file system has no locks, nobody is kept out. `what` begins the line that is said.

    Raises:
        BenchError: another process works in the folder, or it can't be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(f"{what} {str(folder)!r} can't be used", error) from None
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BenchError(f"{what} {str(folder)!r} is in use by another process; wait for its end") from None
    except (OSError, NotImplementedError):
        pass  # whatever is the matter with the folder, the first file of the work will tell
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                if not (folder / LOCK).stat().st_size:  # ours is empty
                    (folder / LOCK).unlink()
            lock.release()
        for path in made:
            with contextlib.suppress(OSError):  # it has come into use
                path.rmdir()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make `path`, or the first of PATH-2, PATH-3, … that does not exist, for this process alone.

    Of several processes that ask at the same instant each gets another one. What was made and is still empty is gone
    afterwards.

    Raises:
        BenchError: no folder can be made there.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    folder, number = path, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
    except OSError as error:
        raise refused(f"folder {str(folder)!r} can't be made", error) from None
    try:
        yield folder
    finally:
        for made in (folder, *missing):
            with contextlib.suppress(OSError):  # it has come into use
                made.rmdir()


def is_unused(folder: Path) -> bool:
    """Whether a folder is not there, or has nothing in it but the lock of somebody who was killed, or ours."""
    return not folder.exists() or all(path.name == LOCK for path in folder.iterdir())
