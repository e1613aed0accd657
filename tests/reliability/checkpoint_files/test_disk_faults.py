"""A disk that is full, read-only, missing, slow or lies.

One clear line, the checkpoints before whole, no litter.
"""

import errno
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_checkpoints import bytes_in, small

from nanogpt_bench.checkpoint import (
    CheckpointNotWritten,
    check_room,
    clean,
    commit_checkpoint,
    newest,
    step_file,
    steps,
    verify,
)
from nanogpt_bench.system.errors import BenchError

OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "unlink")


class Disk:
    """Functions that a commit writes with in place of `os`.

    A disk that writes otherwise has its own `write`.
    """

    def __init__(self, write=os.write):
        self.write = write

    def __getattr__(self, name):
        return getattr(os, name)


class FullDisk(Disk):
    def __init__(self, room):
        self.room = room

    def write(self, file, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(file, data[: self.room])
        self.room -= count
        return count


class Watched:
    """A disk that calls a function before each operation.

    It gets the number of the operation, its name and the path.
    """

    def __init__(self, before_operation):
        self._before_operation, self._count = before_operation, 0

    def __getattr__(self, name):
        method = getattr(os, name)
        if name not in OPERATIONS:
            return method

        def operation(*arguments):
            self._before_operation(self._count, name, arguments[0])
            self._count += 1
            return method(*arguments)

        return operation


def commit_on(disk, run_dir, step, keep_last=1, size=24):
    """Commit a checkpoint there, whatever the real disk says of its room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanogpt_bench.checkpoint.os", disk)
        patch.setattr("nanogpt_bench.checkpoint.check_room", lambda *_: None)
        return commit_checkpoint(run_dir, small(step, size), keep_last=keep_last)


def spread(length, number):
    return sorted({round(i * (length - 1) / (number - 1)) for i in range(number)})


@contextmanager
def file_size_limit(size):
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)


def assert_refused(run_dir, words, disk=None):
    """Check that a third checkpoint can't be written.

    What was there before is there byte for byte, and nothing else.
    """
    old_bytes = bytes_in(run_dir)
    with pytest.raises(CheckpointNotWritten, match=words) as caught:
        commit_on(disk or Disk(), run_dir, 3)
    assert "checkpoint of step 3 can't be written to" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert bytes_in(run_dir) == old_bytes
    assert newest(run_dir) == (step_file(run_dir, 2), [])


def test_a_disk_full_at_any_byte(run_dir, tmp_path, full, tally):
    (tmp_path / "measured").mkdir()
    commit_checkpoint(tmp_path / "measured", small(3), keep_last=1)
    size = sum(map(len, bytes_in(tmp_path / "measured").values()))
    positions = spread(size, 200 if full else 50)
    for room in positions:
        assert_refused(run_dir, "No space left on device", FullDisk(room))
    commit_on(FullDisk(size), run_dir, 3)
    assert names_in(run_dir) == names(3)
    tally(
        "disk full while a checkpoint is written",
        len(positions),
        "all refused, those before whole, no litter",
    )


def test_a_limit_of_the_file_size(run_dir, tally):
    sizes = spread(step_file(run_dir, 2).stat().st_size, 25)
    for size in sizes:
        with file_size_limit(size):
            assert_refused(run_dir, "File too large")
    tally(
        "RLIMIT_FSIZE while a checkpoint is written",
        len(sizes),
        "all refused, those before whole, no litter",
    )


def names(*steps):
    pairs = product(steps, ("", ".sha256"))
    return sorted(f"step-{step}.safetensors{last}" for step, last in pairs)


def names_in(run_dir):
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT],
    ids=errno.errorcode.get,
)
def test_any_operation_may_fail(run_dir, tmp_path, code, tally):
    operations = []
    shutil.copytree(run_dir, tmp_path / "measured")
    commit_on(Watched(lambda n, name, path: operations.append(name)), tmp_path / "measured", 3)
    old_checkpoint = step_file(run_dir, 2).read_bytes()
    for failing, name in enumerate(operations):
        with_fault = tmp_path / f"{failing}"
        shutil.copytree(run_dir, with_fault)

        def fail(number, name, path, failing=failing):
            if number == failing:
                raise OSError(code, os.strerror(code))

        message = ""
        try:
            commit_on(Watched(fail), with_fault, 3)
        except CheckpointNotWritten as error:
            message = str(error)
        assert not message or (
            os.strerror(code) in message and step_file(with_fault, 2).read_bytes() == old_checkpoint
        ), name
        newest_path, skipped = newest(with_fault)
        assert (newest_path is not None, skipped) == (True, []), (failing, name)
        commit_checkpoint(with_fault, small(4), keep_last=1)
        assert names_in(with_fault) == names(4), (failing, name)
    tally(
        f"{errno.errorcode[code]} at an operation of a commit", len(operations), "every operation"
    )


@pytest.mark.parametrize(
    ("committed_steps", "step"), [((), 1), ((1, 2), 1), ((1, 2), 2), ((1, 2), 3)]
)
def test_whenever_it_ends_there_is_a_whole_checkpoint_and_no_litter(
    tmp_path, committed_steps, step
):
    """The folder as it is before each operation is what a kill at that moment leaves."""
    run_dir, shots = tmp_path / "run", tmp_path / "shots"
    run_dir.mkdir()
    for number in committed_steps:
        commit_checkpoint(run_dir, small(number), keep_last=5)
    whole = bytes_in(run_dir)
    commit_on(
        Watched(lambda number, *_: shutil.copytree(run_dir, shots / str(number))),
        run_dir,
        step,
        keep_last=2,
    )
    for shot in sorted(shots.iterdir()):
        clean(shot)
        steps_on_disk = steps(shot)
        assert names_in(shot) == names(*steps_on_disk), shot.name
        assert set(steps_on_disk) <= {*committed_steps, step}
        for number in steps_on_disk:
            verify(step_file(shot, number))
        if committed_steps:
            older = "checkpoints/step-2.safetensors"
            assert step == 2 or bytes_in(shot)[older] == whole[older]
            assert newest(shot)[0] in (step_file(shot, 2), step_file(shot, 1 if step == 2 else 3))
        commit_checkpoint(shot, small(9), keep_last=1)
        assert names_in(shot) == names(9)
    assert len(list(shots.iterdir())) > 8 - 2 * (not committed_steps)


def test_file_and_digest_are_on_the_disk_before_the_checkpoint_has_its_name(run_dir):
    log = []
    commit_on(Watched(lambda n, name, path: log.append(name)), run_dir, 3)
    order = [
        name
        for previous, name in zip(["", *log], log, strict=False)
        if (previous, name) != ("write", "write")
    ]
    calls = ["open", "write", "fsync"]
    removed = ["unlink"] * 4  # the two before, with their digests
    assert order == [*calls, *calls, "rename", "open", "fsync", *removed]


def test_what_was_not_taken_is_not_believed_and_short_writes_are_gone_on_with(run_dir):
    lying = Disk(lambda file, data: (os.write(file, data[: len(data) // 2]), len(data))[1])
    assert_refused(run_dir, "bytes were written, but the file has", lying)
    assert_refused(run_dir, "only 0 of", Disk(lambda file, data: 0))
    verify(commit_on(Disk(lambda file, data: os.write(file, data[:7])), run_dir, 3))


def test_too_little_room_is_said_before_anything_is_written(run_dir, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    old_bytes = bytes_in(run_dir)
    with pytest.raises(
        CheckpointNotWritten, match=r"it needs 1\.\d MB in .*, but 1\.0 MB are free; make room"
    ):
        commit_checkpoint(run_dir, small(3), keep_last=1)
    assert bytes_in(run_dir) == old_bytes
    with pytest.raises(
        BenchError, match=r"the first checkpoint needs 3\.\d MB in 'gone/run', but 1\.0 MB are free"
    ):
        check_room(Path("gone/run"), 2_000_000, "the first checkpoint")


def test_a_folder_that_has_gone_and_a_file_in_its_place_are_named(run_dir, tmp_path):
    shutil.rmtree(run_dir)
    with pytest.raises(CheckpointNotWritten, match="No such file or directory"):
        commit_checkpoint(run_dir, small(3), keep_last=1)
    assert not run_dir.exists()
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(CheckpointNotWritten, match="File exists"):
        commit_checkpoint(tmp_path, small(1), keep_last=1)
    assert bytes_in(tmp_path) == {"checkpoints": b"no folder"}


@pytest.fixture
def small_file_system(tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_is_really_full(small_file_system):
    for step in (1, 2):
        commit_on(Disk(), small_file_system, step, keep_last=5)
    old_bytes = bytes_in(small_file_system)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        commit_on(Disk(), small_file_system, 3, size=8000)
    assert bytes_in(small_file_system) == old_bytes
    with pytest.raises(CheckpointNotWritten, match=r"it needs 1\.\d MB in .* 0\.0 MB are free"):
        commit_checkpoint(small_file_system, small(3), keep_last=1)
    assert bytes_in(small_file_system) == old_bytes


def test_a_file_system_that_becomes_read_only(small_file_system):
    for step in (1, 2):
        commit_on(Disk(), small_file_system, step, keep_last=5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_file_system)], check=True)
    assert_refused(small_file_system, "Read-only file system")
