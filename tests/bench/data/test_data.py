"""Opening corpora and drawing batches."""

import numpy as np
import torch
from bench_runs import refusal

from nanogpt_bench.data.batches import batch, open_corpus
from nanogpt_bench.setup.resolve import resolve

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_depends_on_seed_step_micro_step_and_rank_only():
    draw = [batch(TOKENS, 8, 16, seed=1, step=5, micro_step=2, rank=3)[0] for _ in range(2)]
    assert torch.equal(draw[0], draw[1])
    others = [{"seed": 2}, {"step": 6}, {"micro_step": 3}, {"rank": 4}]
    for change in others:
        where = {"seed": 1, "step": 5, "micro_step": 2, "rank": 3, **change}
        assert not torch.equal(draw[0], batch(TOKENS, 8, 16, **where)[0])


def test_inputs_and_targets_are_consecutive_tokens_from_every_position():
    x, y = batch(TOKENS, 32, 16, seed=0, step=0)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (32, 16)
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], y[:, :-1])
    starts = {int(row[0]) for step in range(200) for row in batch(TOKENS[:20], 8, 16, seed=0, step=step)[0]}
    assert starts == {0, 1, 2, 3}


def test_a_run_can_train_on_the_first_tokens_only(tiny):
    config = resolve(tiny())
    whole = open_corpus(config)
    config.data.train_tokens = 100
    part = open_corpus(config)
    assert np.array_equal(part.train, whole.train[:100])
    assert len(part.val) == len(whole.val)
    for count in (16, len(whole.train) + 1):
        config.data.train_tokens = count
        with refusal(rf"data.train_tokens: {count} .* give 17 to {len(whole.train)}"):
            open_corpus(config)
