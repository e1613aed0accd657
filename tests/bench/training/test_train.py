"""A run and its steps: what its folder holds, what its observers see, and how it ends."""

import hashlib
import json
import math

import pytest
import torch
from bench_runs import one_step, recorded, summary_of, trainer_of

from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors import Observer

#: figures of the clock, which no two runs share
CLOCK = ("time/elapsed_s", "time/tokens_per_s")


def test_a_run_writes_its_files_and_the_summary_it_returns(tiny, tmp_path):
    summary = run(tiny(monitor__watch="[stall, trend]"), tmp_path / "r")
    names = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json"}
    assert {path.name for path in (tmp_path / "r").iterdir()} == names | {"SHA256SUMS", "checkpoints"}
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "r" / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((tmp_path / "r" / name).read_bytes()).hexdigest() for name in names}
    assert summary_of(tmp_path / "r") == summary
    expected = {"name": "r", "rule": "bf16-mixed", "format": "none", "status": "finished", "steps": 6}
    expected |= {"steps_planned": 6, "tokens": 6 * 4 * 16, "failure": None, "stall": None}
    assert expected.items() <= summary.items()
    assert summary["bytes_per_parameter"] == pytest.approx(12, rel=0.005)


def test_metrics_have_increasing_steps_and_the_validations_asked_for(tiny, tmp_path):
    summary = run(tiny(train__max_steps=7), tmp_path / "r")
    records = recorded(tmp_path / "r")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["step"] for record in records if "val/loss" in record] == [0, 3, 6, 7]
    assert all({"train/loss", "lr", "grad/norm", "grad/clipped", *CLOCK} <= set(record) for record in records[1:])
    assert [record["tokens"] for record in records] == [64 * step for step in range(8)]
    assert summary["first_val_loss"] == records[0]["val/loss"]
    assert summary["final_val_loss"] == records[-1]["val/loss"]
    assert summary["best_val_loss"] == min(record["val/loss"] for record in records if "val/loss" in record)
    last = records[-1]
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2))  # ASCII: one byte a character


def test_a_loss_that_is_not_finite_fails_the_run_and_writes_null(tiny, tmp_path):
    config = tiny(rule="sgd", optimizer__lr=1e30, optimizer__grad_clip=0, train__max_steps=50, eval__interval=50)
    summary = run(config, tmp_path / "r")
    assert summary["status"] == "failed"
    assert summary["failure"]["kind"] == "nan"
    assert summary["failure"]["step"] == summary["steps"] + 1
    assert summary["final_val_loss"] is None
    assert summary["best_val_loss"] == summary["first_val_loss"]
    last = recorded(tmp_path / "r")[-1]
    assert last["train/loss"] is None
    assert last["step"] == summary["failure"]["step"] + 2
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
    calls = []

    class Recorder(Observer):
        def __getattribute__(self, name):
            if not name.startswith("_"):
                calls.append(name)
            return super().__getattribute__(name)

    one_step(trainer_of(tiny(train__accumulation=2)), 1, Recorder())
    micro = ["before_forward", "after_forward", "after_backward"]
    assert calls == [*micro, *micro, "before_step", "after_step"]


def test_validation_changes_nothing_and_repeats(tiny):
    trainer = trainer_of(tiny(rule="fp32", model__dropout=0.5))
    before = trainer.model.lm_head.weight.clone()
    assert trainer.validate() == trainer.validate()
    assert torch.equal(trainer.model.lm_head.weight, before)
    assert trainer.model.training
