"""Keys of the configuration: every setting by its dotted name, with its type, its default and its facts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from nanogpt_bench.config.field import FACTS
from nanogpt_bench.config.schema import Config


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
