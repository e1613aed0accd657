"""The forms in which a benchmark prints what it measured: columns, Markdown or JSON."""

import argparse
from collections.abc import Sequence

__all__ = ["add_form_options", "check_at_least", "print_titled", "text_table"]


def add_form_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--markdown`` and ``--json``, of which one can be given."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--json", action="store_true", help="print every figure as JSON")


def check_at_least(
    parser: argparse.ArgumentParser, options: argparse.Namespace, least: int, *names: str
) -> None:
    """End with an error for the first of some options that is below its least value."""
    for name in names:
        value = getattr(options, name)
        if value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: at least {least}")


def print_titled(*parts: str, markdown: bool) -> None:
    """Print a title, a table and remarks; in Markdown with empty lines between them."""
    print(*parts, sep="\n\n" if markdown else "\n")


def text_table(rows: Sequence[Sequence[str]], rule: Sequence[str], markdown: bool) -> str:
    """Return rows, the header first, as Markdown or in columns.

    ``rule`` is the line below a header in Markdown: ``---:`` for a column of numbers.
    """
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)
