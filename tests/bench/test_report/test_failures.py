"""Failed runs get a page with what was found, when, and what came first; E7M0 with nearest rounding gets its own."""

from __future__ import annotations

import pytest

from nanogpt_bench.report.chart import looks
from nanogpt_bench.report.curve_charts import lines_of, marks
from nanogpt_bench.report.failure_pages import e7m0_section, failed_runs, failure_section, predicted_runs
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.runs.load import load_run


def results_of(paths):
    rows = group_rows([load_run(path) for path in paths])
    return measure(rows, find_reference(rows))


def section_of(paths):
    results = results_of(paths)
    reference = find_reference([result.row for result in results])
    return failure_section(
        failed_runs(results), [reference] if reference else [], looks([r.row for r in results], reference)
    )


@pytest.fixture
def healthy(tmp_path, write_run):
    return write_run(tmp_path / "healthy", rule="stochastic", fmt="E4M3")


@pytest.fixture
def exploded(tmp_path, write_run, write_metrics, write_alerts):
    """A run whose residual outputs grow heavy tails and whose loss then leaves everything finite."""
    failure = {"kind": "nan", "message": "train/loss is nan at step 200", "step": 200}
    folder = write_run(
        tmp_path / "b", rule="fp32", name="exploded", status="failed", failure=failure, final_val_loss=None
    )
    write_metrics(folder, {"quant/kurtosis/residual": lambda step: 3 + step}, every=10)
    write_metrics(folder, {"train/loss": lambda step: None if step == 200 else 5.0 - step / 100})
    write_alerts(folder, ("kurtosis", 50), ("kurtosis", 60))
    return folder


def test_a_run_without_a_failure_has_no_page(tmp_path, write_run, healthy):
    assert section_of([write_run(tmp_path / "a"), healthy]) is None


def test_the_page_names_what_was_found_in_the_order_in_which_it_set_in(tmp_path, write_run, exploded):
    section = section_of([write_run(tmp_path / "a"), exploded])
    (failed,) = failed_runs(results_of([tmp_path / "a", exploded]))
    kinds = [finding.kind for finding in failed.diagnosis.found]
    assert {"outlier_explosion", "nan"} <= set(kinds)
    assert kinds.index("outlier_explosion") < kinds.index("nan")
    assert 'id="failure-0" open' in section.body
    assert "fp32 · exploded" in section.body
    assert "<p>The run failed: train/loss is nan at step 200.</p>" in section.body


def test_the_timeline_holds_every_criterion_and_alert_and_the_lead_of_the_kurtosis_alert(tmp_path, write_run, exploded):
    body = section_of([write_run(tmp_path / "a"), exploded]).body
    assert body.index("kurtosis rose") < body.index("end: train/loss is nan")
    assert body.count('class="event alert"') == 1  # the first of a kind
    assert '<i style="left:25.00%"></i>' in body
    # The kurtosis, 3 and 1 more a step, is looked at every 10 steps and first lies above 10 at step 10.
    assert "Lead time of the kurtosis alert: at step 10, 190 steps" in body
    assert "before the NaN at step 200." in body


def test_the_chart_marks_the_first_step_of_each_class(tmp_path, write_run, exploded):
    section = section_of([write_run(tmp_path / "a"), exploded])
    (chart,) = section.charts
    (failed,) = failed_runs(results_of([tmp_path / "a", exploded]))
    steps = [finding.step for finding in failed.diagnosis.found]
    for layer in chart.spec["layer"][-2:]:  # lines, and names above them
        assert [moment["x"] for moment in layer["data"]["values"]] == steps
    assert {line["row"] for line in chart.values} == {"fp32", "bf16-mixed"}
    assert chart.rows == ()  # shown whether or not the row is hidden elsewhere


def test_what_could_not_be_judged_says_which_figures_are_missing(tmp_path, write_run, exploded):
    body = section_of([write_run(tmp_path / "a"), exploded]).body
    assert "Not judged:" in body
    assert "attention collapse (no attention/entropy)" in body


def test_many_pages_begin_closed(tmp_path, write_run):
    failure = {"kind": "crash", "message": "gone", "step": None}
    paths = [write_run(tmp_path / str(i), rule="fp32", status="failed", failure=failure, lr=i) for i in range(1, 7)]
    body = section_of([write_run(tmp_path / "a"), *paths]).body
    assert body.count('<details class="page"') == 6
    assert " open>" not in body


def e7m0_of(paths):
    results = results_of(paths)
    reference = find_reference([result.row for result in results])
    return e7m0_section(
        predicted_runs(results), [reference] if reference else [], looks([r.row for r in results], reference)
    )


def test_e7m0_with_nearest_rounding_has_its_three_predictions_answered(tmp_path, write_run, write_metrics):
    folder = write_run(tmp_path / "b", rule="nearest", fmt="E7M0", final=5.2)
    flat = {"train/loss": lambda step: 5.5 if step < 5 else 5.2, "stall/update_lost": lambda step: 0.97}
    write_metrics(folder, flat | {"stall/zero_gradient_zone": lambda step: 0.2})
    section = e7m0_of([write_run(tmp_path / "a"), folder])
    answers = [section.body.index(f'class="answer {word}"') for word in ("confirmed", "refuted")]
    assert section.body.count('class="answer confirmed"') == 2
    assert answers == sorted(answers)
    for title in ("Plateau within 10 steps", "Update sparsity", "Zero-gradient zones"):
        assert title in section.body
    loss, shares = section.charts
    assert max(loss.values[0]["x"]) == 60
    assert [line["name"] for line in shares.values] == ["updates lost", "in a zero-gradient zone"]


def test_what_the_run_did_not_record_is_not_judged(tmp_path, write_run):
    section = e7m0_of([write_run(tmp_path / "b", rule="nearest", fmt="E7M0")])
    assert '<span class="badge">not judged</span>' in section.body
    assert "stall/zero_gradient_zone" in section.body


def test_other_rows_have_no_page_of_that_kind(tmp_path, write_run, healthy):
    assert e7m0_of([healthy, write_run(tmp_path / "c", rule="stochastic", fmt="E7M0")]) is None


def test_early_divergence_and_failure_are_marked_on_the_curve(tmp_path, write_run, write_alerts):
    failure = {"kind": "nan", "message": "gone", "step": 200}
    folder = write_run(tmp_path / "a", status="failed", failure=failure)
    write_alerts(folder, ("early_divergence", 110), ("early_divergence", 150))
    rows = group_rows([load_run(folder)])
    drawn = lines_of(rows, "val/loss")
    early, end = marks(rows, drawn)
    assert (early.x, early.text) == (110.0, "early divergence at step 110")
    assert early.y == drawn[0].ys[5]  # the validation at step 100, the last before it
    assert (end.x, end.text) == (200.0, "failed at step 200")
