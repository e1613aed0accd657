"""Gain of k from 1 to 0 in each format: against k = 0 in the same format, text and
rounding.
"""

from _markdown import markdown
from _paired import losses_of
from _weights import data_of

from nanogpt_bench.report.paired import adjusted, difference, difference_text
from nanogpt_bench.report.results_file import Exported

PLAIN, ANNEALED = "stochastic", "stiffness-anneal"


def stiffness_table(file: Exported) -> str:
    """A line per format and text that has both, p-values adjusted over all lines; ""
    for fewer than two lines.
    """
    plain = {(row.format, data_of(row)): row for row in file.rows if row.rule == PLAIN and row.runs}
    pairs = [
        (row, plain[place])
        for row in file.rows
        if row.rule == ANNEALED and (place := (row.format, data_of(row))) in plain
    ]
    if len({row.format for row, _ in pairs}) < 2:
        return ""
    found = adjusted([difference(losses_of(row), losses_of(other)) for row, other in pairs])
    lines = [
        (f"`{row.format}`", difference_text(each))
        for (row, _), each in zip(pairs, found, strict=True)
    ]
    return markdown(("format", "k from 1 to 0, minus k = 0"), lines)
