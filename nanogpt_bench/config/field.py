"""Declaring a configuration field: its default, its help, the values it takes and the facts that others ask it for."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, not_known

#: facts of a field that neither it nor its section gives
FACTS: dict[str, Any] = {
    #: a run that goes on with another value goes on to other numbers
    "changes_numbers": True,
    #: part of what a rule means; a reference of another rule leaves it behind
    "of_rule": False,
    #: means nothing where all weights are floats
    "of_formats": False,
    #: storages under which it means something; None: all
    "storages": None,
    #: optimizers under which it means something; None: all
    "optimizers": None,
    #: losses are set against each other only where it is the same
    "of_task": False,
    #: a learning rate, in the optimizer's own unit, of which every rule has one of its own
    "is_rate": False,
    #: the option of compare that gives it, where its rows differ in it
    "rows_by": None,
    #: a mapping whose entries are words, whatever they look like
    "words": False,
    #: a mapping in words, where the help does not begin with that
    "maps": None,
}
#: the largest whole number of a field without a bound
MOST = 2**64 - 1
#: words of YAML that mean null even in quotes, for a setting that may be null
NULLS = ("null", "Null", "NULL", "~")


class Section(BaseModel):
    """Settings with their types and bounds, which are checked where one is made of what somebody gives.

    A text is read as YAML where no text is meant, so that 1e-3 is a number, and a choice may be spelt in any case.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the value that is meant; refuse what pydantic would let pass, or would not name."""
        field = cls.model_fields[str(info.field_name)]
        kind, facts = kind_of(field), facts_of(field)
        if issubclass(kind, Section):
            return value
        check_names(value)
        if isinstance(value, str) and value in NULLS and is_optional(field):
            return None
        value = _said(kind, value)
        if choices := facts["choices"]:
            words = value if isinstance(value, list) else [value]
            found = [_chosen(word, choices) for word in words]
            return found if isinstance(value, list) else found[0]
        bounded = any(hasattr(bound, "le") for bound in field.metadata)
        if kind is int and isinstance(value, int) and value > MOST and not bounded:
            raise BenchError(f"{value} is out of range; give at most {MOST}")
        return value


def kind_of(field: FieldInfo) -> type:
    """Return a field's type without null; `list` or `dict` where it holds several values."""
    given = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = given[0] if is_optional(field) else get_origin(field.annotation) or field.annotation
    return kind


def is_optional(field: FieldInfo) -> bool:
    """Return whether a field may be null."""
    return type(None) in get_args(field.annotation)


def facts_of(field: FieldInfo) -> dict[str, Any]:
    """Return what `setting` or `section` was told of a field."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def check_names(value: Any) -> None:
    """Refuse a mapping, anywhere in a value, that names an entry by something else than a word."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise BenchError(f"{name!r} is not allowed as the name of an entry; give a word, in quotes")
            check_names(item)
    for item in value if isinstance(value, list | tuple) else ():
        check_names(item)


def _said(kind: type, value: Any) -> Any:
    """Read a text as YAML where the field takes something else."""
    if kind is str or not isinstance(value, str):
        return value
    if kind in (int, float) and not untrusted.is_ambiguous(value):
        with suppress(ValueError):
            return kind(value)
    said = parse_text(value)
    return value if said is None and value not in NULLS else said


def parse_text(text: str) -> Any:
    """Return what a text says as YAML, the text itself where it says nothing."""
    try:
        return untrusted.parse_yaml(text)
    except untrusted.GivenTwice as error:
        raise BenchError(f"{text!r}: {error}") from None
    except ValueError:
        return text


def _chosen(value: Any, choices: Sequence[str]) -> Any:
    """The choice that a word means, in whatever case and without its underscores; YAML reads a bare off as false."""
    if value is False and "off" in choices:
        return "off"
    if not isinstance(value, str):
        return value
    if value in choices:
        return value
    meant = [known for known in choices if _folded(known) == _folded(value)]
    if not meant:
        raise BenchError(not_known(value, choices))
    return meant[0]


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
    """Declare a configuration field: its default, one line of help, what it allows and its `FACTS`.

    `above` and `below` are exclusive; `instead` says what does what a value out of bounds asks for. A list or a mapping
    by default is what makes it.
    """
    limits: dict[str, Any] = {"ge": minimum, "le": maximum, "gt": above, "lt": below}
    more: dict[str, Any] = {"choices": choices, "instead": instead, **facts}
    made: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return Field(**made, description=text, json_schema_extra=more, **limits)


def section(kind: type[Section], **facts: Any) -> Any:
    """Declare a section, and the `FACTS` of the fields in it that do not say otherwise."""
    return Field(default_factory=kind, json_schema_extra=facts)
