"""Options of groups: tensors of their own, and what a loaded state has in place of what an optimizer was made with."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

_MOVING: Final = ("lr", "float_lr", "betas", "momentum", "weight_decay")
"""Options that schedules change, so that those of a run under way are expected to be other than at its start."""


def unshare(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group tensors of its own: what schedulers write in place, a group at a time, they would write twice."""
    held = Counter(value.data_ptr() for group in groups for value in group.values() if isinstance(value, Tensor))
    for group in groups:
        shared = [name for name, value in group.items() if isinstance(value, Tensor) and held[value.data_ptr()] > 1]
        group.update({name: group[name].clone() for name in shared})


def warn_of_overridden(optimizer: Any, before: Sequence[dict[str, Any]]) -> None:
    """Warn where options of a loaded state take the place of those that an optimizer was made with; both are named.

    Args:
        optimizer: with ``defaults``, which name the options, after the load.
        before: its groups before it.

    Warns:
        UserWarning: there are some.
    """
    found: dict[str, None] = {}
    for given, loaded in zip(before, optimizer.param_groups, strict=True):
        for name in sorted(optimizer.defaults.keys() - _MOVING):
            ours, theirs = _plain(given.get(name)), _plain(loaded.get(name))
            if ours != theirs:
                found[f"{name}={theirs!r} in place of {ours!r}"] = None
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} goes on with options of the loaded state, not with those that it was made "
            f"with: {', '.join(found)}",
            UserWarning,
            stacklevel=3,
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
