"""Real signals to forked children in every part of a step: exit code, checkpoint, and a resume with the same bits."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from small_runs import differences, traces, words

from nanogpt_bench import checkpoint
from nanogpt_bench.checkpoint import newest, step_file, steps, verify
from nanogpt_bench.commands.run import exit_code, trained
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.system.signals import RESUMABLE

POINTS = ("data", "forward", "backward", "step", "eval", "save")
STEPS, EVERY = 8, 2


@pytest.fixture(scope="module")
def overrides(small_corpus):
    more = {"train.max_steps": STEPS, "eval.interval": EVERY, "checkpoint.every": EVERY, "runtime.threads": 1}
    return words("fp8 stochastic", small_corpus, more)[5:]


def child(folder: Path, overrides: list[str], before: Callable[[], None] = lambda: None, **options: Any) -> int:
    def command() -> int:
        before()
        return exit_code(trained("e4m3.yaml", "r", overrides, **options)[0])

    return forked.finish(forked.start(folder, command))


def send_at(point: str, number: int, what: signal.Signals, times: int = 1) -> Callable[[], None]:
    """Return what makes a process signal itself once it reaches a point of a step."""
    now = {"step": 0}
    sent: list[bool] = []

    def send(at: str) -> None:
        if at == point and now["step"] == number and not sent:
            sent.append(True)
            for _ in range(times):
                os.kill(os.getpid(), what)

    def wrap(owner: Any, name: str, at: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            send(at)
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    def prepare() -> None:
        train_step = Trainer.train_step

        def numbered(trainer: Trainer, step: Step, observers: list[Observer]) -> float:
            now["step"] = step.number
            if step.number == 1:
                trainer.model.blocks[0].register_forward_hook(lambda *_: send("forward"))
                trainer.model.token_embedding.weight.register_hook(lambda _: send("backward"))
                wrap(trainer.optimizer, "step", "step")
            return train_step(trainer, step, observers)

        Trainer.train_step = numbered  # type: ignore[method-assign,assignment]
        for owner, name, at in (
            (Trainer, "_draw", "data"),
            (Trainer, "validation_losses", "eval"),
            (checkpoint, "_write_file", "save"),
        ):
            wrap(owner, name, at)

    return prepare


def assert_alike(run: Path, other: Path) -> None:
    """Two runs left the same, but for the checkpoint of a stop and what it displaced."""
    left, right = (traces(folder / "runs" / "r") for folder in (run, other))
    assert [name for name in differences(left, right) if not name.startswith("checkpoints/")] == []
    last = f"checkpoints/step-{STEPS}.safetensors"
    assert left[last] == right[last]


def cases(full: bool) -> Iterator[tuple[str, int, signal.Signals]]:
    """Every point at every step that has it, each with one of the signals, or both."""
    for point in POINTS:
        possible = range(EVERY, STEPS, EVERY) if point in ("eval", "save") else range(1, STEPS)
        for count in range(34 if full else 5):
            yield point, possible[count % len(possible)], (signal.SIGTERM, signal.SIGINT)[count // len(possible) % 2]


def test_a_signal_anywhere_ends_the_step_and_the_run_resumes_with_the_same_bits(overrides, tmp_path, full, tally):
    assert child(tmp_path / "whole", overrides) == 0
    tried = list(cases(full))
    for index, (point, number, what) in enumerate(tried):
        folder = tmp_path / f"{index}"
        assert child(folder, overrides, send_at(point, number, what)) == RESUMABLE, (point, number)
        run_dir = folder / "runs" / "r"
        last = steps(run_dir)[-1]
        assert number <= last <= number + (point == "save"), (point, number)
        verify(step_file(run_dir, last))
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        assert (summary["status"], summary["stop"]["kind"], summary["steps"]) == ("stopped", "signal", last)
        assert what.name in summary["stop"]["message"]
        assert child(folder, overrides, resume=True) == 0, (point, number)
        assert_alike(folder, tmp_path / "whole")
    tally("SIGTERM and SIGINT", len(tried), ", ".join(POINTS))


@pytest.mark.parametrize("point", ["forward", "save"])
def test_a_second_signal_leaves_the_checkpoint_before_whole(overrides, tmp_path, point):
    def prepare() -> None:
        send_at(point, 4, signal.SIGTERM, times=2)()
        import nanogpt_bench.system.signals as signals

        signals.SAME_REQUEST_SECONDS = 0.0

    assert child(tmp_path / "a", overrides, prepare) == 128 + signal.SIGTERM
    folder, _ = newest(tmp_path / "a" / "runs" / "r")
    assert folder is not None
    assert folder.stem == "step-2"
    assert child(tmp_path / "a", overrides, resume=True) == 0
    assert child(tmp_path / "whole", overrides) == 0
    assert_alike(tmp_path / "a", tmp_path / "whole")
