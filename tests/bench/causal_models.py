"""Tiny causal language models of transformers, with tokenizers.

They are written as `save_pretrained` writes them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanogpt_bench.model.causal import quiet_transformers

WORDS = ("Line", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", ".", ":")
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
#: class and sizes of each kind
KINDS = {
    "llama": ("LlamaForCausalLM", {**WIDE, "num_hidden_layers": 2}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "mixtral": (
        "MixtralForCausalLM",
        {**WIDE, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}),
    "bert": ("BertLMHeadModel", {**WIDE, "num_hidden_layers": 1}),
}


def write(
    folder: Path, kind: str = "llama", *, tied: bool = True, vocab_size: int = 64, **options: Any
) -> Path:
    """Write a random model of about 20,000 parameters into a folder and return it."""
    with quiet_transformers(str(folder)) as transformers, torch.random.fork_rng():
        torch.manual_seed(0)
        name, sizes = KINDS[kind]
        model_class = getattr(transformers, name)
        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        positions = {"gpt2": "n_positions", "mamba": ""}.get(kind, "max_position_embeddings")
        places = {positions: 64} if positions else {}
        settings = {
            **sizes,
            **places,
            **ends,
            "vocab_size": vocab_size,
            "tie_word_embeddings": tied,
            **options,
        }
        model_class(model_class.config_class(**settings)).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path, words: int = len(WORDS)) -> Path:
    """Write a tokenizer of some words, digits and an end of text into a folder."""
    import tokenizers

    names = {
        word: index
        for index, word in enumerate(["<end>", "<unknown>", *WORDS[:words], *"0123456789"])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unknown>"))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), digits]
    )
    with quiet_transformers(str(folder)) as transformers:
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
        )
        fast.save_pretrained(folder)
    return folder


def write_gguf(
    path: Path,
    gguf: Any,
    extra_tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] | None = None,
) -> None:
    """Write a Llama of one layer and a small tokenizer as a GGUF file.

    The tokenizer has letters and one pair of them.
    """
    draw, width, inner = np.random.default_rng(0), 32, 48
    writer = gguf.GGUFWriter(str(path), "llama")
    facts = {
        "context_length": 64,
        "embedding_length": width,
        "block_count": 1,
        "feed_forward_length": inner,
    }
    facts |= {"head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "vocab_size": width}
    facts |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_merges": ["a b"]}
    facts |= {"eos_token_id": 0, "unk_token_id": 1}
    for name, fact in {
        **facts,
        "token_list": ["<end>", "<unknown>", *"abcdefghijklmnopqrst", "Ġ", "ab"],
    }.items():
        getattr(writer, f"add_{name}")(fact)
    square = dict.fromkeys(
        ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"), (width, width)
    )
    sizes = {
        "token_embd": (width, width),
        **square,
        "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width),
    }
    for name, size in {**sizes, "blk.0.ffn_down": (width, inner)}.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.02, size).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
