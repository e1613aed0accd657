"""Trackers: what they are sent, and that one that fails is dropped."""

from __future__ import annotations

import json
import logging
import struct
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from bench_runs import Tiny, recorded, refusal
from safetensors.torch import load_file

from nanogpt_bench.checkpoint import read_checkpoint, step_file
from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop import trackers as build
from nanogpt_bench.loop.train import run


@pytest.fixture
def recorder(monkeypatch):
    """Takes the place of TensorBoard."""
    tracker = Mock(facts={"name": "tensorboard", "id": "abc"})
    monkeypatch.setattr(build, "TensorBoardTracker", lambda run_dir, resumed_step: tracker)
    return tracker


def tracked(tiny: Tiny) -> Config:
    return tiny(rule="fp32", tracking__tensorboard=True, train__max_steps=3)


def test_a_tracker_gets_every_record_once_and_the_summary(tiny, tmp_path, recorder):
    summary = run(tracked(tiny), tmp_path / "r")
    records = recorded(tmp_path / "r")
    assert [call.args for call in recorder.log.call_args_list] == [
        (
            record["step"],
            {key: value for key, value in record.items() if key != "step" and value is not None},
        )
        for record in records
    ]
    assert recorder.method_calls[-1][0] == "finish"
    assert recorder.finish.call_args.args[0]["final_val_loss"] == summary["final_val_loss"]
    assert summary["trackers"] == {"tensorboard": {**recorder.facts, "dropped": None}}
    assert json.loads((tmp_path / "r" / "tracking.json").read_text()) == summary["trackers"]


@pytest.mark.parametrize("point", ["log", "histograms", "finish"])
def test_a_tracker_that_raises_is_reported_once_and_dropped(
    tiny, tmp_path, recorder, caplog, point
):
    getattr(recorder, point).side_effect = OSError(f"{point}\nis broken")
    with caplog.at_level(logging.WARNING, "nanogpt_bench"):
        summary = run(tracked(tiny), tmp_path / "r")
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert getattr(recorder, point).call_count == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"tracker tensorboard is dropped, and the training goes on: OSError: {point} is broken"
    ]
    assert summary["trackers"]["tensorboard"]["dropped"] == f"OSError: {point} is broken"


def test_a_tracker_gets_histograms_of_weights_and_gradients_when_they_are_due(
    tiny, tmp_path, recorder, monkeypatch
):
    monkeypatch.setattr(build, "HISTOGRAM_INTERVAL", 2)
    settings = {"tracking__tensorboard": True, "rule": "stochastic", "model__format": "E4M3"}
    run(tiny(**settings, train__max_steps=5), tmp_path / "r")
    calls = [
        (name, *arguments)
        for name, arguments, _ in recorder.method_calls
        if name in ("histograms", "log")
    ]
    drawn = [
        (index, step, values)
        for index, (name, step, values) in enumerate(calls)
        if name == "histograms"
    ]
    assert [step for _, step, _ in drawn] == [2, 2, 4, 4, 5, 5]
    assert all(calls[index + 1][1] == step for index, step, _ in drawn)
    histograms = drawn[-2][2] | drawn[-1][2]
    names = {name.partition("/")[2] for name in histograms}
    assert {"lm_head.weight", "blocks.0.attn.qkv.weight", "token_embedding.weight"} <= names
    kinds_and_names = product(("weights", "gradients"), names)
    assert histograms.keys() == {f"{kind}/{name}" for kind, name in kinds_and_names}
    assert (
        histograms["weights/lm_head.weight"].size == histograms["gradients/lm_head.weight"].size > 0
    )


def test_a_tracker_that_does_not_start_is_reported_and_left_out(
    tiny, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(build, "TensorBoardTracker", Mock(side_effect=RuntimeError("no network")))
    summary = run(tracked(tiny), tmp_path / "r")
    assert (summary["status"], len(caplog.records)) == ("finished", 1)
    assert summary["trackers"] == {"tensorboard": {"dropped": "RuntimeError: no network"}}
    with refusal(r"tracking\.wandb_id: 'abc123' has no effect while tracking\.wandb is off"):
        run(tiny(rule="fp32", tracking__wandb_id="abc123"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_interrupted_run_finishes_its_trackers(tiny, tmp_path, recorder):
    with pytest.raises(KeyboardInterrupt):
        run(
            tracked(tiny),
            tmp_path / "r",
            on_progress=Mock(side_effect=[None, None, KeyboardInterrupt]),
        )
    assert recorder.finish.call_args.args[0]["status"] == "stopped"


def broken_off(config: Config, run_dir: Path) -> None:
    """Run until a step, losing what has been done since the last checkpoint."""

    def break_off(progress):
        if progress.step == 5:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(config, run_dir, on_progress=break_off)


@pytest.mark.extra("tensorboard")
def test_tensorboard_holds_every_scalar_of_a_run_that_was_resumed(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(rule="fp32", tracking__tensorboard=True, checkpoint__every=2)
    broken_off(config, tmp_path / "r")
    run(config, tmp_path / "r", resume=True, say=lambda line: None)
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [
        (record["step"], pytest.approx(record["train/loss"]))
        for record in recorded(tmp_path / "r")[1:]
    ]
    (event,) = events.Histograms("weights/lm_head.weight")
    weight = load_file(step_file(tmp_path / "r", 6))["model/lm_head.weight"]
    spread = event.histogram_value
    assert (event.step, sum(spread.bucket), spread.num) == (6, weight.numel(), weight.numel())
    assert (spread.min, spread.max) == (
        pytest.approx(weight.min().item()),
        pytest.approx(weight.max().item()),
    )
    assert spread.sum == pytest.approx(weight.sum().item(), abs=1e-4)
    assert events.Histograms("gradients/lm_head.weight")


class FakeWandb:
    """A stand-in for wandb.init that records its arguments.

    It returns a run that records its calls.
    """

    def __init__(self, monkeypatch, key):
        import wandb

        self.given, self.logged, self.summary, self.exit_code = {}, [], {}, None
        self.id, self.project, self.rewinds, self.teardown = "abc123", "p", True, Mock()
        monkeypatch.setattr(wandb, "teardown", self.teardown)
        monkeypatch.setattr(wandb, "init", self.init)
        monkeypatch.setattr(
            wandb, "login", lambda *, prompt, verify: key is not None and not prompt and not verify
        )

    def init(self, **options):
        import wandb

        self.given = options
        if "resume_from" in options and not self.rewinds:
            raise wandb.errors.CommError("rewind is not\nenabled")
        return self

    def log(self, record, step=None):
        # records, and no histograms; that of step 0 has no training loss
        if (step is not None and "train/loss" in record) or step == 0:
            self.logged.append((step, record))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.mark.parametrize(
    ("wanted", "key", "run_id", "mode", "resume"),
    [
        ("auto", None, None, "offline", None),
        ("auto", "k", None, "online", None),
        ("online", "k", "abc123", "online", "must"),
        ("offline", "k", "abc123", "offline", None),
    ],
)
@pytest.mark.extra("wandb")
def test_wandb_is_told_its_mode_and_resumes_online_only(
    tiny, tmp_path, monkeypatch, wanted, key, run_id, mode, resume
):
    fake = FakeWandb(monkeypatch, key)
    monkeypatch.setenv("WANDB_TAGS", "a,b")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config = tiny(rule="fp32", tracking__wandb=wanted, tracking__wandb_id=run_id or "null")
    summary = run(config, tmp_path / "r")
    assert (fake.given["mode"], fake.given.get("resume"), fake.given["id"]) == (
        mode,
        resume,
        run_id,
    )
    assert (fake.given["tags"], fake.given["project"]) == (["a", "b", "fp32"], "mine")
    assert fake.given["config"]["train"]["max_steps"] == 6
    assert [step for step, _ in fake.logged] == list(range(7))
    assert (fake.summary["final_val_loss"], fake.exit_code) == (summary["final_val_loss"], 0)
    facts = {"name": "wandb", "id": "abc123", "mode": mode, "project": "p", "dropped": None}
    assert summary["trackers"]["wandb"] == facts


def records_of(file: Path) -> list[Any]:
    """Return the records of a file of W&B's.

    It has LevelDB's log format after 7 bytes, a protobuf message a record.
    """
    from wandb.proto import wandb_internal_pb2

    data, offset, block, parts, records = file.read_bytes(), 7, 32768, b"", []
    while offset + 7 <= len(data):
        if block - offset % block < 7:  # no header fits into what is left of a block
            offset += block - offset % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


@pytest.mark.extra("wandb")
def test_wandb_offline_holds_histograms_and_an_artifact(tiny, tmp_path):
    import wandb

    settings = {
        "tracking__wandb": "offline",
        "tracking__wandb_artifacts": True,
        "eval__interval": 2,
    }
    run(tiny(rule="fp32", checkpoint__every=2, **settings), tmp_path / "my run")
    wandb.teardown()  # its process writes the file to its end
    (file,) = (tmp_path / "my run" / "wandb").glob("offline-run-*/run-*.wandb")
    records = records_of(file)
    logged = {}
    histories = (record.history.item for record in records if record.HasField("history"))
    for item in chain.from_iterable(histories):
        name, *fields = item.nested_key or [item.key]
        logged.setdefault(name, {})["/".join(fields)] = json.loads(item.value_json)
    for histogram in (logged[f"{kind}/lm_head.weight"] for kind in ("weights", "gradients")):
        assert (histogram["_type"], len(histogram["values"]), len(histogram["bins"])) == (
            "histogram",
            64,
            65,
        )
    artifacts = [
        record.request.log_artifact.artifact
        for record in records
        if record.request.HasField("log_artifact")
    ]
    artifacts += [record.artifact for record in records if record.HasField("artifact")]
    assert {(artifact.name, artifact.type) for artifact in artifacts} == {
        ("my-run-checkpoint", "model")
    }
    aliases = chain.from_iterable(artifact.aliases for artifact in artifacts)
    assert {"latest", "step-6"} <= set(aliases)


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("has_id", [False, True])
@pytest.mark.parametrize("rewinds", [False, True])
@pytest.mark.extra("wandb")
def test_a_resumed_run_goes_on_in_the_same_wandb_run(
    tiny, tmp_path, monkeypatch, caplog, mode, has_id, rewinds
):
    """The resumed run rewinds to the checkpoint's step.

    Not where a run was there before ours, and not for a server that can't.
    """
    config = tiny(rule="fp32", tracking__wandb=mode, checkpoint__every=2)
    first = FakeWandb(monkeypatch, "k")
    broken_off(config, tmp_path / "r")
    assert (first.given["id"], first.exit_code) == (None, 1)
    assert (
        read_checkpoint(step_file(tmp_path / "r", 4), only=()).facts["trackers"]["wandb"]["id"]
        == "abc123"
    )
    second = FakeWandb(monkeypatch, "k")
    second.rewinds = rewinds
    config.tracking.wandb_id = "abc123" if has_id else None
    summary = run(config, tmp_path / "r", resume=True, say=lambda line: None)
    back = (
        {"resume": None, "resume_from": "abc123?_step=4"}
        if rewinds and not has_id
        else {"resume_from": None}
    )
    back = {"resume": "must" if mode == "online" else None, **back}
    assert {name: second.given.get(name) for name in ("id", *back)} == {"id": "abc123", **back}
    assert second.given["allow_val_change"]
    assert [step for step, _ in second.logged] == [5, 6]
    assert (second.exit_code, summary["trackers"]["wandb"]["id"]) == (0, "abc123")
    refused = "W&B keeps the steps after 4 that it already has of this run: rewind is not enabled"
    assert (
        caplog.messages.count(refused) == second.teardown.call_count == (not rewinds and not has_id)
    )


@pytest.mark.extra("wandb")
def test_a_resumed_run_withdraws_steps_in_wandbs_own_files(tiny, tmp_path):
    """A reader of both parts, as `wandb sync` is, has every step once.

    Those after the checkpoint are the second's.
    """
    import wandb

    config = tiny(rule="fp32", tracking__wandb="offline", checkpoint__every=2)
    broken_off(config, tmp_path / "r")
    summary = run(config, tmp_path / "r", resume=True, say=lambda line: None)
    wandb.teardown()
    files = sorted(
        (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb"),
        key=lambda file: file.stat().st_mtime,
    )
    facts, losses, logged, withdrawn = summary["trackers"]["wandb"], {}, [], []
    assert ({file.stem for file in files}, facts["dropped"]) == ({f"run-{facts['id']}"}, None)
    for record in chain.from_iterable(map(records_of, files)):
        if record.HasField("run") and record.run.HasField("branch_point"):
            point = record.run.branch_point
            assert (point.run, point.metric) == (facts["id"], "_step")
            withdrawn = [step for step in losses if step > point.value]
            losses = {step: loss for step, loss in losses.items() if step <= point.value}
        values = {
            item.nested_key[0] if item.nested_key else item.key: item.value_json
            for item in record.history.item
        }
        if "train/loss" in values:
            assert record.history.step.num not in losses
            logged.append(record.history.step.num)
            losses[record.history.step.num] = json.loads(values["train/loss"])
    assert (logged, withdrawn) == ([1, 2, 3, 4, 5, 5, 6], [5])
    assert losses == {
        record["step"]: pytest.approx(record["train/loss"])
        for record in recorded(tmp_path / "r")[1:]
    }
