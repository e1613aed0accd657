"""A long run, killed again and again, beside one that is left alone: nothing leaks, and both end alike."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import children
import pytest
from bench_child import append, below_checkpoints
from small_runs import differences, traces, words

from nanogpt_bench.checkpoint import step_of, steps

#: steps, and kills spread over them
QUICK, SLOW, FULL = (800, 2), (2000, 10), (20_000, 100)
SETTINGS = {"eval.interval": 50, "monitor.interval": 50, "shadow.interval": 50, "checkpoint.every": 20}
#: a process that has committed so many checkpoints has done everything a run does
WARM = 5
#: memory is compared between medians of so many samples
SAMPLES = 5
MOST_DRIFT = 0.02


@dataclass(frozen=True)
class Sample:
    """What a process holds when it commits a checkpoint; memory in bytes."""

    process: int
    step: int
    memory: int
    descriptors: int
    threads: int


class Sampler:
    """Writes down what the process holds at every commit, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, name: str, path: str) -> None:
        where = below_checkpoints(path)
        if name == "rename" and where is not None:
            held = (_memory(), _descriptors(), len(os.listdir("/proc/self/task")))
            append(self._path, " ".join(map(str, (os.getpid(), step_of(where), *held))))


def _memory() -> int:
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    """Open descriptors, but for one of each file of records: these are opened when there is a first line to write."""
    open_files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            open_files.append(os.readlink(f"/proc/self/fd/{number}"))
    return len(open_files) - len({name for name in open_files if name.endswith(".jsonl")})


def read_samples(folder: Path) -> list[Sample]:
    """Return what the processes in a folder wrote down."""
    lines = (folder / "samples").read_text(encoding="utf-8").splitlines()
    return [Sample(*map(int, line.split())) for line in lines]


@pytest.mark.parametrize("long", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_long_run_leaks_nothing_and_survives_its_kills(
    small_corpus: Path, tmp_path: Path, full: bool, tally: Callable[..., None], long: tuple[int, int]
) -> None:
    steps, kills = FULL if full else long
    line = words("fp8 stochastic", small_corpus, {**SETTINGS, "train.max_steps": steps})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(_to_its_end, whole, line)
        number = _killed_run(killed, line, steps, kills)
        alone.result()
    assert number == kills
    assert differences(traces(whole / "runs/r"), traces(killed / "runs/r")) == []
    drift = _drift(read_samples(whole))
    between = _drift_between_lives(read_samples(killed))
    tally("soak, steps", steps, f"resident memory {drift:+.2%} from warm to end, the same descriptors and threads")
    tally("soak, kills", number, f"bit-identical end; last process {between:+.2%} to the first, equally old")
    assert abs(drift) < MOST_DRIFT
    assert abs(between) < MOST_DRIFT


def _to_its_end(folder: Path, line: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    child = children.start(folder, line, Sampler(folder / "samples"))
    assert children.wait_for(child, 3600) == 0, children.output(folder)


def _killed_run(folder: Path, line: list[str], steps: int, kills: int) -> int:
    """Run it with kills at moments spread over its steps; return how many there were."""
    chance, number = random.Random(0), 0
    folder.mkdir()
    share = steps // (kills + 1)
    for target in range(share, share * kills + 1, share):
        child = children.start(folder, line, Sampler(folder / "samples"))
        _kill_after(child, folder, target - chance.randrange(share // 2), chance)
        number += 1
    _to_its_end(folder, line)
    return number


def _kill_after(child: Any, folder: Path, step: int, chance: random.Random) -> None:
    """Kill a child at a random moment after the commit of a step."""
    while not any(number >= step for number in steps(folder / "runs/r")):
        assert children.exit_code(child) is None, children.output(folder)
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 0.2))
    child.kill()
    assert children.finish(child, folder) == -SIGKILL


def _drift(samples: list[Sample]) -> float:
    """Return by which share memory has grown since the process was warm; nothing else may have changed."""
    warm = samples[WARM:]
    assert len({sample.process for sample in samples}) == 1
    assert len({(sample.descriptors, sample.threads) for sample in warm}) == 1, warm
    before, after = (statistics.median(s.memory for s in part) for part in (warm[:SAMPLES], warm[-SAMPLES:]))
    return after / before - 1


def _drift_between_lives(samples: list[Sample]) -> float:
    """Return by which share the last process holds more memory than the first, when as many commits old."""
    lives = [[s for s in samples if s.process == process] for process in dict.fromkeys(s.process for s in samples)]
    first, last = lives[0], lives[-1]
    age = min(len(first), len(last)) - 1
    assert age >= WARM, [len(life) for life in lives]
    assert len({(life[-1].descriptors, life[-1].threads) for life in lives if len(life) > WARM}) == 1, lives
    return last[age].memory / first[age].memory - 1
