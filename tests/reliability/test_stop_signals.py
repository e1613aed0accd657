"""Signals and kills in every part of a step.

Exit code, checkpoint, and a resume with the same bits.
"""

import json
import os
import random
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGKILL
from time import perf_counter
from typing import NamedTuple

import children
import forked
import pytest
from bench_child import DieBefore, Record
from small_runs import KINDS, STEPS, differences, traces, words

from nanogpt_bench import checkpoint
from nanogpt_bench.checkpoint import newest, step_file, steps, verify
from nanogpt_bench.commands.run import exit_code, trained
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.system import signals
from nanogpt_bench.system.signals import RESUMABLE

SIGNAL_STEPS, INTERVAL = 8, 2


@pytest.fixture(scope="module")
def overrides(small_corpus):
    settings = {
        "train.max_steps": SIGNAL_STEPS,
        "eval.interval": INTERVAL,
        "checkpoint.every": INTERVAL,
        "runtime.threads": 1,
    }
    return words("codes stochastic", small_corpus, settings)[5:]


def child(folder, overrides, preparation=lambda: None, **options):
    def command():
        preparation()
        config = load_config(find_config("e4m3.yaml"), overrides)
        return exit_code(trained(config, "e4m3", "r", **options)[0])

    return forked.finish(forked.start(folder, command))


def send_at(point, number, signal_number, times=1):
    """Return what makes a process signal itself once it reaches a point of a step."""
    now, sent = {"step": 0}, []

    def send(moment):
        if moment == point and now["step"] == number and not sent:
            sent.append(True)
            for _ in range(times):
                os.kill(os.getpid(), signal_number)

    def wrap(owner, name, moment):
        original = getattr(owner, name)
        setattr(
            owner,
            name,
            lambda *arguments, **options: (send(moment), original(*arguments, **options))[1],
        )

    def prepare():
        train_step = Trainer.train_step

        def numbered(trainer, step, observers):
            now["step"] = step.number
            if step.number == 1:
                trainer.model.blocks[0].register_forward_hook(lambda *_: send("forward"))
                trainer.model.token_embedding.weight.register_hook(lambda _: send("backward"))
                wrap(trainer.optimizer, "step", "step")
            return train_step(trainer, step, observers)

        Trainer.train_step = numbered
        wrap(Trainer, "_draw", "data")
        wrap(Trainer, "validation_losses", "eval")
        wrap(checkpoint, "_write_file", "save")

    return prepare


def assert_alike(run, whole):
    """Two runs left the same, but for the checkpoint of a stop and what it displaced."""
    run_traces, whole_traces = (traces(folder / "runs" / "r") for folder in (run, whole))
    assert [
        name
        for name in differences(run_traces, whole_traces)
        if not name.startswith("checkpoints/")
    ] == []
    last = f"checkpoints/step-{SIGNAL_STEPS}.safetensors"
    assert run_traces[last] == whole_traces[last]


def cases(full):
    """Every point at every step that has it, each with one of the signals, or both."""
    for point in ("data", "forward", "backward", "step", "eval", "save"):
        possible = (
            range(INTERVAL, SIGNAL_STEPS, INTERVAL)
            if point in ("eval", "save")
            else range(1, SIGNAL_STEPS)
        )
        for count in range(34 if full else 5):
            yield (
                point,
                possible[count % len(possible)],
                (signal.SIGTERM, signal.SIGINT)[count // len(possible) % 2],
            )


def test_a_signal_anywhere_ends_the_step_and_the_run_resumes_with_the_same_bits(
    overrides, tmp_path, full, tally
):
    assert child(tmp_path / "whole", overrides) == 0
    tried = list(cases(full))
    for index, (point, number, signal_number) in enumerate(tried):
        folder = tmp_path / f"{index}"
        assert child(folder, overrides, send_at(point, number, signal_number)) == RESUMABLE, (
            point,
            number,
        )
        run_dir = folder / "runs" / "r"
        last = steps(run_dir)[-1]
        assert number <= last <= number + (point == "save"), (point, number)
        verify(step_file(run_dir, last))
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        assert (summary["status"], summary["stop"]["kind"], summary["steps"]) == (
            "stopped",
            "signal",
            last,
        ), (index, number)
        assert signal_number.name in summary["stop"]["message"], (index, number)
        assert child(folder, overrides, resume=True) == 0, (point, number)
        assert_alike(folder, tmp_path / "whole")
    tally("SIGTERM and SIGINT", len(tried))


@pytest.mark.parametrize("point", ["forward", "save"])
def test_a_second_signal_leaves_the_checkpoint_before_whole(overrides, tmp_path, point):
    def prepare():
        send_at(point, 4, signal.SIGTERM, times=2)()
        signals.SAME_REQUEST_SECONDS = 0.0

    assert child(tmp_path / "a", overrides, prepare) == 128 + signal.SIGTERM
    folder, _ = newest(tmp_path / "a" / "runs" / "r")
    assert folder is not None
    assert folder.stem == "step-2"
    assert child(tmp_path / "a", overrides, resume=True) == 0
    assert child(tmp_path / "whole", overrides) == 0
    assert_alike(tmp_path / "a", tmp_path / "whole")


QUICK, SLOW, FULL = 24, 100, 2000
CHILDREN = 2
MOST_KILLS = 5
#: of the seconds a whole run takes, the share that its steps take; the rest is its
#: start
STEPPING = 0.6
SAVING = "while a checkpoint is written"
RENAMING = "between its digest's fsync and its rename"
RENAMED = "between its rename and the folder's fsync"
REMOVING = "while an old one, or litter, is removed"


class Undisturbed(NamedTuple):
    """A run that nothing happened to.

    What it left, what it did to its checkpoints, and how long it took.
    """

    folder: Path
    words: list
    traces: dict
    operations: list
    seconds: float


class Kill(NamedTuple):
    """A kill.

    Whether at an operation chosen beforehand, where, and before the first commit or
    not.
    """

    aimed: bool
    place: str
    first: bool

    @property
    def counts(self):
        """True for a kill after a committed checkpoint or during a save."""
        return not self.first or self.place in (SAVING, RENAMING)


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory):
    runs = {}
    for kind in KINDS:
        folder, line, start = (
            tmp_path_factory.mktemp("whole"),
            words(kind, small_corpus),
            perf_counter(),
        )
        child = children.start(folder, line, Record(folder / "operations"))
        assert children.finish(child, folder) == 0, children.output(folder)
        operations = (folder / "operations").read_text(encoding="utf-8").splitlines()
        runs[kind] = Undisturbed(
            folder, line, traces(folder / "runs" / "r"), operations, perf_counter() - start
        )
    return runs


def place(operation):
    """Return the part of a checkpoint's life that an operation falls in."""
    name, path = operation.split(" ", 1)
    if name == "remove":
        return REMOVING
    if name == "rename":
        return RENAMING
    return RENAMED if (name, path) == ("fsync", ".") else SAVING


def test_an_undisturbed_run_passes_every_place_and_killed_before_its_summary_writes_the_same(
    undisturbed, tmp_path
):
    for kind, whole in undisturbed.items():
        passed = Counter(map(place, whole.operations))
        assert set(passed) == {SAVING, RENAMING, RENAMED, REMOVING}, kind
        assert passed[RENAMING] == STEPS // 3, (
            kind
        )  # a rename commits a checkpoint, every three steps
        folder = tmp_path / kind
        shutil.copytree(whole.folder, folder)
        (folder / "runs" / "r" / "summary.json").unlink()
        assert children.finish(children.start(folder, whole.words), folder) == 0, children.output(
            folder
        )
        assert differences(whole.traces, traces(folder / "runs" / "r")) == [], kind


@pytest.mark.parametrize("enough", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_nothing_had_happened(undisturbed, tmp_path, full, tally, enough):
    wanted, kills, runs = FULL if full else enough, [], 0
    with ThreadPoolExecutor(CHILDREN) as pool:
        while sum(kill.counts for kill in kills) < wanted:
            for outcome in pool.map(
                partial(_survive, undisturbed, tmp_path), range(runs, runs + 8)
            ):
                kills += outcome
            runs += 8
    counted = [kill for kill in kills if kill.counts]
    early = len(kills) - len(counted)
    tally(
        "kill",
        len(counted),
        f"in {runs} runs, all ended bit-identical; {early} more came too early to count",
    )
    for (aimed, place), number in sorted(
        Counter((kill.aimed, kill.place) for kill in counted).items()
    ):
        tally(f"kill, {'aimed' if aimed else 'random'}, {place}", number)
    assert {kill.place for kill in kills if kill.aimed} == {SAVING, RENAMING, RENAMED, REMOVING}
    assert any(kill.first and kill.counts for kill in kills)


def _survive(undisturbed, above, seed):
    chance, kind, folder = (
        random.Random(seed),
        list(undisturbed)[seed % len(undisturbed)],
        above / f"run-{seed}",
    )
    whole, run_dir, kills = undisturbed[kind], folder / "runs" / "r", []
    folder.mkdir()
    code = -SIGKILL
    for _ in range(chance.randint(1, MOST_KILLS)):
        code, kill = _kill(whole, chance, folder)
        if kill is None:
            break
        kills.append(kill)
        # the last commit must be whole, whatever has been left beside it
        steps_done = _steps(folder)
        assert newest(run_dir) == (
            step_file(run_dir, max(steps_done)) if steps_done else None,
            [],
        ), f"run {seed}, {kind}, {kill}"
    if code == -SIGKILL:
        last = max(_steps(folder), default=0)
        code = children.finish(children.start(folder, whole.words), folder)
        assert last == 0 or f"continues after step {last}\n" in (folder / "output.txt").read_text(
            encoding="utf-8"
        )
    assert code == 0, f"run {seed}, {kind}: exit code {code}: {children.output(folder)}"
    _forget_unpruned(run_dir, whole)
    assert differences(whole.traces, traces(run_dir)) == [], f"run {seed}, {kind}: {kills}"
    shutil.rmtree(folder)
    return kills


def _kill(whole, chance, folder):
    """Start the run, or go on with it, and kill it.

    Return its exit code, and no kill if it ended before.
    """
    aimed = chance.random() < 0.5
    first, litter = not _steps(folder), _litter(folder)
    if aimed:
        death = DieBefore(_operation(whole.operations, chance), folder / "died")
        code = children.finish(children.start(folder, whole.words, death), folder)
    else:
        child = children.start(folder, whole.words)
        rest = 1 - STEPPING * max(_steps(folder), default=0) / STEPS
        code = children.wait_for(child, chance.uniform(0, whole.seconds * rest))
        if code is None:
            child.kill()
            code = children.finish(child, folder)
    assert code in (0, -SIGKILL), f"exit code {code}: {children.output(folder)}"
    if code == 0:
        return code, None
    first = first and not _steps(folder)
    moment = SAVING if _litter(folder) - litter else "between saves"
    if aimed:
        moment = place((folder / "died").read_text(encoding="utf-8").splitlines()[-1])
    return code, Kill(aimed, moment, first)


def _operation(operations, chance):
    """Choose an operation.

    First the part of a checkpoint's life is drawn, so that short parts are not missed.

    One choice in five lies in the first save, the rename that ends it included.
    """
    places = [place(operation) for operation in operations]
    wanted = chance.choice([SAVING, RENAMING, RENAMED, REMOVING, None])
    if wanted is None:
        return chance.randint(0, places.index(RENAMING))
    return chance.choice([index for index, outcome in enumerate(places) if outcome == wanted])


def _forget_unpruned(run_dir, whole):
    """Remove whole checkpoints that are older than those the undisturbed run kept.

    A kill between the last commit and the removal of older checkpoints leaves them: no
    later commit removes them.
    """
    steps_of_whole = steps(whole.folder / "runs" / "r")
    for step in steps(run_dir):
        if step < min(steps_of_whole):
            verify(step_file(run_dir, step))
            step_file(run_dir, step).unlink()
            step_file(run_dir, step).with_suffix(".safetensors.sha256").unlink()


def _steps(folder):
    return steps(folder / "runs" / "r")


def _litter(folder):
    return {
        (path.name, path.stat().st_ino) for path in (folder / "runs/r/checkpoints").glob(".step-*")
    }
