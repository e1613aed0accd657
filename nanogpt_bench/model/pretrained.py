"""Initial weights of the GPT from a GPT-2 checkpoint, which transformers reads."""

from pathlib import Path

import torch

from nanogpt_bench.model.causal import load_causal, settings_of
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.system.errors import BenchError

#: short names and where they lie on the hub
HUB_IDS = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
#: GPT-2's names of its activation function, and ours
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: settings of GPT-2's relatives that change the function; the model here has these values
_FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
#: a block's layers: ours, GPT-2's, and whether the weight lies transposed, as (inputs, outputs)
_LAYERS = (
    ("norm1", "ln_1", False),
    ("attn.qkv", "attn.c_attn", True),
    ("attn.proj", "attn.c_proj", True),
    ("norm2", "ln_2", False),
    ("mlp.fc", "mlp.c_fc", True),
    ("mlp.proj", "mlp.c_proj", True),
)


def checkpoint_shape(name: str) -> GPTShape:
    """Return the shape of the GPT-2 checkpoint called `name`: a folder, a short name such as gpt2, or an id on the hub.

    Raises:
        BenchError: nothing there, a missing package, the hub is out of reach, or a model that is no GPT-2.
    """
    found = settings_of(_model(name))
    if found.model_type != "gpt2":
        raise BenchError(f"{name!r} is of model_type {found.model_type!r}; only gpt2 can be loaded")
    allowed = {**_FIXED, "n_inner": 4 * found.n_embd}
    for key, value in allowed.items():
        if getattr(found, key) not in (value, None):
            raise BenchError(f"{name!r} has {key} {getattr(found, key)!r}; only {value!r} can be loaded")
    if found.activation_function not in _GELUS:
        raise BenchError(
            f"{name!r} has activation_function {found.activation_function!r}; only {', '.join(_GELUS)} can be loaded"
        )
    sizes = {key: getattr(found, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    tied, gelu = bool(found.tie_word_embeddings), _GELUS[found.activation_function]
    return GPTShape(**sizes, block_size=found.n_positions, bias=True, tie_weights=tied, gelu=gelu)


@torch.no_grad()
def load_checkpoint(model: GPT, name: str, tokenizer: str) -> None:
    """Fill a model of the checkpoint's shape with its weights; `tokenizer` is the corpus's, which an error names.

    A model with fewer positions takes the first ones; one whose lm_head is untied gets a copy of the embedding.

    Raises:
        BenchError: another vocabulary, or weights that do not fit the checkpoint's own config.json.
    """
    theirs, ours = checkpoint_shape(name).vocab_size, model.shape.vocab_size
    if theirs != ours:
        raise BenchError(
            f"{name!r} has a vocabulary of {theirs}, the corpus (tokenizer {tokenizer}) one of {ours}; prepare it with "
            "the checkpoint's own tokenizer (GPT-2: --tokenizer gpt2)"
        )
    weights = load_causal(_model(name)).state_dict()
    sources = _sources(model.shape.n_layer)
    for key, parameter in model.named_parameters():
        source, transposed = sources[key]
        value = weights[source]
        parameter.copy_((value.T if transposed else value)[: len(parameter)])


def _model(name: str) -> str:
    """The model's name for transformers, of which a folder's own goes before a short one."""
    return name if Path(name).is_dir() else HUB_IDS.get(name, name)


def _sources(n_layer: int) -> dict[str, tuple[str, bool]]:
    """GPT-2's name for each parameter of ours, and whether it lies transposed there."""
    sources = {
        "token_embedding.weight": ("transformer.wte.weight", False),
        "position_embedding.weight": ("transformer.wpe.weight", False),
        "final_norm.weight": ("transformer.ln_f.weight", False),
        "final_norm.bias": ("transformer.ln_f.bias", False),
        "lm_head.weight": ("lm_head.weight", False),
    }
    for block in range(n_layer):
        for ours, theirs, transposed in _LAYERS:
            sources[f"blocks.{block}.{ours}.weight"] = (f"transformer.h.{block}.{theirs}.weight", transposed)
            sources[f"blocks.{block}.{ours}.bias"] = (f"transformer.h.{block}.{theirs}.bias", False)
    return sources
