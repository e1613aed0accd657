"""Files replaced whole: a reader sees the old one or the new one, and a failure leaves no part behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends without an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Replace the file at `path` by `text` in UTF-8."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return path
