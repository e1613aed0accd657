"""The 124M configuration: its losses are those of a plain training of transformers' GPT-2 from the same weights."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import flags, records_of

from nanogpt_bench.config.settings import Resolved, find_config, load_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.task import model_shape

#: AdamW as everybody writes it, on a CPU; the file's own on a card differs in its precision, compiled
PLAIN = ["--rule=fp32", "--runtime.compile=false", "--monitor.watch=[]", "--checkpoint.every=null"]
#: GPT-2's names of the layers; those of the others differ in a word
NAMES = {"norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj"}
NAMES |= {"mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj", "blocks.": "h.", "final_norm": "ln_f"}
NAMES |= {"token_embedding": "wte", "position_embedding": "wpe"}


def settings(data: Path, *given: str) -> Resolved:
    """The shipped file, with AdamW in float32 and what else is given."""
    return resolve(load_config(find_config("gpt2_124m.yaml"), [f"--data.dir={data}", *PLAIN, *given]))


def transformers_model(config: Resolved, vocabulary: int) -> Any:
    """A GPT-2 of transformers with the run's first weights; its linear layers hold (inputs, outputs)."""
    import transformers

    shape = model_shape(config, open_corpus(config))
    assert shape.vocab_size == vocabulary
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd, "n_positions": shape.block_size}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    )
    theirs = dict(made.transformer.named_parameters())
    for name, weight in build_model(shape, config.seed).named_parameters():
        for ours, other in NAMES.items():
            name = name.replace(ours, other)
        held = theirs.pop(name)
        held.data.copy_(weight.T if ".c_" in name and weight.dim() == 2 else weight)
    assert not theirs
    return made


def transformers_losses(config: Resolved, steps: int) -> list[float]:
    """The losses of the first steps as one would write a training: torch's AdamW, its norm, warm-up and cosine."""
    folder, options, train = Path(config.data.dir), config.optimizer, config.train
    meta = json.loads((folder / "meta.json").read_text())
    tokens, block = np.fromfile(folder / "train.bin", dtype=np.uint16), config.model.block_size
    model = transformers_model(config, meta["vocab_size"])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    losses = []
    for step in range(steps):
        share = (step - options.warmup_steps) / (train.max_steps - options.warmup_steps)
        decayed = options.min_lr_ratio + (1 - options.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * share))
        factor = (step + 1) / (options.warmup_steps + 1) if share < 0 else decayed
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor
        optimizer.zero_grad()
        total = 0.0
        for micro in range(train.accumulation):
            drawn = np.random.Generator(np.random.Philox(key=config.seed, counter=[0, 0, micro, step]))
            starts = drawn.integers(0, len(tokens) - block, size=train.batch_size)
            rows = torch.from_numpy(np.stack([tokens[i : i + block + 1] for i in starts]).astype(np.int64))
            logits = model(rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / train.accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def check(config: Resolved, folder: Path, moves: float) -> None:
    steps = config.train.max_steps
    ours = [line["train/loss"] for line in records_of(config, folder) if "train/loss" in line]
    theirs = transformers_losses(config, steps)
    assert len(ours) == steps
    assert ours == pytest.approx(theirs, abs=1e-5, rel=0)  # ten of float32's units at losses from 8 to 16
    assert max(ours) - min(ours) > moves


def test_a_small_model_has_the_losses_of_transformers(tmp_path, text_file):
    prepare_text(text_file, tmp_path / "data", "gpt2")
    small = {"model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32, "model.block_size": 24, "train.batch_size": 3}
    small |= {"train.max_steps": 12, "optimizer.warmup_steps": 4, "eval.batches": 1, "eval.interval": 12}
    config = settings(tmp_path / "data", *flags(small))
    assert config.train.accumulation == 2
    check(config, tmp_path / "run", moves=0.5)


@pytest.mark.slow
def test_the_whole_model_has_the_losses_of_transformers(tmp_path, text_file):
    (tmp_path / "long.txt").write_text(text_file.read_text(encoding="utf-8") * 8, encoding="utf-8")
    prepare_text(tmp_path / "long.txt", tmp_path / "data", "gpt2")
    ones = ("train.batch_size", "train.accumulation", "optimizer.warmup_steps", "eval.batches")
    config = settings(tmp_path / "data", "--train.max_steps=3", *flags(dict.fromkeys(ones, 1)))
    assert (config.model.n_layer, config.model.n_embd, config.model.block_size) == (12, 768, 1024)
    check(config, tmp_path / "run", moves=0.02)
