"""`model.pretrained`: a model of transformers in the GPT's place, with float weights or
the codes in its files.
"""

from collections.abc import Mapping
from typing import Any

import fp8manifold as fm
from nanogpt_bench.config.conflicts import without
from nanogpt_bench.config.schema import Config, ModelConfig
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, open_also
from nanogpt_bench.data.tokenizers import check_tokens
from nanogpt_bench.model.causal import load_causal, outline, recompute_activations
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.setup.surgery import quantization
from nanogpt_bench.system.errors import BenchError

#: settings that would contradict the files of a model stored in codes
_OTHERWISE = ("embeddings", "headroom", "products", "constraint")


def trains_stored(model: ModelConfig) -> bool:
    """Return whether a resolved configuration trains the codes in a published model's
    files.
    """
    return model.storage == "fp8" and bool(_stored(model))


def _stored(model: ModelConfig) -> Mapping[str, Any]:
    return outline(model.pretrained).stored if model.pretrained else {}


def fill_stored(model: ModelConfig) -> bool:
    """Fill in formats and granularity from a published model's files; return whether
    its codes are trained.
    """
    stored = _stored(model)
    if not stored:
        return False
    called = f"{model.pretrained!r}, whose weights are stored in codes"
    if model.storage not in ("fp8", "float32"):
        raise BenchError(
            f"model.storage: {model.storage!r} can't be used with {called}; give fp8 (they are "
            f"trained as they are) or "
            "--rule fp32 --model.format null (they are decoded)"
        )
    if model.storage == "float32":
        return False
    names, kinds = (
        sorted(set(map(_format_of, stored.values()))),
        sorted({str(e.granularity) for e in stored.values()}),
    )
    formats = (
        {"*": names[0]}
        if len(names) == 1
        else {name: _format_of(each) for name, each in _of_layers(model).items()}
    )
    if model.formats not in ({}, formats):
        said = f"is not that of {called} ({', '.join(names)})"
        raise BenchError(
            f"model.formats: {model.formats!r} {said}; add --model.format null --model.formats {{}}"
        )
    if model.granularity is not None and [model.granularity] != kinds:
        raise BenchError(
            f"model.granularity: {model.granularity!r} is not that of {called} "
            f"({', '.join(kinds)}); add {without('model.granularity')}"
        )
    for key in _OTHERWISE:
        if (given := getattr(model, key)) is not None:
            raise BenchError(
                f"model.{key}: {given!r} can't be used with {called}; add {without(f'model.{key}')}"
            )
    if model.tied == "untie":
        raise BenchError(f"model.tied: 'untie' can't be used with {called}; add --model.tied null")
    model.formats, model.granularity = formats, kinds[0] if len(kinds) == 1 else None
    return True


def _format_of(stored: Any) -> str:
    return str(stored.format.name)


def _of_layers(model: ModelConfig) -> dict[str, Any]:
    found = outline(model.pretrained or "")
    return {
        name: found.stored[f"{name}.weight"]
        for name in found.layers
        if f"{name}.weight" in found.stored
    }


def stored_layers(model: ModelConfig) -> dict[str, fm.LayerSpec]:
    """Return the formats in which a published model stores its linear layers."""
    return {
        name: fm.LayerSpec(each.format, granularity=each.granularity)
        for name, each in _of_layers(model).items()
    }


def outlined_shape(name: str) -> GPTShape:
    """Return a pretrained model's shape as far as a GPT's has it; `block_size` is its
    number of positions.
    """
    found = outline(name)
    sizes = {key: getattr(found, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return GPTShape(**sizes, block_size=found.positions, tie_weights=bool(found.shared))


def pretrained_model(config: Config, corpus: Corpus) -> Any:
    """Return the pretrained model of a resolved configuration, in codes where it can be
    read into codes.
    """
    name = config.model.pretrained or ""
    also = open_also(config, corpus)
    for text, splits in [
        (corpus, (corpus.train, corpus.val)),
        *([(also, (also.val,))] if also else []),
    ]:
        largest = max(int(tokens.max()) for tokens in splits)
        check_tokens(
            str(corpus.meta["tokenizer"]), name, outline(name).vocab_size, str(text.folder), largest
        )
    model = load_causal(name, bytes_each=_bytes_each(config), quantization=read_as_codes(config))
    if config.train.recompute:
        recompute_activations(model)
    return model


def _bytes_each(config: Config) -> float:
    """Return the bytes per parameter: weight, gradient and averages; while it is read,
    at least a float and a code.
    """
    state = {"float32": 8, "bfloat16": 4, "8bit": 2}[config.optimizer.moments or "float32"]
    summed = 2 if config.train.accumulation > 1 else 0  # in bfloat16
    gradients = summed if config.train.step_in_backward else 4
    asked = read_as_codes(config)
    if asked is None:
        weights = 4 if config.model.storage in ("float32", "master") else 1
        return max(5, weights + state + gradients)
    found = outline(config.model.pretrained or "")
    if found.stored:
        return found.stored_bytes / found.parameters + state + gradients
    in_codes = sum(
        rows * columns for name, (rows, columns) in found.layers.items() if name in asked["formats"]
    )
    return 4 - 3 * in_codes / found.parameters + state + gradients


def read_as_codes(config: Config) -> dict[str, Any] | None:
    """Return the `quantization` into which a pretrained model can be read; None where
    its floats are needed first.
    """
    if not isinstance(config, Resolved) or config.model.storage != "fp8":
        return None
    if not config.layers and not trains_stored(config.model):
        return None
    # Scales of activations depend on all tokens, so the check that a model is causal
    # needs the floats.
    if any(spec.activation is not None for spec in config.layers.values()):
        return None
    return quantization(config)
