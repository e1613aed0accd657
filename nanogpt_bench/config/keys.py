"""Keys of the configuration: every setting by its dotted name, and refusals of values.

A `Setting` has the type, default and facts that `config.schema` declares. pydantic
checks types and bounds. Its errors are put into the bench's words here: the key, the
value and what is allowed.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nanogpt_bench.config.field import (
    FIELD_FACTS,
    SettingsSection,
    field_facts,
    is_optional,
    kind_of,
)
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError


@dataclass(frozen=True)
class Setting:
    """A setting as `config.schema` declares it."""

    key: str
    #: its type without null; `list` or `dict` where it holds several values
    kind: type
    #: may be null
    optional: bool
    #: its value where none is given
    default: Any
    #: one line
    help: str
    #: its bounds, as pydantic has them: objects with one of ge, gt, le, lt
    bounds: tuple[Any, ...]
    #: choices, and `config.field.FIELD_FACTS`
    facts: Mapping[str, Any]

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        words = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "a string",
            list: "a list of words",
        }
        # Only used for a mapping, whose help begins with what it maps to what.
        mapped = self.facts["maps"] or self.help.partition(",")[0].replace(" ->", " to")
        kind = words.get(self.kind, f"a mapping of {mapped}")
        null = " or null" if self.optional else ""
        return kind + bounds_in_words(self.bounds) + null


def section_settings(
    section: type[SettingsSection], prefix: str = "", inherited: Mapping[str, Any] = FIELD_FACTS
) -> Iterator[Setting]:
    """Yield the settings of a section and its subsections, as they are declared."""
    for name, field in section.model_fields.items():
        key, kind = prefix + name, kind_of(field)
        facts = {**inherited, **field_facts(field)}
        if issubclass(kind, SettingsSection):
            yield from section_settings(kind, f"{key}.", facts)
            continue
        yield Setting(
            key=key,
            kind=kind,
            optional=is_optional(field),
            default=field.get_default(call_default_factory=True),
            help=field.description or "",
            bounds=tuple(field.metadata),
            facts=facts,
        )


FIELDS = {setting.key: setting for setting in section_settings(Config)}
MAPPINGS = tuple(key for key, setting in FIELDS.items() if setting.kind is dict)
SECTIONS = {key.rsplit(".", 1)[0] for key in FIELDS if "." in key}


@functools.cache
def keys_where(fact: str) -> tuple[str, ...]:
    """Return the keys of the settings that have a fact, as they are declared.

    >>> keys_where("is_rate")
    ('optimizer.lr', 'optimizer.float_lr')
    """
    return tuple(key for key, setting in FIELDS.items() if setting.facts[fact])


def short_names(keys: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """Return a name for each key: its last word, or all of it where that is not unique.

    Args:
        keys: dotted keys.
        taken: names that stand for something else.

    >>> short_names(["optimizer.lr", "eval.interval", "monitor.interval"])
    {'optimizer.lr': 'lr', 'eval.interval': 'eval.interval', 'monitor.interval': 'monitor.interval'}
    """
    last_words = {key: key.rsplit(".", 1)[-1] for key in keys}
    counts = Counter([*last_words.values(), *taken])
    return {key: word if counts[word] == 1 else key for key, word in last_words.items()}


def mapping_above(key: str) -> str | None:
    """Return the mapping setting whose entry `key` names, or None."""
    for name in MAPPINGS:
        if key.startswith(f"{name}.") and key != f"{name}.":
            return name
    return None


def get(config: Config, key: str) -> Any:
    """Return the setting at a dotted key.

    >>> get(Config(), "train.batch_size")
    12
    """
    return functools.reduce(getattr, key.split("."), config)


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
#: kinds of pydantic's errors about a number of the right type
_OUT_OF_RANGE = (
    "greater_than_equal",
    "greater_than",
    "less_than_equal",
    "less_than",
    "finite_number",
)


def bounds_in_words(bounds: tuple[Any, ...]) -> str:
    """Return bounds in words, with a space before each."""
    words = []
    for name, sign in _SIGNS.items():
        for bound in bounds:
            if hasattr(bound, name):
                limit = getattr(bound, name)
                number = str(limit) if isinstance(limit, int) else f"{limit:g}"
                words.append(f" {sign} {number}")
    return " and".join(words)


def refusal(
    error: ValidationError, fields: Mapping[str, Setting] = FIELDS, prefix: str = ""
) -> BenchError:
    """Return pydantic's first error in one line: the setting, its value, what it takes.

    `prefix` is the section of `fields`.
    """
    details = error.errors(include_url=False)[0]
    key = _setting_at(details["loc"], fields, prefix)
    if details["type"] == "value_error":
        return BenchError(f"{key}: {details['ctx']['error']}")
    setting, value = fields[key], details["input"]
    if details["type"] in _OUT_OF_RANGE:
        message = f"{key}: {value!r} is out of range; give {setting.allowed}"
        instead = setting.facts["instead"]
        return BenchError(f"{message}; {instead}" if instead else message)
    shown = "null" if value is None else repr(value)
    return BenchError(f"{key}: {shown} is not allowed; give {setting.allowed}")


def _setting_at(location: Sequence[Any], fields: Mapping[str, Setting], prefix: str) -> str:
    """Return the key of the setting in which pydantic found an error, "" for none.

    A location goes on inside a setting that holds several values.
    """
    names = [str(name) for name in location]
    for depth in range(1, 4):
        key = prefix + ".".join(names[:depth])
        if key in fields:
            return key
    return ""
