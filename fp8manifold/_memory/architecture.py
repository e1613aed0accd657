"""The parameters of a language model, by the settings that transformers has for it.

    architecture(config)   an `Architecture`: its parameters' shapes and roles

Settings are a mapping, an object with attributes, or the name of a file, a folder or a
model on the hub. Only for the last two transformers is imported, which knows what such
a file leaves out. A kind of model is a `_Family`: a line of `_FAMILIES` says what it has
beside what all have. Kinds that are not there are refused.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fp8manifold._base.checks import import_optional

__all__ = ["Architecture", "Parameter", "Role", "architecture"]

_CALLER: Final = "fp8manifold.memory_needed"
_FILE: Final = "config.json"
_LARGEST: Final = 2**40
"""More than any setting that is counted."""


class Role(StrEnum):
    """What a parameter is to those who quantise and step it."""

    #: the weight of a linear layer in a block
    MATRIX = "matrix"
    #: the weights of one layer's experts, as one parameter
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    #: the output layer, unless it shares the embedding
    HEAD = "head"
    #: norms, biases and routers
    SMALL = "small"


@dataclass(frozen=True)
class Parameter:
    """Parameters of one shape and role."""

    role: Role
    shape: tuple[int, ...]
    count: int = 1

    @property
    def size(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of one of them, over all its matrices; a vector is a row."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Architecture:
    """A model's parameters and sizes."""

    layers: int
    width: int
    vocabulary: int
    #: whether the output layer is the embedding
    tied: bool
    #: numbers of a token that a block saves for its backward pass, and of gradients that
    #: come and go in it
    saved_numbers: int
    passing_numbers: int
    parameters: tuple[Parameter, ...]

    @property
    def size(self) -> int:
        """The number of all parameters' numbers."""
        return sum(parameter.count * parameter.size for parameter in self.parameters)

    def of(self, *roles: Role) -> list[Parameter]:
        """Return the parameters of some roles."""
        return [parameter for parameter in self.parameters if parameter.role in roles]


@dataclass(frozen=True)
class _Family:
    """What a kind of models has, and the defaults of settings that files leave out."""

    #: a bias of queries, keys and values; a setting may say so too
    query_bias: bool = False
    #: norms of queries and keys: of each head, or of all together
    head_norms: bool = False
    whole_norms: bool = False
    tied: bool = False
    #: the setting with the width of an expert; "" without experts
    expert_width: str = ""
    shared_expert: bool = False
    head_width: int = 0
    #: whether a file without a number of key heads has one for each head
    keys_by_head: bool = False


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family(keys_by_head=True),
    "mistral": _Family(),
    "granite": _Family(),
    "gemma": _Family(tied=True, head_width=256),
    "smollm3": _Family(tied=True),
    "olmo2": _Family(whole_norms=True),
    "qwen2": _Family(query_bias=True),
    "qwen3": _Family(head_norms=True, head_width=128),
    "mixtral": _Family(expert_width="intermediate_size"),
    "qwen2_moe": _Family(query_bias=True, expert_width="moe_intermediate_size", shared_expert=True),
    "qwen3_moe": _Family(head_norms=True, expert_width="moe_intermediate_size"),
    "gpt2": _Family(tied=True),
}
"""By ``model_type``."""


def architecture(config: Any) -> Architecture:
    """Return the parameters and sizes of a model with these settings.

    Raises:
        TypeError: settings of no known type.
        ValueError: a kind of model that is not known, or a setting that is missing or
            no whole number.
    """
    settings = _Settings(config)
    kind = settings.get("model_type", "llama")
    if kind not in _FAMILIES:
        raise ValueError(
            f"model_type={kind!r} is not supported: parameters can be counted for "
            f"{', '.join(_FAMILIES)}"
        )
    return _gpt2(settings) if kind == "gpt2" else _decoder(settings, _FAMILIES[kind])


class _Settings:
    """Settings by their names, wherever they come from."""

    def __init__(self, config: Any) -> None:
        self._config = _read(config) if isinstance(config, str | Path) else config
        is_object = hasattr(self._config, "model_type") or hasattr(self._config, "vocab_size")
        if not isinstance(self._config, Mapping) and not is_object:
            raise TypeError(
                f"config is a {type(config).__name__}: give a configuration of transformers, a "
                "mapping of its settings, a file config.json, a folder or an id on the hub"
            )

    def get(self, name: str, default: Any) -> Any:
        """Return a setting, or the default if it is missing or None."""
        if isinstance(self._config, Mapping):
            value = self._config.get(name)
        else:
            value = getattr(self._config, name, None)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a setting that is a whole number from 1 on."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"config has no {name}, and the memory depends on it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"config has {name}={value!r}, which is not a whole number")
        if not 1 <= value <= _LARGEST:
            raise ValueError(
                f"config has {name}={value!r}, which is out of range: it must be 1 or more"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false, or 1 or 0."""
        value = self.get(name, default)
        if not isinstance(value, int) or value not in (0, 1):
            raise ValueError(f"config has {name}={value!r}, which is neither true nor false")
        return bool(value)


def _read(name: str | Path) -> Any:
    """Return the settings in a file; those of a folder or of the hub by transformers."""
    path = Path(name)
    if path.is_file():
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{str(path)!r} holds a list or a number, not the settings of a model")
        return settings
    transformers = import_optional("transformers", "hf", f"{_CALLER}({str(name)!r})")
    return transformers.AutoConfig.from_pretrained(name)


def _decoder(settings: _Settings, family: _Family) -> Architecture:
    """Return a model of Llama's kind: rotated positions, norms by root mean square."""
    width = settings.number("hidden_size")
    layers = settings.number("num_hidden_layers")
    vocabulary = settings.number("vocab_size")
    heads = settings.number("num_attention_heads")
    head = settings.number("head_dim", family.head_width or max(width // heads, 1))
    queries = heads * head
    keys = settings.number("num_key_value_heads", heads if family.keys_by_head else None) * head
    tied = settings.flag("tie_word_embeddings", family.tied)

    attention = [(queries, width), (keys, width), (keys, width), (width, queries)]
    small: list[tuple[int, ...]] = [(width,), (width,)]
    if family.query_bias or settings.flag("attention_bias", False):
        small += [(queries,), (keys,), (keys,)]
    if settings.flag("attention_bias", False):
        small.append((width,))
    if family.head_norms:
        small += [(head,), (head,)]
    if family.whole_norms:
        small += [(queries,), (keys,)]
    parameters = [Parameter(Role.MATRIX, shape, layers) for shape in attention]
    parameters += [Parameter(Role.SMALL, shape, layers) for shape in small]

    sparse = _sparse_layers(settings, family, layers)
    inner = 0
    if sparse < layers:
        inner = settings.number("intermediate_size")
        parameters += _gated(settings, width, inner, layers - sparse)
    if sparse:
        chosen = settings.number("num_experts_per_tok") * settings.number(family.expert_width)
        inner = max(inner, chosen)
        parameters += _mixture(settings, family, width, sparse)
        if family.shared_expert:
            inner += settings.number("shared_expert_intermediate_size")
    return Architecture(
        layers,
        width,
        vocabulary,
        tied,
        saved_numbers=8 * width + 3 * queries + 2 * keys + 4 * inner,
        passing_numbers=inner,
        parameters=(*parameters, *_ends(vocabulary, width, tied), Parameter(Role.SMALL, (width,))),
    )


def _gated(settings: _Settings, width: int, inner: int, layers: int) -> Iterator[Parameter]:
    """Yield the weights of gated layers, and their biases if there are any."""
    yield Parameter(Role.MATRIX, (inner, width), 2 * layers)
    yield Parameter(Role.MATRIX, (width, inner), layers)
    if settings.flag("mlp_bias", False):
        yield Parameter(Role.SMALL, (inner,), 2 * layers)
        yield Parameter(Role.SMALL, (width,), layers)


def _sparse_layers(settings: _Settings, family: _Family, layers: int) -> int:
    """Return the number of layers that are mixtures of experts."""
    if not family.expert_width:
        return 0
    step = settings.number("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers", [])
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _mixture(settings: _Settings, family: _Family, width: int, layers: int) -> Iterator[Parameter]:
    """Yield the parameters of mixtures of experts, their routers among them."""
    # releases of transformers differ in the name
    experts = settings.number("num_experts", settings.get("num_local_experts", None))
    inner = settings.number(family.expert_width)
    yield Parameter(Role.EXPERTS, (experts, 2 * inner, width), layers)
    yield Parameter(Role.EXPERTS, (experts, width, inner), layers)
    yield Parameter(Role.SMALL, (experts, width), layers)
    if family.shared_expert:
        shared = settings.number("shared_expert_intermediate_size")
        yield Parameter(Role.MATRIX, (shared, width), 2 * layers)
        yield Parameter(Role.MATRIX, (width, shared), layers)
        yield Parameter(Role.MATRIX, (1, width), layers)


def _ends(vocabulary: int, width: int, tied: bool) -> Iterator[Parameter]:
    """Yield the embedding, and the output layer unless it is the same."""
    yield Parameter(Role.EMBEDDING, (vocabulary, width))
    if not tied:
        yield Parameter(Role.HEAD, (vocabulary, width))


def _gpt2(settings: _Settings) -> Architecture:
    """Return a model of GPT-2's kind: learned positions, biases everywhere."""
    width = settings.number("n_embd")
    layers = settings.number("n_layer")
    inner = settings.number("n_inner", 4 * width)
    vocabulary = settings.number("vocab_size")
    tied = settings.flag("tie_word_embeddings", True)
    matrices = [(3 * width, width), (width, width), (inner, width), (width, inner)]
    vectors = [*(4 * [(width,)]), (3 * width,), (width,), (inner,), (width,)]
    return Architecture(
        layers,
        width,
        vocabulary,
        tied,
        saved_numbers=10 * width + 5 * inner,
        passing_numbers=2 * inner,
        parameters=(
            *(Parameter(Role.MATRIX, shape, layers) for shape in matrices),
            *(Parameter(Role.SMALL, shape, layers) for shape in vectors),
            *_ends(vocabulary, width, tied),
            Parameter(Role.EMBEDDING, (settings.number("n_positions", 1024), width)),
            Parameter(Role.SMALL, (width,), 2),
        ),
    )
