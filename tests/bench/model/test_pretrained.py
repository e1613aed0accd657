"""Weights of GPT-2's files, and the model of 124M as transformers computes it."""

import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import gpt2_checkpoints
import numpy as np
import pytest
import torch
from bench_runs import flags, records_of, refusal, resolved

from nanogpt_bench.config.settings import Resolved, find_config, load_config
from nanogpt_bench.data.batches import load_corpus, open_corpus
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import initial_model
from nanogpt_bench.model.gpt import GPT, GPT_SIZES, GPTShape, build_model
from nanogpt_bench.model.weights import checkpoint_shape, load_checkpoint
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.system import hub as hub_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return gpt2_checkpoints.write(tmp_path_factory.mktemp("gpt2"))


def loaded(folder: Path, **shape: Any) -> GPT:
    model = GPT(GPTShape(**{**vars(checkpoint_shape(str(folder))), **shape})).eval()
    load_checkpoint(model, str(folder), "char")
    return model


@pytest.mark.parametrize("function", ["gelu_new", "gelu"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_transformers(tmp_path, function, tied):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = {
        key: value for key, value in gpt2_checkpoints.SETTINGS.items() if key != "model_type"
    }
    settings |= {
        "activation_function": function,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    }
    published = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    ).eval()
    published.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    tokens = torch.randint(0, 61, (3, 32))
    with torch.no_grad():
        expected, logits = published(tokens).logits, model(tokens)
    assert float(expected.std()) > 0.5  # logits that say something
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert (model.lm_head.weight is model.token_embedding.weight) is tied


def test_gpt2_s_own_size_has_gpt2_s_parameters():
    with torch.device("meta"):
        model = GPT(GPT_SIZES["124M"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    shape = resolved(["--model.size=124M"]).model
    assert (shape.bias, shape.tie_weights, shape.gelu) == (True, True, "tanh")


def renamed(stored: dict[str, torch.Tensor]) -> None:
    for name in list(stored):
        stored[f"transformer.{name}"] = stored.pop(name)
    stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    stored["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    stored["lm_head.weight"] = stored["transformer.wte.weight"].clone()


def halved(stored: dict[str, torch.Tensor]) -> None:
    stored.update({name: value.bfloat16() for name, value in stored.items()})


@pytest.mark.parametrize("edit", [renamed, halved])
def test_names_with_and_without_their_prefix_masks_and_bfloat16_are_read(tmp_path, folder, edit):
    edited = gpt2_checkpoints.change(gpt2_checkpoints.write(tmp_path), edit)
    for index, (weight, edited_weight) in enumerate(
        zip(loaded(folder).parameters(), loaded(edited).parameters(), strict=True)
    ):
        assert edited_weight.dtype is torch.float32, index
        assert torch.equal(
            weight.bfloat16().float() if edit is halved else weight, edited_weight
        ), index


def test_fewer_positions_take_the_first_and_an_untied_head_a_copy(folder):
    full, cut = loaded(folder), loaded(folder, block_size=8, tie_weights=False)
    tokens = torch.arange(8)[None]
    assert torch.equal(cut(tokens), full(tokens))
    assert cut.lm_head.weight is not cut.token_embedding.weight
    assert torch.equal(cut.lm_head.weight, cut.token_embedding.weight)


def test_codes_are_not_read_as_weights(tmp_path):
    def edit(stored):
        stored["h.0.mlp.c_fc.weight"] = (stored["h.0.mlp.c_fc.weight"] * 100).to(torch.int8)

    with refusal(
        r"weight of 'model\.safetensors' holds I8 of shape \(16, 64\), and its scale is missing"
    ):
        loaded(gpt2_checkpoints.change(gpt2_checkpoints.write(tmp_path), edit))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.n_layer=3", "model.n_layer: 3 contradicts the checkpoint"),
        ("--model.n_embd=32", "model.n_embd: 32 contradicts the checkpoint"),
        ("--model.bias=false", "model.bias: False contradicts the checkpoint"),
        ("--model.gelu=exact", "'tanh'"),
        ("--model.size=10M", "add --model.size null"),
        ("--model.block_size=64", "more than the 32 positions"),
    ],
)
def test_settings_for_another_model_are_refused(folder, arguments, words):
    with refusal(words):
        resolved(["--model.init_from", str(folder), arguments])


def test_a_model_of_another_kind_or_with_a_head_of_its_own_is_refused(tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llama = gpt2_checkpoints.write(tmp_path / "other", model_type="llama", **sizes)
    with refusal(r"model_type 'llama'; only gpt2 can be loaded"):
        checkpoint_shape(str(llama))
    headed = gpt2_checkpoints.write(tmp_path / "headed", tie_word_embeddings=False)
    with refusal(r"its own lm_head weight; give false"):
        resolved(["--model.init_from", str(headed), "--model.tie_weights=true"])


def test_a_run_starts_from_the_checkpoint(tiny, corpus_dir, tmp_path):
    vocabulary = load_corpus(corpus_dir, 16).vocab_size
    folder = gpt2_checkpoints.write(
        tmp_path / "gpt2", vocab_size=vocabulary, n_layer=1, n_positions=16
    )
    config = tiny(
        model__init_from=str(folder),
        model__format="E4M3",
        model__tie_weights=False,
        train__max_steps=3,
    )
    model = initial_model(resolve(config), load_corpus(corpus_dir, 16))
    assert torch.equal(model.position_embedding.weight, loaded(folder).position_embedding.weight)
    summary = run(config, tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < summary["first_val_loss"]


def test_another_vocabulary_is_refused(tiny, folder, tmp_path):
    config = tiny(model__init_from=str(folder), model__n_layer=2)
    with refusal(r"has a vocabulary of 61, but the corpus \(tokenizer char\)"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_hub_does_not_have_is_named_and_one_out_of_reach_is_given_up(
    hub, folder, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    (hub.root / "openai-community").mkdir()
    (hub.root / "openai-community" / "gpt2").symlink_to(folder)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with refusal(r"'someone/else' is neither a folder here nor a model on the hub"):
        checkpoint_shape("someone/else")
    with refusal(r"on the hub has no pytorch_model\.bin"):
        hub_module.hub_file("openai-community/gpt2", "pytorch_model.bin")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(hub_module, "PATIENCE", 1.0)
    start = time.monotonic()
    with refusal(r"the hub can't be reached.*local copy"):
        checkpoint_shape("gpt2")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "gpt3"])
def test_a_path_that_does_not_exist_is_no_id(name):
    with refusal("does not exist"):
        checkpoint_shape(name)


#: AdamW as everybody writes it, on a CPU; the file's own on a card differs in its
#: precision, compiled
PLAIN = ["--rule=fp32", "--runtime.compile=false", "--monitor.watch=[]", "--checkpoint.every=null"]
#: GPT-2's names of the layers; those of the others differ in a word
NAMES = {"norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj"}
NAMES |= {"mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj", "blocks.": "h.", "final_norm": "ln_f"}
NAMES |= {"token_embedding": "wte", "position_embedding": "wpe"}


def settings(data: Path, *words: str) -> Resolved:
    """The shipped file, with AdamW in float32 and what else is given."""
    return resolve(
        load_config(find_config("gpt2_124m.yaml"), [f"--data.dir={data}", *PLAIN, *words])
    )


def transformers_model(config: Resolved, vocabulary: int) -> Any:
    """A GPT-2 of transformers with the run's first weights.

    Its linear layers hold (inputs, outputs).
    """
    import transformers

    shape = model_shape(config, open_corpus(config))
    assert shape.vocab_size == vocabulary
    sizes = {
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.block_size,
    }
    zeros = dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0
    )
    published = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=vocabulary, **sizes, **zeros)
    )
    published_weights = dict(published.transformer.named_parameters())
    for name, weight in build_model(shape, config.seed).named_parameters():
        for name_of_ours, name_of_theirs in NAMES.items():
            name = name.replace(name_of_ours, name_of_theirs)
        fused = published_weights.pop(name)
        fused.data.copy_(weight.T if ".c_" in name and weight.dim() == 2 else weight)
    assert not published_weights
    return published


def transformers_losses(config: Resolved, steps: int) -> list[float]:
    """Return the losses of the first steps of a training as one would write it.

    Torch's AdamW, its norm, warm-up and cosine.
    """
    folder, options, train = Path(config.data.dir), config.optimizer, config.train
    meta = json.loads((folder / "meta.json").read_text())
    tokens, block = np.fromfile(folder / "train.bin", dtype=np.uint16), config.model.block_size
    model = transformers_model(config, meta["vocab_size"])
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    losses = []
    for step in range(steps):
        share = (step - options.warmup_steps) / (train.max_steps - options.warmup_steps)
        decayed = options.min_lr_ratio + (1 - options.min_lr_ratio) * 0.5 * (
            1 + math.cos(math.pi * share)
        )
        factor = (step + 1) / (options.warmup_steps + 1) if share < 0 else decayed
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor
        optimizer.zero_grad()
        total = 0.0
        for micro in range(train.accumulation):
            drawn = np.random.Generator(
                np.random.Philox(key=config.seed, counter=[0, 0, micro, step])
            )
            starts = drawn.integers(0, len(tokens) - block, size=train.batch_size)
            rows = torch.from_numpy(
                np.stack([tokens[i : i + block + 1] for i in starts]).astype(np.int64)
            )
            logits = model(rows[:, :-1]).logits
            loss = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                / train.accumulation
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def check(config: Resolved, folder: Path, moves: float) -> None:
    steps = config.train.max_steps
    losses = [line["train/loss"] for line in records_of(config, folder) if "train/loss" in line]
    published_losses = transformers_losses(config, steps)
    assert len(losses) == steps
    assert losses == pytest.approx(
        published_losses, abs=1e-5, rel=0
    )  # ten of float32's units at losses from 8 to 16
    assert max(losses) - min(losses) > moves


def test_a_small_model_has_the_losses_of_transformers(tmp_path, text_file):
    prepare_text(text_file, tmp_path / "data", "gpt2")
    small = {
        "model.n_layer": 2,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.block_size": 24,
        "train.batch_size": 3,
    }
    small |= {
        "train.max_steps": 12,
        "optimizer.warmup_steps": 4,
        "eval.batches": 1,
        "eval.interval": 12,
    }
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
