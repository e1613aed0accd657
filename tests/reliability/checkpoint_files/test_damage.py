"""Whatever happens to the bytes or files of a checkpoint is detected, and the one before it is taken instead."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import small

from nanogpt_bench.checkpoint import BrokenCheckpoint, commit, newest, read, verify

FLIPS, FLIPS_IN_FULL = 500, 10_000
FILES = (
    "manifest.json",
    "state.json",
    *(f"{stem}.safetensors" for stem in ("model", "observers", "optimizer", "random")),
)


def seen(folder: Path) -> bool:
    """Whether both ways to read a checkpoint find it broken, and name it."""
    for look in (verify, read):
        try:
            look(folder)
        except BrokenCheckpoint as error:
            if repr(str(folder)) not in str(error) or "\n" in str(error):
                return False
        else:
            return False
    return True


def assert_passed_over(run_dir: Path) -> None:
    """The checkpoint of step 2 is broken, that of step 1 is taken, and it is said why."""
    found, skipped = newest(run_dir)
    assert found == run_dir / "checkpoints" / "step-1"
    assert len(skipped) == 1
    assert "step-2" in skipped[0]


def test_every_single_bit_flip_is_detected(run_dir: Path, full: bool, tally: Callable[..., None]) -> None:
    folder, draw, number = run_dir / "checkpoints" / "step-2", random.Random(0), FLIPS_IN_FULL if full else FLIPS
    whole = {name: (folder / name).read_bytes() for name in FILES}
    bits = [(name, bit) for name, data in whole.items() for bit in range(8 * len(data))]
    missed = []
    for name, bit in draw.sample(bits, number):
        data = bytearray(whole[name])
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        missed += [] if seen(folder) else [(name, bit)]
        (folder / name).write_bytes(whole[name])
    assert missed == []
    verify(folder)
    tally("bit flips in a checkpoint", number, f"of {len(bits):,} bits, all detected")


def test_truncation_at_every_length_is_detected(run_dir: Path, tally: Callable[..., None]) -> None:
    folder, number = run_dir / "checkpoints" / "step-2", 0
    for name in FILES:
        data = (folder / name).read_bytes()
        for length in range(len(data)):
            os.truncate(folder / name, length)
            assert seen(folder), (name, length)
            (folder / name).write_bytes(data)
            number += 1
        (folder / name).write_bytes(data + b"\0")
        assert seen(folder), name
        (folder / name).write_bytes(data)
    verify(folder)
    tally("truncated files in a checkpoint", number, "every length of every file, all detected")


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("between"))
    second.rename(first)
    first.with_name("between").rename(second)


def in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: shutil.copy(path, path.with_name("copy.safetensors")),
        lambda path: shutil.copy(path, path.with_name(f"{path.name}.bak")),
        lambda path: swap(path, path.parent.with_name("step-1") / path.name),
        lambda path: in_place_of(path, Path.mkdir),
        lambda path: in_place_of(path, os.mkfifo),
        lambda path: (
            shutil.copy(path, path.parents[2] / "same"),
            in_place_of(path, lambda at: at.symlink_to("../../same")),
        ),
        lambda path: in_place_of(path, lambda at: at.symlink_to("/dev/zero")),
    ],
    ids=["missing", "empty", "zeros", "copied", "backup", "of step 1", "folder", "pipe", "link to the same", "link"],
)
def test_a_file_that_is_not_the_one_is_detected(run_dir: Path, name: str, damage: Callable[[Path], object]) -> None:
    folder = run_dir / "checkpoints" / "step-2"
    damage(folder / name)
    assert seen(folder)
    found, skipped = newest(run_dir)
    swapped_too = not _whole(run_dir / "checkpoints" / "step-1")
    assert found == (None if swapped_too else run_dir / "checkpoints" / "step-1")
    assert len(skipped) == 1 + swapped_too


def _whole(folder: Path) -> bool:
    try:
        verify(folder)
    except BrokenCheckpoint:
        return False
    return True


@pytest.mark.parametrize("first", FILES)
def test_files_under_each_others_name_are_detected(run_dir: Path, first: str) -> None:
    folder = run_dir / "checkpoints" / "step-2"
    for second in FILES:
        if second == first:
            continue
        swap(folder / first, folder / second)
        assert seen(folder), second
        swap(folder / first, folder / second)
        kept = (folder / second).read_bytes()
        shutil.copy(folder / first, folder / second)
        assert seen(folder), second
        (folder / second).write_bytes(kept)
    verify(folder)


@pytest.mark.parametrize("way", ["copied", "renamed", "linked", "file", "empty"])
def test_a_folder_that_is_not_that_step_is_detected(run_dir: Path, way: str) -> None:
    first, second = (run_dir / "checkpoints" / f"step-{step}" for step in (1, 2))
    shutil.rmtree(second)
    if way == "copied":
        shutil.copytree(first, second)
    elif way == "renamed":
        commit(run_dir, small(3), keep_last=5).rename(second)
    elif way == "linked":
        shutil.copytree(first, run_dir / "elsewhere")
        second.symlink_to(run_dir / "elsewhere")
    elif way == "file":
        second.write_text("no folder")
    else:
        second.mkdir()
    assert seen(second)
    assert_passed_over(run_dir)


def test_a_checkpoint_may_be_kept_under_a_name_that_is_no_step(run_dir: Path) -> None:
    kept = shutil.copytree(run_dir / "checkpoints" / "step-2", run_dir / "good")
    assert read(Path(kept)).step == 2


def test_what_can_not_be_read_is_passed_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def refuse(path: object, *arguments: object, **options: object) -> int:
        if "step-2/model" in os.fspath(path):  # type: ignore[call-overload]
            raise PermissionError(13, "Permission denied", path)
        return really_open(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    assert_passed_over(run_dir)
    assert "model.safetensors: Permission denied" in newest(run_dir)[1][0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads whatever the permissions are; the test above stands in")
def test_what_one_may_not_read_is_passed_over(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-2" / "model.safetensors").chmod(0)
    assert_passed_over(run_dir)


def test_a_broken_checkpoint_is_replaced_when_its_step_comes_again(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-2" / "state.json").write_text("{}")
    assert_passed_over(run_dir)
    commit(run_dir, small(2), keep_last=2)
    assert newest(run_dir) == (run_dir / "checkpoints" / "step-2", [])
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["step-1", "step-2"]
