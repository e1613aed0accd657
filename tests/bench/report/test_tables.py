"""Every form of the table carries the same numbers.

It has the columns that tell rows apart, and fits a terminal.
"""

from itertools import chain
from pathlib import Path

import pytest
from run_folders import csv_lines, measured, write_comparison, write_run

from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.monitors.stall import CODE_UNCHANGED, UPDATE_LOST
from nanogpt_bench.report import report
from nanogpt_bench.report.columns import COLUMNS, GAP
from nanogpt_bench.report.results import Figure, Result
from nanogpt_bench.report.rows import Row
from nanogpt_bench.report.tables import WIDEST, shown_columns, to_markdown, to_text
from nanogpt_bench.report.verdicts import Judgement, Verdict
from nanogpt_bench.runs.load import Run

#: label, loss, bytes, stall, arrived, alerts
ROWS = (
    ("bf16-mixed", 2.620, 12.0, None, None, 1),
    ("fp32", 2.620, 12.0, None, None, 1),
    ("muon", 2.137, 8.35, None, None, 2),
    ("E4M3 master", 2.622, 12.02, 0.683, None, 1),
    ("E4M3 nearest", 2.724, 9.17, 0.757, 0.601, 1),
    ("E7M0 nearest", 4.011, 9.17, 0.98, 0.054, 1),
)


def result(
    label: str, loss: float, size: float, stall: float | None, arrived: float | None, alerts: int
) -> Result:
    gap = loss - 2.62
    return Result(
        row=Row(label, label, "none", (Run(Path(label), {"optimizer": {"lr": 0.002}}),)),
        reference=label == "bf16-mixed",
        final_val_loss=Figure(loss),
        best_val_loss=Figure(loss),
        gap=Figure(gap),
        gap_share=gap / 2.62,
        bytes_per_parameter=size,
        stall=None if stall is None else Figure(stall),
        stall_metric=CODE_UNCHANGED.name if label == "E4M3 master" else UPDATE_LOST.name,
        tokens_per_s=Figure(18000.0 + 100 * loss),
        verdict=Verdict(Judgement.WITHIN, "stall 98%; outside 10%" if gap > 1 else "within 10%"),
        arrived=None if arrived is None else Figure(arrived),
        cosine=None if arrived is None else Figure(1.0),
        alerts={"stall": alerts},
        val_loss_se=0.0213 + loss / 1000,
    )


def test_a_table_has_what_tells_rows_apart_and_fits_a_terminal():
    results = [result(*row) for row in ROWS]
    shown = [column.heading.partition(" (")[0] for column in shown_columns(results)]
    assert not {"best val loss", "grad cosine"} & set(shown)
    assert {"run", "val loss", "gap to BF16", "bytes", "stall", "verdict"} <= set(shown)
    for table in (to_text(results), to_markdown(results)):
        assert max(map(len, table.splitlines())) <= WIDEST
        assert [word for word in shown if word not in table] == []


def test_shares_are_in_per_cent_and_a_stall_of_codes_says_so():
    cells = {column.heading: column.cell for column in COLUMNS}
    results = [result(*row) for row in ROWS]
    assert [cells["stall"](one) for one in results[2:]] == ["-", "68.3% code", "75.7%", "98.0%"]
    assert [cells["arrived"](one) for one in results[3:]] == ["-", "60.1%", "5.4%"]
    assert cells[GAP](results[5]) == "+1.391 (+53.1%)"


def test_csv_reads_back_to_the_numbers_and_has_every_column(tmp_path):
    results = measured(write_comparison(tmp_path))
    lines = csv_lines(results)
    columns = chain.from_iterable(column.csv for column in COLUMNS)
    assert list(lines[0]) == [
        name for name in columns if name not in {metric.figure for metric in BESIDE_LOSS}
    ]
    assert [line["run"] for line in lines][:4] == [
        "bf16-mixed",
        "fp32",
        "E4M3 master",
        "E4M3 nearest",
    ]
    assert float(lines[3]["final_val_loss"]) == results[3].final_val_loss.mean
    assert [float(lines[3][name]) for name in ("gap", "stall")] == pytest.approx([0.45, 0.81])
    assert lines[0]["stall"] == lines[0]["gap_spread"] == ""
    assert lines[3]["verdict"] == "outside 10%; stall 81%"


@pytest.mark.parametrize("text", ["=HYPERLINK(0)", "+1+cmd", "-2+3", "@SUM(A1)"])
def test_no_text_of_a_run_is_a_formula_in_the_csv_and_numbers_are_numbers(tmp_path, text):
    changes = {"format": text, "final": 1.922, "failures": [{"kind": text, "step": 3}]}
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rule=text, fmt="E4M3", **changes)]
    line = csv_lines(measured(paths))[1]
    assert (line["rule"], line["format"], line["failures"]) == ("'" + text,) * 3
    assert float(line["gap"]) == pytest.approx(-0.178)  # no apostrophe: a number
    assert not any(cell.startswith(tuple("=+@")) for cell in line.values())


def test_the_stall_of_an_unbiased_write_back_is_not_shown_and_what_arrived_is(tmp_path):
    paths = [
        write_run(tmp_path / "a"),
        write_run(
            tmp_path / "b",
            rule="stochastic",
            fmt="E4M3",
            final=2.5,
            stall=0.89,
            arrived=0.998,
            lr=2.0,
        ),
        write_run(tmp_path / "c", rule="nearest", fmt="E4M3", final=2.5, stall=0.89, arrived=0.21),
    ]
    results = measured(paths)
    lines = csv_lines(results)
    assert [line["stall"] for line in lines] == ["", "", "0.89"]
    assert [line["arrived"] for line in lines] == ["", "0.998", "0.21"]
    assert [line["verdict"] for line in lines] == [
        "reference",
        "outside 10%",
        "outside 10%; stall 89%",
    ]
    shown = {
        column.heading: [column.cell(result) for result in results]
        for column in shown_columns(results)
    }
    assert (shown["arrived"], shown["lr"]) == (["-", "99.8%", "21.0%"], ["0.001", "2", "0.001"])


def test_without_a_reference_nothing_speaks_of_one(tmp_path):
    folders = [write_run(tmp_path / "a", rule="fp32"), write_run(tmp_path / "b", rule="sgd")]
    results = measured(folders)
    page = report(folders, out=tmp_path / "out").read_text()
    shown = page[page.index('<section id="results"') : page.index('<section id="loss"')]
    for text in (to_text(results), shown):
        assert not [word for word in ("gap", "BF16", "reference") if word in text]
        assert "finished" in text
