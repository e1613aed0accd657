"""A long run leaks nothing.

Memory, descriptors and threads are at its end what they were once it was warm.
"""

import os
import statistics
from contextlib import suppress

import children
import pytest
from bench_child import append, below_checkpoints
from small_runs import words

QUICK, SLOW, FULL = 800, 2000, 20_000  # steps
SETTINGS = {
    "eval.interval": 50,
    "monitor.interval": 50,
    "shadow.interval": 50,
    "checkpoint.every": 20,
}
#: a process that has committed so many checkpoints has done everything a run does
WARM = 5
#: memory is compared between medians of so many samples
SAMPLES = 5
MOST_DRIFT = 0.02


class Sampler:
    """Write down memory, descriptors and threads of the process at every commit.

    Memory is in pages, a commit is a line.
    """

    def __init__(self, path):
        self._path = path

    def __call__(self, name, path):
        if name == "rename" and below_checkpoints(path) is not None:
            with open("/proc/self/statm", encoding="ascii") as file:
                memory = file.read().split()[1]
            append(self._path, f"{memory} {_descriptors()} {len(os.listdir('/proc/self/task'))}")


def _descriptors():
    """Return the number of open descriptors, but for files of records.

    These are opened when there is a first line to write.
    """
    open_files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            open_files.append(os.readlink(f"/proc/self/fd/{number}"))
    return len(open_files) - len({name for name in open_files if name.endswith(".jsonl")})


@pytest.mark.parametrize("long", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_long_run_leaks_nothing(small_corpus, tmp_path, full, tally, long):
    steps = FULL if full else long
    line = words("codes stochastic", small_corpus, {**SETTINGS, "train.max_steps": steps})
    child = children.start(tmp_path, line, Sampler(tmp_path / "samples"))
    assert children.wait_for(child, 3600) == 0, children.output(tmp_path)
    lines = (tmp_path / "samples").read_text(encoding="utf-8").splitlines()
    warm = [[*map(int, line.split())] for line in lines][WARM:]
    assert len({tuple(resources) for _, *resources in warm}) == 1, warm
    first, last = (
        statistics.median(memory for memory, *_ in part)
        for part in (warm[:SAMPLES], warm[-SAMPLES:])
    )
    drift = last / first - 1
    tally(
        "soak, steps",
        steps,
        f"resident memory {drift:+.2%} from warm to end, the same descriptors and threads",
    )
    assert abs(drift) < MOST_DRIFT
