"""What a command may replace where somebody names a file or a folder: what it wrote itself before, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanogpt_bench.system.errors import BenchError


def refuse_to_replace(option: str, path: Path, wrote: Callable[[Path], bool], instead: str) -> None:
    """Refuse to put a file where there is another one; an empty one may be replaced, and one that `wrote` knows.

    `option` is how the file was named, `instead` what to give in its place.

    Raises:
        BenchError: names the file.
    """
    if not path.exists():  # a link to nothing is replaced, and nothing is lost
        return
    if not path.is_file():
        raise BenchError(f"{option} {str(path)!r} is there and is no ordinary file; give {instead}")
    if path.stat().st_size and not wrote(path):
        raise BenchError(f"{option} {str(path)!r} is there, and this command did not write it; give {instead}")


def holds(shape: Callable[[Any], bool]) -> Callable[[Path], bool]:
    """Return the function that tells whether a JSON file's content is of a shape."""

    def wrote(path: Path) -> bool:
        from nanogpt_bench.system.untrusted import read_json  # which needs the extra that a command line may lack

        with suppress(OSError, ValueError):
            return shape(read_json(path, times=8))
        return False

    return wrote


def rows_with(*names: str) -> Callable[[Any], bool]:
    """Return the function that tells whether a content is a list of mappings that all have these names.

    >>> rows_with("a")([{"a": 1, "b": 2}]), rows_with("a")([]), rows_with("a")({"a": 1})
    (True, False, False)
    """

    def shape(content: Any) -> bool:
        rows = content if isinstance(content, list) else []
        return bool(rows) and all(isinstance(row, Mapping) and set(names) <= row.keys() for row in rows)

    return shape


def mapping_with(*names: str) -> Callable[[Any], bool]:
    """Return the function that tells whether a content is a mapping that has these names.

    >>> mapping_with("a")({"a": 1, "b": 2}), mapping_with("a")(["a"])
    (True, False)
    """
    return lambda content: isinstance(content, Mapping) and set(names) <= content.keys()
