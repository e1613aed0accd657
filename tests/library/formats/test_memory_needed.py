"""The memory of a training, by arithmetic.

Parameters are those of transformers' own models, weights and state those of live ones.
"""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from fresh_programs import outputs_of

import fp8manifold as fm
from fp8manifold._memory.architecture import architecture

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 301}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ENDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
MIXED = {"num_experts": 4, "moe_intermediate_size": 32}
CONFIGS = {
    "Llama": {},
    "Llama, biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mistral": {},
    "Granite": {},
    "Gemma": {},
    "SmolLM3": ENDS,
    "Olmo2": ENDS,
    "Qwen2": {},
    "Qwen3": {},
    "Mixtral": {},
    "Qwen2Moe": MIXED | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "Qwen3Moe": MIXED | {"decoder_sparse_step": 2, "attention_bias": True},
    "GPT2": {},
}
#: the page's first model of eight billion parameters
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}


def config_of(name):
    kind = name.partition(",")[0]
    if kind == "GPT2":
        return transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=90)
    return getattr(transformers, f"{kind}Config")(**SIZES | CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name):
    config = config_of(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = Counter()
    for parameter in architecture(config).parameters:
        counted[parameter.shape] += parameter.count
    # a one-dimensional convolution has its weight transposed
    turned = name == "GPT2"
    shapes = Counter()
    for path, parameter in model.named_parameters():
        is_turned = turned and parameter.dim() == 2 and ".h." in path
        shapes[tuple(parameter.shape[::-1] if is_turned else parameter.shape)] += 1
    assert counted == shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_may_be_a_mapping_or_a_file(name, tmp_path):
    config = config_of(name)
    needed = fm.memory_needed(config)
    assert fm.memory_needed(config.to_dict()) == needed
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_diff_dict()), encoding="utf-8")
    assert fm.memory_needed(path) == fm.memory_needed(str(path)) == needed
    assert fm.memory_needed(tmp_path) == needed


def test_transformers_is_imported_for_a_folder_only():
    code = (
        "import sys, fp8manifold as fm\n"
        f"fm.memory_needed({LLAMA!r})\n"
        "print('transformers' in sys.modules)"
    )
    assert outputs_of({"counted": code})["counted"] == "False\n"


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight"),
    [("adamw", 2.03), ("muon", 1.15), ("lion", 1.02), ("adafactor", 0.002)],
)
def test_the_state_of_eight_billion_weights(optimizer, bytes_per_weight):
    needed = fm.memory_needed(LLAMA, optimizer)
    assert needed.parameters == 8_030_261_248
    assert needed.state / needed.parameters == pytest.approx(bytes_per_weight, rel=0.01, abs=5e-4)
    assert needed.weights / needed.parameters == pytest.approx(1.001, abs=1e-3)


def test_parts_are_those_of_the_moment_with_the_most():
    whole, chunked = (fm.memory_needed(LLAMA, chunk=chunk) for chunk in (None, 256))
    assert (whole.moment, chunked.moment) == ("loss", "output layer")
    assert whole.logits == 12 * 128256 * 2048
    assert whole.gradients == 0
    # the sum of the chunks' gradients of the output layer, and a new one
    assert chunked.gradients == 2 * 2 * 4096 * 128256
    assert whole.peak == sum(
        getattr(whole, part)
        for part in ("weights", "state", "gradients", "activations", "logits", "workspace")
    )
    assert chunked.peak < whole.peak


@pytest.mark.parametrize(
    "options",
    [
        {"in_backward": False},
        {"checkpointing": False},
        {"tokens": 4096},
        {"sequences": 2},
        {"dtype": "float32"},
        {"moments": "bfloat16"},
        {"embeddings": False},
        {"storage": "float"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_of_these_takes_more(options):
    assert fm.memory_needed(LLAMA, **options).peak > fm.memory_needed(LLAMA).peak


def test_moments_are_in_8_bits_by_default():
    assert fm.memory_needed(LLAMA, moments="8bit") == fm.memory_needed(LLAMA)


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False)], ids=["true", "false"])
def test_true_and_false_may_be_numbers(one, other):
    by_number, by_word = (LLAMA | {"tie_word_embeddings": tied} for tied in (one, other))
    assert fm.memory_needed(by_number) == fm.memory_needed(by_word)


def test_a_llama_without_a_number_of_key_heads_has_one_for_each_head():
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert fm.memory_needed(without) == fm.memory_needed(LLAMA | {"num_key_value_heads": 32})


def test_sequences_count_as_tokens():
    by_sequences = fm.memory_needed(LLAMA, sequences=4, tokens=512)
    assert by_sequences == fm.memory_needed(LLAMA, tokens=2048)


def test_tied_weights_have_one_gradient_from_each_end():
    tied = fm.memory_needed(LLAMA | {"tie_word_embeddings": True}, tokens=1)
    assert tied.moment == "embedding"
    assert tied.gradients == 3 * 2 * 4096 * 128256


def test_a_cpu_copies_more():
    card, cpu = (fm.memory_needed(LLAMA, tokens=1, device=device) for device in ("cuda", "cpu"))
    assert cpu.workspace == 4 * 4096 * 128256
    assert replace(cpu, workspace=0, moment=card.moment).peak <= card.peak


REFUSED = {
    "kind": ({"model_type": "mamba"}, {}, ValueError, "model_type='mamba' is not supported"),
    "missing": ({"vocab_size": None}, {}, ValueError, "no vocab_size"),
    "text": ({"vocab_size": "many"}, {}, ValueError, "vocab_size='many'"),
    "zero": ({"num_hidden_layers": 0}, {}, ValueError, "out of range"),
    "optimizer": ({}, {"optimizer": "adam"}, ValueError, "did you mean 'adamw'"),
    "storage": ({}, {"storage": "fp8"}, ValueError, "storage='fp8' is unknown"),
    "peer": ({}, {"optimizer": "adamw8bit"}, ValueError, "does not step weights in codes"),
    "tokens": ({}, {"tokens": 0}, ValueError, "tokens=0"),
    "chunk": ({}, {"chunk": 1.5}, TypeError, "chunk=1.5"),
    "tied": ({"tie_word_embeddings": "false"}, {}, ValueError, "tie_word_embeddings='false'"),
    "two": ({"mlp_bias": 2}, {}, ValueError, "mlp_bias=2, which is neither true nor false"),
    "embeddings": ({}, {"embeddings": "E4M3"}, TypeError, "embeddings='E4M3' must be True or"),
    "in_backward": ({}, {"in_backward": 1}, TypeError, "in_backward=1 must be True or False"),
    "checkpointing": ({}, {"checkpointing": None}, TypeError, "checkpointing=None must be"),
    "moments": (
        {},
        {"optimizer": "adafactor", "moments": "float32"},
        ValueError,
        "moments='float32' is not an option of optimizer='adafactor'",
    ),
    "moments of a peer": (
        {},
        {"optimizer": "torch_adamw", "storage": "float", "moments": "8bit"},
        ValueError,
        "moments='8bit' is not an option of optimizer='torch_adamw'",
    ),
    "keys": (
        {"model_type": "mistral", "num_key_value_heads": None},
        {},
        ValueError,
        "no num_key_value_heads",
    ),
}


@pytest.mark.parametrize(
    ("settings", "options", "kind", "text"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_is_not_known_is_refused(settings, options, kind, text):
    with pytest.raises(kind, match=text):
        fm.memory_needed(LLAMA | settings, **options)


@pytest.mark.parametrize("config", [None, 3, [1]], ids=["none", "number", "list"])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(TypeError, match="config is a"):
        fm.memory_needed(config)


@pytest.mark.parametrize("text", ["{", "[]"], ids=["broken", "list"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json' (is not JSON|holds a list)"):
        fm.memory_needed(path)
