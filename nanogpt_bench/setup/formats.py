"""Formats of a configuration: what is quantised in which layers.

`fill_formats` reads the names in `model.formats` once. `read_layers` turns them into a
`LayerSpec` for each linear layer, without making the model.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import fp8manifold as fm
from nanogpt_bench.config.schema import DECODED, NO_FORMAT, Config, ModelConfig, Storage
from nanogpt_bench.model.gpt import FLOATS, linear_sizes
from nanogpt_bench.system.errors import BenchError, one_line, refusals

#: keys of a layer specification whose values are formats, or mappings that hold some
_FORMAT_KEYS = ("weight", "activation", "gradient", "format")
#: both names of the weight of a tied lm_head
_TIED = {"lm_head": ("token_embedding.weight", "lm_head.weight")}
#: a value of `model.formats` once it is read: a format, "none", or a layer's
#: specification that contains formats
ParsedFormat = fm.FloatFormat | str | dict[str, Any]


def fill_formats(model: ModelConfig) -> dict[str, ParsedFormat]:
    """Put `model.format` into `model.formats`, in canonical names; return these."""
    if model.format is not None:
        model.formats = {**model.formats, "*": model.format}
        model.format = None
    formats = {
        pattern: _parse_formats(value, f"model.formats.{pattern}")
        for pattern, value in model.formats.items()
    }
    if all(value == NO_FORMAT for value in formats.values()):
        formats = {}
    model.formats = {pattern: _with_names(value) for pattern, value in formats.items()}
    return formats


def _parse_formats(value: Any, key: str) -> ParsedFormat:
    if not isinstance(value, dict):
        return _parse_format(value, key)
    parsed = dict(value)
    for name in _FORMAT_KEYS:
        if value.get(name):
            parsed[name] = _parse_formats(value[name], key)
    return parsed


def _with_names(value: Any) -> Any:
    """Return a value of `model.formats` with the canonical names of its formats."""
    if isinstance(value, fm.FloatFormat):
        return value.name
    if isinstance(value, dict):
        return {name: _with_names(item) for name, item in value.items()}
    return value


def _parse_format(name: Any, key: str) -> fm.FloatFormat | str:
    if name is None or str(name).lower() == NO_FORMAT:
        return NO_FORMAT
    with refusals(key, ValueError, TypeError):
        return _named_format(name) if isinstance(name, str) else fm.FloatFormat.from_string(name)


@functools.lru_cache(maxsize=1000)
def _named_format(name: str) -> fm.FloatFormat:
    return fm.FloatFormat.from_string(name)


def format_name(name: Any, key: str = "model.format") -> str:
    """Return the canonical name of a format, or "none"; errors name the setting `key`.

    >>> format_name("e4m3")
    'E4M3'
    """
    return str(_with_names(_parse_format(name, key)))


def read_layers(
    model: ModelConfig, formats: Mapping[str, ParsedFormat]
) -> Mapping[str, fm.LayerSpec]:
    """Return what is quantised in each linear layer.

    The rest of the model's configuration has to be filled in.
    """
    return _layer_specs(
        _LayerSettings(
            formats_text=repr(model.formats),
            storage="grid" if model.storage == Storage.CONTINUOUS else str(model.storage),
            granularity=model.granularity or "channel",
            n_layer=model.n_layer or 0,
            n_embd=model.n_embd or 0,
            tie_weights=bool(model.tie_weights),
            tied=model.tied or "refuse",
            pretrained=model.pretrained,
            products=model.products or DECODED,
            formats=formats,
        )
    )


@dataclass(frozen=True)
class _LayerSettings:
    """All settings that the layers depend on.

    It is a key of the cache, since many runs of a sweep have equal ones.
    """

    #: `model.formats` as text, which stands for `formats` in comparisons
    formats_text: str
    storage: str
    granularity: str
    n_layer: int
    n_embd: int
    tie_weights: bool
    tied: str
    pretrained: str | None
    products: str
    formats: Mapping[str, ParsedFormat] = field(compare=False)


@functools.lru_cache(maxsize=1000)
def _layer_specs(settings: _LayerSettings) -> dict[str, fm.LayerSpec]:
    layers: Any
    shared: Any = {}
    if settings.pretrained:
        from nanogpt_bench.model.causal import outline

        pretrained = outline(settings.pretrained)
        layers = pretrained.layers
        shared = pretrained.shared
    else:
        # Any size of vocabulary will do, since the corpus is not known.
        layers = linear_sizes(settings.n_layer, settings.n_embd, vocab_size=16)
        if settings.tie_weights:
            shared = _TIED
    options: Any = {
        "storage": settings.storage,
        "granularity": settings.granularity,
        "tied": settings.tied,
    }
    formats: dict[str, Any] = dict(settings.formats)
    try:
        specs = fm.files.check_formats(formats, layers, shared=shared, **options)
        if settings.products != DECODED and specs:
            # Once more with products, which need sizes that fit. The codes of heads,
            # whose vocabulary may have any size, are decoded instead.
            options["products"] = settings.products
            formats |= _decoded_heads(specs, formats)
            specs = fm.files.check_formats(formats, layers, shared=shared, **options)
    except (ValueError, TypeError) as error:
        if settings.products != DECODED and str(error).startswith("products="):
            reason = one_line(error).removeprefix("products=")
            raise BenchError(f"model.products: {reason}") from None
        message = f"model.formats: {one_line(error)}"
        if "tied='untie'" in str(error):
            message += "; add --model.tied leave, or --model.tied untie"
        if not settings.pretrained:
            message = _float_module_error(layers, settings.formats) or message
        raise BenchError(message) from None
    return specs


def _decoded_heads(
    specs: Mapping[str, fm.LayerSpec], formats: Mapping[str, ParsedFormat]
) -> dict[str, fm.LayerSpec]:
    """Return the specifications of heads whose format does not name products."""
    heads: dict[str, fm.LayerSpec] = {}
    for name, spec in specs.items():
        value = formats.get(name)
        names_products = isinstance(value, dict) and "products" in value
        if name.endswith("lm_head") and not names_products:
            heads[name] = spec
    return heads


def _float_module_error(linear: Mapping[str, Any], patterns: Mapping[str, Any]) -> str | None:
    """Return the error of a pattern that names a module without linear layers.

    Such a module is an embedding, for example. The result is None if no pattern names
    one.
    """
    parts_of_names: set[str] = set()
    for name in linear:
        parts_of_names.update(name.split("."))
    # Names inside a block, such as attn.qkv.
    kinds = dict.fromkeys(name.split(".", 2)[-1] for name in linear)
    for pattern in patterns:
        if any(fnmatch(part, pattern) for part in parts_of_names):
            continue
        for name, kind in FLOATS.items():
            if fnmatch(name.rpartition(".")[2], pattern):
                return (
                    f"model.formats.{pattern}: {kind} {name!r} stays float, as all embeddings and "
                    f"norms do; give formats for linear layers: {', '.join(kinds)}, attn, mlp, "
                    "blocks.N"
                )
    return None


def weight_format(value: Any) -> str:
    """Return the weight's format in a value of `model.formats`.

    The value is a format, or a layer's or an operand's specification.

    >>> weight_format("E4M3"), weight_format({"activation": "E5M2"})
    ('E4M3', 'none')
    """
    if isinstance(value, dict):
        return weight_format(value.get("weight", value.get("format")))
    return str(value or NO_FORMAT)


def format_summary(config: Config) -> str:
    """Return the weight format that all patterns share, "mixed", or "none".

    >>> format_summary(Config())
    'none'
    """
    weights = {weight_format(value) for value in config.model.formats.values()}
    return "mixed" if len(weights) > 1 else next(iter(weights), NO_FORMAT)
