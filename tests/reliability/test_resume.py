"""`run --resume` refuses what it can't go on with.

Also what it says, and that sums go on where they were.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest
from small_runs import STEPS, differences, traces, words

from nanogpt_bench.checkpoint import step_file, step_of
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop import train
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.report.sections import configuration_text
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.system.signals import StopRequest

KIND = "codes stochastic"
RUN = Path("runs/r")


@pytest.fixture(scope="module")
def finished(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words(KIND, small_corpus)) == 0
    return folder


@pytest.fixture
def line(finished, small_corpus, tmp_path, monkeypatch):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return lambda overrides=None, *options: [*words(KIND, small_corpus, overrides), *options]


def read_json(path):
    return json.loads(path.read_text())


def taken_up_at(run_dir):
    return [entry["step"] for entry in read_json(run_dir / "environment.json").get("resumed", [])]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"train.batch_size": 4}, ["train.batch_size was 2, is now 4"]),
        ({"seed": 7}, ["seed was 42, is now 7"]),
        (
            {"optimizer.lr": 0.125, "model.dropout": 0.25},
            ["optimizer.lr was", "model.dropout was 0.1, is now 0.25"],
        ),
    ],
)
def test_changed_keys_are_refused_by_name(changed, named, line, capsys):
    old_traces = traces(RUN)
    assert main(line(changed)) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "the run was made with other settings" in message
    assert message.endswith("give the same, or --allow-config-change to continue with the new ones")
    for part in named:
        assert part in message, part
    assert message.count(" was ") >= len(changed)
    assert differences(old_traces, traces(RUN)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.max_steps": STEPS - 1}, "is less than"),
        ({"optimizer.lr": 0.125}, "so optimizer.lr can't change them"),
    ],
    ids=["fewer steps", "no steps"],
)
def test_a_change_that_leaves_nothing_to_do_is_refused(line, capsys, change, message):
    assert main(line(change, "--allow-config-change")) == 2
    assert message in capsys.readouterr().err


def test_a_change_that_is_allowed_goes_on_and_is_said(line, capsys):
    overrides = {"train.max_steps": STEPS + 3, "optimizer.lr": 0.125}
    assert main(line(overrides, "--allow-config-change")) == 0
    printed = capsys.readouterr().err
    assert f"train.max_steps was {STEPS}, is now {STEPS + 3}" in printed
    assert ", is now 0.125" in printed
    assert f"continues after step {STEPS}\n" in printed
    records = [json.loads(text) for text in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(STEPS + 4))
    assert taken_up_at(RUN) == [STEPS]
    # What the run is from now on is in its folder, and the next start asks for nothing.
    assert main(line(overrides)) == 0
    # That its configuration does not repeat it, the folder says wherever it shows it.
    announced = f"settings were changed after step {STEPS}: optimizer.lr was 0.002, is now 0.125, train.max_steps was {STEPS}, "
    announced += f"is now {STEPS + 3}; config.yaml alone does not reproduce the run"
    assert (RUN / "config.yaml").read_text().startswith(f"# {announced}\nrule: ")
    (change,) = read_json(RUN / "summary.json")["config_history"]
    assert change == {
        "step": STEPS,
        "changed": {"optimizer.lr": [0.002, 0.125], "train.max_steps": [STEPS, STEPS + 3]},
    }
    capsys.readouterr()
    assert main(["verify", str(RUN)]) == 0
    assert f"  note: {announced}\n" in capsys.readouterr().out
    loaded = load_run(RUN)
    assert announced in loaded.notes
    assert f"# {announced}" in configuration_text(loaded)


def test_settings_that_change_no_number_are_free_and_so_is_the_place_of_the_corpus(
    line, small_corpus, tmp_path, capsys
):
    shutil.copytree(small_corpus, tmp_path / "moved")
    assert (
        main(line({"checkpoint.keep": 5, "tracking.wandb": "off", "data.dir": tmp_path / "moved"}))
        == 0
    )
    printed = capsys.readouterr().err
    assert "settings that differ from the checkpoint's: data.dir was" in printed
    assert ", checkpoint.keep was 2, is now 5\n" in printed
    assert read_json(RUN / "summary.json")["config_history"] == []
    assert (RUN / "config.yaml").read_text().startswith("rule: ")


def test_another_corpus_is_refused_or_remembered(line, small_corpus, tmp_path, capsys):
    (tmp_path / "text").write_text(
        "Quite another text of some more words, again and again.\n" * 120
    )
    prepare_text(tmp_path / "text", tmp_path / "other", "byte")
    old_traces = traces(RUN)
    assert main(line({"data.dir": tmp_path / "other"})) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "data.dir: the run began on another corpus (its sha256 differs)" in message
    assert differences(old_traces, traces(RUN)) == []
    overrides = {"data.dir": tmp_path / "other", "train.max_steps": STEPS + 1}
    assert main(line(overrides, "--allow-config-change")) == 0
    (change,) = read_json(RUN / "summary.json")["config_history"]
    texts = [read_json(path / "meta.json")["splits"] for path in (small_corpus, tmp_path / "other")]
    digests = [{split: text[split]["sha256"] for split in ("train", "val")} for text in texts]
    assert change["changed"]["corpus"] == digests
    assert main(line(overrides)) == 0  # the run's text is this one from now on


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_checkpoints_that_are_damaged_are_named_with_what_is_wrong(finished, line, capsys):
    shutil.copy(step_file(RUN, 21), step_file(RUN, 22))
    flip(step_file(RUN, STEPS))
    assert main(line()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        f"skipped checkpoint 'runs/r/checkpoints/step-{STEPS}.safetensors': "
    )
    assert "sha256" in lines[0]
    no_digest = "step-22.safetensors.sha256: No such file"
    assert lines[1].startswith(
        f"skipped checkpoint 'runs/r/checkpoints/step-22.safetensors': {no_digest}"
    )
    assert lines[2] == "runs/r continues after step 21"
    differing = differences(traces(finished / RUN), traces(RUN))
    assert {step_of(Path(name).name.removesuffix(".sha256")) for name in differing} <= {
        21,
        22,
    }  # kept beside step 24


@pytest.mark.parametrize(
    ("command", "code"),
    [(None, 2), (["verify", "runs/r"], 1), (["evaluate", "runs/r"], 2)],
    ids=["run", "verify", "evaluate"],
)
def test_checkpoints_of_an_earlier_layout_are_refused(line, capsys, command, code):
    shutil.rmtree(RUN / "checkpoints")
    (RUN / "checkpoints" / "step-24").mkdir(parents=True)
    old_traces = traces(RUN)
    message = "checkpoint 'runs/r/checkpoints/step-24' is a folder, as earlier versions wrote them; this version"
    assert main(command or line()) == code
    printed = capsys.readouterr()
    assert message in (printed.out if code == 1 else printed.err.splitlines()[-1])
    assert differences(old_traces, traces(RUN)) == []


def test_without_a_whole_checkpoint_an_unfinished_run_begins(finished, line, capsys):
    for path in (RUN / "checkpoints").glob("step-*.safetensors"):
        flip(path)
    (RUN / "summary.json").unlink()
    assert main(line()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [text.partition(":")[0] for text in lines[:2]] == [
        f"skipped checkpoint 'runs/r/checkpoints/step-{step}.safetensors'" for step in (24, 21)
    ]
    assert lines[2] == "runs/r has no valid checkpoint: the run begins at step 0"
    assert differences(traces(finished / RUN), traces(RUN)) == []


def test_without_a_checkpoint_there_is_nothing_to_lose_or_it_is_refused(
    finished, line, tmp_path, capsys
):
    shutil.rmtree(RUN / "checkpoints")
    assert main(line()) == 2
    assert (
        "holds a finished run, without a checkpoint to continue from; give another --name"
        in capsys.readouterr().err
    )
    (RUN / "summary.json").unlink()
    assert main(line({"seed": 7})) == 2
    assert "seed was 42, is now 7" in capsys.readouterr().err
    shutil.rmtree(RUN)
    assert main(line()) == 0
    assert "runs/r has no checkpoint: the run begins at step 0" in capsys.readouterr().err
    assert differences(traces(finished / RUN), traces(RUN)) == []
    shutil.rmtree(RUN)
    RUN.mkdir()
    (RUN / "letter.txt").write_text("mine")
    assert main(line()) == 2
    assert "is not empty and does not hold a run" in capsys.readouterr().err
    assert [path.name for path in RUN.iterdir()] == ["letter.txt"]


def test_a_finished_run_is_left_as_it_is(finished, line, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Trainer, "train_step", refuse)
    assert main(line()) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"runs/r continues after step {STEPS}"
    assert captured.out.startswith(f"finished after {STEPS} steps: val loss ")
    assert differences(traces(finished / RUN), traces(RUN)) == []


def test_sums_go_on_over_two_resumes(small_corpus, tmp_path, monkeypatch):
    settings = {
        "shadow.enabled": False,
        "rule": "nearest",
        "optimizer.lr": 1e-5,
    }  # a stall, told after the first resume
    overrides = words(KIND, small_corpus, settings)[5:]
    config = load_config(find_config("e4m3.yaml"), overrides)
    now, train_step = [100.0], Trainer.train_step

    def a_second(trainer, *arguments):
        now[0] += 1.0
        return train_step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "train_step", a_second)  # and everything else takes no time
    monkeypatch.setattr(train, "perf_counter", lambda: now[0])
    train.run(config, tmp_path / "whole" / "r")
    for step in (7, 16, STEPS):
        stop = StopRequest()

        def show(progress, step=step, stop=stop):
            if progress.step == step:
                stop.note(signal.SIGTERM)

        train.run(
            config,
            tmp_path / "parts" / "r",
            resume=True,
            stop=stop,
            on_progress=show,
            say=lambda text: None,
        )
    assert taken_up_at(tmp_path / "parts" / "r") == [7, 16]
    whole, parts = (
        read_json(tmp_path / name / "r" / "summary.json") for name in ("whole", "parts")
    )
    assert (whole["seconds"], whole["tokens"], whole["steps"]) == (STEPS, STEPS * 2 * 8, STEPS)
    assert whole["tokens_per_s"] == 16.0
    assert whole["alerts"]["stall"] == 1
    assert whole["stall"] > 0
    # Everything, the figures of the clock included.
    assert parts == whole
    figures = [
        [
            json.loads(text)
            for text in (tmp_path / name / "r" / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "parts")
    ]
    for first, second in zip(*figures, strict=True):
        for key in ("tokens", "time/elapsed_s", "time/tokens_per_s", "stall/update_lost"):
            assert first.get(key) == second.get(key), (key, first["step"])
    assert figures[1][-1]["tokens"] == 384
