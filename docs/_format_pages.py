"""The table on the page of formats: the facts of each named format."""

from collections.abc import Sequence
from pathlib import Path

from _markdown import markdown
from _tables import TABLED_FORMATS, number

import fp8manifold as fm


def facts(formats: Sequence[fm.FloatFormat]) -> str:
    """Facts that `FloatFormat` derives of formats, a line per format."""
    header = (
        "format",
        "binades",
        "values in [1, 2)",
        "one ULP, smallest and largest",
        "code of the largest",
    )
    rows = []
    for fmt in formats:
        steps = sum(1 <= value < 2 for value in fmt.values) or "none"
        ulps = f"{number(fmt.ulp_min)}, {number(fmt.ulp_max)}"
        inf = "none" if fmt.inf_code is None else f"`0x{fmt.inf_code:02X}`"
        cells = (
            fmt.name,
            str(fmt.emax - fmt.emin + 1),
            str(steps),
            ulps,
            f"`0x{fmt.max_code:02X}`",
            inf,
        )
        rows.append((*cells, spans(fmt.nan_codes), "yes" if fmt.has_negative_zero else "no"))
    return markdown((*header, "infinity", "NaN", "negative zero"), rows)


def spans(codes: Sequence[int]) -> str:
    """Codes as text, consecutive ones as `first to last`.

    >>> spans([0x7D, 0x7E, 0x7F, 0xFF]), spans([])
    ('`0x7D` to `0x7F`, `0xFF`', 'none')
    """
    first = [code for code in codes if code - 1 not in codes]
    last = [code for code in codes if code + 1 not in codes]
    ends = zip(first, last, strict=True)
    return (
        ", ".join(f"`0x{a:02X}`" if a == b else f"`0x{a:02X}` to `0x{b:02X}`" for a, b in ends)
        or "none"
    )


def write_formats(folder: Path) -> None:
    """Write the table of facts."""
    formats = [fm.FloatFormat.from_string(name) for name in TABLED_FORMATS]
    (folder / "format-facts.md").write_text(facts(formats), encoding="utf-8")
