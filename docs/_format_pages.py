"""The page of formats: for each one with a name its facts, its number line and where its codes are."""

from collections.abc import Iterator
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


def facts(fmt: fm.FloatFormat) -> str:
    """Facts that `FloatFormat` derives of a format, as a table."""
    steps = sum(1 <= value < 2 for value in fmt.values) or "none"
    inf = "none" if fmt.inf_code is None else f"`0x{fmt.inf_code:02X}`"
    rows: Iterator[tuple[str, str]] = iter(
        (
            ("sign, exponent, mantissa bits", f"1, {fmt.exponent_bits}, {fmt.mantissa_bits}"),
            ("bias, layout", f"{fmt.bias}, `{fmt.layout}`"),
            ("largest value", f"{number(fmt.max)}, code `0x{fmt.max_code:02X}`"),
            ("smallest normal", number(fmt.min_normal)),
            ("smallest subnormal", "none" if fmt.min_subnormal is None else number(fmt.min_subnormal)),
            ("binades of normal values", str(fmt.emax - fmt.emin + 1)),
            ("values from 1 to below 2", str(steps)),
            ("one ULP, smallest and largest", f"{number(fmt.ulp_min)}, {number(fmt.ulp_max)}"),
            ("infinity", inf),
            ("NaN", ", ".join(f"`0x{code:02X}`" for code in fmt.nan_codes) or "none"),
            ("negative zero", "yes" if fmt.has_negative_zero else "no"),
            ("finite codes", str(fmt.finite_codes)),
        )
    )
    return markdown((fmt.name, ""), rows)


def section(fmt: fm.FloatFormat) -> str:
    """The heading, figure and table of one format."""
    drawn = f"Ticks at the positive values of {fmt.name}, above from zero, below on a logarithmic axis."
    return f"### {fmt.name}\n\n![{drawn}](figures/format-{fmt.name}.svg)\n\n{facts(fmt)}\n"


def write_formats(folder: Path) -> None:
    """Write all sections into one file that the page includes."""
    text = "\n".join(section(fm.FloatFormat.from_string(name)) for name in TABLED_FORMATS)
    (folder / "format-sections.md").write_text(text, encoding="utf-8")


def draw_formats(folder: Path) -> None:
    """Draw the number line of every format into the folder."""
    matplotlib.use("Agg")
    with plt.rc_context(STYLE):
        for name in TABLED_FORMATS:
            figure = number_line(fm.FloatFormat.from_string(name))
            figure.savefig(folder / f"format-{name}.svg", facecolor="white", metadata={"Date": None})
            plt.close(figure)
