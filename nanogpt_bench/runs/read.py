"""Reading the files of a run folder, also of an interrupted run.

A mapping, the records of a JSON lines file, their columns of numbers, and the digests
in SHA256SUMS. What is missing or damaged becomes a note, not an error.
"""

import math
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import one_line, printable
from nanogpt_bench.system.files import sha256, write_text
from nanogpt_bench.system.untrusted import RefusedFile, read_text

METRICS_FILE = "metrics.jsonl"
ALERTS_FILE = "alerts.jsonl"
#: the most bytes of a line of JSON; a record of ten thousand metrics has half a million
LONGEST_LINE = 8 * 2**20
#: the largest step: beyond it a float can't hold every whole number
MOST_STEPS = 2**53
#: the note about a file that an interruption cut off
CUT_OFF = "the last line is cut off"


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None.

    A bool is not a number here.

    >>> finite(2), finite(float("nan")), finite("2"), finite(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        # a whole number beyond the largest float
        return None


def cleaned(content: Any) -> Any:
    r"""Return plain data with control characters replaced by their escapes.

    They are replaced in texts and keys. Line breaks and tabs stay. Keys that YAML read
    as numbers or dates become texts.

    >>> cleaned({"a\x1b": ["\x00", 1, "b\nc"]})
    {'a\\x1b': ['\\x00', 1, 'b\nc']}
    """
    if isinstance(content, str):
        if content.isprintable():
            return content
        return _BETWEEN_BREAKS.sub(lambda part: printable(part[0]), content)
    if isinstance(content, dict):
        return {cleaned(str(key)): cleaned(value) for key, value in content.items()}
    if isinstance(content, list):
        return [cleaned(item) for item in content]
    return content


#: a part of a text without line breaks and tabs
_BETWEEN_BREAKS = re.compile(r"[^\n\t]+")


def mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; {} and a note if there is none."""
    try:
        if path.suffix == ".yaml":
            content = untrusted.read_yaml(path, links=False)
        else:
            content = untrusted.read_json(path, links=False)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {str(error).splitlines()[0]}")
        return {}
    if isinstance(content, dict):
        return dict(cleaned(content))
    notes.append(f"{path.name} holds a {type(content).__name__}, not a mapping")
    return {}


def records(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every whole line with a step in a JSON lines file.

    Other lines are noted.
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
                notes.append(f"{path.name}: {CUT_OFF}; the {whole} complete records were read")
            else:
                notes.append(
                    f"{path.name}: line {number} is not a record with a step, and was left out"
                )


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; one that is too long as `?`, which is no record."""
    line = file.readline(LONGEST_LINE)
    while line:
        is_too_long = _goes_on(line)
        while _goes_on(line):
            line = file.readline(LONGEST_LINE)
        yield b"?\n" if is_too_long else line
        line = file.readline(LONGEST_LINE)


def _goes_on(line: bytes) -> bool:
    return len(line) == LONGEST_LINE and not line.endswith(b"\n")


def _record(line: bytes) -> dict[str, Any] | None:
    text = line.decode("utf-8", errors="replace")
    try:
        record = untrusted.parse_json(text)
    except ValueError:
        return None
    # Control characters are rare, and `cleaned` is slow.
    if "\\" in text or not text.rstrip("\r\n").isprintable():
        record = cleaned(record)
    step = finite(record.get("step")) if isinstance(record, dict) else None
    return record if step is not None and 0 <= step <= MOST_STEPS else None


class _Column:
    """The values of one name: indices of the records that have it, and numbers."""

    def __init__(self) -> None:
        self.rows: array[int] = array("I")
        self.values: array[float] = array("d")


class Records:
    """The numbers in a run's records, by name and record.

    Texts and nested values are left out.

    >>> records = Records([{"step": 0, "loss": 2.0}, {"step": 2, "loss": None}])
    >>> records.names, records.curve("loss")
    (('step', 'loss'), ([0.0, 2.0], [2.0, None]))
    """

    def __init__(self, records: list[dict[str, Any]] | None = None) -> None:
        self._columns: dict[str, _Column] = {}
        self._rows = 0
        for record in records or []:
            self.add(record)

    def __len__(self) -> int:
        return self._rows

    def add(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one record."""
        for name, value in record.items():
            if value is not None and not isinstance(value, int | float):
                continue
            if name not in self._columns:
                self._columns[sys.intern(name)] = _Column()
            column = self._columns[name]
            number = float(value) if isinstance(value, bool) else finite(value)
            column.rows.append(self._rows)
            column.values.append(math.nan if number is None else number)
        self._rows += 1

    @property
    def names(self) -> tuple[str, ...]:
        """All recorded names, in the order of their first appearance."""
        return tuple(self._columns)

    @property
    def last_step(self) -> int | None:
        steps = self._columns.get("step")
        return None if steps is None else int(steps.values[-1])

    def rows(self, name: str) -> Iterator[tuple[int, float | None]]:
        """Yield the index of every record with this name, and its value.

        The value is None where it is not finite.
        """
        column = self._columns.get(name)
        if column is None:
            return
        for row, value in zip(column.rows, column.values, strict=True):
            yield row, value if math.isfinite(value) else None

    def values(self, name: str) -> list[float]:
        """Return the finite values of a name."""
        return [value for _, value in self.rows(name) if value is not None]

    def curve(self, name: str, against: str = "step") -> tuple[list[float], list[float | None]]:
        """Return x and y: `name` over `against`, where `against` is finite.

        y is None where `name` is not finite.
        """
        places = {row: place for row, place in self.rows(against) if place is not None}
        x: list[float] = []
        y: list[float | None] = []
        for row, value in self.rows(name):
            if row in places:
                x.append(places[row])
                y.append(value)
        return x, y


SUMS = "SHA256SUMS"
AT_START = ("config.yaml", "environment.json")
AT_END = (*AT_START, METRICS_FILE, ALERTS_FILE, "summary.json")
#: a line of SHA256SUMS
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)")


def write_sums(run_dir: Path, names: Sequence[str] = AT_END) -> None:
    """Write the digests of those of a run's files that exist."""
    files = [name for name in names if (run_dir / name).is_file()]
    write_text(run_dir / SUMS, "".join(f"{sha256(run_dir / name)}  {name}\n" for name in files))


def not_as_written(run_dir: Path, *, ended: bool) -> Iterator[tuple[str, str]]:
    """Yield name and error of every file that is not as it was written.

    Nothing if the run has no digests. For a run that has not `ended` only the files
    from its start are compared, since the others grow.
    """
    try:
        digests = _read_sums(run_dir / SUMS)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield SUMS, f"can't be read: {one_line(error)}"
        return
    if ended:
        missing = [name for name in AT_END if name not in digests and (run_dir / name).is_file()]
        if missing:
            yield SUMS, f"has no sha256 of {', '.join(missing)}: it was cut off or changed"
    for name, digest in digests.items():
        if not ended and name not in AT_START:
            continue
        path = run_dir / name
        if not path.exists():
            yield name, "is missing"
        elif not path.is_file() or path.is_symlink():
            yield name, f"is not an ordinary file, but {SUMS} lists it"
        elif sha256(path) != digest:
            yield name, f"has another sha256 than {SUMS} gives: it was cut off or changed"


def _read_sums(path: Path) -> dict[str, str]:
    text = read_text(path, 1 << 16, links=False)
    lines = text.splitlines()
    digests: dict[str, str] = {}
    for line in lines:
        match = _SUM_LINE.fullmatch(line)
        if match is not None:
            digests[match[2]] = match[1]
    # The file is written at the start, and again at the end.
    is_complete = tuple(digests) == AT_START or AT_END[-1] in digests
    if not text.endswith("\n") or len(digests) < len(lines) or not is_complete:
        raise RefusedFile("it was cut off or changed")
    return digests
