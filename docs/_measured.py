"""The tables of the page on performance, from the files that the benchmarks write with
`--record`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "measured"


def shown(cell: Any, decimals: int = 2) -> str:
    """A cell as text: a list is a ratio, its median alone or with the smallest and
    largest, on one line.

    >>> shown([1.5, 1.25, 2.0]).split(), shown([0.7]), shown(9.0), shown(None), shown("E4M3")
    (['1.50x', '(1.25', '..', '2.00)'], '0.70x', '9.00', '', 'E4M3')
    """
    if isinstance(cell, list):
        median, *ends = (f"{part:.2f}" for part in cell)
        return (
            f"{median}x ({' .. '.join(ends)})".replace(" ", "\N{NO-BREAK SPACE}")
            if ends
            else f"{median}x"
        )
    return "" if cell is None else f"{cell:.{decimals}f}" if isinstance(cell, float) else str(cell)


def places(column: Iterable[Any]) -> int:
    """The number of decimals that a column needs.

    >>> places([9.01, 12.0, None, "E4M3"]), places([0.0, 3.5])
    (2, 1)
    """
    return max(
        (len(str(cell).partition(".")[2]) for cell in column if isinstance(cell, float)), default=0
    )


def table(facts: dict[str, Any]) -> str:
    """One file as Markdown: its rows, and below them what was measured, where and when,
    and the reference.
    """
    ruled = ["---" if isinstance(cell, str) else "---:" for cell in facts["rows"][0]]
    decimals = [places(column) for column in zip(*facts["rows"], strict=True)]
    rows = (
        [shown(cell, n) for cell, n in zip(row, decimals, strict=True)] for row in facts["rows"]
    )
    lines = [facts["columns"], ruled, *rows]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    source = f"`{facts['command']}`, {facts['date']}, {facts['machine']}, {versions}."
    if facts["peer"]:
        source += (
            f" Ratios are to {facts['peer']}, measured in turn in the same run: the median and, in "
            f"brackets, the "
            "smallest and the largest."
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source}\n"


def write_measured(folder: Path) -> None:
    """Write the table of every file into the folder."""
    for path in sorted(FOLDER.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        (folder / f"measured-{path.stem}.md").write_text(table(facts), encoding="utf-8")
