"""The gap by length of a file whose rules were trained for several: a table and a chart, as the report has them."""

from _tables import markdown

from nanogpt_bench.report import engine
from nanogpt_bench.report.exported import Exported
from nanogpt_bench.report.length import LADDERS, cells_of, climbed, ladder_chart, looks_of
from nanogpt_bench.report.palette import looks
from nanogpt_bench.report.pictures import figure
from nanogpt_bench.report.results import Result, find_reference, measure, references_of

LENGTH = next(ladder for ladder in LADDERS if ladder.name == "length")


def climbs(file: Exported) -> bool:
    """Whether the same rule was trained for several lengths."""
    return bool(climbed(LENGTH, _measured(file)))


def gap_by_length(file: Exported) -> str:
    """Each rule's paired difference to the baseline of the same length, a column a length."""
    head, *lines = cells_of(LENGTH, climbed(LENGTH, _measured(file)))
    return markdown(["rule", *head[1:]], [[f"`{label}`", *cells] for label, *cells in lines])


def drawn_by_length(file: Exported) -> str:
    """The same as an SVG."""
    results = _measured(file)
    rows = [result.row for result in results]
    against = references_of(rows, find_reference(rows, file.baseline)).values()
    every = looks(rows, *against)
    chart = ladder_chart(LENGTH, results, every)
    assert chart is not None
    return engine.svg(figure([chart], looks_of(LENGTH, results, every)))


def _measured(file: Exported) -> list[Result]:
    return measure(file.rows, find_reference(file.rows, file.baseline))
