"""A copy of a hub data set on disk: parquet files named by their split, as the hub keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.data.rows import VAL_NAMES, reading
from nanogpt_bench.system.digest import sha256
from nanogpt_bench.system.errors import BenchError

SPLITS = ("train", *VAL_NAMES)


def local_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Return the parquet files of each split in FOLDER/CONFIG or else in FOLDER, in the order of their names.

    Raises:
        BenchError: no such folder, no training split in it, or a file that is no whole parquet file.
    """
    if not folder.is_dir():
        raise BenchError(f"--data-dir {str(folder)!r} is not a folder")
    inner = folder / config if config and (folder / config).is_dir() else folder
    paths = sorted(path for path in inner.glob("*.parquet") if path.is_file())
    found = {split: [path for path in paths if _split(path) == split] for split in SPLITS}
    if not found["train"]:
        expected = f"{config}/train-*.parquet or train-*.parquet" if config else "train-*.parquet"
        raise BenchError(f"--data-dir {str(folder)!r} holds no {expected}")
    for path in paths:
        _check_whole(path)
    return {split: paths for split, paths in found.items() if paths}


def _split(path: Path) -> str:
    return path.stem.partition("-")[0]


def _check_whole(path: Path) -> None:
    import pyarrow.parquet

    with reading(repr(str(path))):
        pyarrow.parquet.read_schema(path)


def local_facts(files: Mapping[str, list[Path]]) -> dict[str, Any]:
    """Return what tells one copy from another: the sha256 of every file by its name."""
    return {path.name: sha256(path) for paths in files.values() for path in paths}
