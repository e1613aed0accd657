"""The gap by length or by model size, of a file that has several of either: a table and
a chart, as in the report.
"""

from _ladders import LADDERS, Ladder, cells_of, climbed, ladder_chart, line_styles
from _markdown import markdown

from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.row_styles import styles
from nanogpt_bench.report.rows import find_reference, references_of
from nanogpt_bench.report.svg_figures import side_by_side, svg


def ladder_of(file: Exported) -> Ladder | None:
    """The number of which a rule has several values, training length or model size;
    None if no rule has.
    """
    return next((ladder for ladder in LADDERS if climbed(ladder, _measured(file))), None)


def gap_by(ladder: Ladder, file: Exported) -> str:
    """Each rule's paired difference to the baseline of the same length or size, a
    column each.
    """
    head, *lines = cells_of(ladder, climbed(ladder, _measured(file)))
    return markdown(["rule", *head[1:]], [[f"`{label}`", *cells] for label, *cells in lines])


def drawn_by(ladder: Ladder, file: Exported) -> str:
    """The chart of those differences, as SVG."""
    results = _measured(file)
    rows = [result.row for result in results]
    against = references_of(rows, find_reference(rows, file.baseline)).values()
    every = styles(rows, *against)
    chart = ladder_chart(ladder, results, every)
    assert chart is not None
    return svg(side_by_side([chart], line_styles(ladder, results, every)))


def _measured(file: Exported) -> list[Result]:
    return measure(file.rows, find_reference(file.rows, file.baseline))
