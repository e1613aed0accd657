"""Values of settings that had another name: files of earlier versions have it.

Whatever reads such a file asks here once, so that the rest of the bench knows the
names of today alone.
"""

from collections.abc import Mapping
from typing import Any, Final

RENAMED: Final[dict[str, dict[str, str]]] = {"model.storage": {"fp8": "codes"}}
"""Today's names of settings' values by their former ones, by dotted key."""


def current_value(key: str, value: Any) -> Any:
    """Return today's name of a setting's value that a file has.

    >>> current_value("model.storage", "fp8"), current_value("model.products", "fp8")
    ('codes', 'fp8')
    """
    names = RENAMED.get(key, {})
    return names.get(value, value) if isinstance(value, str) else value


def with_current_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted keys, with today's names of their values.

    >>> with_current_values({"model.storage": "fp8", "seed": 1})
    {'model.storage': 'codes', 'seed': 1}
    """
    return {key: current_value(key, value) for key, value in settings.items()}


def with_current_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in sections, with today's names of their values.

    >>> with_current_sections({"model": {"storage": "fp8"}, "seed": 1})
    {'model': {'storage': 'codes'}, 'seed': 1}
    """
    current: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            current[name] = {
                entry: current_value(f"{name}.{entry}", content) for entry, content in value.items()
            }
        else:
            current[name] = current_value(name, value)
    return current
