"""What sweeps have left in the current folder."""

from __future__ import annotations

import json
from pathlib import Path


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def runs_of(folder: Path) -> dict[str, dict]:
    return {entry["name"]: entry for entry in read_json(folder / "sweep.json")["runs"]}


def trained() -> list[str]:
    """The runs that stub workers were given since the last call, in order."""
    path = Path("done.txt")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names
