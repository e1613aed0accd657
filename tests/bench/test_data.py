"""Opening corpora and drawing batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import batch, load_corpus, open_corpus
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system.errors import BenchError

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_depends_on_seed_step_micro_step_and_rank_only() -> None:
    draw = [batch(TOKENS, 8, 16, seed=1, step=5, micro_step=2, rank=3)[0] for _ in range(2)]
    assert torch.equal(draw[0], draw[1])
    others = [{"seed": 2}, {"step": 6}, {"micro_step": 3}, {"rank": 4}]
    for change in others:
        where = {"seed": 1, "step": 5, "micro_step": 2, "rank": 3, **change}
        assert not torch.equal(draw[0], batch(TOKENS, 8, 16, **where)[0])


def test_inputs_and_targets_are_consecutive_tokens() -> None:
    x, y = batch(TOKENS, 32, 16, seed=0, step=0)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (32, 16)
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_every_position_can_be_drawn_the_last_included() -> None:
    starts = {int(row[0]) for step in range(200) for row in batch(TOKENS[:20], 8, 16, seed=0, step=step)[0]}
    assert starts == {0, 1, 2, 3}


def cut_byte(folder: Path) -> None:
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-1])


def cut_tokens(folder: Path) -> None:
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-10])


def change_token(folder: Path) -> None:
    data = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])


def change_count(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    counts = {key: value for key, value in {**meta["splits"]["train"], **changes}.items() if value is not None}
    change_meta(folder, splits={**meta["splits"], "train": counts})


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_byte, "odd number"),
        (cut_tokens, r"tokens, meta\.json says"),
        (lambda folder: (folder / "val.bin").unlink(), r"val\.bin' does not exist"),
        (lambda folder: (folder / "val.bin").write_bytes(b""), "is empty"),
        (lambda folder: (folder / "meta.json").unlink(), r"no meta\.json; prepare it with"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "is damaged"),
        (lambda folder: change_meta(folder, splits={}), "is damaged"),
        (change_token, r"val\.bin' does not have the sha256 that meta\.json gives"),
        (lambda folder: change_count(folder, sha256="0" * 64), r"train\.bin' does not have the sha256"),
        (lambda folder: change_count(folder, sha256=None), "is damaged .*sha256"),
        (lambda folder: change_count(folder, tokens="many"), "is damaged"),
        (lambda folder: change_meta(folder, vocab_size=3), "a vocabulary of 3, its char tokenizer has"),
        (lambda folder: change_meta(folder, vocab_size=3, characters="abc"), r"holds token \d+, the vocabulary has 3"),
        (lambda folder: change_meta(folder, tokenizer="byte"), "a vocabulary of .*, its byte tokenizer has 257"),
        (lambda folder: change_meta(folder, tokenizer="gpt2"), "a vocabulary of .*, its gpt2 tokenizer has 50257"),
        (lambda folder: change_meta(folder, tokenizer="gpt5"), r"meta\.json': unknown tokenizer 'gpt5'"),
        (lambda folder: change_meta(folder, characters=None), "is damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, corpus_dir: Path, damage: Callable[[Path], object], reason: str) -> None:
    folder = tmp_path / "data"
    shutil.copytree(corpus_dir, folder)
    load_corpus(folder, 16)
    damage(folder)
    with pytest.raises(BenchError, match=reason) as caught:
        load_corpus(folder, 16)
    assert "\n" not in str(caught.value)


def test_a_run_can_train_on_the_first_tokens_only(tiny: Callable[..., Config]) -> None:
    config = resolve(tiny())
    whole = open_corpus(config)
    config.data.train_tokens = 100
    part = open_corpus(config)
    assert np.array_equal(part.train, whole.train[:100])
    assert len(part.val) == len(whole.val)
    for count in (16, len(whole.train) + 1):
        config.data.train_tokens = count
        with pytest.raises(BenchError, match=rf"data.train_tokens: {count} .* give 17 to {len(whole.train)}"):
            open_corpus(config)
