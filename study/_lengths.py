"""The gap by length or by model size, of a file that has several of either.

The table and the chart are those of the report.
"""

from _ladders import LADDERS, Ladder, cells_of, ladder_chart, ladder_results, line_styles
from _markdown import markdown

from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.row_styles import styles
from nanogpt_bench.report.rows import find_reference, references_by_label
from nanogpt_bench.report.svg_figures import side_by_side, svg


def ladder_of(file: Exported) -> Ladder | None:
    """Return the number of which a rule has several values; None if no rule has."""
    results = _results_of(file)
    return next((ladder for ladder in LADDERS if ladder_results(ladder, results)), None)


def gap_table(ladder: Ladder, file: Exported) -> str:
    """Return each rule's paired difference to the baseline of the same number.

    There is a column for each value of the number.
    """
    header, *lines = cells_of(ladder, ladder_results(ladder, _results_of(file)))
    return markdown(["rule", *header[1:]], [[f"`{label}`", *cells] for label, *cells in lines])


def gap_figure(ladder: Ladder, file: Exported) -> str:
    """Return the chart of those differences, as SVG."""
    results = _results_of(file)
    rows = [result.row for result in results]
    references = references_by_label(rows, find_reference(rows, file.baseline)).values()
    styles_of_rows = styles(rows, *references)
    chart = ladder_chart(ladder, results, styles_of_rows)
    assert chart is not None
    return svg(side_by_side([chart], line_styles(ladder, results, styles_of_rows)))


def _results_of(file: Exported) -> list[Result]:
    return measure(file.rows, find_reference(file.rows, file.baseline))
