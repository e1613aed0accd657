"""Memory given back while floats become codes: pages of mapped files, and what the allocator keeps of freed floats.

A page of a file that was read counts as memory of the process until it is given back; the file still has it.
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["MappedFiles"]

_MAPPINGS: Final = Path("/proc/self/smaps")
_DONTNEED: Final = 4
_EVERY: Final = 2**24
_PARTS: Final = 64
"""Memory is given back whenever so many bytes, or such a part of the files, were read: it takes milliseconds."""


class MappedFiles:
    """Files that are mapped from now on, privately, and only read."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = {os.path.realpath(path) for path in paths}
        self._before = {address for address, _, _ in self._mapped()}
        self._read = 0
        self._every = max(_EVERY, sum(os.path.getsize(path) for path in self._paths) // _PARTS)

    def was_read(self, size: int) -> None:
        """Count bytes that nobody needs any more, and give memory back once there are enough of them."""
        self._read += size
        if self._read >= self._every:
            self.give_back()

    def give_back(self) -> None:
        """Pages of mappings made since the beginning, but not of one that was written to: they are not the file's."""
        self._read = 0
        if sys.platform != "linux":
            return
        library = ctypes.CDLL(None)
        for address, length, written in self._mapped():
            if address not in self._before and not written:
                library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED))
        if hasattr(library, "malloc_trim"):  # glibc, which keeps what was freed between tensors that live on
            library.malloc_trim(ctypes.c_size_t(0))

    def _mapped(self) -> Iterator[tuple[int, int, bool]]:
        """Address and length of every mapping of one of the files, and whether it was written to; Linux alone says."""
        if sys.platform != "linux" or not self._paths:
            return
        try:
            lines = _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        place = None
        for line in lines:
            words = line.split(maxsplit=5)
            if not words[0].endswith(":"):
                place = words[0] if len(words) > 5 and words[5] in self._paths else None
            elif place is not None and words[0] == "Anonymous:":
                start, end = (int(part, 16) for part in place.split("-"))
                yield start, end - start, words[1] != "0"
