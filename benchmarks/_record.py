"""Figures of a benchmark as a file, docs/measured/NAME.json.

The tables of the site's pages are made from these files.
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
from typing import Any, Final

import torch

__all__ = ["Cell", "add_option", "machine", "record"]

ROOT: Final = Path(__file__).resolve().parent.parent
MEASURED_FOLDER: Final = ROOT / "docs" / "measured"
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
    """Return the kind of machine: cores and architecture, or the GPU's name."""
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
    """Write the figures of the running script, and return the path of the file.

    Args:
        peer: what the ratios are to; "" without ratios.
        columns: the header of the table.
        rows: its other lines.
        device: "cpu" or "cuda", for the name of the machine.
        packages: those whose code was measured. The version of each that is installed
            is written down.
    """
    script = Path(sys.argv[0]).resolve()
    facts = {
        "command": " ".join(["python", script.relative_to(ROOT).as_posix(), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "versions": _versions(packages),
        "peer": peer,
        "columns": list(columns),
    }
    rounded_rows = [[_rounded(cell) for cell in row] for row in rows]
    MEASURED_FOLDER.mkdir(parents=True, exist_ok=True)
    path = MEASURED_FOLDER / f"{script.stem}.json"
    path.write_text(_json_by_lines(facts, rounded_rows), encoding="utf-8")
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
    if isinstance(cell, float):
        return round(cell, 3)
    return [round(part, 2) for part in cell]


def _json_by_lines(facts: dict[str, Any], rows: Sequence[Sequence[Cell]]) -> str:
    """Return JSON with a line for every fact and every row."""
    lines = []
    for name, value in facts.items():
        lines.append(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    row_lines = [f"    {json.dumps(row, ensure_ascii=False)}" for row in rows]
    lines.append('  "rows": [\n' + ",\n".join(row_lines) + "\n  ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"
