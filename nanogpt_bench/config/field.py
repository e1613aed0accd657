"""Declaring a configuration field: default, help, allowed values, facts.

`setting` declares a field of a `SettingsSection`. Its facts, see `FIELD_FACTS`, are what other
modules ask about it. `SettingsSection` reads every value before pydantic checks it: strings of
a YAML file or a command line become numbers, and a choice gets its canonical spelling.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, not_known

#: the facts of a field, with their values where neither the field nor its section gives
#: one
FIELD_FACTS: dict[str, Any] = {
    #: a run resumed with another value gets other numbers
    "changes_numbers": True,
    #: belongs to a run's rule: the reference of a sweep, which has its own rule, does
    #: not take it over (`config.rules.reference_settings`)
    "of_rule": False,
    #: means nothing where all weights are floats
    "of_formats": False,
    #: storages under which it means something; None: all
    "storages": None,
    #: optimizers under which it means something; None: all
    "optimizers": None,
    #: losses are compared only between runs with the same value
    "of_task": False,
    #: a learning rate, in the optimizer's own unit; every rule has its own
    "is_rate": False,
    #: the option of `compare` to give in place of this setting, in which its rows
    #: differ; None: `compare` takes the setting
    "rows_by": None,
    #: a mapping whose entries are words, even those that look like numbers
    "words": False,
    #: the path of a folder: one that is spelt a/./b or a/b/ is a/b
    "is_folder": False,
    #: what a mapping maps, for error messages; None: the help begins with it
    "maps": None,
}
#: the largest whole number that a field without a bound takes
LARGEST_INTEGER = 2**64 - 1
#: words of YAML that mean null even in quotes, for a setting that may be null
NULLS = ("null", "Null", "NULL", "~")


class SettingsSection(BaseModel):
    """Settings with their types and bounds, checked when a section is made.

    A string for a field of another type is read as YAML, so that 1e-3 is a number. A
    choice may be spelt in any case.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject what pydantic accepts silently or reports badly; return the value."""
        field = cls.model_fields[str(info.field_name)]
        kind, facts = kind_of(field), field_facts(field)
        if issubclass(kind, SettingsSection):
            return value
        check_names(value)
        _check_filled(value)
        if isinstance(value, str) and value in NULLS and is_optional(field):
            return None
        value = _parse_string(kind, value)
        if facts.get("is_folder") and isinstance(value, str):
            value = Path(value).as_posix()
        choices = facts["choices"]
        if choices:
            if isinstance(value, list):
                return [_canonical_choice(word, choices) for word in value]
            return _canonical_choice(value, choices)
        is_bounded = any(hasattr(bound, "le") for bound in field.metadata)
        is_integer = kind is int and isinstance(value, int)
        if is_integer and not is_bounded and value > LARGEST_INTEGER:
            raise BenchError(f"{value} is out of range; give at most {LARGEST_INTEGER}")
        return value


def kind_of(field: FieldInfo) -> type:
    """Return a field's type without null; `list` or `dict` for a container."""
    kind: Any = get_origin(field.annotation) or field.annotation
    if is_optional(field):
        members = get_args(field.annotation)
        kind = next(member for member in members if member is not type(None))
    return kind


def is_optional(field: FieldInfo) -> bool:
    """Return whether a field may be null."""
    return type(None) in get_args(field.annotation)


def field_facts(field: FieldInfo) -> dict[str, Any]:
    """Return the facts that `setting` or `section` gave a field."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def check_names(value: Any) -> None:
    """Refuse a mapping, anywhere in a value, with a key that is not a string."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise BenchError(
                    f"{name!r} is not allowed as the key of an entry; give a string, in quotes"
                )
            check_names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_names(item)


def _check_filled(value: Any) -> None:
    """Refuse an empty text, alone or as one of several words."""
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and not word.strip():
            raise BenchError(f"{word!r} is not allowed; give a value, or leave it out")


def _parse_string(kind: type, value: Any) -> Any:
    """Read a string as YAML where the field takes another type."""
    if kind is str or not isinstance(value, str):
        return value
    if kind is float and untrusted.is_beyond_floats(value):
        raise BenchError(f"{value!r} is not allowed: {untrusted.BEYOND_FLOATS}")
    if kind in (int, float) and not untrusted.is_ambiguous(value):
        with suppress(ValueError):
            return kind(value)
    parsed = parse_text(value)
    # A text without a value, such as a comment of YAML, does not mean null.
    if parsed is None and value not in NULLS:
        return value
    return parsed


def parse_text(text: str) -> Any:
    """Return the value of a text read as YAML, or the text itself if it is none."""
    try:
        return untrusted.parse_yaml(text)
    except untrusted.DuplicateName as error:
        raise BenchError(f"{text!r}: {error}") from None
    except ValueError:
        return text


def _canonical_choice(value: Any, choices: Sequence[str]) -> Any:
    """Return the choice that a word spells.

    Case, underscores and hyphens don't count. YAML reads a bare off as false.
    """
    if value is False and "off" in choices:
        return "off"
    if not isinstance(value, str) or value in choices:
        return value
    for choice in choices:
        if _folded(choice) == _folded(value):
            return choice
    raise BenchError(not_known(value, choices))


def _folded(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def setting(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    instead: str | None = None,
    **facts: Any,
) -> Any:
    """Declare a configuration field.

    Args:
        default: the value where none is given. For a list or a mapping the function
            that makes it.
        text: one line of help.
        minimum: smallest allowed value.
        maximum: largest allowed value.
        above: exclusive lower bound.
        below: exclusive upper bound.
        choices: the allowed words.
        instead: another way to get what a value out of bounds asks for.
        facts: those of `FIELD_FACTS` that have another value.
    """
    limits: dict[str, Any] = {"ge": minimum, "le": maximum, "gt": above, "lt": below}
    extra: dict[str, Any] = {"choices": choices, "instead": instead, **facts}
    if callable(default):
        limits["default_factory"] = default
    else:
        limits["default"] = default
    return Field(description=text, json_schema_extra=extra, **limits)


def section(kind: type[SettingsSection], text: str, **facts: Any) -> Any:
    """Declare a section, its one line of help, and `FIELD_FACTS` of its fields."""
    return Field(default_factory=kind, description=text, json_schema_extra=facts)
