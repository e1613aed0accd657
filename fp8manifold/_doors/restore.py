"""Load a saved folder into a model that is there already, as a trainer resumes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._doors.load import load


def restore(model: Any, folder: str | Path) -> None:
    """Load a folder with a side file into a model that is quantised in the same way.

    Args:
        model: of transformers; its wrappers' names are ignored.
        folder: of `save`.

    Raises:
        ValueError: a tensor that the model lacks.
        RuntimeError: one of another format or shape.
    """
    base: Any = unwrapped(model)
    state = _with_wrapper_names(base, load(folder, dtype=base.dtype).state_dict())
    result = base.load_state_dict(state, strict=False)
    if result.unexpected_keys:
        raise ValueError(
            f"{str(folder)!r} has {result.unexpected_keys[0]!r}, which the model lacks: it was "
            "quantised in another way"
        )


def _with_wrapper_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by the names that a model has for it under wrappers."""
    wrapped_names = {plain_name(name): name for name, _ in model.named_modules()}
    renamed = {}
    for name, value in state.items():
        owner = name
        while owner and owner not in wrapped_names:
            owner = owner.rpartition(".")[0]
        rest = name.removeprefix(owner) if owner else f".{name}"
        renamed[f"{wrapped_names[owner]}{rest}".lstrip(".")] = value
    return renamed
