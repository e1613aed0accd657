"""Formats of a configuration: names read once, and turned into what is quantised in
which layers.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import fp8manifold as fm
from nanogpt_bench.config.schema import Config, ModelConfig
from nanogpt_bench.model.gpt import FLOATS, linear_sizes
from nanogpt_bench.system.errors import BenchError, one_line, refusals

#: keys of a layer specification whose values are formats, or mappings that hold some
_FORMAT_KEYS = ("weight", "activation", "gradient", "format")
#: both names of the weight of a tied lm_head
_TIED = {"lm_head": ("token_embedding.weight", "lm_head.weight")}
#: a format, "none", or a layer specification that contains formats
Read = fm.FloatFormat | str | dict[str, Any]


def fill_formats(model: ModelConfig) -> dict[str, Read]:
    """Put `model.format` into `model.formats`, all in canonical names, and return the
    formats that were read.
    """
    if model.format is not None:
        model.formats, model.format = {**model.formats, "*": model.format}, None
    formats = {
        pattern: _read(value, f"model.formats.{pattern}")
        for pattern, value in model.formats.items()
    }
    if all(value == "none" for value in formats.values()):
        formats = {}
    model.formats = {pattern: _written(value) for pattern, value in formats.items()}
    return formats


def _read(value: Any, key: str) -> Read:
    if not isinstance(value, dict):
        return _format(value, key)
    return {**value, **{name: _read(value[name], key) for name in _FORMAT_KEYS if value.get(name)}}


def _written(value: Any) -> Any:
    if isinstance(value, fm.FloatFormat):
        return value.name
    return (
        {name: _written(item) for name, item in value.items()} if isinstance(value, dict) else value
    )


def _format(name: Any, key: str) -> fm.FloatFormat | str:
    if name is None or str(name).lower() == "none":
        return "none"
    with refusals(key, ValueError, TypeError):
        return _named(name) if isinstance(name, str) else fm.FloatFormat.from_string(name)


@functools.lru_cache(maxsize=1000)
def _named(name: str) -> fm.FloatFormat:
    return fm.FloatFormat.from_string(name)


def format_name(name: Any, key: str = "model.format") -> str:
    """Return the canonical name of a format, or "none"; errors name the setting `key`.

    >>> format_name("e4m3")
    'E4M3'
    """
    return str(_written(_format(name, key)))


def read_layers(model: ModelConfig, formats: Mapping[str, Read]) -> Mapping[str, fm.LayerSpec]:
    """Return what is quantised in each linear layer; the rest of the model's
    configuration has to be filled in.
    """
    return _layers(
        _Asked(
            repr(model.formats),
            "grid" if model.storage == "continuous" else str(model.storage),
            model.granularity or "channel",
            (model.n_layer or 0, model.n_embd or 0),
            bool(model.tie_weights),
            model.tied or "refuse",
            model.pretrained,
            model.products or "decoded",
            formats,
        )
    )


@dataclass(frozen=True)
class _Asked:
    """All settings that the layers depend on: a key of the cache, since runs of a sweep
    have the same.
    """

    written: str
    storage: str
    granularity: str
    size: tuple[int, int]
    tie: bool
    tied: str
    pretrained: str | None
    products: str
    formats: Mapping[str, Read] = field(compare=False)


@functools.lru_cache(maxsize=1000)
def _layers(asked: _Asked) -> dict[str, fm.LayerSpec]:
    own = None
    if asked.pretrained:
        from nanogpt_bench.model.causal import outline

        own = outline(asked.pretrained)
    layers: Any = (
        own.layers if own else linear_sizes(*asked.size, vocab_size=16)
    )  # any size: the corpus is not known
    shared = own.shared if own else _TIED if asked.tie else {}
    options: Any = {"storage": asked.storage, "granularity": asked.granularity, "tied": asked.tied}
    formats = dict(asked.formats)
    try:
        specs = fm.check_formats(formats, layers, shared=shared, **options)
        if (
            asked.products != "decoded" and specs
        ):  # products need sizes that fit: heads, of any vocabulary, are decoded
            options["products"] = asked.products
            specs = fm.check_formats(
                {**formats, **_heads(specs, formats)}, layers, shared=shared, **options
            )
    except (ValueError, TypeError) as error:
        if asked.products != "decoded" and str(error).startswith("products="):
            raise BenchError(
                f"model.products: {one_line(error).removeprefix('products=')}"
            ) from None
        hint = (
            "; add --model.tied leave, or --model.tied untie"
            if "tied='untie'" in str(error)
            else ""
        )
        always = None if own else _always_float(layers, asked.formats)
        raise BenchError(always or f"model.formats: {one_line(error)}{hint}") from None
    return specs


def _heads(
    specs: Mapping[str, fm.LayerSpec], formats: Mapping[str, Read]
) -> dict[str, fm.LayerSpec]:
    """Return the specifications of heads whose format does not name products: their
    codes are decoded.
    """
    said = [
        name for name, value in formats.items() if isinstance(value, dict) and "products" in value
    ]
    return {
        name: spec for name, spec in specs.items() if name.endswith("lm_head") and name not in said
    }


def _always_float(linear: Mapping[str, Any], patterns: Mapping[str, Any]) -> str | None:
    """Return the error of a pattern that names a module without linear layers, such as
    an embedding.
    """
    reached = {part for name in linear for part in name.split(".")}
    layers = dict.fromkeys(name.split(".", 2)[-1] for name in linear)
    for pattern in patterns:
        for name, kind in FLOATS.items():
            last = name.rpartition(".")[2]
            if fnmatch(last, pattern) and not any(fnmatch(part, pattern) for part in reached):
                return (
                    f"model.formats.{pattern}: {kind} {name!r} stays float, as all embeddings and "
                    f"norms do; formats are for linear layers: {', '.join(layers)}, attn, mlp, "
                    f"blocks.N"
                )
    return None


def weight_format(value: Any) -> str:
    """Return the weight's format in a value of `model.formats`: a format, or a layer's
    or an operand's specification.

    >>> weight_format("E4M3"), weight_format({"activation": "E5M2"})
    ('E4M3', 'none')
    """
    if isinstance(value, dict):
        return weight_format(value.get("weight", value.get("format")))
    return str(value or "none")


def format_summary(config: Config) -> str:
    """Return the one weight format all patterns share, "mixed" when they differ, "none"
    without any.

    >>> format_summary(Config())
    'none'
    """
    weights = {weight_format(value) for value in config.model.formats.values()}
    return "mixed" if len(weights) > 1 else next(iter(weights), "none")
