"""Figures of a benchmark as a file, docs/measured/NAME.json, from which tables of the
pages are made.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

__all__ = ["Cell", "add_option", "machine", "record"]

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "docs" / "measured"
ARCHITECTURES: Final = {"x86_64": "x86", "AMD64": "x86", "aarch64": "Arm", "arm64": "Arm"}
#: text, a number, nothing, or a ratio as its median alone or with its smallest and
#: largest
Cell = str | int | float | None | Sequence[float]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option --record."""
    parser.add_argument(
        "--record",
        action="store_true",
        help="also write the figures to docs/measured, for the site",
    )


def machine(device: str = "cpu") -> str:
    """The kind of machine: cores and architecture, or the GPU's name."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    kind = ARCHITECTURES.get(platform.machine(), platform.machine())
    return f"{os.cpu_count()}-core {kind} CPU"


def record(
    peer: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    device: str = "cpu",
    packages: Iterable[str] = (),
) -> Path:
    """Write the figures of the script that runs, with what they are ratios to and where
    they were taken.

    `packages` are those whose code was measured; the version of each that is installed
    is written down.
    """
    script = Path(sys.argv[0]).resolve()
    path = script.relative_to(ROOT).as_posix()
    facts = {
        "command": " ".join(["python", path, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "versions": _versions(packages),
        "peer": peer,
        "columns": list(columns),
        "rows": [[_rounded(cell) for cell in row] for row in rows],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{script.stem}.json"
    path.write_text(_text(facts), encoding="utf-8")
    return path


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _rounded(cell: Cell) -> Cell:
    if cell is None or isinstance(cell, str | int):
        return cell
    return round(cell, 3) if isinstance(cell, float) else [round(part, 2) for part in cell]


def _text(facts: dict[str, object]) -> str:
    """JSON with a line for every fact and every row."""
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in facts["rows"])  # type: ignore[attr-defined]
    head = [
        f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}"
        for k, v in facts.items()
        if k != "rows"
    ]
    return "{\n" + ",\n".join(head) + f',\n  "rows": [\n{rows}\n  ]\n}}\n'
