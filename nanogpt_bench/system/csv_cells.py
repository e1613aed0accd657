"""What is written into the cells of a CSV file that a spreadsheet may open."""

from __future__ import annotations

#: with which a spreadsheet takes a text for a formula, to be computed when the file is opened
BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: object) -> object:
    """The value as it goes into a cell: nothing for None, a text that could be a formula behind an apostrophe.

    Numbers stay as they are, negative ones and those given as text too.

    >>> cell("=1+1"), cell("-x"), cell(-0.178), cell("-0.178"), cell("E4M3 nearest"), cell(None)
    ("'=1+1", "'-x", -0.178, '-0.178', 'E4M3 nearest', '')
    """
    if isinstance(value, str) and value.startswith(BEGINS_A_FORMULA) and not _is_number(value):
        return "'" + value
    return "" if value is None else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip() == text
