"""A model whose files hold codes, trained as it is stored: its formats and scales are the files', and nothing else."""

from collections.abc import Mapping
from typing import Any

import fp8manifold as fm
from nanogpt_bench.config.conflicts import without
from nanogpt_bench.config.schema import ModelConfig
from nanogpt_bench.model.causal import outline
from nanogpt_bench.system.errors import BenchError

#: settings that say otherwise than the files
_OTHERWISE = ("embeddings", "headroom", "products", "constraint")


def trains_stored(model: ModelConfig) -> bool:
    """Whether a resolved configuration trains codes as a published model has them."""
    return model.storage == "fp8" and bool(_stored(model))


def _stored(model: ModelConfig) -> Mapping[str, Any]:
    return outline(model.pretrained).stored if model.pretrained else {}


def fill_stored(model: ModelConfig) -> bool:
    """Fill in formats and granularity as the files of a published model have them; under float32 it is decoded.

    Returns:
        Whether codes are trained as they are, as `trains_stored` says.

    Raises:
        BenchError: a setting that says otherwise, and the flag that takes it away.
    """
    stored = _stored(model)
    if not stored:
        return False
    called = f"{model.pretrained!r}, whose weights are stored in codes"
    if model.storage not in ("fp8", "float32"):
        raise BenchError(
            f"model.storage: {model.storage!r} can't be used with {called}; give fp8 (they are trained as they are) or "
            "--rule fp32 --model.format null (they are decoded)"
        )
    if model.storage == "float32":
        return False
    names, kinds = (sorted({kind(each) for each in stored.values()}) for kind in (_format_of, _granularity_of))
    formats = (
        {"*": names[0]} if len(names) == 1 else {name: _format_of(each) for name, each in _of_layers(model).items()}
    )
    if model.formats not in ({}, formats):
        said = f"is not that of {called} ({', '.join(names)})"
        raise BenchError(f"model.formats: {model.formats!r} {said}; add --model.format null --model.formats {{}}")
    if model.granularity is not None and [model.granularity] != kinds:
        raise BenchError(
            f"model.granularity: {model.granularity!r} is not that of {called} ({', '.join(kinds)}); "
            f"add {without('model.granularity')}"
        )
    for key in _OTHERWISE:
        if (given := getattr(model, key)) is not None:
            raise BenchError(f"model.{key}: {given!r} can't be used with {called}; add {without(f'model.{key}')}")
    if model.tied == "untie":
        raise BenchError(f"model.tied: 'untie' can't be used with {called}; add --model.tied null")
    model.formats, model.granularity = formats, kinds[0] if len(kinds) == 1 else None
    return True


def _format_of(stored: Any) -> str:
    return str(stored.format.name)


def _granularity_of(stored: Any) -> str:
    return str(stored.granularity)


def _of_layers(model: ModelConfig) -> dict[str, Any]:
    found = outline(model.pretrained or "")
    return {name: found.stored[f"{name}.weight"] for name in found.layers if f"{name}.weight" in found.stored}


def stored_layers(model: ModelConfig) -> dict[str, fm.LayerSpec]:
    """Return what the linear layers of a published model are stored in."""
    return {name: fm.LayerSpec(each.format, granularity=each.granularity) for name, each in _of_layers(model).items()}
