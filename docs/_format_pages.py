"""The page of formats: the facts of each named one and its number line."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from _figures import STYLE
from _markdown import markdown
from _tables import TABLED_FORMATS, number
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import fp8manifold as fm

LINE, SUBNORMAL = "#0072B2", "#D55E00"


def number_line(fmt: fm.FloatFormat) -> Figure:
    """A tick for every positive value: on a straight axis from zero, and on one of powers of two."""
    figure, (near, whole) = plt.subplots(2, 1, figsize=(8, 2.3), layout="constrained")
    values = [value for value in fmt.values if value > 0]
    near_end = max(fmt.max / 16, 8 * fmt.min_normal) if fmt.exponent_bits > 1 else fmt.max
    shown = [value for value in values if value <= min(near_end, fmt.max)]
    for axes, ticks in ((near, [0.0, *shown]), (whole, values)):
        small = [value for value in ticks if value < fmt.min_normal]
        axes.vlines([value for value in ticks if value >= fmt.min_normal], 0, 1, color=LINE, linewidth=0.8)
        axes.vlines(small, 0, 1, color=SUBNORMAL, linewidth=0.8)
        axes.set(yticks=[], ylim=(0, 1))
        axes.spines["left"].set_visible(False)
    near.set(xlim=(0, shown[-1] * 1.01), xlabel="value, from zero")
    whole.set_xscale("log", base=2)
    whole.set(xlabel="value, a binade to every step of the axis")
    return figure


def facts(formats: Sequence[fm.FloatFormat]) -> str:
    """Facts that `FloatFormat` derives of formats, a line per format."""
    header = ("format", "binades", "values in [1, 2)", "one ULP, smallest and largest", "code of the largest")
    rows = []
    for fmt in formats:
        steps = sum(1 <= value < 2 for value in fmt.values) or "none"
        ulps = f"{number(fmt.ulp_min)}, {number(fmt.ulp_max)}"
        inf = "none" if fmt.inf_code is None else f"`0x{fmt.inf_code:02X}`"
        cells = (fmt.name, str(fmt.emax - fmt.emin + 1), str(steps), ulps, f"`0x{fmt.max_code:02X}`", inf)
        rows.append((*cells, spans(fmt.nan_codes), "yes" if fmt.has_negative_zero else "no"))
    return markdown((*header, "infinity", "NaN", "negative zero"), rows)


def spans(codes: Sequence[int]) -> str:
    """Codes, those that follow one another by the first and the last.

    >>> spans([0x7D, 0x7E, 0x7F, 0xFF]), spans([])
    ('`0x7D` to `0x7F`, `0xFF`', 'none')
    """
    first = [code for code in codes if code - 1 not in codes]
    last = [code for code in codes if code + 1 not in codes]
    ends = zip(first, last, strict=True)
    return ", ".join(f"`0x{a:02X}`" if a == b else f"`0x{a:02X}` to `0x{b:02X}`" for a, b in ends) or "none"


def section(fmt: fm.FloatFormat) -> str:
    """The heading and figure of one format."""
    drawn = f"Ticks at the positive values of {fmt.name}, above from zero, below on a logarithmic axis."
    return f"### {fmt.name}\n\n![{drawn}](figures/format-{fmt.name}.svg)\n"


def write_formats(folder: Path) -> None:
    """Write the table of facts and the sections."""
    formats = [fm.FloatFormat.from_string(name) for name in TABLED_FORMATS]
    (folder / "format-facts.md").write_text(facts(formats), encoding="utf-8")
    (folder / "format-sections.md").write_text("\n".join(map(section, formats)), encoding="utf-8")


def draw_formats(folder: Path) -> None:
    """Draw the number line of every format into the folder."""
    matplotlib.use("Agg")
    with plt.rc_context(STYLE):
        for name in TABLED_FORMATS:
            figure = number_line(fm.FloatFormat.from_string(name))
            figure.savefig(folder / f"format-{name}.svg", facecolor="white", metadata={"Date": None})
            plt.close(figure)
