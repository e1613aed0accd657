"""The verdict says what happened: thresholds decide, failures come first, seeds are counted."""

import pytest
from laws import each
from run_folders import rows_of, write_run

from nanogpt_bench.report.results import Evidence, Judgement, judge, measure
from nanogpt_bench.runs.load import load_run

NAN = {"kind": "nan", "message": "train/loss is nan\nat once", "step": 37}
CRASH = {"kind": "crash", "message": "gone", "step": None}


@pytest.fixture
def run(tmp_path):
    """Makes a run in whose records some classes of failure were found, with the summary changed as asked."""
    made = iter(range(100))

    def make(*kinds, **changes):
        failures = [{"kind": kind, "step": 7} for kind in kinds]
        return load_run(write_run(tmp_path / f"run{next(made)}", failures=failures, **changes))

    return make


@each(
    ("evidence", "outcome", "text"),
    [
        # the loss
        (Evidence(-0.05), Judgement.WITHIN, "within 10%"),
        (Evidence(0.10), Judgement.WITHIN, "within 10%"),
        (Evidence(0.1001), Judgement.OUTSIDE, "outside 10%"),
        (Evidence(), Judgement.UNKNOWN, "no finished reference"),
        (Evidence(unmeasured=True), Judgement.UNKNOWN, "finished"),
        (Evidence(unlike=("corpus", "steps")), Judgement.INCOMPARABLE, "not comparable: corpus, steps"),
        # its noise: twice the standard error, and enough to matter; of no known error nothing is behind
        (Evidence(0.04, gap=0.104, gap_error=0.03), Judgement.BEHIND, "behind"),
        (Evidence(0.04, gap=0.104, gap_error=0.06), Judgement.WITHIN, "within 10%"),
        (Evidence(0.02, gap=0.04, gap_error=0.001), Judgement.WITHIN, "within 10%"),
        (Evidence(-0.2, gap=-0.4, gap_error=0.03), Judgement.AHEAD, "ahead"),
        (Evidence(-0.04, gap=-0.104, gap_error=0.03), Judgement.AHEAD, "ahead"),
        (Evidence(-0.04, gap=-0.104, gap_error=0.06), Judgement.WITHIN, "within 10%"),
        (Evidence(-0.11), Judgement.AHEAD, "ahead"),
        (Evidence(-0.11, cosine=0.9), Judgement.DOUBTFUL, "ahead; cosine 0.90"),
        (Evidence(0.04, gap=0.104), Judgement.WITHIN, "within 10%"),
        # a stall is named where the loss is short of the reference
        (Evidence(0.3, 0.5), Judgement.OUTSIDE, "outside 10%; stall 50%"),
        (Evidence(0.3, 0.49), Judgement.OUTSIDE, "outside 10%"),
        (Evidence(0.01, 0.9), Judgement.WITHIN, "within 10%"),
        # gradients make a row doubtful
        (Evidence(0.01, cosine=0.91), Judgement.WITHIN, "within 10%"),
        (Evidence(0.01, cosine=0.9), Judgement.DOUBTFUL, "within 10%; cosine 0.90"),
        (Evidence(0.2, cosine=0.3, stall=0.6), Judgement.OUTSIDE, "outside 10%; cosine 0.30; stall 60%"),
        (Evidence(0.0, cosine=0.3, reference=True), Judgement.REFERENCE, "reference"),
    ],
)
def test_limits_decide(run, evidence, outcome, text):
    verdict = judge([run()], evidence)
    assert (verdict.outcome, verdict.text) == (outcome, text)


@each(
    ("kinds", "evidence", "text"),
    [
        (["divergence"], Evidence(4.0, stall=0.89), "divergence; outside 10%; stall 89%"),
        (["divergence"], Evidence(), "divergence; no finished reference"),
        (["divergence"], Evidence(unlike=("steps",)), "divergence; not comparable: steps"),
        (["divergence"], Evidence(0.0, reference=True), "reference; divergence"),
        (["stall", "plateau"], Evidence(0.3, stall=0.9), "stall 90%, plateau; outside 10%"),
        (["stall", "divergence"], Evidence(0.3, stall=0.9), "divergence, stall 90%; outside 10%"),
        (["zero_gradients", "plateau", "nan"], Evidence(0.3), "NaN, zero gradients and 1 more; outside 10%"),
        (["plateau"], Evidence(0.01), "within 10%"),
        (["plateau"], Evidence(), "no finished reference"),
        (["plateau"], Evidence(unlike=("corpus", "steps")), "not comparable: corpus, steps"),
    ],
)
def test_the_class_of_failure_leads_where_a_row_is_short_of_the_reference(run, kinds, evidence, text):
    assert judge([run(*kinds)], evidence).text == text


def test_a_diverged_row_within_reach_is_doubtful_and_seeds_are_counted(run):
    assert judge([run("divergence"), run()], Evidence(0.3)).text == "divergence (1 of 2 seeds); outside 10%"
    verdict = judge([run("divergence")], Evidence(0.01))
    assert (verdict.outcome, verdict.text) == (Judgement.DOUBTFUL, "within 10%; divergence")


def test_the_end_of_the_runs_outranks_the_loss(run):
    def ended(*runs):
        verdict = judge(runs, Evidence(0.01))
        return verdict.outcome, verdict.text

    failed = run(status="failed", failure=NAN)
    assert ended(failed) == (Judgement.FAILED, "failed at step 37: train/loss is nan at once")
    assert ended(run(), run(status="failed", failure=CRASH), run())[1] == "failed: gone (1 of 3 seeds)"
    assert ended(run(status="stopped"), failed)[0] is Judgement.FAILED
    assert ended(run(status="stopped")) == (Judgement.UNFINISHED, "stopped at step 200")
    assert ended() == (Judgement.UNFINISHED, "not run")
    # a class that ended the run is said once
    assert ended(run("nan", "plateau", status="failed", failure=NAN))[1].startswith("plateau; failed at step 37")


def test_the_standard_error_of_a_gap_is_over_batches_and_over_seeds_that_of_the_gaps(tmp_path):
    def said(name, finals, error):
        ends = [("fp32", seed, 2.62) for seed in range(len(finals))] + [("sgd", *end) for end in enumerate(finals)]
        rows = rows_of(
            write_run(tmp_path / f"{name}-{rule}-{seed}", rule=rule, final=final, seed=seed, final_val_loss_se=error)
            for rule, seed, final in ends
        )
        return measure(rows, rows[0])[1].verdict.text

    assert said("sure", (2.724,), 0.0213) == "behind"
    assert said("lower", (2.516,), 0.0213) == "ahead"
    assert said("noisy", (2.724,), 0.05) == "within 10%"
    assert said("near", (2.72, 2.73, 2.71), 0.05) == "behind"
    assert said("wide", (2.9, 2.5, 2.8), 0.0213) == "within 10%"


def test_runs_that_differ_in_more_than_the_seed_are_rows_named_by_what_differs(tmp_path):
    def labels(*runs):
        """The labels of runs (name, seed, learning rate, value of four settings) and the size of their rows."""
        paths = []
        for name, seed, lr, value in runs:
            paths.append(write_run(tmp_path / f"{len(list(tmp_path.iterdir()))}" / name, rule="fp32", seed=seed, lr=lr))
            if value is not None:
                config = [f"{key}: {value}" for key in "abcd"]
                (paths[-1] / "config.yaml").write_text("\n".join(["rule: fp32", f"seed: {seed}", *config]))
        return [(row.label, len(row.runs)) for row in rows_of(paths)]

    rates = [(f"{lr}-{seed}", seed, lr, None) for lr in (1e-4, 1e-3) for seed in (1, 2)]
    assert labels(*rates) == [("fp32 lr=0.0001", 2), ("fp32 lr=0.001", 2)]
    # no few settings tell these apart: the runs' names do
    many = [("old", 2, 0), ("new", 5, 1)]
    runs = [(f"{name}-{seed}", seed, 1e-3, value) for name, count, value in many for seed in range(1, count + 1)]
    assert labels(*runs) == [("fp32 (old-1, old-2)", 2), ("fp32 (new-1, new-2, new-3 and 2 more)", 5)]
