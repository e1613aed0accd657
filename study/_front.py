"""Tables of optimizers on one-byte weights, each against the same optimizer in float32.

They come from the study's results files. ``python study/make.py --front`` prints
README's table and that of the page on optimizers. Without it those of the page on
results are made.
"""

from collections.abc import Sequence
from pathlib import Path

from _claims import ComparedRow, claims_table
from _compared import result_label
from _markdown import markdown
from _paired import in_figures
from _study import against_baseline

from nanogpt_bench.report.results import Result

README_ROWS = (
    ComparedRow("study_q16_adamw", "fp32", "AdamW, float32", "fp32"),
    ComparedRow("study_q16_adamw", "bf16-pure", "AdamW, bfloat16", "fp32"),
    ComparedRow("study_q16_adamw", "bf16-stochastic", "AdamW, bfloat16, stochastic", "fp32"),
    ComparedRow("study_q16_adamw", "E4M3 stochastic-8bit", "AdamW, E4M3", "fp32"),
    ComparedRow("study_q16_adamw", "E4M3 nearest", "AdamW, E4M3, nearest", "fp32"),
    ComparedRow("study_q16_adamw", "muon", "Muon, float32", "muon"),
    ComparedRow("study_q16_adamw", "E2M5 muon-stochastic", "Muon, E2M5", "muon"),
    ComparedRow("study_q16_adamw", "E4M3 muon-stochastic", "Muon, E4M3", "muon"),
)
#: all other rules, at rates of the first search
OTHER_ROWS = (
    ComparedRow("study_q1", "bf16-mixed", "AdamW, bfloat16 autocast", "fp32"),
    ComparedRow("study_q1", "E4M3 master", "AdamW, E4M3, float32 copy", "fp32"),
    ComparedRow("study_q1", "E4M3 stochastic-8bit", 'AdamW, E4M3, `moments="8bit"`', "fp32"),
    ComparedRow("study_q1", "E4M3 stochastic", "AdamW, E4M3, float32 moments", "fp32"),
    ComparedRow("study_q1", "E4M3 residual8", "AdamW, E4M3, `residual8`", "fp32"),
    ComparedRow(
        "study_q1", "E4M3 stiffness-anneal", "AdamW, E4M3, `stiffness` from 1 to 0", "fp32"
    ),
    ComparedRow("study_q1", "E4M3 riemannian", "`RiemannianAdam`, E4M3, against AdamW", "fp32"),
    ComparedRow("study_q1", "E4M3 nearest", "AdamW, E4M3, `nearest`", "fp32"),
    ComparedRow(
        "study_q11_e4m3 study_q11_e4m3_law",
        "E4M3 muon-stochastic draws=independent",
        'Muon, E4M3, `moments="8bit"`',
        "muon",
    ),
    ComparedRow("study_q1", "E4M3 muon-residual8", "Muon, E4M3, `residual8`", "muon"),
    ComparedRow(
        "study_q11_e2m5 study_q11_law",
        "E2M5 muon-stochastic draws=independent",
        'Muon, E2M5, `moments="8bit"`',
        "muon",
    ),
)
#: those on the page on optimizers, which leaves out rules without an optimizer of ours
OPTIMIZERS_PAGE_ROWS = OTHER_ROWS[2:]


def front_table(rows: Sequence[ComparedRow] = README_ROWS) -> str:
    """Return bytes per parameter and differences of final losses, a line per row.

    There is a column for each of two texts, with half of the 95% intervals.
    """
    header = (
        "training",
        "bytes per parameter",
        "loss minus the same optimizer's in float32, STDLIB",
        "the same, EULAW",
    )
    lines = []
    for row in rows:
        results = _results_by_text(row, row.baseline)
        lines.append([row.title, _bytes_cell(results), *map(_difference_cell, results)])
    return markdown(header, lines)


def results_page_table(rows: Sequence[ComparedRow] = README_ROWS) -> str:
    """Return differences to the same optimizer in float32, and to float32 AdamW."""
    header = (
        "training",
        "bytes",
        "minus itself in float32, STDLIB",
        "EULAW",
        "minus float32 AdamW, STDLIB",
        "EULAW",
    )
    lines = []
    for row in rows:
        against_itself = _results_by_text(row, row.baseline)
        against_adamw = _results_by_text(row, "fp32")
        differences = map(_difference_cell, [*against_itself, *against_adamw])
        lines.append([row.title, _bytes_cell(against_itself), *differences])
    return markdown(header, lines)


def _results_by_text(row: ComparedRow, baseline: str) -> list[Result]:
    """Return the results of a row, one for each text."""
    row_results = []
    for _, results in against_baseline(row.files, baseline):
        row_results.append(next(result for result in results if result_label(result) == row.rule))
    return row_results


def _bytes_cell(results: Sequence[Result]) -> str:
    return f"{results[0].bytes_per_parameter:.2f}"


def _difference_cell(result: Result) -> str:
    if result.reference or result.difference is None:
        return "0"
    return in_figures(result.difference).replace(" ", "\N{NO-BREAK SPACE}")


def write_front(folder: Path) -> None:
    """Write the tables of the page on results, and that of Q16."""
    tables = {
        "study-found": results_page_table(),
        "study-others": results_page_table(OTHER_ROWS),
        "study-claims": claims_table(README_ROWS),
    }
    for name, table in tables.items():
        (folder / f"{name}.md").write_text(table, encoding="utf-8")
