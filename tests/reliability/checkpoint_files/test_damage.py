"""Whatever happens to the bytes or files of a checkpoint is detected, and the one before it is taken instead."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import small

from nanogpt_bench.checkpoint import BrokenCheckpoint, commit, newest, read, step_file, steps, verify

FLIPS, FLIPS_IN_FULL = 500, 10_000
#: the file, and its digest
LAST = ("", ".sha256")


def beside(path: Path, last: str) -> Path:
    return path.with_name(path.name + last)


def seen(path: Path) -> bool:
    for look in (verify, read):
        try:
            look(path)
        except BrokenCheckpoint as error:
            if repr(str(path)) not in str(error) or "\n" in str(error):
                return False
        else:
            return False
    return True


def assert_passed_over(run_dir: Path) -> None:
    """The checkpoint of step 2 is broken, that of step 1 is taken, and it is said why."""
    found, skipped = newest(run_dir)
    assert found == step_file(run_dir, 1)
    assert len(skipped) == 1
    assert "step-2" in skipped[0]


def test_every_single_bit_flip_is_detected(run_dir: Path, full: bool, tally: Callable[..., None]) -> None:
    path, draw, number = step_file(run_dir, 2), random.Random(0), FLIPS_IN_FULL if full else FLIPS
    whole = {last: beside(path, last).read_bytes() for last in LAST}
    bits = [(last, bit) for last, data in whole.items() for bit in range(8 * len(data))]
    missed = []
    for last, bit in draw.sample(bits, number):
        data = bytearray(whole[last])
        data[bit // 8] ^= 1 << bit % 8
        beside(path, last).write_bytes(data)
        missed += [] if seen(path) else [(last, bit)]
        beside(path, last).write_bytes(whole[last])
    assert missed == []
    verify(path)
    tally("bit flips in a checkpoint", number, f"of {len(bits):,} bits, all detected")


def test_truncation_at_every_length_is_detected(run_dir: Path, tally: Callable[..., None]) -> None:
    path, number = step_file(run_dir, 2), 0
    for last in LAST:
        file = beside(path, last)
        data = file.read_bytes()
        for length in range(len(data)):
            os.truncate(file, length)
            assert seen(path), (last, length)
            file.write_bytes(data)
            number += 1
        file.write_bytes(data + b"\0")
        assert seen(path), last
        file.write_bytes(data)
    verify(path)
    tally("truncated files of a checkpoint", number, "every length of both files, all detected")


def in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: shutil.copy(path.with_name(path.name.replace("step-2", "step-1")), path),
        lambda path: in_place_of(path, Path.mkdir),
        lambda path: in_place_of(path, os.mkfifo),
        lambda path: (
            shutil.copy(path, path.parent.parent / "same"),
            in_place_of(path, lambda at: at.symlink_to("../same")),
        ),
        lambda path: in_place_of(path, lambda at: at.symlink_to("/dev/zero")),
    ],
    ids=["missing", "zeros", "of step 1", "folder", "pipe", "link to the same", "link"],
)
def test_a_file_that_is_not_the_one_is_detected(run_dir: Path, last: str, damage: Callable[[Path], object]) -> None:
    path = step_file(run_dir, 2)
    damage(beside(path, last))
    assert seen(path)
    if path.exists():
        assert_passed_over(run_dir)
    else:
        assert newest(run_dir) == (step_file(run_dir, 1), [])


def test_a_checkpoint_under_another_step_s_name_is_detected(run_dir: Path) -> None:
    first, second = (step_file(run_dir, step) for step in (1, 2))
    shutil.copy(first, second)
    digest = beside(first, ".sha256").read_text().replace("step-1", "step-2")
    beside(second, ".sha256").write_text(digest)
    assert seen(second)
    assert_passed_over(run_dir)
    assert "holds step 1, not the step of its name" in newest(run_dir)[1][0]


def test_what_can_not_be_read_is_passed_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "step-2.safetensors":
            raise PermissionError(13, "Permission denied", path)
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert_passed_over(run_dir)
    assert newest(run_dir)[1][0].endswith("step-2.safetensors': Permission denied")


def test_a_broken_checkpoint_is_replaced_when_its_step_comes_again(run_dir: Path) -> None:
    step_file(run_dir, 2).write_text("{}")
    assert_passed_over(run_dir)
    commit(run_dir, small(2), keep_last=2)
    assert newest(run_dir) == (step_file(run_dir, 2), [])
    assert steps(run_dir) == [1, 2]
