"""A package that is not installed is named in one line, with the extra that brings it,
before anything is written.
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


@pytest.mark.parametrize(
    ("module", "package", "call", "said"),
    [
        (
            "data.dataset",
            "datasets",
            lambda here, _: prepare_eurlex(here / "out", data_dir=here),
            r"datasets; .*\[hub\]",
        ),
        (
            "data.tokenizers",
            "tiktoken",
            lambda *_: make_tokenizer("gpt2", ""),
            r"needs tiktoken; .*\[gpt2-offline\]",
        ),
        *(
            (
                "data.tokenizers",
                package,
                call,
                rf"needs {package}; get it with pip install 'fp8manifold\[\S+\]'",
            )
            for package in ("tokenizers", "tiktoken")
            for call in (
                lambda *_: check_tokenizer("bpe-300"),
                lambda *_: make_tokenizer("bpe-300", "", ["ab"]),
            )
        ),
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
                lambda here, _: find_model(str(here / "x.gguf")),
                rf"{package};.*\[hf\]",
            )
            for package in ("transformers", "gguf")
        ),
        (
            "loop.trackers",
            "wandb",
            lambda here, tiny: run(tiny(tracking__wandb="offline"), here / "r"),
            r"wandb; .*\[wandb\]",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    module, package, call, said, here, tiny, monkeypatch
):
    (here / "x.gguf").write_bytes(b"GGUF")
    tokenizers.encoding.cache_clear()
    find = importlib.util.find_spec
    absent = import_module(f"nanogpt_bench.{module}")
    monkeypatch.setattr(absent, "find_spec", lambda name: None if name == package else find(name))
    with refusal(said):
        call(here, tiny)
    assert [path.name for path in here.iterdir()] == ["x.gguf"]
