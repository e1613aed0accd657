"""Corpora as they are written and read: batches, windows, and what stands in the way."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_runs import refusal
from damages import contents

from nanogpt_bench.data.batches import batch, open_corpus
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.data.write import write_corpus
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system.errors import DiskError

SPLITS = {"train": ["a" * 100, "b" * 50], "val": ["c" * 80]}


def write(out: Path, tokenizer: ByteTokenizer | None = None) -> dict[str, object]:
    return write_corpus(out, SPLITS, tokenizer or ByteTokenizer(), {"kind": "test"}, progress=False)


def test_files_and_meta_agree_and_a_prepared_corpus_is_replaced(tmp_path):
    meta = write(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "meta.json").read_text()) == meta
    train = np.fromfile(tmp_path / "out" / "train.bin", dtype="<u2")
    assert train.tolist() == [97] * 100 + [256] + [98] * 50 + [256]
    counts = meta["splits"]["train"]
    digest = hashlib.sha256((tmp_path / "out" / "train.bin").read_bytes()).hexdigest()
    assert counts == {"documents": 2, "tokens": 152, "bytes": 150, "sha256": digest}
    write(tmp_path / "out")
    write_corpus(
        tmp_path / "out",
        {"train": ["x" * 70], "val": ["y" * 70]},
        ByteTokenizer(),
        {"kind": "test"},
        progress=False,
    )
    assert (
        json.loads((tmp_path / "out" / "meta.json").read_text())["splits"]["train"]["tokens"] == 71
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Failing(ByteTokenizer):
    """Fails in the second document: as Ctrl-C would, or where there is no room for it."""

    def __init__(self, error):
        self.error = error

    def encode(self, text):
        if text.startswith("b"):
            raise self.error
        return super().encode(text)


@pytest.mark.parametrize("there_before", [False, True])
def test_what_ends_it_leaves_what_was_there(tmp_path, there_before):
    out = tmp_path / "out"
    if there_before:
        write(out)
    old_contents = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write(out, Failing(KeyboardInterrupt()))
    with pytest.raises(DiskError, match=r"--out '.*out' can't be written: No space left on device"):
        write(out, Failing(OSError(28, "No space left on device")))
    assert contents(tmp_path) == old_contents


def test_what_is_in_the_way_or_too_short_is_named_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with refusal(r"thesis\.tex"):
        write(tmp_path)
    with refusal("is a file"):
        write(tmp_path / "thesis.tex")
    with refusal("too short: its val split has 11 tokens, and at least 65"):
        write_corpus(
            tmp_path / "o",
            {"train": ["x" * 99], "val": ["y" * 10]},
            ByteTokenizer(),
            {},
            progress=False,
        )
    assert contents(tmp_path) == {"thesis.tex": b"precious"}


@pytest.mark.parametrize("limit", [None, 800])
@pytest.mark.parametrize("stream", [False, True])
def test_the_bar_is_drawn_on_standard_error_only(limit, stream, tmp_path, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    splits = {name: iter(texts * 10) if stream else texts * 10 for name, texts in SPLITS.items()}
    write_corpus(tmp_path / "out", splits, ByteTokenizer(), {}, progress=True, limit=limit)
    output = capsys.readouterr()
    assert output.out == ""
    assert "tokenizing" in output.err
    assert f"{1520 + 810 if limit is None else 880:,} tokens" in output.err


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"step": 6}, {"micro_step": 3}, {"rank": 4}], ids=str
)
def test_batches_depend_on_their_keys(change):
    tokens = np.arange(1000, dtype=np.uint16)
    draw = [batch(tokens, 8, 16, seed=1, step=5, micro_step=2, rank=3)[0] for _ in range(2)]
    assert torch.equal(draw[0], draw[1])
    place = {"seed": 1, "step": 5, "micro_step": 2, "rank": 3, **change}
    assert not torch.equal(draw[0], batch(tokens, 8, 16, **place)[0])


def test_targets_follow_inputs():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = batch(tokens, 32, 16, seed=0, step=0)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (32, 16)
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], y[:, :-1])
    starts = set()
    for step in range(200):
        x, _ = batch(tokens[:20], 8, 16, seed=0, step=step)
        starts |= set(x[:, 0].tolist())
    assert starts == {0, 1, 2, 3}


def test_a_run_can_train_on_the_first_tokens_only(tiny):
    config = resolve(tiny())
    whole = open_corpus(config)
    config.data.train_tokens = 100
    part = open_corpus(config)
    assert np.array_equal(part.train, whole.train[:100])
    assert len(part.val) == len(whole.val)


@pytest.mark.parametrize("side", ["too few", "too many"])
def test_a_number_of_first_tokens_that_there_are_not_is_refused(side, tiny):
    config = resolve(tiny())
    all_tokens = len(open_corpus(config).train)
    count = 16 if side == "too few" else all_tokens + 1
    config.data.train_tokens = count
    with refusal(rf"data.train_tokens: {count} .* give 17 to {all_tokens}"):
        open_corpus(config)


def test_a_folder_with_a_damaged_meta_json_alone_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text("{")
    with refusal("holds a meta.json that can't be read: prepare did not write it so"):
        write_corpus(tmp_path, {"train": ["a" * 99]}, ByteTokenizer(), {}, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]
