"""SIGKILL at any moment: the run goes on from its last checkpoint and ends as if nothing had happened."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from time import perf_counter
from typing import Any

import children
import pytest
from bench_child import DieBefore, Record
from small_runs import KINDS, STEPS, differences, traces, words

from nanogpt_bench.checkpoint import newest, step_file, steps, verify

QUICK, SLOW, FULL = 24, 100, 2000
CHILDREN = 2
MOST_KILLS = 5
#: of the seconds a whole run takes, the share that its steps take; the rest is its start
STEPPING = 0.6
SAVING = "while a checkpoint is written"
RENAMING = "between its digest's fsync and its rename"
RENAMED = "between its rename and the folder's fsync"
REMOVING = "while an old one, or litter, is removed"


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to: what it left, what it did to its checkpoints, and how long it took."""

    folder: Path
    words: list[str]
    traces: dict[str, Any]
    operations: list[str]
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A child that was killed: whether at an operation chosen beforehand, where, and before the first commit or not."""

    aimed: bool
    where: str
    first: bool

    @property
    def counts(self) -> bool:
        """True for a kill after a committed checkpoint or during a save."""
        return not self.first or self.where in (SAVING, RENAMING)


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory):
    return {kind: _undisturbed(words(kind, small_corpus), tmp_path_factory.mktemp("whole")) for kind in KINDS}


def _undisturbed(line: list[str], folder: Path) -> Undisturbed:
    begun = perf_counter()
    child = children.start(folder, line, Record(folder / "operations"))
    assert children.finish(child, folder) == 0, children.output(folder)
    operations = (folder / "operations").read_text(encoding="utf-8").splitlines()
    return Undisturbed(folder, line, traces(folder / "runs" / "r"), operations, perf_counter() - begun)


def place(operation: str) -> str:
    """Return in which part of a checkpoint's life an operation on the checkpoints falls."""
    name, path = operation.split(" ", 1)
    if name == "remove":
        return REMOVING
    if name == "rename":
        return RENAMING
    return RENAMED if (name, path) == ("fsync", ".") else SAVING


def test_an_undisturbed_run_passes_every_place_that_kills_are_aimed_at(undisturbed):
    for kind, whole in undisturbed.items():
        passed = Counter(map(place, whole.operations))
        assert set(passed) == {SAVING, RENAMING, RENAMED, REMOVING}, kind
        assert passed[RENAMING] == STEPS // 3, kind  # a rename commits a checkpoint, every three steps


def test_a_run_killed_before_its_summary_writes_the_same(undisturbed, tmp_path):
    for kind, whole in undisturbed.items():
        folder = tmp_path / kind
        shutil.copytree(whole.folder, folder)
        (folder / "runs" / "r" / "summary.json").unlink()
        assert children.finish(children.start(folder, whole.words), folder) == 0, children.output(folder)
        assert differences(whole.traces, traces(folder / "runs" / "r")) == [], kind


@pytest.mark.parametrize("enough", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_nothing_had_happened(undisturbed, tmp_path, full, tally, enough):
    wanted, kills, runs = FULL if full else enough, [], 0
    with ThreadPoolExecutor(CHILDREN) as pool:
        for seeds in _batches(8):
            for found in pool.map(lambda seed: _survive(undisturbed, seed, tmp_path / f"run-{seed}"), seeds):
                kills += found
                runs += 1
            if sum(kill.counts for kill in kills) >= wanted:
                break
    _report(kills, runs, tally)
    assert {kill.where for kill in kills if kill.aimed} == {SAVING, RENAMING, RENAMED, REMOVING}
    assert any(kill.first and kill.counts for kill in kills)


def _batches(size: int) -> Iterator[range]:
    number = 0
    while True:
        yield range(number, number + size)
        number += size


def _survive(undisturbed: dict[str, Undisturbed], seed: int, folder: Path) -> list[Kill]:
    chance = random.Random(seed)
    kind = list(undisturbed)[seed % len(undisturbed)]
    whole, run_dir, kills = undisturbed[kind], folder / "runs" / "r", list[Kill]()
    folder.mkdir()
    code = -SIGKILL
    for _ in range(chance.randint(1, MOST_KILLS)):
        code, kill = _kill(whole, chance, folder)
        if kill is None:
            break
        kills.append(kill)
        _check_newest(run_dir, f"run {seed}, {kind}, killed {kill.where}")
    if code == -SIGKILL:
        last = max(_steps(folder), default=0)
        code = children.finish(children.start(folder, whole.words), folder)
        assert last == 0 or f"goes on after step {last}\n" in (folder / "output.txt").read_text(encoding="utf-8")
    assert code == 0, f"run {seed}, {kind}: exit code {code}: {children.output(folder)}"
    _forget_unpruned(run_dir, whole)
    assert differences(whole.traces, traces(run_dir)) == [], f"run {seed}, {kind}: {kills}"
    shutil.rmtree(folder)
    return kills


def _kill(whole: Undisturbed, chance: random.Random, folder: Path) -> tuple[int, Kill | None]:
    """Start the run, or go on with it, and kill it; return its exit code, and no kill if it ended before."""
    aimed = chance.random() < 0.5
    first, litter = not _steps(folder), _litter(folder)
    if aimed:
        told = DieBefore(_operation(whole.operations, chance), folder / "died")
        code = children.finish(children.start(folder, whole.words, told), folder)
    else:
        child = children.start(folder, whole.words)
        rest = 1 - STEPPING * max(_steps(folder), default=0) / STEPS
        code = children.wait_for(child, chance.uniform(0, whole.seconds * rest)) or _kill_now(child, folder)
    assert code in (0, -SIGKILL), f"exit code {code}: {children.output(folder)}"
    if code == 0:
        return code, None
    first = first and not _steps(folder)
    where = place(_last_line(folder / "died")) if aimed else (SAVING if _litter(folder) - litter else "between saves")
    return code, Kill(aimed, where, first)


def _kill_now(child: Any, folder: Path) -> int:
    if children.exit_code(child) is None:
        child.kill()
    return children.finish(child, folder)


def _operation(operations: list[str], chance: random.Random) -> int:
    """Choose an operation: first the part of a checkpoint's life, so that its short parts are not missed.

    One choice in five lies in the first save, the rename that ends it included.
    """
    places = [place(operation) for operation in operations]
    wanted = chance.choice([SAVING, RENAMING, RENAMED, REMOVING, None])
    if wanted is None:
        return chance.randint(0, places.index(RENAMING))
    return chance.choice([index for index, found in enumerate(places) if found == wanted])


def _check_newest(run_dir: Path, what: str) -> None:
    """The last commit must be whole, whatever has been left beside it."""
    found, skipped = newest(run_dir)
    assert skipped == [], what
    assert found == (step_file(run_dir, max(steps(run_dir))) if steps(run_dir) else None), what


def _forget_unpruned(run_dir: Path, whole: Undisturbed) -> None:
    """Remove whole checkpoints that are older than those the undisturbed run kept.

    A kill between the last commit and the removal of older checkpoints leaves them: no later commit removes them.
    """
    kept = steps(whole.folder / "runs" / "r")
    for step in steps(run_dir):
        if step < min(kept):
            verify(step_file(run_dir, step))
            step_file(run_dir, step).unlink()
            step_file(run_dir, step).with_suffix(".safetensors.sha256").unlink()


def _steps(folder: Path) -> list[int]:
    return steps(folder / "runs" / "r")


def _litter(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_ino) for path in (folder / "runs/r/checkpoints").glob(".step-*")}


def _last_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[-1]


def _report(kills: list[Kill], runs: int, tally: Callable[..., None]) -> None:
    counted = [kill for kill in kills if kill.counts]
    early = len(kills) - len(counted)
    tally("kill", len(counted), f"in {runs} runs, all ended bit-identical; {early} more came too early to count")
    for aimed in (False, True):
        places = Counter(kill.where for kill in counted if kill.aimed is aimed)
        how = "aimed" if aimed else "random"
        for where, number in sorted(places.items()):
            tally(f"kill, {how}, {where}", number)
    tally("kill during the first save", sum(kill.first for kill in counted))
