"""Runs whose losses can't be set against each other are not judged: the verdict names what differs, everywhere."""

import json
from pathlib import Path

import pytest
import yaml
from laws import each
from run_folders import measured, rows_of, write_run

from nanogpt_bench.report.chart import styles
from nanogpt_bench.report.results import Judgement, measure
from nanogpt_bench.report.rows import find_reference, reference_beside
from nanogpt_bench.report.tables import to_text

CONFIG = {
    "data": {"train_tokens": None},
    "optimizer": {},
    "eval": {"batches": 20, "seed": 1337},
    "model": {"init_from": None, "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32},
    "train": {"max_steps": 200, "batch_size": 12, "accumulation": 1},
}


def described(folder: Path, *, text: str = "fox", tokenizer: str = "char", **settings: dict[str, object]) -> Path:
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


@pytest.fixture
def judged(tmp_path):
    """The result of a run that differs from its reference as given."""
    made = iter(range(100))

    def compare(**differences):
        folder = tmp_path / str(next(made))
        base = described(write_run(folder / "a"))
        other = described(write_run(folder / "b", rule="nearest", fmt="E4M3", final=1.1), **differences)
        return measured([base, other])[1]

    return compare


@each(
    ("differences", "named"),
    [
        ({"text": "hen"}, "corpus"),
        ({"tokenizer": "byte"}, "tokenizer"),
        ({"text": "hen", "tokenizer": "byte"}, "corpus, tokenizer"),
        ({"model": {"n_layer": 3}}, "size"),
        ({"model": {"block_size": 64}}, "size"),
        ({"model": {"init_from": "gpt2"}}, "first weights"),
        ({"train": {"max_steps": 100}}, "steps"),
        ({"train": {"accumulation": 2}}, "batch size"),
        ({"train": {"batch_size": 4, "accumulation": 3}}, "validation"),
        ({"data": {"train_tokens": 1000}}, "training tokens"),
        ({"eval": {"batches": 2}}, "validation"),
        ({"text": "hen", "train": {"max_steps": 100}}, "corpus, steps"),
    ],
)
def test_the_verdict_names_what_differs_and_gap_and_marks_stay_empty(judged, differences, named):
    result = judged(**differences)
    assert (result.verdict.outcome, result.verdict.text) == (Judgement.INCOMPARABLE, f"not comparable: {named}")
    assert (result.gap, result.gap_share) == (None, None)


@pytest.fixture
def grid(tmp_path):
    """The rows of every rule given at 100 and 200 steps; the losses of the longer runs are 1 lower."""

    def rows(*rules, **settings):
        runs = []
        for steps in (100, 200):
            for rule, fmt, final in rules:
                folder = write_run(tmp_path / f"{rule}-{steps}", rule=rule, fmt=fmt, final=final - (steps == 200))
                runs.append(described(folder, train={"max_steps": steps}, **settings))
        return rows_of(runs)

    return rows


def test_each_number_of_steps_has_the_reference_of_its_own(grid):
    results = measure(rows := grid(("bf16-mixed", "none", 4.0), ("nearest", "E4M3", 4.2)), find_reference(rows))
    assert [result.verdict.text for result in results] == ["reference", "within 10%"] * 2
    assert [result.gap and round(result.gap.mean, 9) for result in results] == [0, 0.2] * 2
    assert [round(result.gap_share, 4) for result in results[1::2]] == [round(0.2 / 4, 4), round(0.2 / 3, 4)]
    assert to_text(results).count("gap to BF16") == 1
    references = [result.row for result in results if result.reference]
    assert [reference_beside(row.runs[0], references)[0].label for row in rows[1::2]] == [r.label for r in rows[::2]]
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
    assert "run (one seed: a lead)" in heading
    assert "gap to E4M3 nearest |" in heading


def test_tuned_rates_do_not_decide_which_row_stands_in_for_the_reference(tmp_path):
    """On another text a row may be best at the rates that another row has on this one."""
    runs = []
    for text, beta2, lr in (("hen", 0.95, 0.1), ("egg", 0.99, 0.1), ("egg", 0.95, 0.2)):
        folder = write_run(tmp_path / f"{text}-{beta2}", rule="nearest", fmt="E4M3")
        runs.append(described(folder, text=text, optimizer={"lr": lr, "beta2": beta2}))
    rows = rows_of(runs)
    assert [result.reference for result in measure(rows, rows[0])] == [True, False, True]
