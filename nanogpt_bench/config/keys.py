"""Keys of the configuration: every setting by its dotted name, with its type, default and facts; the check of values.

pydantic checks types, bounds and choices, as `config.schema` declares them. Its findings become errors in the bench's
words: the key, the value, what is allowed, the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, Strict, TypeAdapter, ValidationError

from nanogpt_bench.config.field import FACTS
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, nearest


@dataclass(frozen=True)
class Setting:
    """A setting as `config.schema` declares it."""

    key: str
    #: its type without null; `list` or `dict` where it holds several values
    kind: type
    #: whether it may be null
    optional: bool
    #: help, bounds and choices (see `config.field.allowed`), and `config.field.FACTS`
    facts: Mapping[str, Any]
    declared: dataclasses.Field[Any]

    @property
    def default(self) -> Any:
        """The value that it has when nobody gives one."""
        factory = self.declared.default_factory
        return self.declared.default if factory is dataclasses.MISSING else factory()


def _settings(section: Any, prefix: str, inherited: Mapping[str, Any]) -> Iterator[Setting]:
    hints = get_type_hints(section)
    for item in dataclasses.fields(section):
        key, hint, facts = prefix + item.name, hints[item.name], {**inherited, **item.metadata}
        if dataclasses.is_dataclass(hint):
            yield from _settings(hint, f"{key}.", facts)
        else:
            optional = type(None) in get_args(hint)
            kind = get_args(hint)[0] if optional else get_origin(hint) or hint
            yield Setting(key, kind, optional, facts, item)


#: in the order of their declaration, sections flattened
FIELDS = {setting.key: setting for setting in _settings(Config, "", FACTS)}
MAPPINGS = tuple(key for key, setting in FIELDS.items() if setting.kind is dict)
SECTIONS = {key.rsplit(".", 1)[0] for key in FIELDS if "." in key}


@functools.cache
def keys_where(fact: str) -> tuple[str, ...]:
    """Return the keys of which a fact is true, in the order of their declaration.

    >>> keys_where("is_rate")
    ('optimizer.lr', 'optimizer.float_lr')
    """
    return tuple(key for key, setting in FIELDS.items() if setting.facts[fact])


def mapping_above(key: str) -> str | None:
    """Return the mapping setting whose entry `key` names, if it names one."""
    return next((name for name in MAPPINGS if key.startswith(f"{name}.") and key != f"{name}."), None)


def get(config: Config, key: str) -> Any:
    """Return the setting at a dotted key.

    >>> get(Config(), "train.batch_size")
    12
    """
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


#: words that mean null for a key that may be null
NULL_WORDS = ("null", "none", "~", "")
#: bounds by their name in the schema and in pydantic, and how they are written
_BOUNDS = {
    "minimum": ("ge", ">=", operator.ge),
    "above": ("gt", ">", operator.gt),
    "maximum": ("le", "<=", operator.le),
    "below": ("lt", "<", operator.lt),
}
#: kinds of pydantic's errors about a number of the right type
_OUT_OF_RANGE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number")
#: words of YAML that mean null even in quotes
_QUOTED_NULLS = ("null", "Null", "NULL", "~")


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} settings as their types have them, such as 1.0 for 1 where a float is meant.

    >>> checked({"optimizer.lr": 1, "optimizer.name": "StiffnessAdamW"})
    {'optimizer.lr': 1.0, 'optimizer.name': 'stiffness_adamw'}

    Raises:
        BenchError: a wrong type, out of range, or null where that means nothing.
    """
    return {key: _checked(key, value) for key, value in settings.items()}


def _checked(key: str, value: Any) -> Any:
    _check_names(key, value)
    try:
        checked = _adapter(key).validate_python(value)
        if not isinstance(checked, int) or is_finite(checked):  # or more than the conversion to a float can take
            return checked
        raise _not_allowed(key, value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
    if found["type"] == "literal_error" and isinstance(found["input"], str):
        raise _not_a_choice(key, found["input"], FIELDS[key].facts["choices"])
    if found["type"] in _OUT_OF_RANGE:
        instead = FIELDS[key].facts["instead"]
        more = f"; {instead}" if instead else ""
        raise BenchError(f"{key}: {found['input']!r} is out of range; give {type_name(key)}{more}")
    raise _not_allowed(key, value)


@functools.cache
def _adapter(key: str) -> TypeAdapter[Any]:
    setting = FIELDS[key]
    kind = _constrained(setting)
    read: Any = Annotated[kind | None if setting.optional else kind, BeforeValidator(_reader(setting))]
    return TypeAdapter(read)


def _constrained(setting: Setting) -> Any:
    """The type of a setting with its bounds and choices, as pydantic takes it."""
    facts, kind = setting.facts, setting.kind
    if kind is dict:
        return dict[Annotated[str, Strict()], Any]
    literal: Any = Literal
    choice: Any = literal[facts["choices"]] if facts["choices"] else None
    if kind is list:
        return list[choice or Annotated[str, Strict()]]  # type: ignore[misc]  # found at run time
    if choice:
        return choice
    limits: dict[str, Any] = {name: facts[bound] for bound, (name, _, _) in _BOUNDS.items() if facts[bound] is not None}
    finite: dict[str, Any] = {"allow_inf_nan": False} if kind is float else {}
    return Annotated[kind, Field(strict=True, **limits, **finite)]


def _reader(setting: Setting) -> Callable[[Any], Any]:
    """Return what makes a value of a text, where it is no text that is meant, or one of the choices in any spelling."""
    if setting.kind is not str:
        return functools.partial(_said, setting.kind)
    if setting.facts["choices"]:
        return lambda value: None if _is_null(setting, value) else _own_spelling(setting.facts["choices"], value)
    return lambda value: None if _is_null(setting, value) else value


def _is_null(setting: Setting, value: Any) -> bool:
    return setting.optional and isinstance(value, str) and value in _QUOTED_NULLS


def _said(kind: type, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if kind in (int, float) and not untrusted.is_ambiguous(value):
        with suppress(ValueError):
            return kind(value)
    said = parse_text(value)
    return value if said is None and value not in _QUOTED_NULLS else said


def parse_text(text: str) -> Any:
    """Return what a text says as YAML, the text itself where it says nothing.

    Raises:
        BenchError: it gives a key twice.
    """
    try:
        return untrusted.parse_yaml(text)
    except untrusted.GivenTwice as error:
        raise BenchError(f"{text!r}: {error}") from None
    except ValueError:
        return text


def own_spellings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every choice spelt in other case or without its underscores in its own spelling.

    >>> own_spellings({"optimizer.name": "StiffnessAdamW"})
    {'optimizer.name': 'stiffness_adamw'}
    """
    return {key: _own_spelling(FIELDS[key].facts["choices"] or (), value) for key, value in settings.items()}


def _own_spelling(choices: Sequence[str], value: Any) -> Any:
    if value is False and "off" in choices:  # as YAML reads a bare off
        return "off"
    return next((known for known in choices if isinstance(value, str) and _folded(known) == _folded(value)), value)


def _folded(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _check_names(key: str, value: Any) -> None:
    """Refuse a mapping, anywhere in a setting, that names an entry by something else than a word."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise BenchError(f"{key}: {name!r} is not allowed as the name of an entry; give a word, in quotes")
            _check_names(key, item)
    for item in value if isinstance(value, list | tuple) else ():
        _check_names(key, item)


def _not_allowed(key: str, value: Any) -> BenchError:
    shown = "null" if value is None else repr(value)
    return BenchError(f"{key}: {shown} is not allowed; give {type_name(key)}")


def _not_a_choice(key: str, value: str, choices: Sequence[str]) -> BenchError:
    guess = nearest(value, choices)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    return BenchError(f"{key}: {value!r} is not known{hint} allowed: {', '.join(choices)}")


def type_name(key: str) -> str:
    """Return what a setting takes, in words.

    >>> type_name("train.max_steps"), type_name("optimizer.lr")
    ('a whole number >= 1', 'a number > 0 or null')
    """
    setting = FIELDS[key]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list of words"}
    maps = setting.facts["maps"] or setting.facts["help"].partition(",")[0].replace(" ->", " to")
    named = words.get(setting.kind, f"a mapping of {maps}")
    return named + bounds(setting.facts) + (" or null" if setting.optional else "")


def bounds(metadata: Any) -> str:
    """Return what a field's metadata allows, in words."""
    limits = {sign: metadata[name] for name, (_, sign, _) in _BOUNDS.items() if metadata[name] is not None}
    return " and".join(f" {sign} {limit if isinstance(limit, int) else f'{limit:g}'}" for sign, limit in limits.items())


def inside(value: float, metadata: Any) -> bool:
    """Return whether a number is within the bounds of a field's metadata."""
    return all(metadata[name] is None or holds(value, metadata[name]) for name, (_, _, holds) in _BOUNDS.items())


def is_finite(value: float) -> bool:
    """Return whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
