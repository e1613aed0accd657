"""Files of a run replaced whole: a reader sees the old one or the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    write_whole(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees all of it or none; what a killed process left of it is written over."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
