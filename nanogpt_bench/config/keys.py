"""Keys of the configuration: every setting by its dotted name, with its type, default
and facts; refusals of values.

pydantic checks types and bounds, as `config.schema` declares them. Its errors are put
into the bench's words: the key, the value and what is allowed.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nanogpt_bench.config.field import FACTS, Section, facts_of, is_optional, kind_of
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
    #: choices, and `config.field.FACTS`
    facts: Mapping[str, Any]

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        words = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "a word",
            list: "a list of words",
        }
        maps = self.facts["maps"] or self.help.partition(",")[0].replace(" ->", " to")
        named = words.get(self.kind, f"a mapping of {maps}")
        return named + bounds_in_words(self.bounds) + (" or null" if self.optional else "")


def settings_of(
    section: type[Section], prefix: str = "", inherited: Mapping[str, Any] = FACTS
) -> Iterator[Setting]:
    """Yield the settings of a section and of those in it, in the order of their
    declaration.
    """
    for name, field in section.model_fields.items():
        key, kind, facts = prefix + name, kind_of(field), {**inherited, **facts_of(field)}
        if issubclass(kind, Section):
            yield from settings_of(kind, f"{key}.", facts)
        else:
            default, text = field.get_default(call_default_factory=True), field.description or ""
            yield Setting(
                key, kind, is_optional(field), default, text, tuple(field.metadata), facts
            )


FIELDS = {setting.key: setting for setting in settings_of(Config)}
MAPPINGS = tuple(key for key, setting in FIELDS.items() if setting.kind is dict)
SECTIONS = {key.rsplit(".", 1)[0] for key in FIELDS if "." in key}


@functools.cache
def keys_where(fact: str) -> tuple[str, ...]:
    """Return the keys of the settings that have a fact, in the order of their
    declaration.

    >>> keys_where("is_rate")
    ('optimizer.lr', 'optimizer.float_lr')
    """
    return tuple(key for key, setting in FIELDS.items() if setting.facts[fact])


def mapping_above(key: str) -> str | None:
    """Return the mapping setting whose entry `key` names, if it names one."""
    return next(
        (name for name in MAPPINGS if key.startswith(f"{name}.") and key != f"{name}."), None
    )


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
    limits = [
        (sign, getattr(bound, name))
        for name, sign in _SIGNS.items()
        for bound in bounds
        if hasattr(bound, name)
    ]
    return " and".join(
        f" {sign} {limit if isinstance(limit, int) else f'{limit:g}'}" for sign, limit in limits
    )


def refusal(
    error: ValidationError, fields: Mapping[str, Setting] = FIELDS, prefix: str = ""
) -> BenchError:
    """Return pydantic's first error in one line: the setting, its value and what it
    takes; `prefix` is its section.
    """
    found = error.errors(include_url=False)[0]
    place = [str(part) for part in found["loc"]]
    key = next(
        (key for end in range(1, 4) if (key := prefix + ".".join(place[:end])) in fields), ""
    )
    if found["type"] == "value_error":
        return BenchError(f"{key}: {found['ctx']['error']}")
    setting, value = fields[key], found["input"]
    if found["type"] in _OUT_OF_RANGE:
        instead = setting.facts["instead"]
        return BenchError(
            f"{key}: {value!r} is out of range; give {setting.allowed}"
            + (f"; {instead}" if instead else "")
        )
    return BenchError(
        f"{key}: {'null' if value is None else repr(value)} is not allowed; give {setting.allowed}"
    )
