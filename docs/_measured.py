"""The tables of the page on performance, from the files that the benchmarks have written (`--record`)."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "measured"


def shown(cell: Any) -> str:
    """A cell as text: a list is a ratio, its median alone or with the smallest and largest.

    >>> shown([1.5, 1.25, 2.0]), shown([0.7]), shown(9.01), shown(None), shown("E4M3")
    ('1.50x (1.25 .. 2.00)', '0.70x', '9.01', '', 'E4M3')
    """
    if isinstance(cell, list):
        median, *ends = (f"{part:.2f}" for part in cell)
        return f"{median}x ({' .. '.join(ends)})" if ends else f"{median}x"
    return "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)


def table(facts: dict[str, Any]) -> str:
    """One file as Markdown: its rows, and below them what was measured, where, when and against what."""
    ruled = ["---" if isinstance(cell, str) else "---:" for cell in facts["rows"][0]]
    lines = [facts["columns"], ruled, *([shown(cell) for cell in row] for row in facts["rows"])]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    source = (
        f"`{facts['command']}`, {facts['date']}, {facts['machine']}, {versions}. Ratios are to {facts['peer']}, "
        "measured in turn in the same run: the median and, in brackets, the smallest and the largest."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source}\n"


def write_measured(folder: Path) -> None:
    """Write the table of every file into the folder."""
    for path in sorted(FOLDER.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        (folder / f"measured-{path.stem}.md").write_text(table(facts), encoding="utf-8")
