"""The tables of the page on performance, from the files of the benchmarks' `--record`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORDS_FOLDER = Path(__file__).parent / "measured"


def shown(cell: Any, decimals: int = 2) -> str:
    """Return a cell as text on one line.

    A list is a ratio: its median alone, or followed by the smallest and the largest.

    >>> shown([1.5, 1.25, 2.0]).split(), shown([0.7])
    (['1.50x', '(1.25', '..', '2.00)'], '0.70x')
    >>> shown(9.0), shown(None), shown("E4M3")
    ('9.00', '', 'E4M3')
    """
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.{decimals}f}"
    if not isinstance(cell, list):
        return str(cell)
    median, *ends = (f"{part:.2f}" for part in cell)
    if not ends:
        return f"{median}x"
    return f"{median}x ({' .. '.join(ends)})".replace(" ", "\N{NO-BREAK SPACE}")


def places(column: Iterable[Any]) -> int:
    """Return the number of decimals that a column needs.

    >>> places([9.01, 12.0, None, "E4M3"]), places([0.0, 3.5])
    (2, 1)
    """
    numbers = [cell for cell in column if isinstance(cell, float)]
    return max((len(str(number).partition(".")[2]) for number in numbers), default=0)


def recorded_table(facts: dict[str, Any]) -> str:
    """Return one file as Markdown.

    Below the rows stand the command, the date, the machine, the versions, and what the
    ratios are to.
    """
    decimals = [places(column) for column in zip(*facts["rows"], strict=True)]
    rule = ["---" if isinstance(cell, str) else "---:" for cell in facts["rows"][0]]
    lines = [facts["columns"], rule]
    for row in facts["rows"]:
        lines.append([shown(cell, count) for cell, count in zip(row, decimals, strict=True)])
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    source = f"`{facts['command']}`, {facts['date']}, {facts['machine']}, {versions}."
    if facts["peer"]:
        source += (
            f" Ratios are to {facts['peer']}, measured in turn in the same run: the median and,"
            " in brackets, the smallest and the largest."
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source}\n"


def write_measured(folder: Path) -> None:
    """Write the table of every file into the folder."""
    for path in sorted(RECORDS_FOLDER.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        (folder / f"measured-{path.stem}.md").write_text(recorded_table(facts), encoding="utf-8")
