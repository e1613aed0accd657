"""Runs: the rate's schedule, what is entered, where a run ends, and what it leaves."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bench_runs import flags, one_step, recorded, summary_of, train, trainer_of

import nanogpt_bench
from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.config.schema import COURSES, OptimizerConfig
from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors import Observer
from nanogpt_bench.runs.load import has_ended, make_ready
from nanogpt_bench.setup.optimizers import lr_factor, stiffness_at
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.plan import plan_point
from nanogpt_bench.sweep.record import SweepRecord


def test_a_run_writes_its_files_and_the_summary_it_returns(tiny, tmp_path):
    summary = run(tiny(monitor__watch="[stall, trend]"), tmp_path / "r")
    names = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json"}
    assert {path.name for path in (tmp_path / "r").iterdir()} == names | {
        "SHA256SUMS",
        "checkpoints",
    }
    sums = dict(
        reversed(line.split("  "))
        for line in (tmp_path / "r" / "SHA256SUMS").read_text().splitlines()
    )
    assert sums == {
        name: hashlib.sha256((tmp_path / "r" / name).read_bytes()).hexdigest() for name in names
    }
    assert summary_of(tmp_path / "r") == summary
    expected = {
        "name": "r",
        "rule": "bf16-mixed",
        "format": "none",
        "status": "finished",
        "steps": 6,
    }
    expected |= {"steps_planned": 6, "tokens": 6 * 4 * 16, "failure": None, "stall": None}
    assert expected.items() <= summary.items()
    assert summary["bytes_per_parameter"] == pytest.approx(12, rel=0.005)


def test_metrics_have_increasing_steps_and_the_validations_asked_for(tiny, tmp_path):
    summary = run(tiny(train__max_steps=7), tmp_path / "r")
    records = recorded(tmp_path / "r")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["step"] for record in records if "val/loss" in record] == [0, 3, 6, 7]
    metrics = {
        "train/loss",
        "lr",
        "grad/norm",
        "grad/clipped",
        "time/elapsed_s",
        "time/tokens_per_s",
    }
    assert all(metrics <= record.keys() for record in records[1:])
    assert [record["tokens"] for record in records] == [64 * step for step in range(8)]
    assert summary["first_val_loss"] == records[0]["val/loss"]
    assert summary["final_val_loss"] == records[-1]["val/loss"]
    assert summary["best_val_loss"] == min(
        record["val/loss"] for record in records if "val/loss" in record
    )
    last = records[-1]
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    assert last["val/bits_per_byte"] == pytest.approx(
        last["val/loss"] / math.log(2)
    )  # ASCII: one byte a character


def test_a_loss_that_is_not_finite_fails_the_run_and_writes_null(tiny, tmp_path):
    config = tiny(
        rule="sgd",
        optimizer__lr=1e30,
        optimizer__grad_clip=0,
        train__max_steps=50,
        eval__interval=50,
    )
    summary = run(config, tmp_path / "r")
    assert (summary["status"], summary["failure"]["kind"]) == ("failed", "nan")
    assert summary["failure"]["step"] == summary["steps"] + 1
    assert (summary["final_val_loss"], summary["best_val_loss"]) == (
        None,
        summary["first_val_loss"],
    )
    last = recorded(tmp_path / "r")[-1]  # two more steps are tried before the run fails
    assert (last["train/loss"], last["step"]) == (None, summary["failure"]["step"] + 2)
    assert (last["loss_is_nan"], last["grad_has_nan"]) == (1, 1)


def test_time_is_a_limit(tiny, tmp_path):
    summary = run(tiny(train__max_steps=100_000, train__max_seconds=0.2), tmp_path / "r")
    assert summary["status"] == "stopped"
    assert 0 < summary["steps"] < 100_000
    assert summary["final_val_loss"] == recorded(tmp_path / "r")[-1]["val/loss"]


def test_the_environment_names_versions_corpus_and_command(tiny, tmp_path):
    threads = torch.get_num_threads()
    run(tiny(runtime__threads=1), tmp_path / "r")
    assert torch.get_num_threads() == threads
    facts = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert facts["libraries"]["torch"] == torch.__version__
    assert facts["threads"] == 1
    assert len(facts["corpus"]["splits"]["train"]["sha256"]) == 64
    assert {"command", "cpu", "cpu_capability", "python", "tokenizer"} <= set(facts)


def test_the_points_of_a_step_come_in_their_order(tiny):
    recorder = Mock(spec=Observer)
    one_step(trainer_of(tiny(train__accumulation=2)), 1, recorder)
    micro = ["before_forward", "after_forward", "after_backward"]
    assert [name for name, *_ in recorder.method_calls] == [
        *micro,
        *micro,
        "before_step",
        "after_step",
    ]


def test_validation_changes_nothing_and_repeats(tiny):
    trainer = trainer_of(tiny(rule="fp32", model__dropout=0.5))
    old_weight = trainer.model.lm_head.weight.clone()
    assert trainer.validate() == trainer.validate()
    assert torch.equal(trainer.model.lm_head.weight, old_weight)
    assert trainer.model.training


#: settings, and the factors from a step on
FACTORS = [
    ({"warmup_steps": 9}, 0, [step / 10 for step in range(1, 11)]),
    ({"warmup_steps": 0, "schedule": "trapezoid", "min_lr_ratio": 0.0}, 0, [1.0] * 80),
    (
        {"warmup_steps": 0, "schedule": "trapezoid", "min_lr_ratio": 0.0},
        80,
        [1 - step / 20 for step in range(21)],
    ),
    (
        {"warmup_steps": 20, "schedule": "linear", "min_lr_ratio": 0.0},
        20,
        [1 - step / 80 for step in range(81)],
    ),
    (
        {"warmup_steps": 10, "schedule": "step", "step_at": 0.25, "min_lr_ratio": 0.1},
        10,
        [1.0] * 15 + [0.1] * 76,
    ),
]


@pytest.mark.parametrize(("settings", "start", "expected"), FACTORS)
def test_a_schedule_has_its_factors(settings, start, expected):
    factors = [
        lr_factor(OptimizerConfig(**settings), step, 100)
        for step in range(start, start + len(expected))
    ]
    assert factors == pytest.approx(expected)


#: what is left of the way after 0, 2, 4, 6 and 8 of 8 steps
LEFT_OUT = {
    "linear": [1, 0.75, 0.5, 0.25, 0],
    "cosine": [1, 0.8536, 0.5, 0.1464, 0],
    "step": [1, 1, 0, 0, 0],
}


@pytest.mark.parametrize("course", COURSES)
def test_k_follows_its_course_by_name(tiny, course):
    options = {"optimizer__stiffness_schedule": course, "train__max_steps": 8}
    config = resolve(tiny(rule="stiffness-anneal", model__format="E4M3", **options))
    assert [stiffness_at(config, step) for step in range(0, 9, 2)] == pytest.approx(
        LEFT_OUT[course], abs=1e-4
    )
    train(trainer_of(config), 1)  # and the optimizer takes it


@pytest.mark.parametrize("rule", ["muon-stochastic", "stochastic-8bit"])
def test_the_last_steps_are_written_back_in_another_way(tiny, rule, tmp_path):
    """Residuals come to be at the fourth of six steps."""
    options = {"optimizer__writeback_end": "residual8", "optimizer__step_at": 0.5}
    config, plain = (
        tiny(rule=rule, model__format="E4M3", train__max_steps=6, **overrides)
        for overrides in (options, {})
    )
    trainer, observed = trainer_of(config), []
    for number in range(1, 7):
        one_step(trainer, number)
        observed.append(any("residual" in state for state in trainer.optimizer.state.values()))
    assert observed == [False] * 3 + [True] * 3
    whole, other_run = (
        run(config, tmp_path / name) for name, config in (("whole", config), ("other", plain))
    )
    assert whole["bytes_per_quantized_parameter"] > other_run["bytes_per_quantized_parameter"]


def test_the_rate_in_ulps_follows_the_schedule_of_the_learning_rate(tiny):
    options = {
        "optimizer__schedule": "step",
        "optimizer__warmup_steps": 0,
        "optimizer__min_lr_ratio": 0.5,
    }
    trainer = trainer_of(
        tiny(rule="riemannian", model__format="E4M3", train__max_steps=4, **options)
    )
    rates = []
    for number in range(1, 5):
        rates.append(
            (one_step(trainer, number).record["lr"], trainer.optimizer.param_groups[0]["lr"])
        )
    assert rates == [(0.5, 0.5)] * 2 + [(0.25, 0.25)] * 2


#: files of whose functions a run calls one, and files that it imports at all
MOST_ENTERED, MOST_IMPORTED = 61, 69
#: a command line under a profiler, which writes down how often every function of the
#: bench was called
COUNT = """
import json, sys
from collections import Counter
from nanogpt_bench.cli import main

calls = Counter()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(sys.argv[1]) and code.co_name != "<module>":
        calls[f"{code.co_filename}:{code.co_qualname}"] += 1

sys.setprofile(note)
code = main(sys.argv[3:])
sys.setprofile(None)
imported = [name for name in sys.modules if name.partition(".")[0] == "nanogpt_bench"]
print(json.dumps([code, calls, imported]), file=open(sys.argv[2], "w"))
"""


def test_a_run_enters_few_files_imports_what_it_uses_and_is_resolved_once(
    working_folder, corpus_dir
):
    """Count calls by FILE:FUNCTION of a run of the shipped e4m3.yaml.

    Also the modules of the bench that it imports.
    """
    words = ["run", "e4m3.yaml", "--train.max_steps=5", "--train.batch_size=4", "--eval.batches=2"]
    words += [
        f"--data.dir={corpus_dir}",
        *flags({"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16}),
    ]
    bench = str(Path(nanogpt_bench.__file__).parent)
    subprocess.run(
        [sys.executable, "-c", COUNT, bench, "calls.json", *words], check=True, timeout=300
    )
    code, calls, imported = json.loads(Path("calls.json").read_text())
    assert code == 0
    assert len({place.rpartition(":")[0] for place in calls}) <= MOST_ENTERED
    assert len(imported) <= MOST_IMPORTED
    # neither pages nor sweeps, nor what prepares texts or reads models of others
    foreign = (
        "report",
        "sweep",
        "workers",
        "evaluation",
        "data.text",
        "data.write",
        "model.causal",
        "setup.start",
    )
    assert [
        name for name in imported if name.removeprefix("nanogpt_bench.").startswith(foreign)
    ] == []
    assert calls[f"{bench}/setup/resolve.py:resolve"] == 1


FAILED = {"status": "failed", "stop": None}


@pytest.mark.parametrize(
    ("summary", "ended"),
    [
        ({"status": "finished"}, True),
        ({**FAILED, "failure": {"kind": "nan"}}, True),
        ({**FAILED, "failure": {"kind": "divergence"}}, True),
        ({"status": "stopped", "stop": {"kind": "plateau"}}, True),
        ({"status": "stopped", "stop": {"kind": "time"}}, True),
        *(
            ({**FAILED, "failure": {"kind": kind}}, False)
            for kind in ("crash", "OSError", "BenchError", "MemoryError")
        ),
        *(
            ({"status": "stopped", "stop": {"kind": kind}}, False)
            for kind in ("signal", "disk", "killed")
        ),
        ({"status": "stopped", "stop": None}, False),
        ({**FAILED, "failure": None}, False),
        ({}, False),
    ],
)
def test_only_what_the_training_brought_about_is_an_end(summary, ended):
    assert has_ended(summary) is ended


@pytest.mark.parametrize(
    ("kind", "again"), [("FileNotFoundError", True), ("crash", True), ("nan", False)]
)
def test_a_sweep_tries_again_what_an_outside_cause_ended(tmp_path, kind, again):
    run, record = (
        plan_point({"train.max_steps": 4}, {"rule": "fp32"}),
        SweepRecord(tmp_path, "grid"),
    )
    record.add(run)
    record.note_failure(run, {"kind": kind, "message": "it is gone", "traceback": "Traceback"})
    assert summary_of(tmp_path / run.name)["failure"]["kind"] == kind
    assert record.unfinished() == ([run] if again else [])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_a_failed_attempt_left_does_not_stay(tmp_path, checkpoint):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "traceback.txt").touch()
    if checkpoint:
        (folder / "checkpoints").mkdir()
        step_file(folder, 3).touch()
    assert make_ready(folder) is checkpoint
    assert not (folder / "traceback.txt").exists()
