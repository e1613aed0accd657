"""The verdict says what happened: thresholds decide, failures come first, seeds are counted."""

from __future__ import annotations

import json

import pytest

from nanogpt_bench.cli import build_parser
from nanogpt_bench.report.build import THRESHOLDS
from nanogpt_bench.report.results import measure, tokens_to_gap
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.report.verdict import Evidence, Outcome, Thresholds, judge
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.system.errors import BenchError


@pytest.fixture
def run(tmp_path, write_run):
    """Makes a run with the summary changed as asked."""
    made = iter(range(100))
    return lambda **changes: load_run(write_run(tmp_path / f"run{next(made)}", **changes))


@pytest.mark.parametrize(
    ("share", "within", "outcome", "text"),
    [
        (-0.05, 0.10, Outcome.WITHIN, "within 10%"),
        (0.10, 0.10, Outcome.WITHIN, "within 10%"),
        (0.1001, 0.10, Outcome.OUTSIDE, "outside 10%"),
        (0.04, 0.025, Outcome.OUTSIDE, "outside 2.5%"),
    ],
)
def test_the_loss_threshold(run, share, within, outcome, text):
    verdict = judge([run()], Evidence(share), thresholds=Thresholds(within=within))
    assert (verdict.outcome, verdict.text) == (outcome, text)


def test_stall_is_named_where_the_loss_is_short_of_the_reference(run):
    limits = Thresholds(stall=0.5)
    assert judge([run()], Evidence(0.3, 0.5), thresholds=limits).text == "outside 10%; stall 50%"
    assert judge([run()], Evidence(0.3, 0.49), thresholds=limits).text == "outside 10%"
    assert judge([run()], Evidence(0.01, 0.9), thresholds=limits).text == "within 10%"


def test_a_failure_outranks_the_loss(run):
    failed = run(status="failed", failure={"kind": "nan", "message": "train/loss is nan\nat once", "step": 37})
    verdict = judge([failed], Evidence(0.01))
    assert (verdict.outcome, verdict.text) == (Outcome.FAILED, "failed at step 37: train/loss is nan at once")


def test_failed_seeds_are_counted(run):
    failed = run(status="failed", failure={"kind": "crash", "message": "gone", "step": None})
    assert judge([run(), failed, run()], Evidence()).text == "failed: gone (1 of 3 seeds)"


def test_a_run_that_stopped_early_is_unfinished(run):
    verdict = judge([run(status="stopped")], Evidence(0.01))
    assert (verdict.outcome, verdict.text) == (Outcome.UNFINISHED, "stopped at step 200")


def test_no_runs_and_no_reference(run):
    assert judge([], Evidence()).text == "not run"
    assert judge([run()], Evidence()).text == "no finished reference"
    assert judge([], Evidence(), running=True).text == "waiting"


@pytest.mark.parametrize(
    "limits",
    [
        {"within": 0.0},
        {"within": float("nan")},
        {"stall": 0.0},
        {"stall": 1.5},
        {"cosine": 1.1},
        {"alerts": -1},
        {"gap": 0.0},
    ],
)
def test_thresholds_out_of_range_are_refused_by_name(limits):
    (name,) = limits
    with pytest.raises(BenchError, match=name):
        Thresholds(**limits)


def test_seeds_are_paired_with_the_reference_of_the_same_seed(tmp_path, write_run):
    for seed, (base, other) in enumerate([(2.0, 2.2), (2.4, 2.5)]):
        write_run(tmp_path / f"a{seed}", final=base, seed=seed)
        write_run(tmp_path / f"b{seed}", rule="nearest", fmt="E4M3", final=other, seed=seed)
    rows = group_rows([load_run(path) for path in sorted(tmp_path.iterdir())])
    reference, nearest = measure(rows, find_reference(rows))
    assert [row.label for row in rows] == ["bf16-mixed", "E4M3 nearest"]
    assert nearest.gap.mean == pytest.approx(0.15)
    assert nearest.gap.spread == pytest.approx(0.0707, abs=1e-4)  # that of the differences 0.2 and 0.1
    assert nearest.gap_share == pytest.approx(0.15 / 2.2)
    assert reference.verdict.outcome is Outcome.REFERENCE


def test_a_run_that_ended_early_has_no_gap(tmp_path, write_run):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32", status="stopped")]
    rows = group_rows([load_run(path) for path in paths])
    assert measure(rows, rows[0])[1].gap is None


def test_runs_that_differ_in_more_than_the_seed_are_rows_named_by_what_differs(tmp_path, write_run):
    paths = [
        write_run(tmp_path / f"{lr}-{seed}", rule="fp32", lr=lr, seed=seed) for lr in (1e-4, 1e-3) for seed in (1, 2)
    ]
    rows = group_rows([load_run(path) for path in paths])
    assert [(row.label, len(row.runs)) for row in rows] == [("fp32 lr=0.0001", 2), ("fp32 lr=0.001", 2)]


def test_rows_that_no_few_settings_tell_apart_are_named_by_their_runs(tmp_path, write_run):
    paths = [write_run(tmp_path / name, rule="fp32") for name in ("old", "new")]
    (paths[1] / "config.yaml").write_text("{rule: fp32, a: 1, b: 2, c: 3, d: 4}")
    assert [row.label for row in group_rows([load_run(path) for path in paths])] == ["fp32 (old)", "fp32 (new)"]


def test_a_row_of_several_seeds_is_named_by_all_of_its_runs(tmp_path, write_run):
    paths = []
    for name, seeds, value in (("old", 2, 0), ("new", 5, 1)):
        for seed in range(1, seeds + 1):
            paths.append(write_run(tmp_path / f"{name}-{seed}", rule="fp32", seed=seed))
            settings = {"rule": "fp32", "seed": seed, **dict.fromkeys("abcd", value)}
            (paths[-1] / "config.yaml").write_text(json.dumps(settings))
    rows = group_rows([load_run(path) for path in paths])
    assert [row.label for row in rows] == ["fp32 (old-1, old-2)", "fp32 (new-1, new-2, new-3 and 2 more)"]


@pytest.mark.parametrize(
    ("evidence", "limits", "outcome", "text"),
    [
        (Evidence(0.01, cosine=0.91), Thresholds(), Outcome.WITHIN, "within 10%"),
        (Evidence(0.01, cosine=0.9), Thresholds(), Outcome.DOUBTFUL, "within 10%; cosine 0.90"),
        (Evidence(0.01, cosine=0.9), Thresholds(cosine=0.8), Outcome.WITHIN, "within 10%"),
        (Evidence(0.01, alerts=7), Thresholds(), Outcome.WITHIN, "within 10%"),
        (Evidence(0.01, alerts=1), Thresholds(alerts=0), Outcome.DOUBTFUL, "within 10%; 1 alert"),
        (Evidence(0.01, alerts=2), Thresholds(alerts=2), Outcome.WITHIN, "within 10%"),
        (Evidence(0.2, cosine=0.3, stall=0.6), Thresholds(), Outcome.OUTSIDE, "outside 10%; cosine 0.30; stall 60%"),
        (Evidence(0.0, cosine=0.3, reference=True), Thresholds(), Outcome.REFERENCE, "reference"),
    ],
)
def test_gradients_and_alerts_make_a_row_doubtful(run, evidence, limits, outcome, text):
    verdict = judge([run()], evidence, thresholds=limits)
    assert (verdict.outcome, verdict.text) == (outcome, text)


def test_alerts_and_cosine_come_from_the_run_folders(tmp_path, write_run, write_alerts, write_metrics):
    base = write_run(tmp_path / "a")
    folder = write_run(tmp_path / "b", rule="nearest", fmt="E4M3", final=2.15)
    write_metrics(folder, {"grad/cosine": lambda step: 0.7 + 0.001 * step}, every=100)
    write_alerts(folder, ("kurtosis", 10), ("overflow", 20), ("kurtosis", 30))
    rows = group_rows([load_run(base), load_run(folder)])
    result = measure(rows, rows[0])[1]
    assert result.cosine.mean == pytest.approx(0.8)
    assert result.alerts == {"kurtosis": 2, "overflow": 1}
    assert (result.verdict.outcome, result.verdict.text) == (Outcome.DOUBTFUL, "within 10%; cosine 0.80")


def test_the_command_line_has_the_same_defaults():
    args, _ = build_parser()[0].parse_known_args(["report", "runs", "--out", "report"])
    assert Thresholds(**{name: getattr(args, name) for name in THRESHOLDS}) == Thresholds()


def test_tokens_to_gap_are_the_first_at_which_the_smoothed_loss_left_the_reference(tmp_path, write_run, write_metrics):
    base, far = write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32")
    for folder in (base, far):
        write_metrics(folder, {"train/loss": lambda step: 2.0})
    # 200 steps are smoothed over 5: 0.3 nats from step 100 on first average more than 0.1 at step 101.
    write_metrics(far, {"train/loss": lambda step: 2.3 if step >= 100 else 2.0})
    runs = load_run(far), load_run(base)
    assert tokens_to_gap(*runs, nats=0.1) == 768 * 102
    assert tokens_to_gap(*runs, nats=0.31) is None
    write_metrics(far, {"train/loss": lambda step: None if step == 50 else 2.0})
    assert tokens_to_gap(load_run(far), load_run(base), nats=5.0) == 768 * 51


@pytest.fixture
def found_in(run):
    """Makes a run in whose records these classes of failure were found."""
    return lambda *kinds, **changes: run(failures=[{"kind": kind, "step": 7} for kind in kinds], **changes)


@pytest.mark.parametrize(
    ("kinds", "evidence", "text"),
    [
        (["divergence"], Evidence(4.0, stall=0.89), "divergence; outside 10%; stall 89%"),
        (["divergence"], Evidence(None), "divergence; no finished reference"),
        (["divergence"], Evidence(None, unmeasured=True), "divergence; finished"),
        ([], Evidence(None, unmeasured=True), "finished"),
        (["divergence"], Evidence(None, unlike=("steps",)), "divergence; not comparable: steps"),
        (["divergence"], Evidence(0.01), "within 10%; divergence"),
        (["divergence"], Evidence(0.0, reference=True), "reference; divergence"),
        (["stall", "plateau"], Evidence(0.3, stall=0.9), "stall 90%, plateau; outside 10%"),
        (["stall", "divergence"], Evidence(0.3, stall=0.9), "divergence, stall 90%; outside 10%"),
        (["zero_gradients", "plateau", "nan"], Evidence(0.3), "NaN, zero gradients and 1 more; outside 10%"),
        (["plateau"], Evidence(0.01), "within 10%"),
        (["plateau"], Evidence(None), "no finished reference"),
        (["plateau"], Evidence(None, unlike=("corpus", "steps")), "not comparable: corpus, steps"),
        ([], Evidence(0.3, stall=0.9), "outside 10%; stall 90%"),
    ],
)
def test_the_class_of_failure_leads_where_a_row_is_short_of_the_reference(found_in, kinds, evidence, text):
    assert judge([found_in(*kinds)], evidence).text == text


def test_a_diverged_row_within_reach_is_doubtful_and_seeds_are_counted(found_in, run):
    assert judge([found_in("divergence"), run()], Evidence(0.3)).text == "divergence (1 of 2 seeds); outside 10%"
    assert judge([found_in("divergence")], Evidence(0.01)).outcome is Outcome.DOUBTFUL


def test_a_class_that_ended_the_run_is_said_once(found_in):
    failure = {"kind": "divergence", "message": "the loss rose", "step": 37}
    failed = found_in("divergence", "plateau", status="failed", failure=failure)
    assert judge([failed], Evidence()).text == "plateau; failed at step 37: the loss rose"
