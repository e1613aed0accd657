"""From YAML files and `--section.key value` overrides to a checked `Config`, and back to YAML.

Keys are checked here, so that a typo is answered with its nearest valid spelling; `config.check` checks values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogpt_bench.config.check import NULL_WORDS, checked, own_spellings, parse_text, type_name
from nanogpt_bench.config.keys import FIELDS, SECTIONS, mapping_above
from nanogpt_bench.config.precedence import settle
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, nearest, one_line, unknown


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
    kept, lines = settle(*map(own_spellings, given))
    if say is not None and path is not None:
        for line in lines:
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
        raise BenchError(
            f"config {str(path)!r} is empty; give settings, such as rule: fp32, or {{}} for the defaults of all"
        )
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
    return unknown("key", key, inside or [*sorted(SECTIONS), *(known for known in FIELDS if "." not in known)])


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


def _read_entry(mapping: str, text: str) -> Any:
    return text if FIELDS[mapping].facts["words"] else parse_text(text)


def _read_value(key: str, text: str) -> Any:
    setting = FIELDS[key]
    if setting.kind is list:
        return [word.strip() for word in text.strip("[] ").split(",") if word.strip()]
    if setting.optional and text.lower() in NULL_WORDS:
        return None
    return text if setting.kind is str else parse_text(text)


def build_config(values: dict[str, Any]) -> Config:
    """Return the `Config` with these {dotted key: value} settings, types and ranges checked.

    Raises:
        BenchError: a value of a wrong type, out of range, or null where that means nothing.
    """
    config = Config()
    for key, value in checked(values).items():
        section, _, name = key.rpartition(".")
        setattr(getattr(config, section) if section else config, name, value)
    return config


def to_yaml(config: Config) -> str:
    """Return the settings as YAML, in the order of their declaration.

    >>> to_yaml(Config()).splitlines()[:2]
    ['rule: null', 'seed: 42']
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
