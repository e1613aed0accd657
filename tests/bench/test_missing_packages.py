"""A package that is not installed is named in one line, with its extra.

This happens before anything is written.
"""

import importlib.util
from importlib import import_module

import pytest
from bench_runs import refusal

from nanogpt_bench.data import tokenizers
from nanogpt_bench.data.dataset import prepare_eurlex
from nanogpt_bench.data.tokenizers import check_tokenizer, make_tokenizer
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.causal import find_model
from nanogpt_bench.model.weights import checkpoint_shape

NEEDED = r"needs {0}; get it with pip install 'fp8manifold\[\S+\]'"


def check_byte_pairs(*_):
    check_tokenizer("bpe-300")


def make_byte_pairs(*_):
    make_tokenizer("bpe-300", "", ["ab"])


@pytest.mark.parametrize(
    ("module", "package", "call", "sentence"),
    [
        (
            "data.dataset",
            "datasets",
            lambda folder, _: prepare_eurlex(folder / "out", data_dir=folder),
            r"datasets; .*\[hub\]",
        ),
        (
            "data.tokenizers",
            "tiktoken",
            lambda *_: make_tokenizer("gpt2", ""),
            r"needs tiktoken; .*\[gpt2-offline\]",
        ),
        ("data.tokenizers", "tokenizers", check_byte_pairs, NEEDED.format("tokenizers")),
        ("data.tokenizers", "tokenizers", make_byte_pairs, NEEDED.format("tokenizers")),
        ("data.tokenizers", "tiktoken", check_byte_pairs, NEEDED.format("tiktoken")),
        ("data.tokenizers", "tiktoken", make_byte_pairs, NEEDED.format("tiktoken")),
        (
            "system.hub",
            "huggingface_hub",
            lambda *_: checkpoint_shape("gpt2"),
            r"fp8manifold\[hub\]",
        ),
        *(
            (
                "model.causal",
                package,
                lambda folder, _: find_model(str(folder / "x.gguf")),
                rf"{package};.*\[hf\]",
            )
            for package in ("transformers", "gguf")
        ),
        (
            "loop.trackers",
            "wandb",
            lambda folder, tiny: run(tiny(tracking__wandb="offline"), folder / "r"),
            r"wandb; .*\[wandb\]",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    module, package, call, sentence, working_folder, tiny, monkeypatch
):
    (working_folder / "x.gguf").write_bytes(b"GGUF")
    tokenizers.encoding.cache_clear()
    find = importlib.util.find_spec
    absent = import_module(f"nanogpt_bench.{module}")
    monkeypatch.setattr(absent, "find_spec", lambda name: None if name == package else find(name))
    with refusal(sentence):
        call(working_folder, tiny)
    assert [path.name for path in working_folder.iterdir()] == ["x.gguf"]
