"""The table on the page of formats: the facts of each named format."""

from collections.abc import Sequence
from pathlib import Path

from _markdown import markdown
from _tables import TABLED_FORMATS, number

import fp8manifold as fm

HEADER = (
    "format",
    "binades",
    "values in [1, 2)",
    "one ULP, smallest and largest",
    "code of the largest",
    "infinity",
    "NaN",
    "negative zero",
)


def facts(formats: Sequence[fm.FloatFormat]) -> str:
    """Return a table of the facts that `FloatFormat` derives, a line per format."""
    return markdown(HEADER, [_facts_row(fmt) for fmt in formats])


def _facts_row(fmt: fm.FloatFormat) -> list[str]:
    values_from_1_to_2 = sum(1 <= value < 2 for value in fmt.values)
    return [
        fmt.name,
        str(fmt.emax - fmt.emin + 1),
        str(values_from_1_to_2 or "none"),
        f"{number(fmt.ulp_min)}, {number(fmt.ulp_max)}",
        _code_text(fmt.max_code),
        "none" if fmt.inf_code is None else _code_text(fmt.inf_code),
        spans(fmt.nan_codes),
        "yes" if fmt.has_negative_zero else "no",
    ]


def spans(codes: Sequence[int]) -> str:
    """Return codes as text, consecutive ones as `first to last`.

    >>> spans([0x7D, 0x7E, 0x7F, 0xFF]), spans([])
    ('`0x7D` to `0x7F`, `0xFF`', 'none')
    """
    firsts = [code for code in codes if code - 1 not in codes]
    lasts = [code for code in codes if code + 1 not in codes]
    texts = []
    for first, last in zip(firsts, lasts, strict=True):
        end = "" if first == last else f" to {_code_text(last)}"
        texts.append(_code_text(first) + end)
    return ", ".join(texts) or "none"


def _code_text(code: int) -> str:
    return f"`0x{code:02X}`"


def write_formats(folder: Path) -> None:
    """Write the table of facts."""
    formats = [fm.FloatFormat.from_string(name) for name in TABLED_FORMATS]
    (folder / "format-facts.md").write_text(facts(formats), encoding="utf-8")
