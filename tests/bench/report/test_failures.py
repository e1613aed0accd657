"""Failed runs get a page with what was found, when, and what came first."""

import pytest
from run_folders import measured, rows_of, write_alerts, write_metrics, write_run

from nanogpt_bench.failures import diagnose
from nanogpt_bench.report.chart import styles
from nanogpt_bench.report.charts import lines_of, loss_charts
from nanogpt_bench.report.sections import Page, all_sections
from nanogpt_bench.runs.load import load_run


@pytest.fixture
def exploded(tmp_path):
    """A run whose residual outputs grow heavy tails and whose loss then leaves everything finite, and its section."""
    failure = {"kind": "nan", "message": "train/loss is nan at step 200", "step": 200}
    folder = write_run(
        tmp_path / "b", rule="fp32", name="exploded", status="failed", failure=failure, final_val_loss=None
    )
    write_metrics(folder, {"quant/kurtosis/residual": lambda step: 3 + step}, every=10)
    write_metrics(folder, {"train/loss": lambda step: None if step == 200 else 5.0 - step / 100})
    write_alerts(folder, ("kurtosis", 50), ("kurtosis", 60))
    results = measured([write_run(tmp_path / "a"), folder])
    rows = [result.row for result in results]
    sections = {each.name: each for each in all_sections(Page({}, results, styles(rows, rows[0])))}
    return load_run(folder), sections["failures"]


def test_the_page_has_what_was_found_when_and_what_is_missing(exploded):
    run, section = exploded
    kinds = [finding.kind for finding in diagnose(run).found]
    assert {"outlier_explosion", "nan"} <= set(kinds)
    assert kinds.index("outlier_explosion") < kinds.index("nan")
    body = section.body
    assert 'id="failure-0" open' in body
    assert body.index("kurtosis rose") < body.index("end: train/loss is nan")
    assert body.count('class="event alert"') == 1  # the first of a kind
    assert '<i style="left:25.00%"></i>' in body
    assert "attention collapse (no attention/entropy over that of uniform attention)" in body


def test_the_chart_marks_the_first_step_of_each_class(exploded):
    run, section = exploded
    (chart,) = section.charts
    steps = [finding.step for finding in diagnose(run).found]
    for layer in chart.spec["layer"][-2:]:  # lines, and names above them
        assert [moment["x"] for moment in layer["data"]["values"]] == steps
    assert {line["row"] for line in chart.values} == {"fp32", "bf16-mixed"}
    assert chart.rows == ()  # shown whether or not the row is hidden elsewhere


def test_early_divergence_and_failure_are_marked_on_the_curve(tmp_path):
    failure = {"kind": "nan", "message": "gone", "step": 200}
    folder = write_run(tmp_path / "a", status="failed", failure=failure)
    write_alerts(folder, ("early_divergence", 110), ("early_divergence", 150))
    rows = rows_of([folder])
    chart, *_ = loss_charts(rows, styles(rows))
    early, end = chart.spec["layer"][-1]["data"]["values"]
    assert (early["x"], early["text"]) == (110.0, "bf16-mixed: divergence found at step 110")
    assert early["y"] == lines_of(rows, "val/loss")[0].ys[5]  # the validation at step 100, the last before it
    assert (end["x"], end["text"]) == (200.0, "bf16-mixed: failed at step 200")
