"""A long run leaks nothing: memory, descriptors and threads are at its end what they were once it was warm."""

import os
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import children
import pytest
from bench_child import append, below_checkpoints
from small_runs import words

from nanogpt_bench.checkpoint import step_of

#: steps
QUICK, SLOW, FULL = 800, 2000, 20_000
SETTINGS = {"eval.interval": 50, "monitor.interval": 50, "shadow.interval": 50, "checkpoint.every": 20}
#: a process that has committed so many checkpoints has done everything a run does
WARM = 5
#: memory is compared between medians of so many samples
SAMPLES = 5
MOST_DRIFT = 0.02


@dataclass(frozen=True)
class Sample:
    """Memory (bytes), threads and descriptors of a process that commits a checkpoint."""

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
            append(self._path, " ".join(map(str, (step_of(where), *held))))


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
    lines = (folder / "samples").read_text(encoding="utf-8").splitlines()
    return [Sample(*map(int, line.split())) for line in lines]


@pytest.mark.parametrize("long", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_long_run_leaks_nothing(small_corpus, tmp_path, full, tally, long):
    steps = FULL if full else long
    line = words("fp8 stochastic", small_corpus, {**SETTINGS, "train.max_steps": steps})
    child = children.start(tmp_path, line, Sampler(tmp_path / "samples"))
    assert children.wait_for(child, 3600) == 0, children.output(tmp_path)
    drift = _drift(read_samples(tmp_path))
    tally("soak, steps", steps, f"resident memory {drift:+.2%} from warm to end, the same descriptors and threads")
    assert abs(drift) < MOST_DRIFT


def _drift(samples: list[Sample]) -> float:
    """Return by which share memory has grown since the process was warm; nothing else may have changed."""
    warm = samples[WARM:]
    assert len({(sample.descriptors, sample.threads) for sample in warm}) == 1, warm
    before, after = (statistics.median(s.memory for s in part) for part in (warm[:SAMPLES], warm[-SAMPLES:]))
    return after / before - 1
