"""CSV, Markdown and LaTeX carry the same table, and text from a run can't break any of them."""

from __future__ import annotations

import csv
import io
import re

import pytest

from nanogpt_bench.report.build import report
from nanogpt_bench.report.results import findings, measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.report.tables import COLUMNS, shown_columns, to_csv, to_latex, to_markdown, to_text
from nanogpt_bench.runs.load import load_run


def measured(paths, baseline=None):
    rows = group_rows([load_run(path) for path in paths])
    return measure(rows, find_reference(rows, baseline))


@pytest.fixture
def results(tmp_path, write_comparison):
    return measured(write_comparison(tmp_path))


def test_csv_reads_back_to_the_numbers(results):
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert [line["run"] for line in lines][:4] == ["bf16-mixed", "fp32", "E4M3 master", "E4M3 nearest"]
    assert float(lines[3]["final_val_loss"]) == results[3].final_val_loss.mean
    assert float(lines[3]["gap"]) == pytest.approx(0.45)
    assert float(lines[3]["stall"]) == pytest.approx(0.81)
    assert lines[0]["stall"] == lines[0]["gap_spread"] == ""
    assert lines[3]["verdict"] == "outside 10%; stall 81%"


@pytest.mark.parametrize("text", ["=HYPERLINK(0)", "+1+cmd", "-2+3", "@SUM(A1)"])
def test_no_text_of_a_run_is_a_formula_in_the_csv_and_numbers_are_numbers(tmp_path, write_run, text):
    failures = [{"kind": text, "step": 3}]
    paths = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", rule=text, fmt="E4M3", format=text, final=1.922, failures=failures),
    ]
    line = list(csv.DictReader(io.StringIO(to_csv(measured(paths)))))[1]
    assert (line["rule"], line["format"], line["failures"]) == ("'" + text,) * 3
    assert line["run"] == f"'{text} {text}"
    assert float(line["gap"]) == pytest.approx(-0.178)  # no apostrophe: a number
    assert not any(cell.startswith(tuple("=+@")) for cell in line.values())


def test_markdown_has_a_line_a_row_and_a_cell_a_column(results):
    lines = to_markdown(results).splitlines()
    assert len(lines) == 2 + len(results)
    assert {len(re.split(r"(?<!\\)\|", line)) for line in lines} == {len(shown_columns(results)) + 2}
    assert len({len(line) for line in lines}) == 1
    assert "+0.450 (+21.4%)" in lines[5]
    assert "93.0% code" in lines[4]


def test_seeds_give_a_spread(tmp_path, write_comparison):
    text = to_text(measured(write_comparison(tmp_path, seeds=3)))
    assert "2.110 ± 0.010" in text


def test_the_stall_of_an_unbiased_write_back_is_not_shown_and_what_arrived_is(tmp_path, write_run):
    """Folders of before it was recorded have a dash; a stall that says nothing is in no verdict either."""
    paths = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", rule="stochastic", fmt="E4M3", final=2.5, stall=0.89, arrived=0.998),
        write_run(tmp_path / "c", rule="nearest", fmt="E4M3", final=2.5, stall=0.89, arrived=0.21),
        write_run(tmp_path / "d", rule="riemannian", fmt="E4M3", final=2.5, stall=0.89),
    ]
    results = measured(paths)
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert [line["stall"] for line in lines] == ["", "", "0.89", ""]
    assert [line["arrived"] for line in lines] == ["", "0.998", "0.21", ""]
    assert [line["verdict"] for line in lines] == ["reference", "outside 10%", "outside 10%; stall 89%", "outside 10%"]
    (column,) = [column for column in shown_columns(results) if column.heading == "arrived"]
    assert [column.cell(result) for result in results] == ["-", "99.8%", "21.0%", "-"]
    assert "arrived" not in [column.heading for column in shown_columns(measured([paths[0], paths[3]]))]


def test_text_from_a_run_is_escaped(tmp_path, write_run):
    failure = {"kind": "x", "message": "50% | a_b & <i> \\ $1 {x} #~^", "step": 1}
    results = measured([write_run(tmp_path / "a", status="failed", failure=failure)])
    assert r"50% \| a\_b & \<i\> \\" in to_markdown(results)
    latex = to_latex(results)
    assert r"50\% | a\_b \& \textless{}i\textgreater{} \textbackslash{} \$1 \{x\} \#" in latex
    assert latex.count(" & ") == 2 * (len(shown_columns(results)) - 1)


def test_unknown_numbers_are_dashes(tmp_path, write_run):
    folder = write_run(tmp_path / "a", final_val_loss=None, best_val_loss=float("nan"), bytes_per_parameter=None)
    (result,) = measured([folder])
    assert [column.cell(result) for column in COLUMNS[2:7]] == ["-"] * 5
    assert [column.heading for column in shown_columns([result])][6:9] == ["stall", "tokens/s", "verdict"]


def test_optional_columns_come_with_the_first_row_that_has_them(tmp_path, write_run, write_alerts):
    base, folder = write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32")
    write_alerts(folder, ("kurtosis", 3))
    results = measured([base, folder])
    assert "alerts" in [column.heading for column in shown_columns(results)]
    assert "grad cosine" not in [column.heading for column in shown_columns(results)]
    assert list(csv.DictReader(io.StringIO(to_csv(results))))[1]["alert_kinds"] == "kurtosis:1"


def test_the_learning_rate_stands_in_every_table(tmp_path, write_run):
    results = measured([write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="riemannian", lr=2.0)])
    assert [line["lr"] for line in csv.DictReader(io.StringIO(to_csv(results)))] == ["0.001", "2"]
    headings, _, *lines = (line.split("|") for line in to_text(results).splitlines())
    assert headings[2].strip() == "lr"
    assert [line[2].strip() for line in lines] == ["0.001", "2"]


def test_without_a_reference_nothing_speaks_of_one(tmp_path, write_run):
    folders = [write_run(tmp_path / "a", rule="fp32"), write_run(tmp_path / "b", rule="sgd")]
    results = measured(folders)
    page = report(folders, out=tmp_path / "out").read_text()
    shown = page[page.index('<section id="results"') : page.index('<section id="loss"')]
    for text in (to_text(results), to_markdown(results), to_latex(results), shown):
        assert not [word for word in ("gap", "BF16", "reference") if word in text]
        assert "finished" in text


@pytest.mark.parametrize(("baseline", "said"), [(None, "gap to BF16"), ("fp32", "gap to fp32")])
def test_the_gap_says_what_it_is_measured_against(tmp_path, write_run, baseline, said):
    results = measured([write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32")], baseline)
    for text in (to_text(results), to_markdown(results), to_latex(results)):
        assert text.count("gap to ") == text.count(said) == 1


def test_findings_tell_the_measured_gap_of_nearest_rounding(results):
    first, second = findings(results)
    assert first.startswith("E4M3 nearest: +0.450 nats (+21.4%)")
    assert "E4M3 stochastic: +0.030 nats (+1.4%)" in first
    assert second.startswith("E7M0 nearest: +0.920 nats")
