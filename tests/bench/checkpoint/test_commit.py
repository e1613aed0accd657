"""A checkpoint goes to disk whole and comes back bit for bit.

It takes the place of those that are no longer needed.
"""

import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file

import nanogpt_bench.checkpoint.format as checkpoint_format
from nanogpt_bench.checkpoint import (
    BrokenCheckpoint,
    CheckpointNotWritten,
    Contents,
    clean,
    commit_checkpoint,
    newest,
    read_checkpoint,
    step_file,
    steps,
    verify,
)

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def contents(step: int, best: bool = False) -> Contents:
    """A checkpoint of three small files, the tensors different at every step."""
    random = torch.Generator().manual_seed(step)
    weights = {f"blocks.{i}.w": torch.randn(3, 5, generator=random) for i in range(3)}
    codes = {"w/codes": torch.randint(0, 256, (7,), dtype=torch.uint8, generator=random)}
    facts = {"best": best, "config": {"seed": 42}, "scalars": [1, 2.5, None, "ü"]}
    return Contents(
        step, {"model": weights, "optimizer": codes, "random": {}}, {"model": {"w": "E4M3"}}, facts
    )


def assert_same(contents: Contents, wanted: Contents) -> None:
    assert contents.step == wanted.step
    assert contents.facts == {**wanted.facts, "step": wanted.step}
    assert contents.metadata == wanted.metadata
    assert contents.tensors.keys() == {stem for stem, tensors in wanted.tensors.items() if tensors}
    for stem, tensors in contents.tensors.items():
        assert tensors.keys() == wanted.tensors[stem].keys(), stem
        for name, tensor in tensors.items():
            expected = wanted.tensors[stem][name]
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (stem, name)
            assert (
                tensor.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))
            ), (stem, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_and_may_be_written_to(tmp_path, dtype):
    bits = (
        torch.randint(0, 2, (64,), dtype=torch.uint8).repeat(4)
        if dtype is torch.bool
        else torch.arange(256).byte()
    )
    filled = bits.view(dtype)
    tensors = {
        "filled": filled,
        "empty": torch.empty(0, 3, dtype=dtype),
        "scalar": filled[1].clone(),
    }
    wanted = Contents(1, {"model": tensors}, facts={})
    contents = read_checkpoint(commit_checkpoint(tmp_path, wanted, keep_last=1))
    assert_same(contents, wanted)
    contents.tensors["model"]["filled"].zero_()


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0 is not allowed"):
        commit_checkpoint(tmp_path, contents(1), keep_last=0)
    assert os.listdir(tmp_path) == []
    for step in range(1, 8):
        commit_checkpoint(tmp_path, contents(step, best=step in (1, 3)), keep_last=2)
    assert steps(tmp_path) == [3, 6, 7]
    commit_checkpoint(tmp_path, contents(8, best=True), keep_last=2)
    assert steps(tmp_path) == [7, 8]


def test_a_header_too_long_to_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_format, "HEADER", 200)
    with pytest.raises(ValueError, match=r"its header would have [\d,]+ bytes; at most 200"):
        commit_checkpoint(tmp_path, contents(1), keep_last=1)
    assert os.listdir(tmp_path) == []


def test_without_checkpoints_there_is_none(tmp_path):
    assert newest(tmp_path) == (None, [])
    clean(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(BrokenCheckpoint, match=r"step-3.safetensors': No such file"):
        verify(step_file(tmp_path, 3))


def test_litter_is_removed_and_nothing_else(tmp_path):
    folder = commit_checkpoint(tmp_path, contents(1), keep_last=1).parent
    whole = sorted(os.listdir(folder))
    for name in (
        ".step-2.safetensors.part",
        "step-3.safetensors.sha256",
        "notes.safetensors.sha256",
    ):
        (folder / name).write_text("x")
    clean(tmp_path)
    assert sorted(os.listdir(folder)) == ["notes.safetensors.sha256", *whole]


def test_others_read_it(tmp_path):
    path = commit_checkpoint(tmp_path, contents(1), keep_last=1)
    loaded = load_file(path)
    assert loaded["model/blocks.1.w"].equal(contents(1).tensors["model"]["blocks.1.w"])
    assert len(loaded) == 4
    assert (
        subprocess.run(
            ["sha256sum", "-c", f"{path.name}.sha256"], cwd=path.parent, check=False
        ).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"facts": {"loss": float("nan")}}, "JSON compliant"),
        ({"facts": {"class": torch.nn.Linear}}, None),
        ({"tensors": {"model": {"w": torch.ones(4, 6).T}}}, "contiguous"),
        (
            {"tensors": {"model": {"w": torch.ones(2).to(torch.float8_e8m0fnu)}}},
            "is torch.float8_e8m0fnu",
        ),
        ({"tensors": {"model": {"w": torch.ones(2).to_sparse()}}}, "sparse"),
    ],
)
def test_what_no_file_can_hold_is_refused_and_leaves_nothing(tmp_path, change, words):
    bad = contents(3)
    for key, value in change.items():
        setattr(bad, key, value)
    commit_checkpoint(tmp_path, contents(2), keep_last=2)
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        commit_checkpoint(tmp_path, bad, keep_last=2)
    assert not isinstance(caught.value, CheckpointNotWritten)
    assert len(os.listdir(tmp_path / "checkpoints")) == 2
