"""The few operations by which a checkpoint reaches the disk, each of which may fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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
