"""Declaring a configuration field: its default, its help and the values it takes."""

from __future__ import annotations

from dataclasses import field
from typing import Any


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


def setting(default: Any, text: str, **limits: Any) -> Any:
    """Declare a configuration field: its default, one line of help and what it allows (see `allowed`)."""
    return field(default=default, metadata=allowed(text, **limits))
