"""More runs than there can be are refused at once, in one line that names the number."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_runs import refusal

from nanogpt_bench.config.settings import load_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.axes import read_axis
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import MOST_RUNS, check_count, count_points, plan_sweep
from nanogpt_bench.sweep.sensitivity import plan_study
from nanogpt_bench.system.errors import LONGEST_ERROR

MILLION = {"optimizer.lr": {"min": 1e-5, "max": 1.0, "points": 10**6}}
LR = {"optimizer.lr": {"min": 1e-5, "max": 1.0}}
SEEDS = {"seed": {"min": 1, "max": 10**9, "scale": "linear", "points": 10**6}}


def sweep(folder: Path, **content: Any) -> Path:
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("content", "words", "count"),
    [
        ({"axes": {**MILLION, **SEEDS, "train.max_steps": {**SEEDS["seed"], "points": 10**30}}}, (), "about "
                                                                                                     "10^42"),
        ({"axes": LR, "search": "random", "samples": 10**9}, (), "1,000,000,000"),
        ({"axes": {"seed": list(range(101)), "rule": ["sgd"], "eval.batches": list(range(1, 101))}}, (), "10,100"),
        ({"axes": {"model.format": ["E4M3"], "seed": SEEDS["seed"]}}, ("--sensitivity",), "1,000,000"),
    ],
)  # fmt: skip
def test_a_sweep_of_too_many_runs(tmp_path, refused, content, words, count):
    """It takes at most two seconds of a core."""
    path, start = sweep(tmp_path, **content), time.process_time()
    message = refused("sweep", path, *words, "--out", tmp_path / "out", "--data.dir=missing")
    assert time.process_time() - start < 2
    assert f"asks for {count} runs; at most {MOST_RUNS:,} are allowed" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


def test_as_many_as_are_allowed_are_counted_and_planned(tmp_path):
    plan = read_sweep(sweep(tmp_path, axes={"seed": [1, 2, 3]}))
    assert count_points(plan) == len(plan_sweep(plan)) == 3
    check_count(MOST_RUNS, "a sweep")
    with refusal("asks for 10,001 runs"):
        check_count(MOST_RUNS + 1, "a sweep")
    patterns = [f"blocks.{number}.attn" for number in range(6000)]
    plan = read_sweep(
        sweep(tmp_path, axes={"model.format": ["E4M3", "E5M2"]}, sensitivity={"patterns": patterns})
    )
    with refusal(r"asks for 12,\d\d\d runs"):
        plan_study(plan)


def test_values_that_are_there_twice_are_found_among_many():
    start = time.process_time()
    with refusal(r"\{'a': \[1\]\} is given twice"):
        read_axis("model.formats", [{"a": [number]} for number in range(9000)] + [{"a": [1]}])
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: " + "9" * 399, "seed: 9"),
        ("model: {formats: {1: E4M3}}", "1 is not allowed as the key of an entry"),
        ("model: {formats: {'*': {weight: E4M3, 2020-01-01: x}}}", "is not allowed as the key of "
                                                                   "an entry"),
        ('"\\e[2J\\u202E\\u2028": 1', "unknown key '\\x1b[2J\\u202e\\u2028'"),
        ("rule: " + "x" * 100_000, "unknown rule 'xxx"),
    ],
)  # fmt: skip
def test_what_a_file_holds_is_quoted_in_one_short_line(tmp_path, text, part):

    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with refusal() as caught:
        resolve(load_config(path))
    message = str(caught.value)
    assert part in message
    assert message.isprintable()
    assert len(message) <= LONGEST_ERROR
