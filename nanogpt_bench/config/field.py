"""Declaring a configuration field: its default, its help, the values it takes and the facts that others ask it for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

#: what is true of a field that does not say otherwise, and of which no section says it
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
    #: what the rows of a comparison differ in; the option that gives it
    "rows_by": None,
    #: of a mapping: its entries are words, whatever they look like
    "words": False,
    #: of a mapping: what it maps to what, where the help does not begin with it
    "maps": None,
}


def allowed(
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    instead: str | None = None,
) -> dict[str, Any]:
    """Return a field's metadata: one line of help and its bounds, `above` and `below` being exclusive.

    `instead` says what does what a value out of bounds asks for.
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    return {"help": text, "choices": choices, "instead": instead, **limits}


def setting(default: Any, text: str, **more: Any) -> Any:
    """Declare a configuration field: its default, one line of help, what it allows (see `allowed`) and its `FACTS`.

    A list or a mapping by default is what makes it.
    """
    facts = {name: more.pop(name) for name in list(more) if name in FACTS}
    metadata = {**allowed(text, **more), **facts}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def section(kind: type, **facts: Any) -> Any:
    """Declare a section, and the `FACTS` of the fields in it that do not say otherwise."""
    return field(default_factory=kind, metadata=facts)
