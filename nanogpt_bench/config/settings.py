"""From YAML files and `--section.key value` overrides to a checked `Config`, and back to YAML.

Keys are checked here, so that a typo is answered with its nearest valid spelling; `config.typed` checks the types and
`_check_range` the bounds written down in `config.schema`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from nanogpt_bench.config.precedence import settle
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.typed import typed
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, nearest, one_line, unknown

#: words that mean null for a key that may be null
NULL_WORDS = ("null", "none", "~", "")


def fields_of(section: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, field, type) for every setting, sections flattened.

    >>> [key for key, _, _ in fields_of()][:3]
    ['rule', 'seed', 'data.dir']
    """
    hints = get_type_hints(section)
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from fields_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item, hints[item.name]


FIELDS = {key: (item, hint) for key, item, hint in fields_of()}
MAPPINGS = tuple(key for key, (_, hint) in FIELDS.items() if str(hint).startswith("dict"))
SECTIONS = {key.rsplit(".", 1)[0] for key in FIELDS if "." in key}


def load_config(path: Path | None, overrides: Sequence[str] = (), say: Callable[[str], None] | None = None) -> Config:
    """Read a YAML file (None: all defaults), apply command-line overrides and check every key, type and range.

    What in the file contradicts an override gives way to it; `say` is told what.

    >>> load_config(None, ["--train.max_steps", "7"]).train.max_steps
    7

    Raises:
        BenchError: unreadable file, unknown key, wrong type or a value out of range, in one line.
    """
    return build_config(load_settings(path, overrides, say))


def load_settings(
    path: Path | None, overrides: Sequence[str] = (), say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the settings that `load_config` builds a configuration of, as {dotted key: value}.

    Raises:
        BenchError: unreadable file or unknown key, in one line.
    """
    file = read_yaml(path) if path else {}
    given = (file, parse_overrides(overrides), parse_overrides(overrides, file))
    kept, lines = settle(*({key: _own_spelling(key, value) for key, value in each.items()} for each in given))
    for line in lines if say and path else ():
        say(f"{path.name}: {line}")
    return kept


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file as {dotted key: value}, its keys checked.

    Raises:
        BenchError: a file that can't be read, is not YAML, or holds an unknown key.
    """
    try:
        loaded = untrusted.read_yaml(path)
    except OSError as error:
        raise BenchError(f"config {str(path)!r} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"config {str(path)!r} is not YAML: {one_line(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise BenchError(f"config {str(path)!r} must hold keys and values, not {type(loaded).__name__}")
    return dict(flatten(loaded))


def flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested sections, the keys checked.

    Raises:
        BenchError: an unknown key, or a value in place of a section.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in SECTIONS:
            if not isinstance(value, dict):
                raise BenchError(f"{key}: {value!r} is not a section; give its keys, such as {_first_key(key)}")
            yield from flatten(value, f"{key}.")
        elif key not in FIELDS:
            raise unknown_key(".".join([key, *_first_path(value)]))
        else:
            yield key, value


def _first_path(value: Any) -> Iterator[str]:
    """Yield the names that lead to the first setting inside a section."""
    while isinstance(value, dict) and value:
        name = next(iter(value))
        yield str(name)
        value = value[name]


def _first_key(section: str) -> str:
    return next(known for known in FIELDS if known.startswith(f"{section}."))


def _check_key(key: str) -> None:
    if key not in FIELDS:
        raise unknown_key(key)


def unknown_key(key: str) -> BenchError:
    """Return the error for a key that does not exist: its nearest spelling, or the keys of its section."""
    guess = nearest(key, FIELDS) or _same_last_word(key)
    if guess:
        return BenchError(f"unknown key {key!r}; did you mean {guess!r}?")
    section = key.rsplit(".", 1)[0]
    inside = [known for known in FIELDS if known.startswith(f"{section}.")]
    return unknown("key", key, inside or [*sorted(SECTIONS), "rule", "seed"])


def _same_last_word(key: str) -> str | None:
    last = key.rsplit(".", 1)[-1]
    return next((known for known in FIELDS if known.rsplit(".", 1)[-1] == last), None)


def parse_overrides(arguments: Sequence[str], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `base` with `--a.b value` and `--a.b=value` arguments applied, values read as YAML scalars.

    An entry of a mapping can be given alone: `--model.formats.attn E4M3` leaves its other entries as they are.

    >>> parse_overrides(["--model.format", "E4M3", "--seed=3"])
    {'model.format': 'E4M3', 'seed': 3}
    """
    values = dict(base or {})
    queue = list(arguments)
    while queue:
        key, text = _next_override(queue)
        mapping = mapping_above(key)
        if mapping:
            values[mapping] = {**entries_of(values, mapping), key[len(mapping) + 1 :]: _read_entry(mapping, text)}
        else:
            values[key] = _read_value(key, text)
    return values


def entries_of(values: Mapping[str, Any], mapping: str) -> dict[str, Any]:
    """Return the entries that a mapping setting has so far.

    Raises:
        BenchError: it was given something else.
    """
    entries = values.get(mapping) or {}
    if not isinstance(entries, dict):
        raise BenchError(f"{mapping}: {entries!r} is not allowed; give {type_name(mapping)}")
    return entries


def _next_override(queue: list[str]) -> tuple[str, str]:
    """Take one override off the queue and return its checked key and its text."""
    word = queue.pop(0)
    if not word.startswith("--"):
        raise BenchError(f"unexpected argument {word!r}; settings are written --section.key value")
    key, equals, text = word[2:].partition("=")
    if not mapping_above(key):
        _check_key(key)
    if not equals and not queue:
        raise BenchError(f"--{key} needs a value; give {type_name(key) if key in FIELDS else 'one'}")
    return key, text if equals else queue.pop(0)


def mapping_above(key: str) -> str | None:
    """Return the mapping setting whose entry `key` names, if it names one."""
    return next((name for name in MAPPINGS if key.startswith(f"{name}.") and key != f"{name}."), None)


def _is_mapping(key: str) -> bool:
    return key in MAPPINGS


def _is_list(key: str) -> bool:
    return key in FIELDS and str(FIELDS[key][1]).startswith("list")


def _read_entry(mapping: str, text: str) -> Any:
    """Return one entry of a mapping: formats are words, whatever they look like."""
    return text if mapping == "model.formats" else _yaml(text)


def _yaml(text: str) -> Any:
    """Return what a text says as YAML, the text itself where it says nothing."""
    try:
        return untrusted.parse_yaml(text)
    except ValueError:
        return text


def _read_value(key: str, text: str) -> Any:
    hint = FIELDS[key][1]
    if _is_list(key):
        return [word.strip() for word in text.strip("[] ").split(",") if word.strip()]
    if _optional(hint) and text.lower() in NULL_WORDS:
        return None
    if "str" in str(hint) and not _is_mapping(key):
        return text
    return _yaml(text)


def _optional(hint: Any) -> bool:
    return type(None) in getattr(hint, "__args__", ())


def build_config(values: dict[str, Any]) -> Config:
    """Return the `Config` with these {dotted key: value} settings, types and ranges checked.

    Raises:
        BenchError: a value of a wrong type, out of range, or null where that means nothing.
    """
    values = {key: _own_spelling(key, _off(key, value)) for key, value in values.items()}
    for key, value in values.items():
        if value is None and not _optional(FIELDS[key][1]):
            raise BenchError(f"{key}: null is not allowed; give {type_name(key)}")
        if isinstance(value, int) and not is_finite(value):  # more than the conversion to a float can take
            raise BenchError(f"{key}: {value!r} is not allowed; give {type_name(key)}")
        _check_names(key, value)
    config = Config()
    for key, value in values.items():
        _set(config, key, _typed(key, value))
        _check_range(key, get(config, key), FIELDS[key][0].metadata)
    return config


def _check_names(key: str, value: Any) -> None:
    """Refuse a mapping, anywhere in a setting, that names an entry by something else than a word."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise BenchError(f"{key}: {name!r} is not allowed as the name of an entry; give a word, in quotes")
            _check_names(key, item)
    for item in value if isinstance(value, list | tuple) else ():
        _check_names(key, item)


def _off(key: str, value: Any) -> Any:
    """Return a setting as it was meant: YAML reads a bare off as false."""
    return "off" if value is False and "off" in (FIELDS[key][0].metadata["choices"] or ()) else value


def _own_spelling(key: str, value: Any) -> Any:
    """Return a choice spelt in other case or without its underscores (StiffnessAdamW) in its own spelling."""
    choices = FIELDS[key][0].metadata["choices"] or ()
    return next((known for known in choices if isinstance(value, str) and _folded(known) == _folded(value)), value)


def _folded(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _set(config: Config, key: str, value: Any) -> None:
    section, _, last = key.rpartition(".")
    setattr(get(config, section) if section else config, last, value)


def get(config: Config, key: str) -> Any:
    """Return the setting at a dotted key.

    >>> get(Config(), "train.batch_size")
    12
    """
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _typed(key: str, value: Any) -> Any:
    try:
        return typed(key, FIELDS[key][1], value)
    except TypeError:
        raise BenchError(f"{key}: {value!r} is not allowed; give {type_name(key)}") from None


def type_name(key: str) -> str:
    """Return what a setting takes, in words."""
    item, hint = FIELDS[key]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if _is_list(key):
        return "a list of words"
    kinds = getattr(hint, "__args__", (hint,)) if not _is_mapping(key) else ()
    what = "layer pattern to format name" if key == "model.formats" else item.metadata["help"].partition(",")[0]
    named = [words[kind] for kind in kinds if kind in words] or [f"a mapping of {what.replace(' ->', ' to')}"]
    return " or ".join(named) + bounds(item.metadata) + (" or null" if _optional(hint) else "")


def bounds(metadata: Any) -> str:
    """Return what a field's metadata allows, in words."""
    limits = [
        f" {word} {metadata[name]:g}"
        for name, word in (("minimum", ">="), ("above", ">"), ("maximum", "<="), ("below", "<"))
        if metadata[name] is not None
    ]
    return " and".join(limits)


def _check_range(key: str, value: Any, metadata: Any) -> None:
    if value is None:
        return
    for word in value if isinstance(value, list) else [value]:
        if metadata["choices"] and word not in metadata["choices"]:
            raise _not_a_choice(key, word, metadata["choices"])
    if not isinstance(value, int | float):
        return
    if not (is_finite(value) and inside(value, metadata)):
        instead = f"; {metadata['instead']}" if metadata["instead"] else ""
        raise BenchError(f"{key}: {value!r} is out of range; give {type_name(key)}{instead}")


def is_finite(value: float) -> bool:
    """Return whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def inside(value: float, metadata: Any) -> bool:
    """Return whether a number is within the bounds of a field's metadata."""
    compare = {"minimum": operator.ge, "above": operator.gt, "maximum": operator.le, "below": operator.lt}
    return all(metadata[name] is None or holds(value, metadata[name]) for name, holds in compare.items())


def _not_a_choice(key: str, value: str, choices: Sequence[str]) -> BenchError:
    guess = nearest(value, choices)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    return BenchError(f"{key}: {value!r} is not known{hint} allowed: {', '.join(choices)}")


def to_yaml(config: Config) -> str:
    """Return the settings as YAML, in the order of their declaration.

    >>> to_yaml(Config()).splitlines()[:2]
    ['rule: null', 'seed: 42']
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Return the value that a setting has when nobody gives one."""
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
