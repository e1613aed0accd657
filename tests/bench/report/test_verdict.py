"""The verdict says what happened, and names what makes runs incomparable."""

import json
from itertools import product
from pathlib import Path

import pytest
import yaml
from run_folders import measured, rows_of, write_run

from nanogpt_bench.report.results import measure
from nanogpt_bench.report.row_styles import styles
from nanogpt_bench.report.rows import find_reference, reference_beside
from nanogpt_bench.report.tables import to_text
from nanogpt_bench.report.verdicts import Judgement, RowComparison, judge_row
from nanogpt_bench.runs.load import load_run

NAN = {"kind": "nan", "message": "train/loss is nan\nat once", "step": 37}
CRASH = {"kind": "crash", "message": "gone", "step": None}


@pytest.fixture
def run(tmp_path):
    """Make a run in whose records some classes of failure are found.

    Its summary is changed as asked.
    """

    def make(*kinds, **changes):
        failures = [{"kind": kind, "step": 7} for kind in kinds]
        return load_run(
            write_run(
                tmp_path / f"run{len(list(tmp_path.iterdir()))}", failures=failures, **changes
            )
        )

    return make


@pytest.mark.parametrize(
    ("evidence", "outcome", "text"),
    [
        # the loss
        (RowComparison(-0.05), Judgement.WITHIN, "within 10%"),
        (RowComparison(0.10), Judgement.WITHIN, "within 10%"),
        (RowComparison(0.1001), Judgement.OUTSIDE, "outside 10%"),
        (RowComparison(), Judgement.UNKNOWN, "no finished reference"),
        (RowComparison(lacks_reference=True), Judgement.UNKNOWN, "finished"),
        (
            RowComparison(differing_facts=("corpus", "steps")),
            Judgement.INCOMPARABLE,
            "not comparable: corpus, steps",
        ),
        # its noise: twice the standard error, and enough to matter; of no known error
        # nothing is behind
        (RowComparison(0.04, gap=0.104, gap_error=0.03), Judgement.BEHIND, "behind"),
        (RowComparison(0.04, gap=0.104, gap_error=0.06), Judgement.WITHIN, "within 10%"),
        (RowComparison(0.02, gap=0.04, gap_error=0.001), Judgement.WITHIN, "within 10%"),
        (RowComparison(-0.2, gap=-0.4, gap_error=0.03), Judgement.AHEAD, "ahead"),
        (RowComparison(-0.04, gap=-0.104, gap_error=0.03), Judgement.AHEAD, "ahead"),
        (RowComparison(-0.11), Judgement.AHEAD, "ahead"),
        (RowComparison(-0.11, cosine=0.9), Judgement.DOUBTFUL, "ahead; cosine 0.90"),
        (RowComparison(0.04, gap=0.104), Judgement.WITHIN, "within 10%"),
        # a reference that has hardly trained: an untrained row would be within 10%
        (
            RowComparison(0.01, reference_fall=0.1),
            Judgement.UNKNOWN,
            "too early",
        ),
        (
            RowComparison(0.01, reference_fall=-0.02),
            Judgement.UNKNOWN,
            "too early",
        ),
        (RowComparison(0.01, reference_fall=0.11), Judgement.WITHIN, "within 10%"),
        (RowComparison(0.2, reference_fall=0.05), Judgement.OUTSIDE, "outside 10%"),
        (
            RowComparison(0.04, gap=0.104, gap_error=0.03, reference_fall=0.05),
            Judgement.BEHIND,
            "behind",
        ),
        # a stall is named where the loss is short of the reference
        (RowComparison(0.3, 0.5), Judgement.OUTSIDE, "outside 10%; stall 50%"),
        (RowComparison(0.3, 0.49), Judgement.OUTSIDE, "outside 10%"),
        (RowComparison(0.01, 0.9), Judgement.WITHIN, "within 10%"),
        # gradients make a row doubtful
        (RowComparison(0.01, cosine=0.91), Judgement.WITHIN, "within 10%"),
        (RowComparison(0.01, cosine=0.9), Judgement.DOUBTFUL, "within 10%; cosine 0.90"),
        (
            RowComparison(0.2, cosine=0.3, stall=0.6),
            Judgement.OUTSIDE,
            "outside 10%; cosine 0.30; stall 60%",
        ),
        (RowComparison(0.0, cosine=0.3, reference=True), Judgement.REFERENCE, "reference"),
    ],
)
def test_limits_decide(run, evidence, outcome, text):
    verdict = judge_row([run()], evidence)
    assert (verdict.outcome, verdict.text) == (outcome, text)


@pytest.mark.parametrize(
    ("kinds", "evidence", "text"),
    [
        (["divergence"], RowComparison(4.0, stall=0.89), "divergence; outside 10%; stall 89%"),
        (["divergence"], RowComparison(), "divergence; no finished reference"),
        (
            ["divergence"],
            RowComparison(differing_facts=("steps",)),
            "divergence; not comparable: steps",
        ),
        (["divergence"], RowComparison(0.0, reference=True), "reference; divergence"),
        (
            ["stall", "divergence"],
            RowComparison(0.3, stall=0.9),
            "divergence, stall 90%; outside 10%",
        ),
        (
            ["zero_gradients", "plateau", "nan"],
            RowComparison(0.3),
            "NaN, zero gradients and 1 more; outside 10%",
        ),
        (["plateau"], RowComparison(0.01), "within 10%"),
        (
            ["plateau"],
            RowComparison(differing_facts=("corpus", "steps")),
            "not comparable: corpus, steps",
        ),
    ],
)
def test_the_class_of_failure_leads_where_a_row_is_short_of_the_reference(
    run, kinds, evidence, text
):
    assert judge_row([run(*kinds)], evidence).text == text


def test_a_diverged_row_within_reach_is_doubtful_and_seeds_are_counted(run):
    assert (
        judge_row([run("divergence"), run()], RowComparison(0.3)).text
        == "divergence (1 of 2 seeds); outside 10%"
    )
    verdict = judge_row([run("divergence")], RowComparison(0.01))
    assert (verdict.outcome, verdict.text) == (Judgement.DOUBTFUL, "within 10%; divergence")


def test_the_end_of_the_runs_outranks_the_loss(run):
    def ended(*runs):
        verdict = judge_row(runs, RowComparison(0.01))
        return verdict.outcome, verdict.text

    failed = run(status="failed", failure=NAN)
    assert ended(failed) == (Judgement.FAILED, "failed at step 37: train/loss is nan at once")
    assert (
        ended(run(), run(status="failed", failure=CRASH), run())[1] == "failed: gone (1 of 3 seeds)"
    )
    assert ended(run(status="stopped"), failed)[0] is Judgement.FAILED
    assert ended(run(status="stopped")) == (Judgement.UNFINISHED, "stopped at step 200")
    at_once = {"kind": "time", "message": "max_seconds 60", "step": 90}
    assert ended(run(status="stopped", stop=at_once))[1] == "stopped at step 90: max_seconds 60"
    assert ended() == (Judgement.UNFINISHED, "not run")
    # a class that ended the run is said once
    assert ended(run("nan", "plateau", status="failed", failure=NAN))[1].startswith(
        "plateau; failed at step 37"
    )


def test_the_standard_error_of_a_gap_is_over_batches_and_over_seeds_that_of_the_gaps(tmp_path):
    def verdict_of(name, finals, error):
        ends = [("fp32", seed, 2.62) for seed in range(len(finals))] + [
            ("sgd", *end) for end in enumerate(finals)
        ]
        rows = rows_of(
            write_run(
                tmp_path / f"{name}-{rule}-{seed}",
                rule=rule,
                final=final,
                seed=seed,
                final_val_loss_se=error,
            )
            for rule, seed, final in ends
        )
        return measure(rows, rows[0])[1].verdict.text

    assert verdict_of("sure", (2.724,), 0.0213) == "behind"
    assert verdict_of("lower", (2.516,), 0.0213) == "ahead"
    assert verdict_of("noisy", (2.724,), 0.05) == "within 10%"
    assert verdict_of("near", (2.72, 2.73, 2.71), 0.05) == "behind"
    assert verdict_of("wide", (2.9, 2.5, 2.8), 0.0213) == "within 10%"


def test_a_reference_that_hardly_fell_gives_no_verdict(tmp_path):
    """An untrained row is within a tenth of it."""
    texts = []
    for first in (2.2, 5.5):
        rows = rows_of(
            write_run(
                tmp_path / f"{rule}-{first}",
                rule=rule,
                final=2.1,
                first_val_loss=first,
                final_val_loss_se=0.01,
            )
            for rule in ("fp32", "sgd")
        )
        texts.append(measure(rows, rows[0])[1].verdict.text)
    assert texts == ["too early", "within 10%"]


def test_runs_that_differ_in_more_than_the_seed_are_rows_named_by_what_differs(tmp_path):
    def labels(*runs):
        """Return the labels of runs, and the size of their rows.

        A run is (name, seed, learning rate, value of four settings).
        """
        paths = []
        for name, seed, lr, value in runs:
            paths.append(
                write_run(
                    tmp_path / f"{len(list(tmp_path.iterdir()))}" / name,
                    rule="fp32",
                    seed=seed,
                    lr=lr,
                )
            )
            if value is not None:
                config = [f"{key}: {value}" for key in "abcd"]
                (paths[-1] / "config.yaml").write_text(
                    "\n".join(["rule: fp32", f"seed: {seed}", *config])
                )
        return [(row.label, len(row.runs)) for row in rows_of(paths)]

    rates = [(f"{lr}-{seed}", seed, lr, None) for lr, seed in product((1e-4, 1e-3), (1, 2))]
    assert labels(*rates) == [("fp32 lr=0.0001", 2), ("fp32 lr=0.001", 2)]
    # no few settings tell these apart: the runs' names do
    old = [(f"old-{seed}", seed, 1e-3, 0) for seed in range(1, 3)]
    new = [(f"new-{seed}", seed, 1e-3, 1) for seed in range(1, 6)]
    assert labels(*old, *new) == [
        ("fp32 (old-1, old-2)", 2),
        ("fp32 (new-1, new-2, new-3 and 2 more)", 5),
    ]


def test_seeds_of_one_row_may_be_tracked_and_saved_differently(tmp_path):
    paths = []
    for seed, section in ((1, {"wandb_id": "a"}), (2, {"wandb_id": "b"})):
        paths.append(write_run(tmp_path / str(seed), rule="fp32", seed=seed))
        path = paths[-1] / "config.yaml"
        config = yaml.safe_load(path.read_text())
        saved = {"every": 10 * seed}
        path.write_text(yaml.safe_dump({**config, "tracking": section, "checkpoint": saved}))
    assert [(row.label, len(row.runs)) for row in rows_of(paths)] == [("fp32", 2)]


def test_settings_of_one_last_word_keep_their_whole_names(tmp_path):
    paths = []
    for interval in (10, 20):
        paths.append(write_run(tmp_path / str(interval), rule="fp32"))
        path = paths[-1] / "config.yaml"
        config = yaml.safe_load(path.read_text())
        sections = {"eval": {"interval": interval}, "monitor": {"interval": 2 * interval}}
        path.write_text(yaml.safe_dump(config | sections))
    assert [row.label for row in rows_of(paths)] == [
        "fp32 eval.interval=10 monitor.interval=20",
        "fp32 eval.interval=20 monitor.interval=40",
    ]


CONFIG = {
    "data": {"train_tokens": None},
    "optimizer": {},
    "eval": {"batches": 20},
    "model": {"init_from": None, "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32},
    "train": {"max_steps": 200, "batch_size": 12, "accumulation": 1},
}


def described(
    folder: Path, *, text: str = "fox", tokenizer: str = "char", **settings: dict[str, object]
) -> Path:
    """A run folder that says what it was trained on, and how."""
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for section, values in CONFIG.items():
        config[section] = {**config.get(section, {}), **values, **settings.get(section, {})}
    path.write_text(yaml.safe_dump(config))
    splits = {split: {"sha256": f"{text} {tokenizer} {split}"} for split in ("train", "val")}
    corpus = {"source": {"file": text}, "splits": splits}
    (folder / "environment.json").write_text(json.dumps({"corpus": corpus, "tokenizer": tokenizer}))
    return folder


@pytest.mark.parametrize(
    ("differences", "named"),
    [
        ({"text": "hen"}, "corpus"),
        ({"tokenizer": "byte"}, "tokenizer"),
        ({"model": {"n_layer": 3}}, "size"),
        ({"model": {"init_from": "gpt2"}}, "first weights"),
        ({"train": {"max_steps": 100}}, "steps"),
        ({"train": {"accumulation": 2}}, "batch size"),
        ({"train": {"batch_size": 4, "accumulation": 3}}, "validation"),
        ({"data": {"train_tokens": 1000}}, "training tokens"),
        ({"eval": {"batches": 2}}, "validation"),
        # Configurations of earlier releases have the seed of the validation's draw.
        ({"eval": {"seed": 7}}, "validation"),
        ({"text": "hen", "train": {"max_steps": 100}}, "corpus, steps"),
    ],
)
def test_the_verdict_names_what_differs_and_gap_and_marks_stay_empty(tmp_path, differences, named):
    folder = tmp_path / str(differences)
    second = described(
        write_run(folder / "b", rule="nearest", fmt="E4M3", final=1.1), **differences
    )
    _, result = measured([described(write_run(folder / "a")), second])
    assert (result.verdict.outcome, result.verdict.text) == (
        Judgement.INCOMPARABLE,
        f"not comparable: {named}",
    )
    assert (result.gap, result.gap_share) == (None, None)


def with_other_text(folder, digest, gpu=None):
    """Say in a run's records which other text it was measured on, and by which GPU."""
    path = folder / "environment.json"
    other = {"splits": {"val": {"sha256": digest}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"also": other, "gpu": gpu}))
    return folder


@pytest.mark.parametrize(("digest", "is_subtracted"), [("hen", False), ("fox", True)])
def test_losses_on_two_other_texts_are_not_subtracted(tmp_path, digest, is_subtracted):
    folders = []
    for rule, text in (("bf16-mixed", "fox"), ("sgd", digest)):
        for seed in (1, 2):
            losses = {"also_loss": 2.5 + 0.01 * seed}
            folder = write_run(tmp_path / f"{rule}-{seed}", rule=rule, seed=seed, **losses)
            folders.append(with_other_text(described(folder), text))
    _, result = measured(folders)
    assert result.difference is not None
    assert (result.also_difference is not None) == is_subtracted


@pytest.mark.parametrize(("device", "apart"), [("auto", True), ("cpu", False)])
def test_runs_of_two_gpus_are_apart(tmp_path, device, apart):
    folders = []
    for rule, gpu in (("bf16-mixed", "H100"), ("sgd", "A100")):
        for seed in (1, 2):
            folder = described(write_run(tmp_path / f"{rule}-{seed}", rule=rule, seed=seed))
            config = yaml.safe_load((folder / "config.yaml").read_text())
            runtime = {"runtime": {"device": device}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config | runtime))
            folders.append(with_other_text(folder, "fox", gpu))
    _, result = measured(folders)
    assert result.difference.apart is apart


def test_the_draw_of_validations_batches_that_earlier_releases_state_is_todays(tmp_path):
    earlier = described(write_run(tmp_path / "a"), eval={"seed": 1337})
    today = described(write_run(tmp_path / "b", rule="nearest", fmt="E4M3", final=1.1))
    _, result = measured([earlier, today])
    assert result.verdict.outcome is not Judgement.INCOMPARABLE


def test_each_number_of_steps_has_the_reference_of_its_own(tmp_path):
    paths = []
    for steps, lower in ((100, 0), (200, 1)):
        folder = tmp_path / str(steps)
        reference = write_run(folder / "a", rule="bf16-mixed", fmt="none", final=4.0 - lower)
        nearest = write_run(folder / "b", rule="nearest", fmt="E4M3", final=4.2 - lower)
        for path in (reference, nearest):
            paths.append(described(path, train={"max_steps": steps}))
    rows = rows_of(paths)
    results = measure(rows, find_reference(rows))
    assert [result.verdict.text for result in results] == ["reference", "within 10%"] * 2
    assert [result.gap and round(result.gap.mean, 9) for result in results] == [0, 0.2] * 2
    assert [round(result.gap_share, 4) for result in results[1::2]] == [
        round(0.2 / 4, 4),
        round(0.2 / 3, 4),
    ]
    assert to_text(results).count("gap to BF16") == 1
    references = [result.row for result in results if result.reference]
    assert [reference_beside(row.runs[0], references)[0].label for row in rows[1::2]] == [
        r.label for r in rows[::2]
    ]
    shown = styles(rows, *references)
    assert [shown[row.label].colour is None for row in rows] == [True, False] * 2
    assert len({(style.colour, style.dash) for style in shown.values()}) == 4


def test_of_several_rows_the_one_most_like_the_reference_named_stands_in_for_it(tmp_path):
    runs = []
    for steps, lr in ((100, 0.1), (200, 0.3), (200, 0.1), (200, 0.2)):
        folder = write_run(tmp_path / f"{steps}-{lr}", rule="nearest", fmt="E4M3")
        runs.append(described(folder, train={"max_steps": steps}, optimizer={"lr": lr}))
    rows = rows_of(runs)
    assert rows[0].label == "E4M3 nearest lr=0.1 max_steps=100"
    results = measure(rows, rows[0])
    assert [result.reference for result in results] == [True, False, True, False]
    heading = to_text(results).splitlines()[0]
    assert "run (one seed: a hint)" in heading
    assert "gap to E4M3 nearest |" in heading


def test_tuned_rates_do_not_decide_which_row_stands_in_for_the_reference(tmp_path):
    """On another text a row may be best at the rates that another row has on this one."""
    runs = []
    for text, beta2, lr in (("hen", 0.95, 0.1), ("egg", 0.99, 0.1), ("egg", 0.95, 0.2)):
        folder = write_run(tmp_path / f"{text}-{beta2}", rule="nearest", fmt="E4M3")
        runs.append(described(folder, text=text, optimizer={"lr": lr, "beta2": beta2}))
    rows = rows_of(runs)
    assert [result.reference for result in measure(rows, rows[0])] == [True, False, True]


@pytest.mark.parametrize(
    ("digests", "names", "rows"),
    [
        ("aaa", ("data/x", "./data/x", "/somewhere/data/x"), [3]),
        ("abc", ("data/x", "data/x", "data/x"), [1, 1, 1]),
    ],
    ids=["one text", "three texts"],
)
def test_a_text_is_known_by_its_digests_not_by_its_folders_name(digests, names, rows, tmp_path):
    """Under one name there may be several texts, and one text under several."""
    folders = []
    for seed, (digest, name) in enumerate(zip(digests, names, strict=True)):
        folder = write_run(tmp_path / str(seed), seed=seed)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "data": {"dir": name}}))
        splits = {split: {"sha256": digest} for split in ("train", "val")}
        environment = {"corpus": {"splits": splits}}
        (folder / "environment.json").write_text(json.dumps(environment))
        folders.append(folder)
    assert [len(row.runs) for row in rows_of(folders)] == rows
