"""Columns that tell no rows apart are not shown, the table fits a terminal, and a row that is behind says so."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import write_run

from nanogpt_bench.compare.board import Board, Entry
from nanogpt_bench.compare.closing import print_results
from nanogpt_bench.report.results import Figure, Result, measure
from nanogpt_bench.report.rows import Row, find_reference, group_rows
from nanogpt_bench.report.tables import CSV_FIELDS, WIDEST, shown_columns, to_csv, to_markdown, to_text
from nanogpt_bench.report.verdict import Evidence, Outcome, Thresholds, Verdict, judge
from nanogpt_bench.runs.load import Run, load_run
from nanogpt_bench.system.errors import BenchError

#: a comparison as the README shows one: label, loss, bytes, stall, arrived, alerts
TWELVE = (
    ("bf16-mixed", 2.620, 12.0, None, None, 1),
    ("fp32", 2.620, 12.0, None, None, 1),
    ("muon", 2.137, 8.35, None, None, 2),
    ("E4M3 master", 2.622, 12.02, 0.683, None, 1),
    ("E4M3 nearest", 2.724, 9.17, 0.757, 0.601, 1),
    ("E4M3 stiffness-anneal", 2.598, 9.17, None, 1.001, 1),
    ("E7M0 nearest", 4.011, 9.17, 0.98, 0.054, 1),
)


def result(label: str, loss: float, size: float, stall: float | None, arrived: float | None, alerts: int) -> Result:
    gap = loss - 2.62
    text = "stall 98%; outside 10%" if gap > 1 else "behind; stall 76%" if gap > 0.1 else "within 10%"
    return Result(
        row=Row(label, label, "none", (Run(Path(label), {"optimizer": {"lr": 0.002}}),)),
        reference=label == "bf16-mixed",
        final_val_loss=Figure(loss),
        best_val_loss=Figure(loss),
        gap=Figure(gap),
        gap_share=gap / 2.62,
        bytes_per_parameter=size,
        stall=None if stall is None else Figure(stall),
        stall_metric="code_unchanged" if label == "E4M3 master" else "update_lost",
        tokens_per_s=Figure(18000.0 + 100 * loss),
        verdict=Verdict(Outcome.WITHIN, text),
        arrived=None if arrived is None else Figure(arrived),
        tokens_to_gap=Figure(3070.0),
        cosine=None if arrived is None else Figure(1.0),
        alerts={"stall": alerts},
        val_loss_se=0.0213 + loss / 1000,
    )


def headings(results: list[Result]) -> list[str]:
    return [column.heading.partition(" (")[0] for column in shown_columns(results)]


def test_a_table_has_what_tells_rows_apart_and_fits_a_terminal() -> None:
    results = [result(*row) for row in TWELVE]
    shown = headings(results)
    assert not {"best val loss", "grad cosine", "tokens to gap"} & set(shown)
    assert {"run", "val loss", "gap to BF16", "bytes", "stall", "verdict"} <= set(shown)
    for table in (to_text(results), to_markdown(results)):
        assert max(map(len, table.splitlines())) <= WIDEST
    console = Console(width=WIDEST, force_terminal=True, record=True, file=io.StringIO())
    print_results(results, console)
    printed = console.export_text()
    assert [word for word in shown if word not in printed] == []


@pytest.mark.parametrize(("alerts", "shown"), [((1, 1), False), ((1, 2), True), ((0, 1), True), ((0, 0), False)])
def test_alerts_are_shown_where_they_differ(alerts: tuple[int, int], shown: bool) -> None:
    results = [
        replace(result(*TWELVE[place]), alerts={"stall": count} if count else {}) for place, count in enumerate(alerts)
    ]
    assert ("alerts" in headings(results)) == shown


def test_what_only_one_row_has_is_shown_and_what_all_share_is_not() -> None:
    first, second = (replace(result(*TWELVE[place]), tokens_to_gap=None) for place in (0, 1))
    assert "arrived" in headings([first, replace(second, arrived=Figure(0.5))])
    assert "arrived" not in headings([replace(each, arrived=Figure(0.5)) for each in (first, second)])
    assert "best val loss" in headings([first, replace(second, best_val_loss=Figure(2.5))])


def test_files_of_numbers_keep_every_column() -> None:
    (line,) = list(csv.DictReader(io.StringIO(to_csv([result(*TWELVE[0])]))))
    assert list(line) == list(CSV_FIELDS)
    assert {"best_val_loss", "grad_cosine", "alerts", "tokens_to_gap"} <= set(line)


def test_the_board_has_no_column_that_no_run_fills() -> None:
    board = Board([], Console(file=io.StringIO()))
    board.entries = [Entry("fp32", progress={"step": 1, "max_steps": 2}), Entry("nearest")]
    assert not [column.header for column in board.table().columns if "mean" in str(column.header)]
    board.entries[1].progress = {"step": 1, "max_steps": 2, "stall": 0.5}
    assert [column.header for column in board.table().columns if "mean" in str(column.header)] == ["mean stall"]


@pytest.mark.parametrize(
    ("gap", "error", "outcome"),
    [
        (0.104, 0.03, Outcome.BEHIND),
        (0.104, 0.06, Outcome.WITHIN),  # within twice its standard error
        (0.04, 0.001, Outcome.WITHIN),  # too small to matter
        (-0.4, 0.03, Outcome.WITHIN),
        (0.104, None, Outcome.WITHIN),  # of which nothing is known
    ],
)
def test_a_gap_beyond_its_noise_is_behind(gap: float, error: float | None, outcome: Outcome) -> None:
    ended = [Run(Path("r"), summary={"status": "finished"})]
    assert judge(ended, Evidence(gap / 2.62, gap=gap, gap_error=error)).outcome == outcome


def test_a_limit_of_what_is_behind_is_above_0() -> None:
    with pytest.raises(BenchError, match="behind = 0"):
        Thresholds(behind=0)


def test_nearest_rounding_is_told_from_the_rest(tmp_path: Path) -> None:
    losses = {"bf16-mixed": 2.62, "fp32": 2.62, "sgd": 2.724, "lion": 2.64}
    paths = [
        write_run(tmp_path / rule, rule=rule, final=loss, final_val_loss_se=0.0213) for rule, loss in losses.items()
    ]
    rows = group_rows([load_run(path) for path in paths])
    said = {each.row.label: each.verdict.text for each in measure(rows, find_reference(rows))}
    assert said == {"bf16-mixed": "reference", "fp32": "within 10%", "sgd": "behind", "lion": "within 10%"}


def test_over_seeds_the_standard_error_is_that_of_the_gaps(tmp_path: Path) -> None:
    def verdict(finals: tuple[float, ...], name: str) -> str:
        paths = [
            write_run(tmp_path / f"{name}-{rule}-{seed}", rule=rule, final=2.62 if rule == "fp32" else final, seed=seed)
            for rule in ("fp32", "sgd")
            for seed, final in enumerate(finals)
        ]
        rows = group_rows([load_run(path) for path in paths])
        return measure(rows, rows[0])[1].verdict.text

    assert verdict((2.72, 2.73, 2.71), "near") == "behind"
    assert verdict((2.9, 2.5, 2.8), "wide") == "within 10%"
