"""The gain of k from 1 to 0 over k = 0, in the same format, text and rounding."""

from _markdown import markdown
from _paired import losses_of
from _weights import data_of

from nanogpt_bench.report.paired import adjusted, difference, difference_text
from nanogpt_bench.report.results_file import Exported

PLAIN = "stochastic"
ANNEALED = "stiffness-anneal"


def stiffness_table(file: Exported) -> str:
    """Return a line per format and text that has both rules.

    The p-values are adjusted over all lines. Returns "" for fewer than two formats.
    """
    plain_rows = {}
    for row in file.rows:
        if row.rule == PLAIN and row.runs:
            plain_rows[row.format, data_of(row)] = row
    formats = []
    differences = []
    for row in file.rows:
        plain = plain_rows.get((row.format, data_of(row)))
        if row.rule == ANNEALED and plain is not None:
            formats.append(row.format)
            differences.append(difference(losses_of(row), losses_of(plain)))
    if len(set(formats)) < 2:
        return ""
    lines = []
    for fmt, paired in zip(formats, adjusted(differences), strict=True):
        lines.append((f"`{fmt}`", difference_text(paired)))
    return markdown(("format", "k from 1 to 0, minus k = 0"), lines)
