"""The run: files, determinism, failure, interruption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_runs import recorded

from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.outcome import Progress
from nanogpt_bench.loop.train import run
from nanogpt_bench.system.errors import BenchError

Tiny = Callable[..., Config]
#: figures of the clock, which no two runs share
CLOCK = ("time/elapsed_s", "time/tokens_per_s")
#: what depends on the machine and on what else it does
MACHINE = (*CLOCK, "memory/peak_bytes", "shadow/overhead", "mfu")


def without_clock(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in MACHINE} for record in recorded(run_dir)]


def test_a_run_writes_its_files_and_the_summary_it_returns(tiny: Tiny, tmp_path: Path) -> None:
    summary = run(tiny(monitor__gradients=False, alerts__kurtosis=1e9), tmp_path / "r")
    names = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "weights.json", "checkpoints"}
    assert {path.name for path in (tmp_path / "r").iterdir()} == names
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == summary
    assert (summary["name"], summary["rule"], summary["format"], summary["status"]) == (
        "r",
        "bf16-mixed",
        "none",
        "finished",
    )
    assert summary["steps"] == summary["steps_planned"] == 6
    assert summary["tokens"] == 6 * 4 * 16
    assert summary["failure"] is None
    assert summary["bytes_per_parameter"] == pytest.approx(12, rel=0.005)
    assert summary["stall"] is None


def test_metrics_have_increasing_steps_and_the_validations_asked_for(tiny: Tiny, tmp_path: Path) -> None:
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


def test_the_resolved_config_repeats_the_run(tiny: Tiny, tmp_path: Path) -> None:
    from nanogpt_bench.config.rules import RULES
    from nanogpt_bench.config.settings import load_config

    run(tiny(rule="fp32"), tmp_path / "a")
    resolved = tmp_path / "a" / "config.yaml"
    assert yaml.safe_load(resolved.read_text())["optimizer"]["lr"] == RULES["fp32"].lr
    run(load_config(resolved), tmp_path / "b")
    assert without_clock(tmp_path / "a") == without_clock(tmp_path / "b")


@pytest.mark.parametrize("rule", ["fp32", "bf16-mixed", "bf16-pure", "sgd"])
def test_float_rules_learn_and_repeat_bit_for_bit(tiny: Tiny, tmp_path: Path, rule: str) -> None:
    config = tiny(rule=rule, train__max_steps=60, optimizer__lr=0.01, model__dropout=0.1)
    summary = run(config, tmp_path / "a")
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.3
    torch.rand(3)  # the global generator's state does not matter
    run(config, tmp_path / "b")
    assert without_clock(tmp_path / "a") == without_clock(tmp_path / "b")


def test_model_seed_and_data_seed_are_apart(tiny: Tiny, tmp_path: Path) -> None:
    runs = {
        name: records_of(tiny(**seeds), tmp_path / name)
        for name, seeds in {
            "base": {},
            "model": {"model__seed": 7},
            "data": {"data__seed": 7},
        }.items()
    }
    assert runs["model"][0]["val/loss"] != runs["base"][0]["val/loss"]
    assert runs["data"][0]["val/loss"] == runs["base"][0]["val/loss"]
    assert runs["data"][1]["train/loss"] != runs["base"][1]["train/loss"]


def records_of(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    run(config, run_dir)
    return recorded(run_dir)


def test_accumulated_micro_batches_count_as_one_step(tiny: Tiny, tmp_path: Path) -> None:
    summary = run(tiny(train__accumulation=3, train__max_steps=2), tmp_path / "r")
    assert summary["steps"] == 2
    assert summary["tokens"] == 2 * 3 * 4 * 16


def test_a_loss_that_is_not_finite_fails_the_run_and_writes_null(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(rule="sgd", optimizer__lr=1e30, optimizer__grad_clip=0, train__max_steps=50, eval__interval=50)
    summary = run(config, tmp_path / "r")
    assert summary["status"] == "failed"
    assert summary["failure"]["kind"] == "nan"
    assert summary["failure"]["step"] == summary["steps"] + 1
    assert summary["final_val_loss"] is None
    assert summary["best_val_loss"] == summary["first_val_loss"]
    last = recorded(tmp_path / "r")[-1]
    assert last["train/loss"] is None
    assert last["step"] == summary["failure"]["step"] + config.alerts.nan_patience - 1
    assert (last["loss_is_nan"], last["grad_has_nan"]) == (1, 1)


def test_time_is_a_limit(tiny: Tiny, tmp_path: Path) -> None:
    summary = run(tiny(train__max_steps=100_000, train__max_seconds=0.2), tmp_path / "r")
    assert summary["status"] == "stopped"
    assert 0 < summary["steps"] < 100_000
    assert summary["final_val_loss"] == recorded(tmp_path / "r")[-1]["val/loss"]


def test_ctrl_c_leaves_a_summary(tiny: Tiny, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "r", on_progress=interrupt)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", 4)


def test_progress_is_told_after_every_step(tiny: Tiny, tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(tiny(), tmp_path / "r", on_progress=seen.append)
    assert [progress.step for progress in seen] == list(range(7))
    assert seen[-1].max_steps == 6
    assert seen[-1].val_loss == recorded(tmp_path / "r")[-1]["val/loss"]


def test_a_folder_with_a_run_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "r")
    before = (tmp_path / "r" / "metrics.jsonl").read_text()
    with pytest.raises(BenchError, match="already holds a run"):
        run(tiny(), tmp_path / "r")
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "overrides", [{"data__dir": "nowhere"}, {"model__format": "E9M9"}, {"model__block_size": 10**6}]
)
def test_refused_settings_leave_no_folder(tiny: Tiny, tmp_path: Path, overrides: dict[str, object]) -> None:
    with pytest.raises(BenchError):
        run(tiny(**overrides), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_environment_names_versions_corpus_and_command(tiny: Tiny, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run(tiny(runtime__threads=1), tmp_path / "r")
    assert torch.get_num_threads() == threads
    facts = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert facts["libraries"]["torch"] == torch.__version__
    assert facts["threads"] == 1
    assert len(facts["corpus"]["splits"]["train"]["sha256"]) == 64
    assert {"command", "cpu", "cpu_capability", "python", "tokenizer"} <= set(facts)
