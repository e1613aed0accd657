"""A seed counts once in a row, and a final loss is that of a run that came to its end: tables, page and gaps agree."""

import json
from dataclasses import replace

import pytest
from bench_runs import summary_of
from run_folders import measured, write_run

from nanogpt_bench.report import report
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.report.tables import to_csv
from nanogpt_bench.runs.load import load_run


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
    assert [run.path for run in row.row.aside] == [again]
    lines = []
    page = report([*reference, first, again], out=tmp_path / "out", say=lines.append)
    said = f"sgd: {again} is not counted; {first} has seed 1 too, and went as far and comes first"
    assert said in lines
    assert said in page.read_text(encoding="utf-8")


def test_a_seed_of_the_data_or_the_model_is_a_seed(tmp_path):
    def own(run, seed):
        return replace(run, config={**run.config, "data": {**run.config.get("data", {}), "seed": seed}})

    paths = [write_run(tmp_path / f"{rule}-{n}", rule=rule, seed=1) for rule in ("bf16-mixed", "sgd") for n in (1, 2)]
    for path, final in zip(paths, (2.0, 3.0, 2.5, 3.7), strict=True):
        content = summary_of(path)
        (path / "summary.json").write_text(json.dumps(content | {"final_val_loss": final}))
    rows = group_rows([own(load_run(path), seed) for path, seed in zip(paths, (1, 2, 1, 2), strict=True)])
    assert [len(row.runs) for row in rows] == [2, 2]
    (_, row) = measure(rows, find_reference(rows))
    assert row.gap.mean == row.difference.mean == pytest.approx(0.6)


@pytest.mark.parametrize("status", ["stopped", "incomplete"])
def test_a_run_that_has_not_finished_has_no_final_loss(tmp_path, reference, status):
    whole = write_run(tmp_path / "a", rule="sgd", final=3.2, seed=1)
    part = write_run(tmp_path / "b", rule="sgd", final=4.9, seed=2, status="stopped", final_val_loss_se=9.0)
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
