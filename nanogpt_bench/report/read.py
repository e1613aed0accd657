"""Read the files of a run folder, whatever state an interrupted run left them in; what is wrong is noted in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def finite(value: Any) -> float | None:
    """`value` as a float when it is a finite number, else None (bool is not a number here).

    >>> finite(2), finite(float("nan")), finite("2"), finite(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(values: Any) -> tuple[float, ...] | None:
    """A list of finite numbers as a tuple; None when it is anything else.

    >>> numbers([1, 2.5]), numbers([1, None]), numbers("12")
    ((1.0, 2.5), None, None)
    """
    if not isinstance(values, list):
        return None
    found = [finite(value) for value in values]
    known = tuple(value for value in found if value is not None)
    return known if len(known) == len(found) else None


def mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; {} with a note when there is none to be read."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} could not be read: {str(error).splitlines()[0]}")
        return {}
    if isinstance(content, dict):
        return content
    notes.append(f"{path.name} holds a {type(content).__name__} where a mapping was expected")
    return {}


def records(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every whole line of a JSON lines file that has a step; the others are noted.

    Only the last line can be cut off by an interruption; a damaged line before it is something else.
    """
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError:
        notes.append(f"{path.name} is missing")
        return
    whole = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(line)
        if record is not None:
            whole += 1
            yield number, record
        elif number == len(lines):
            notes.append(f"{path.name}: the last line is cut off; the {whole} whole records were read")
        else:
            notes.append(f"{path.name}: line {number} is not a record with a step and was left out")


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and finite(record.get("step")) is not None
    return record if whole else None
