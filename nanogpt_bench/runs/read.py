"""Read the files of a run folder, whatever state an interrupted run left them in; what is wrong is noted in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import one_line, printable

#: bytes of a line of JSON; a record of ten thousand figures has half a million
LONGEST_LINE = 8 * 2**20
#: above this a step is no whole number any more where numbers are floats
MOST_STEPS = 2**53


def finite(value: Any) -> float | None:
    """`value` as a float when it is a finite number, else None (bool is not a number here).

    >>> finite(2), finite(float("nan")), finite("2"), finite(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond the largest float
        return None


def cleaned(content: Any) -> Any:
    """Plain data whose texts, those of keys among them, hold nothing that a terminal, a page or a font obeys.

    Line breaks and tabs stay; keys that YAML has made numbers or dates become texts.

    >>> cleaned({"a\\x1b": ["\\x00", 1, "b\\nc"]})
    {'a\\\\x1b': ['\\\\x00', 1, 'b\\nc']}
    """
    if isinstance(content, str):
        return content if content.isprintable() else _BREAKS.sub(lambda part: printable(part[0]), content)
    if isinstance(content, dict):
        return {cleaned(str(key)): cleaned(value) for key, value in content.items()}
    return [cleaned(item) for item in content] if isinstance(content, list) else content


_BREAKS = re.compile(r"[^\n\t]+")


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
        content = (untrusted.read_yaml if path.suffix == ".yaml" else untrusted.read_json)(path, links=False)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {str(error).splitlines()[0]}")
        return {}
    if isinstance(content, dict):
        return dict(cleaned(content))
    notes.append(f"{path.name} holds a {type(content).__name__} where a mapping was expected")
    return {}


def records(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every whole line of a JSON lines file that has a step; the others are noted.

    Only the last line can be cut off by an interruption; a damaged line before it is something else.
    """
    try:
        file = untrusted.open_file(path, links=False)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {one_line(error)}")
        return
    whole = 0
    with file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            record = _record(line)
            if record is not None:
                whole += 1
                yield number, record
            elif not line.endswith(b"\n"):
                notes.append(f"{path.name}: the last line is cut off; the {whole} whole records were read")
            else:
                notes.append(f"{path.name}: line {number} is not a record with a step and was left out")


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; of one longer than any that is read, an empty one."""
    while line := file.readline(LONGEST_LINE):
        too_long = len(line) == LONGEST_LINE and not line.endswith(b"\n")
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)
        yield b"?\n" if too_long else line


def _record(line: bytes) -> dict[str, Any] | None:
    text = line.decode("utf-8", errors="replace")
    try:
        record = untrusted.parse_json(text)
    except ValueError:
        return None
    if "\\" in text or not text.rstrip("\r\n").isprintable():  # hardly any line is
        record = cleaned(record)
    step = finite(record.get("step")) if isinstance(record, dict) else None
    return record if step is not None and 0 <= step <= MOST_STEPS else None
