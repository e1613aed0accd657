"""Units of a model that was read in codes: names, dtypes and shapes are its folder's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold._doors.published import CopiedTensors, check_complete, refuse_adapters
from fp8manifold._published.layout import FolderLayout, entries_of
from fp8manifold._published.places import Place
from fp8manifold._published.stored_weight import Header, torch_dtype, written_parts
from fp8manifold._ranks import local_of
from fp8manifold._served.unit import CodesUnit, ConstantUnit, FloatUnit, TensorMetadata, Unit
from fp8manifold.tensor import FP8Tensor


def published_units(model: Any, base: nn.Module, published: Mapping[str, Any]) -> list[Unit]:
    """Return what the files of a model have, in the order of its parameters.

    Args:
        model: under wrappers.
        base: the model of transformers inside.
        published: the description of its folder.

    Raises:
        TypeError, ValueError: as :func:`fp8manifold.save`.
    """
    layout = FolderLayout(dict(published))
    refuse_adapters(base)
    layout.find_places(base)
    entries = entries_of(base)
    check_complete(model, base, layout, entries)
    units: list[Unit] = [
        _unit_of(name, place, layout, entries[place.target])
        for name, place in layout.places.items()
    ]
    order = {name: number for number, name in enumerate(entries)}
    units.sort(key=lambda unit: order[unit.target])
    # one engine sends all tensors, and from one device
    device = next(iter(entries.values())).device
    for name in layout.headers:
        constant = _constant(name, layout, device)
        if constant is not None:
            units.append(constant)
    return units


def _unit_of(name: str, place: Place, layout: FolderLayout, entry: Tensor) -> Unit:
    """Return the unit of a weight, or of a float, by its name in the model."""
    stored = layout.stored.get(name)
    is_in_codes = isinstance(local_of(entry), FP8Tensor)
    if stored is not None:
        if not is_in_codes:
            raise ValueError(
                f"{place.target!r} is no longer in codes: {stored.codes!r} can't be served"
            )
        return CodesUnit(stored, place, entry, written_parts)
    header = layout.headers[name]
    if is_in_codes:
        raise ValueError(
            f"{place.target!r} is in codes, but {name!r} is {header.dtype}: it can't be served"
        )
    return FloatUnit(
        TensorMetadata(name, _served_dtype(header, entry.dtype), header.shape), place, entry
    )


def _served_dtype(header: Header, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds all values: the file's, else that of the model."""
    in_file = torch_dtype(header.dtype)
    return in_file if torch.promote_types(in_file, dtype) == in_file else dtype


def _constant(name: str, layout: FolderLayout, device: torch.device) -> ConstantUnit | None:
    """Return the unit of a tensor that the model has no place for; None if it has one."""
    stored = layout.weight_of_tensor.get(name)
    if (name if stored is None else stored.name) in layout.places:
        return None
    header = layout.headers[name]
    dtype = torch_dtype(header.dtype)
    kept: Mapping[str, Any] = layout.published["kept"]
    read: Callable[[], Tensor]
    if name in kept:

        def read() -> Tensor:
            return torch.tensor(kept[name], dtype=dtype, device=device)

    else:

        def read() -> Tensor:
            return _copied(name, layout).to(device)

    return ConstantUnit(TensorMetadata(name, dtype, header.shape), read)


def _copied(name: str, layout: FolderLayout) -> Tensor:
    source = layout.published.get("source")
    copied = CopiedTensors(layout, None if source is None else Path(source))
    try:
        return copied.read(name)
    finally:
        copied.close()
