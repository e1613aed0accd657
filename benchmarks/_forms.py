"""The forms in which a benchmark prints what it measured: columns, Markdown or JSON."""

import argparse
from collections.abc import Sequence

__all__ = ["add_form_options", "text_table"]


def add_form_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--markdown`` and ``--json``, of which one can be given."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--json", action="store_true", help="print every figure as JSON")


def text_table(rows: Sequence[Sequence[str]], rule: Sequence[str], markdown: bool) -> str:
    """Rows, the header first, as Markdown under ``rule`` (``---:`` for a column of
    numbers) or in columns.
    """
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    )
