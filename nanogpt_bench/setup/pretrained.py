"""`model.pretrained`: a model of transformers in the GPT's place.

Its weights are floats, or the codes in its files, which are then trained as they are.
"""

from collections.abc import Mapping
from typing import Any

import fp8manifold as fm
from nanogpt_bench.config.conflicts import without
from nanogpt_bench.config.schema import Config, ModelConfig, Storage
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, open_also
from nanogpt_bench.data.tokenizers import check_tokens
from nanogpt_bench.model.causal import load_causal, outline, recompute_activations
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.setup.memory import FLOAT_STORAGES, bytes_of_averages, trains_on_cpu
from nanogpt_bench.setup.surgery import quantization
from nanogpt_bench.system.errors import BenchError

#: settings that would contradict the files of a model stored in codes
_CONTRADICTING = ("embeddings", "headroom", "products", "constraint")


def trains_stored(model: ModelConfig) -> bool:
    """Return whether the codes in a published model's files are trained.

    `model` is of a resolved configuration.
    """
    return model.storage == Storage.CODES and bool(_stored(model))


def _stored(model: ModelConfig) -> Mapping[str, Any]:
    return outline(model.pretrained).stored if model.pretrained else {}


def fill_stored(model: ModelConfig) -> bool:
    """Fill in formats and granularity from a published model's files.

    Returns whether its codes are trained.
    """
    stored = _stored(model)
    if not stored:
        return False
    source = f"{model.pretrained!r}, whose weights are stored in codes"
    if model.storage not in (Storage.CODES, Storage.FLOAT32):
        raise BenchError(
            f"model.storage: {model.storage!r} can't be used with {source}; give codes, to train "
            "them as they are, or --rule fp32 --model.format null, to decode them"
        )
    if model.storage == Storage.FLOAT32:
        return False
    names = sorted({_format_name(weight) for weight in stored.values()})
    granularities = sorted({str(weight.granularity) for weight in stored.values()})
    if len(names) == 1:
        formats = {"*": names[0]}
    else:
        formats = {layer: _format_name(weight) for layer, weight in _stored_weights(model).items()}
    if model.formats not in ({}, formats):
        raise BenchError(
            f"model.formats: {model.formats!r} is not the format of {source} ({', '.join(names)}); "
            f"add --model.format null --model.formats {{}}"
        )
    if model.granularity is not None and [model.granularity] != granularities:
        raise BenchError(
            f"model.granularity: {model.granularity!r} is not the granularity of {source} "
            f"({', '.join(granularities)}); add {without('model.granularity')}"
        )
    for name in _CONTRADICTING:
        value = getattr(model, name)
        if value is not None:
            key = f"model.{name}"
            raise BenchError(f"{key}: {value!r} can't be used with {source}; add {without(key)}")
    if model.tied == "untie":
        raise BenchError(f"model.tied: 'untie' can't be used with {source}; add --model.tied null")
    model.formats = formats
    model.granularity = granularities[0] if len(granularities) == 1 else None
    return True


def _format_name(weight: Any) -> str:
    return str(weight.format.name)


def _stored_weights(model: ModelConfig) -> dict[str, Any]:
    """Return the stored weight of each linear layer that has one in codes."""
    files = outline(model.pretrained or "")
    weights: dict[str, Any] = {}
    for layer in files.layers:
        if f"{layer}.weight" in files.stored:
            weights[layer] = files.stored[f"{layer}.weight"]
    return weights


def stored_layers(model: ModelConfig) -> dict[str, fm.LayerSpec]:
    """Return the formats in which a published model stores its linear layers."""
    return {
        layer: fm.LayerSpec(weight.format, granularity=weight.granularity)
        for layer, weight in _stored_weights(model).items()
    }


def outlined_shape(name: str) -> GPTShape:
    """Return a pretrained model's shape as far as a GPT's has it.

    `block_size` is its number of positions.
    """
    files = outline(name)
    return GPTShape(
        n_layer=files.n_layer,
        n_head=files.n_head,
        n_embd=files.n_embd,
        vocab_size=files.vocab_size,
        block_size=files.positions,
        tie_weights=bool(files.shared),
    )


def pretrained_model(config: Config, corpus: Corpus) -> Any:
    """Return the pretrained model of a resolved configuration.

    It is in codes where it can be read into codes.
    """
    name = config.model.pretrained or ""
    also = open_also(config, corpus)
    _check_text(name, corpus, corpus, corpus.train, corpus.val)
    if also:
        _check_text(name, corpus, also, also.val)
    model = load_causal(name, bytes_each=_bytes_each(config), quantization=read_as_codes(config))
    if config.train.recompute:
        recompute_activations(model)
    return model


def _check_text(name: str, corpus: Corpus, text: Corpus, *splits: Any) -> None:
    """Refuse a text with tokens that the model does not have."""
    check_tokens(
        str(corpus.meta["tokenizer"]),
        name,
        outline(name).vocab_size,
        str(text.folder),
        max(int(tokens.max()) for tokens in splits),
    )


def _bytes_each(config: Config) -> float:
    """Return the bytes of main memory per parameter: weight, gradient and averages.

    While a parameter is read it takes at least a float and a code. On a GPU the main
    memory holds no more than what is read. This is for models of transformers;
    `setup.memory.bytes_each` is for the GPT.
    """
    averages = bytes_of_averages(config)
    gradient = 4
    if config.train.step_in_backward:
        # Micro-batches are summed in bfloat16.
        gradient = 2 if config.train.accumulation > 1 else 0
    if not trains_on_cpu(config):
        averages = gradient = 0
    arguments = read_as_codes(config)
    if arguments is None:
        weight = 4 if config.model.storage in FLOAT_STORAGES else 1
        return max(5, weight + averages + gradient)
    files = outline(config.model.pretrained or "")
    if files.stored:
        return files.stored_bytes / files.parameters + averages + gradient
    weights_in_codes = 0
    for layer, (rows, columns) in files.layers.items():
        if layer in arguments["formats"]:
            weights_in_codes += rows * columns
    # four bytes for a float, one for a code
    return 4 - 3 * weights_in_codes / files.parameters + averages + gradient


def read_as_codes(config: Config) -> dict[str, Any] | None:
    """Return the `quantization` into which a pretrained model can be read.

    None where its floats are needed first.
    """
    if not isinstance(config, Resolved) or config.model.storage != Storage.CODES:
        return None
    if not config.layers and not trains_stored(config.model):
        return None
    # Scales of activations depend on all tokens, so the check that a model is causal
    # needs the floats.
    if any(spec.activation is not None for spec in config.layers.values()):
        return None
    return quantization(config)
