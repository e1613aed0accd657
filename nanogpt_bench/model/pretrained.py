"""Initial weights from a GPT-2 checkpoint in Hugging Face's layout: `config.json` and `model.safetensors`.

GPT-2 keeps the weight of a linear layer transposed, (inputs, outputs), under the names on the right of `_LAYERS`;
only plain tensors are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.hub import hub_file
from nanogpt_bench.system.untrusted import check_header, read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"
#: short names and where they lie on the hub
HUB_IDS = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
#: GPT-2's names of its activation function, and ours
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: settings of GPT-2's relatives that change the function; the model here has these values
_FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
#: a block's layers: ours, GPT-2's, and whether the weight lies transposed
_LAYERS = (
    ("norm1", "ln_1", False),
    ("attn.qkv", "attn.c_attn", True),
    ("attn.proj", "attn.c_proj", True),
    ("norm2", "ln_2", False),
    ("mlp.fc", "mlp.c_fc", True),
    ("mlp.proj", "mlp.c_proj", True),
)
#: causal masks that some checkpoints carry
_MASKS = (".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's name, the shape that its config.json describes, and where its files are (None: on the hub)."""

    name: str
    shape: GPTShape
    folder: Path | None

    @property
    def weights(self) -> Path:
        """Path of the weights, which are fetched from the hub where there is no folder.

        Raises:
            BenchError: the checkpoint has no weights in safetensors.
        """
        path = self.folder / WEIGHTS if self.folder else hub_file(HUB_IDS.get(self.name, self.name), WEIGHTS)
        if not path.is_file():
            raise BenchError(f"model.init_from: {self.name!r} has no {WEIGHTS}; one file of safetensors is needed")
        return path


def find_checkpoint(name: str) -> Checkpoint:
    """Return the checkpoint called `name`: a folder, a short name such as gpt2, or an id on the hub.

    Raises:
        BenchError: nothing there, the hub is out of reach, or a config.json that describes no GPT-2.
    """
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and name not in HUB_IDS and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise BenchError(
            f"model.init_from: {name!r} does not exist; give a folder with {CONFIG} and {WEIGHTS}, an id on the hub "
            f"such as openai-community/gpt2, or one of {', '.join(HUB_IDS)}"
        )
    path = folder / CONFIG if folder else hub_file(HUB_IDS.get(name, name), CONFIG)
    return Checkpoint(name, _shape(_read_config(path, name), name), folder)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except OSError as error:
        raise BenchError(f"model.init_from: {name!r} has no readable {CONFIG}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"model.init_from: {CONFIG} of {name!r} is damaged: {one_line(error)}") from None
    if not isinstance(settings, dict) or settings.get("model_type") != "gpt2":
        kind = settings.get("model_type") if isinstance(settings, dict) else type(settings).__name__
        raise BenchError(f"model.init_from: {name!r} is of model_type {kind!r}; only gpt2 can be loaded")
    return settings


def _shape(settings: dict[str, Any], name: str) -> GPTShape:
    """Return the shape that config.json describes; what GPT-2 has by default may be absent."""
    for key, value in _FIXED.items():
        if settings.get(key, value) != value:
            raise BenchError(f"model.init_from: {name!r} has {key} {settings[key]!r}; only {value!r} can be loaded")
    sizes: dict[str, Any] = {ours: _size(settings, theirs, name) for ours, theirs in _SIZES.items()}
    if settings.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise BenchError(
            f"model.init_from: {name!r} has n_inner {settings['n_inner']!r}; only 4 n_embd, {4 * sizes['n_embd']}, can "
            "be loaded"
        )
    function = settings.get("activation_function", "gelu_new")
    if function not in _GELUS:
        raise BenchError(
            f"model.init_from: {name!r} has activation_function {function!r}; only {', '.join(_GELUS)} can be loaded"
        )
    tied = bool(settings.get("tie_word_embeddings", True))
    return GPTShape(**sizes, bias=True, tie_weights=tied, gelu=_GELUS[function])


#: sizes that config.json has to give: ours and GPT-2's
_SIZES = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}


def _size(settings: dict[str, Any], key: str, name: str) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or value < 1:
        raise BenchError(f"model.init_from: {CONFIG} of {name!r} has {key} {value!r}; a whole number >= 1 is needed")
    return value


def check_size(name: str) -> None:
    """Refuse a config.json that speaks of more weights than the file beside it can hold, before they are allocated.

    Raises:
        BenchError: fewer bytes than weights.
    """
    checkpoint = find_checkpoint(name)
    shape, size = checkpoint.shape, checkpoint.weights.stat().st_size
    width = shape.n_embd
    claimed = width * (12 * shape.n_layer * width + shape.vocab_size + shape.block_size)
    if claimed > size:
        raise BenchError(
            f"model.init_from: {CONFIG} of {name!r} speaks of {claimed:,} weights, its {WEIGHTS} has {size:,} bytes"
        )


@torch.no_grad()
def load_checkpoint(model: GPT, name: str, tokenizer: str) -> None:
    """Fill a model of the checkpoint's shape with its weights; `tokenizer` is the corpus's, which an error names.

    A model with fewer positions takes the first ones; one whose lm_head is untied gets a copy of the embedding.

    Raises:
        BenchError: another vocabulary, or tensors that are missing, of another shape, or unknown.
    """
    checkpoint = find_checkpoint(name)
    _check_vocabulary(model.shape, checkpoint, tokenizer)
    try:
        check_header(checkpoint.weights)
        fm.huggingface.check_floats(model, checkpoint.weights)
        with safe_open(checkpoint.weights, framework="pt") as file:
            stored = {key.removeprefix("transformer."): key for key in sorted(file.keys()) if not key.endswith(_MASKS)}
            sources = _sources(checkpoint.shape)
            _check_names(sources, stored, name)
            if checkpoint.shape.tie_weights and "lm_head.weight" in stored:
                _check_head(file.get_tensor(stored["wte.weight"]), file.get_tensor(stored["lm_head.weight"]), name)
            for ours, parameter in model.named_parameters():
                theirs, transposed = sources[ours]
                value = file.get_tensor(stored[theirs])
                _copy(parameter, value.T if transposed else value, ours, f"{theirs!r} of {name!r}")
    except BenchError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise BenchError(f"model.init_from: {WEIGHTS} of {name!r} can't be read: {one_line(error)}") from None


def _check_vocabulary(shape: GPTShape, checkpoint: Checkpoint, tokenizer: str) -> None:
    if shape.vocab_size != checkpoint.shape.vocab_size:
        raise BenchError(
            f"model.init_from: {checkpoint.name!r} has a vocabulary of {checkpoint.shape.vocab_size}, the corpus "
            f"(tokenizer {tokenizer}) one of {shape.vocab_size}; prepare it with the checkpoint's own tokenizer "
            "(GPT-2: --tokenizer gpt2)"
        )


def _sources(shape: GPTShape) -> dict[str, tuple[str, bool]]:
    """Return, for each parameter of ours, GPT-2's name of it and whether it lies transposed there."""
    head = "wte.weight" if shape.tie_weights else "lm_head.weight"
    sources = {
        "token_embedding.weight": ("wte.weight", False),
        "position_embedding.weight": ("wpe.weight", False),
        "final_norm.weight": ("ln_f.weight", False),
        "final_norm.bias": ("ln_f.bias", False),
        "lm_head.weight": (head, False),
    }
    for block in range(shape.n_layer):
        for ours, theirs, transposed in _LAYERS:
            sources[f"blocks.{block}.{ours}.weight"] = (f"h.{block}.{theirs}.weight", transposed)
            sources[f"blocks.{block}.{ours}.bias"] = (f"h.{block}.{theirs}.bias", False)
    return sources


def _check_names(sources: dict[str, tuple[str, bool]], stored: dict[str, str], name: str) -> None:
    """Refuse a file that lacks a tensor or has one that would be left out; a tied lm_head may be there twice."""
    expected = {theirs for theirs, _ in sources.values()}
    missing, unknown = expected - stored.keys(), stored.keys() - expected - {"lm_head.weight"}
    if missing or unknown:
        what = f"lacks the tensor {min(missing)!r}" if missing else f"has a tensor too many, {min(unknown)!r}"
        raise BenchError(f"model.init_from: {WEIGHTS} of {name!r} {what}; it does not agree with its {CONFIG}")


def _check_head(table: Tensor, head: Tensor, name: str) -> None:
    """Refuse a head of its own where the settings say that the embedding is the head: it would be left out."""
    if not torch.equal(table, head):
        raise BenchError(
            f"model.init_from: {WEIGHTS} of {name!r} has a 'lm_head.weight' of its own, and its {CONFIG} says that it "
            "is tied; set tie_word_embeddings to false there"
        )


def _copy(parameter: Tensor, value: Tensor, ours: str, source: str) -> None:
    if ours == "position_embedding.weight":
        value = value[: len(parameter)]
    if value.shape != parameter.shape:
        raise BenchError(
            f"model.init_from: tensor {source} has shape {tuple(value.shape)}, {ours} has {tuple(parameter.shape)}"
        )
    parameter.copy_(value)
