"""Files replaced whole, and their hashes: a reader sees the old one or the new one; a failure leaves no part behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

#: flags of a file that is opened only if it is no link
NO_LINKS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
#: of a file's name that the name of its part begins with
LONGEST_STEM = 100
_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """An open file beside `path`; it takes the place of `path` when the block ends without an error.

    It is made under a name that nobody can foresee, and only if there is nothing of that name, so that a link laid in
    the folder leads no writing elsewhere. A link at `path` itself is replaced, and what it points to stays as it is.
    """
    part = path.with_name(f".{path.name[:LONGEST_STEM]}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags | NO_LINKS, 0o666)) as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def remove_parts(folder: Path) -> None:
    """Remove what processes that were killed while they replaced files in a folder have left."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            path.unlink()


def write_text(path: Path, text: str) -> Path:
    """Replace the file at `path` by `text` in UTF-8.

    Raises:
        OSError: the disk does not take it; the error names `path`, and what was there stays.
    """
    try:
        with replacing(path) as file:
            # Half a surrogate pair, as in the name of a folder that is not UTF-8, has no bytes of its own.
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def sha256(path: Path) -> str:
    """Return a file's sha256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
