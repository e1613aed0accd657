"""Differences paired by seed.

A seed counts once, and a final loss is that of a run that came to its end.
"""

import json
from dataclasses import replace

import pytest
from run_folders import csv_lines, measured, write_run
from scipy.stats import ttest_rel

from nanogpt_bench.report import report
from nanogpt_bench.report.paired import Difference, adjusted, difference, difference_text
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.report.tables import to_csv, to_markdown, to_text
from nanogpt_bench.runs.load import load_run

#: Student's own example (1908): hours of sleep gained under two drugs by the same ten
#: patients
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_seeds_are_paired_as_in_students_sleep_and_those_without_a_twin_left_out():
    paired = difference(dict(enumerate(SECOND)), dict(enumerate(FIRST)))
    assert paired.mean == pytest.approx(1.58)
    assert (paired.low, paired.high) == (
        pytest.approx(0.7001142, abs=1e-6),
        pytest.approx(2.4598858, abs=1e-6),
    )
    assert paired.p == pytest.approx(0.00283289, abs=1e-7)
    assert paired.p == pytest.approx(ttest_rel(SECOND, FIRST).pvalue)
    assert paired.seeds == 10
    paired = difference({1: 2.0, 2: 2.5, 9: 100.0}, {2: 2.0, 1: 1.6, 5: -100.0})
    assert (paired.mean, paired.seeds) == (pytest.approx(0.45), 2)
    assert difference({1: 2.0}, {2: 2.0}) is None
    assert difference({1: 2.0}, {1: 1.5}) == Difference(0.5, 1)


@pytest.mark.parametrize("apart", [0.0, 0.25])
def test_seeds_that_agree_to_the_last_bit_have_an_interval_of_one_point(apart):
    paired = difference({1: 2.0 + apart, 2: 3.0 + apart}, {1: 2.0, 2: 3.0})
    assert (paired.mean, paired.low, paired.high, paired.is_found) == (
        apart,
        apart,
        apart,
        apart > 0,
    )


def test_holm_over_the_rows_that_were_tested():
    ps = [0.01, None, 0.04, 0.03, 0.005]
    family = [None if p is None else Difference(0.1, 5, 0.05, 0.15, p) for p in ps]
    lead = Difference(0.1, 1)
    adjusted_rows = adjusted([*family, lead])
    # Holm (1979): 0.005 * 4, 0.01 * 3, 0.03 * 2, and what follows no smaller.
    assert [row and row.holm for row in adjusted_rows] == [
        pytest.approx(0.03),
        None,
        0.06,
        0.06,
        0.02,
        None,
    ]
    assert adjusted_rows[-1] == lead
    same, near = (
        difference({1: 2.0, 2: 2.5}, {1: 2.0, 2: 2.5}),
        Difference(0.1, 5, 0.05, 0.15, 0.03),
    )
    assert [same.p, *(row.holm for row in adjusted([same, near]))] == [
        1.0,
        1.0,
        0.06,
    ]  # the reference's own row


def folders(tmp_path, *, seeds):
    """Runs of a reference, of a rule below it at every seed, and of one now above, now below."""
    rows = [("fp32", 2.0, 0.0), ("sgd", 1.9, 0.002), ("muon", 2.0, 0.02)]
    paths = []
    for rule, final, swing in rows:
        for seed in range(seeds):
            loss = final + seed / 100 + swing * (-1) ** seed
            paths.append(write_run(tmp_path / f"{rule}-{seed}", rule=rule, final=loss, seed=seed))
    return paths


def test_every_table_has_the_interval_or_says_that_no_difference_was_found(tmp_path):
    paths = folders(tmp_path, seeds=4)
    results = measured(paths, "fp32")
    reference, lower, same = (result.difference for result in results)
    assert reference is None
    assert lower.high < 0 < lower.seeds == 4
    assert lower.holm == pytest.approx(2 * lower.p)
    assert not same.is_found
    page = report(paths, out=tmp_path / "out", baseline="fp32").read_text()
    for text in (to_text(results), to_markdown(results), page):
        assert "paired difference (95" in text
        assert "no difference found" in text
        assert "-0.100" in text
        assert "one seed: a hint" not in text
        assert "BF16" not in text.partition("<script")[0]
    lines = csv_lines(results)
    assert float(lines[1]["difference_high"]) == lower.high
    assert [line["difference_seeds"] for line in lines] == ["", "4", "4"]
    assert lines[0]["difference_p_holm"] == ""


def test_a_pair_on_two_processors_is_marked(tmp_path):
    paths = folders(tmp_path, seeds=3)
    machine = {"cpu": "one", "cpu_capability": "AVX2", "platform": "Linux"}
    for path in paths:
        of_sgd = {"cpu_capability": "AVX512"} if path.name == "sgd-1" else {}
        (path / "environment.json").write_text(json.dumps(machine | of_sgd))
    reference, marked, plain = measured(paths, "fp32")
    assert (reference.difference, marked.difference.apart, plain.difference.apart) == (
        None,
        True,
        False,
    )
    assert difference_text(marked.difference).endswith(" †")
    assert "†: two processors" in to_text([reference, marked, plain])
    assert "†" not in to_text(
        measured([path for path in paths if not path.name.startswith("sgd")], "fp32")
    )
    (paths[0] / "environment.json").write_text(
        json.dumps({"cpu": "one", "platform": "Linux"})
    )  # an older record
    assert not measured(paths, "fp32")[2].difference.apart


@pytest.fixture
def reference(tmp_path):
    return [write_run(tmp_path / f"bf16-{seed}", final=2.1 + seed, seed=seed) for seed in (1, 2)]


def test_the_same_seed_twice_is_one_seed(tmp_path, reference, capsys):
    first = write_run(tmp_path / "a", rule="sgd", final=3.2, seed=1)
    again = write_run(tmp_path / "b", rule="sgd", final=3.3, seed=1)
    (_, row) = measured([*reference, first, again])
    assert (row.final_val_loss.mean, row.final_val_loss.spread) == (3.2, None)
    assert row.gap.mean == row.difference.mean == pytest.approx(0.1)
    assert row.difference.is_lead
    assert [run.path for run in row.row.uncounted] == [again]
    lines = []
    page = report([*reference, first, again], out=tmp_path / "out", say=lines.append)
    message = f"sgd: {again} is not counted, since {first} has seed 1 too and has as many steps and comes first"
    assert message in lines
    assert message in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("section", ["data", "model"])
def test_a_seed_of_the_data_or_the_model_is_a_seed(tmp_path, section):
    runs = []
    for rule, seed, final in (
        ("bf16-mixed", 1, 2.0),
        ("bf16-mixed", 2, 3.0),
        ("sgd", 1, 2.5),
        ("sgd", 2, 3.7),
    ):
        run = load_run(write_run(tmp_path / f"{rule}-{seed}", rule=rule, final=final, seed=1))
        runs.append(
            replace(
                run, config={**run.config, section: {**run.config.get(section, {}), "seed": seed}}
            )
        )
    rows = group_rows(runs)
    assert [len(row.runs) for row in rows] == [2, 2]
    (_, row) = measure(rows, find_reference(rows))
    assert row.gap.mean == row.difference.mean == pytest.approx(0.6)


@pytest.mark.parametrize("status", ["stopped", "incomplete"])
def test_a_run_that_has_not_finished_has_no_final_loss(tmp_path, reference, status):
    whole = write_run(tmp_path / "a", rule="sgd", final=3.2, seed=1)
    part = write_run(
        tmp_path / "b", rule="sgd", final=4.9, seed=2, status="stopped", final_val_loss_se=9.0
    )
    if status == "incomplete":
        (part / "summary.json").unlink()
        for folder in (whole, part):  # as a real run's settings do, they name the steps
            with (folder / "config.yaml").open("a") as file:
                file.write("train: {max_steps: 200}\n")
    (_, row) = measured([*reference, whole, part])
    assert (row.final_val_loss.mean, row.final_val_loss.spread) == (3.2, None)
    assert row.gap.mean == pytest.approx(row.final_val_loss.mean - 3.1)
    assert row.best_val_loss.mean <= row.final_val_loss.mean
    assert row.val_loss_se is None
    assert "4.9" not in to_csv([row]).splitlines()[1]


def test_a_run_without_a_finished_twin_has_the_gap_to_the_mean_of_the_others(tmp_path):
    paths = [
        write_run(tmp_path / "bf16-1", final=3.1, seed=1),
        write_run(tmp_path / "bf16-2", final=9.0, seed=2, status="stopped"),
        write_run(tmp_path / "sgd-1", rule="sgd", final=3.2, seed=1),
        write_run(tmp_path / "sgd-2", rule="sgd", final=3.5, seed=2),
    ]
    (_, row) = measured(paths)
    assert row.gap.mean == pytest.approx((0.1 + 0.4) / 2)
    assert row.difference.seeds == 1
