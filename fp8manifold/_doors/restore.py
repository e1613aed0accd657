"""Load a saved folder into a model that is there already, as a trainer resumes."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._doors.load import load
from fp8manifold._doors.side_file import Content, are_equal, read_side_file


def restore(model: Any, folder: str | Path) -> None:
    """Load a folder with a side file into a model that is quantised in the same way.

    Args:
        model: of transformers; its wrappers' names are ignored.
        folder: of `save`.

    Raises:
        ValueError: a tensor that the model lacks, or whose dtype in the model does not
            hold its values exactly.
        RuntimeError: one of another format or shape.
    """
    base: Any = unwrapped(model)
    # The floats of a published layout are read in one dtype.
    is_published = read_side_file(Path(folder)).content is Content.PUBLISHED
    saved = load(folder, dtype=_widest_dtype(base) if is_published else None)
    state = _with_wrapper_names(base, saved.state_dict())
    _check_is_exact(base, state)
    result = base.load_state_dict(state, strict=False)
    if result.unexpected_keys:
        raise ValueError(
            f"{str(folder)!r} has {result.unexpected_keys[0]!r}, which the model lacks: it was "
            "quantised in another way"
        )


def _widest_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that holds the values of all parameters."""
    return reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})


def _check_is_exact(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse floats that would be rounded as the model takes them."""
    for name, own in model.state_dict().items():
        value = state.get(name)
        if value is None or value.dtype is own.dtype:
            continue
        if not value.is_floating_point() or not own.is_floating_point():
            continue
        if not are_equal(value.to(own.dtype).to(value.dtype), value):
            raise ValueError(
                f"{plain_name(name)!r} was saved in {value.dtype}, but the model has it in "
                f"{own.dtype}, which can't hold its values: take the dtype that it was saved in"
            )


def _with_wrapper_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by the names that a model loads, which may have those of wrappers.

    Some wrappers name themselves in a state (compiled blocks), and others do not.
    """
    own_owners = {name.rpartition(".")[0] for name in model.state_dict()}
    owners = {plain_name(owner): owner for owner in own_owners}
    renamed = {}
    for name, value in state.items():
        owner, dot, entry = name.rpartition(".")
        renamed[f"{owners.get(owner, owner)}{dot}{entry}"] = value
    return renamed
