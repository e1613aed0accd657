"""A disk that is full, read-only, missing, slow or lies: one clear line, the checkpoints before whole, no litter."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_checkpoints import bytes_in, small

from nanogpt_bench.checkpoint import CheckpointNotWritten, check_room, clean, commit, newest, step_file, steps, verify
from nanogpt_bench.system.errors import BenchError

POSITIONS, POSITIONS_IN_FULL = 50, 200
OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "unlink")


class Disk:
    """Functions that a commit writes with in place of `os`; a disk that writes otherwise has its own `write`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class FullDisk(Disk):
    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(file, data[: self.room])
        self.room -= written
        return written


class Watched(Disk):
    """A disk that calls `told` with number, operation and path before each operation."""

    def __init__(self, told: Callable[[int, str, object], None]) -> None:
        self._told, self._count = told, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(os, name)
        if name not in OPERATIONS:
            return method

        def operation(*arguments: object) -> object:
            self._told(self._count, name, arguments[0])
            self._count += 1
            return method(*arguments)

        return operation


def commit_on(disk: Disk, run_dir: Path, step: int, keep_last: int = 1, size: int = 24) -> Path:
    """Commit a checkpoint there, whatever the real disk says of its room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanogpt_bench.checkpoint.os", disk)
        patch.setattr("nanogpt_bench.checkpoint.check_room", lambda *_: None)
        return commit(run_dir, small(step, size), keep_last=keep_last)


def spread(length: int, number: int) -> list[int]:
    return sorted({round(i * (length - 1) / (number - 1)) for i in range(number)})


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_refused(run_dir: Path, words: str, disk: Disk | None = None) -> None:
    """A third checkpoint can't be written; what was there before is there byte for byte, and nothing else."""
    before = bytes_in(run_dir)
    with pytest.raises(CheckpointNotWritten, match=words) as caught:
        commit_on(disk or Disk(), run_dir, 3)
    assert "checkpoint of step 3 can't be written to" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert bytes_in(run_dir) == before
    assert newest(run_dir) == (step_file(run_dir, 2), [])


def test_a_disk_full_at_any_byte(run_dir: Path, tmp_path: Path, full: bool, tally: Callable[..., None]) -> None:
    (tmp_path / "measured").mkdir()
    commit(tmp_path / "measured", small(3), keep_last=1)
    size = sum(map(len, bytes_in(tmp_path / "measured").values()))
    positions = spread(size, POSITIONS_IN_FULL if full else POSITIONS)
    for room in positions:
        assert_refused(run_dir, "No space left on device", FullDisk(room))
    commit_on(FullDisk(size), run_dir, 3)
    assert names_in(run_dir) == names(3)
    tally("disk full while a checkpoint is written", len(positions), "all refused, those before whole, no litter")


def test_a_limit_of_the_file_size(run_dir: Path, tally: Callable[..., None]) -> None:
    sizes = spread(step_file(run_dir, 2).stat().st_size, 25)
    for size in sizes:
        with file_size_limit(size):
            assert_refused(run_dir, "File too large")
    tally("RLIMIT_FSIZE while a checkpoint is written", len(sizes), "all refused, those before whole, no litter")


def names(*steps: int) -> list[str]:
    return sorted(f"step-{step}.safetensors{last}" for step in steps for last in ("", ".sha256"))


def names_in(run_dir: Path) -> list[str]:
    return sorted(os.listdir(run_dir / "checkpoints"))


def outcome(run_dir: Path, disk: Disk) -> str | None:
    try:
        commit_on(disk, run_dir, 3)
    except CheckpointNotWritten as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT], ids=errno.errorcode.get
)
def test_any_operation_may_fail(run_dir: Path, tmp_path: Path, code: int, tally: Callable[..., None]) -> None:
    operations: list[str] = []
    shutil.copytree(run_dir, tmp_path / "measured")
    commit_on(Watched(lambda n, name, path: operations.append(name)), tmp_path / "measured", 3)
    before = step_file(run_dir, 2).read_bytes()
    for failing, name in enumerate(operations):
        with_fault = tmp_path / f"{failing}"
        shutil.copytree(run_dir, with_fault)

        def fail(number: int, name: str, path: object, failing: int = failing) -> None:
            if number == failing:
                raise OSError(code, os.strerror(code))

        said = outcome(with_fault, Watched(fail))
        assert said is None or os.strerror(code) in said
        assert said is None or step_file(with_fault, 2).read_bytes() == before, name
        found, skipped = newest(with_fault)
        assert (found is not None, skipped) == (True, []), (failing, name)
        commit(with_fault, small(4), keep_last=1)
        assert names_in(with_fault) == names(4), (failing, name)
    tally(f"{errno.errorcode[code]} at an operation of a commit", len(operations), "every operation")


@pytest.mark.parametrize("step", [1, 2, 3])
def test_whenever_it_ends_there_is_a_whole_checkpoint(run_dir: Path, tmp_path: Path, step: int) -> None:
    """The folder as it is before each operation is what a kill at that moment leaves."""
    shots = tmp_path / "shots"
    disk = Watched(lambda number, name, path: shutil.copytree(run_dir, shots / str(number)))
    before = step_file(run_dir, 2).read_bytes()
    commit_on(disk, run_dir, step, keep_last=2)
    for shot in sorted(shots.iterdir()):
        clean(shot)
        there = steps(shot)
        assert names_in(shot) == names(*there), shot.name
        assert set(there) <= {1, 2, 3}
        for number in there:
            verify(step_file(shot, number))
        assert step == 2 or step_file(shot, 2).read_bytes() == before
        assert newest(shot)[0] in (step_file(shot, 2), step_file(shot, 1 if step == 2 else 3))
        commit(shot, small(9), keep_last=1)
        assert names_in(shot) == names(9)
    assert len(list(shots.iterdir())) > 8


def test_a_kill_during_the_first_save_leaves_none_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    disk = Watched(lambda number, name, path: shutil.copytree(tmp_path / "run", tmp_path / "shots" / str(number)))
    commit_on(disk, tmp_path / "run", 1)
    for shot in (tmp_path / "shots").iterdir():
        clean(shot)
        found, skipped = newest(shot)
        assert skipped == []
        assert found is None or found.stem == "step-1"
        assert bytes_in(shot) == ({} if found is None else bytes_in(tmp_path / "run"))


def test_file_and_digest_are_on_the_disk_before_the_checkpoint_has_its_name(run_dir: Path) -> None:
    log: list[str] = []
    commit_on(Watched(lambda n, name, path: log.append(name)), run_dir, 3)
    order = [name for before, name in zip(["", *log], log, strict=False) if (before, name) != ("write", "write")]
    written = ["open", "write", "fsync"]
    removed = ["unlink"] * 4  # the two before, with their digests
    assert order == [*written, *written, "rename", "open", "fsync", *removed]


class Writing(Disk):
    """A disk that has its own way of writing."""

    def __init__(self, write: Callable[[int, memoryview], int]) -> None:
        self.write = write


def test_what_was_not_taken_is_not_believed_and_short_writes_are_gone_on_with(run_dir: Path) -> None:
    lying = Writing(lambda file, data: (os.write(file, data[: len(data) // 2]), len(data))[1])
    assert_refused(run_dir, "the system took .* bytes and has .* of them", lying)
    assert_refused(run_dir, "the system took 0 of", Writing(lambda file, data: 0))
    verify(commit_on(Writing(lambda file, data: os.write(file, data[:7])), run_dir, 3))


def test_too_little_room_is_said_before_anything_is_written(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    before = bytes_in(run_dir)
    with pytest.raises(CheckpointNotWritten, match=r"it needs 1\.\d MB below .*, 1\.0 MB are free; make room"):
        commit(run_dir, small(3), keep_last=1)
    assert bytes_in(run_dir) == before
    with pytest.raises(BenchError, match=r"the first checkpoint needs 3\.\d MB below 'gone/run', 1\.0 MB are free"):
        check_room(Path("gone/run"), 2_000_000, "the first checkpoint")


def test_a_folder_that_has_gone_and_a_file_in_its_place_are_named(run_dir: Path, tmp_path: Path) -> None:
    shutil.rmtree(run_dir)
    with pytest.raises(CheckpointNotWritten, match="No such file or directory"):
        commit(run_dir, small(3), keep_last=1)
    assert not run_dir.exists()
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(CheckpointNotWritten, match="File exists"):
        commit(tmp_path, small(1), keep_last=1)
    assert bytes_in(tmp_path) == {"checkpoints": b"no folder"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes whatever the permissions are; failing calls stand in")
def test_a_folder_one_may_not_write_to(run_dir: Path) -> None:
    (run_dir / "checkpoints").chmod(0o500)
    assert_refused(run_dir, "Permission denied")
    (run_dir / "checkpoints").chmod(0o700)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_is_really_full(small_file_system: Path) -> None:
    for step in (1, 2):
        commit_on(Disk(), small_file_system, step, keep_last=5)
    before = bytes_in(small_file_system)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        commit_on(Disk(), small_file_system, 3, size=8000)
    assert bytes_in(small_file_system) == before
    with pytest.raises(CheckpointNotWritten, match=r"it needs 1\.\d MB below .* 0\.0 MB are free"):
        commit(small_file_system, small(3), keep_last=1)
    assert bytes_in(small_file_system) == before


def test_a_file_system_that_becomes_read_only(small_file_system: Path) -> None:
    for step in (1, 2):
        commit_on(Disk(), small_file_system, step, keep_last=5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_file_system)], check=True)
    assert_refused(small_file_system, "Read-only file system")
