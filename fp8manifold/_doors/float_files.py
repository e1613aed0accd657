"""The files of a model, written one decoded tensor at a time.

transformers decides what a model's files have: which of two names a tied weight keeps,
how modules are called in a file, and which file each tensor is in. It takes tensors for
that, and all values at once. So it is given an outline in place of each weight in codes,
which has a shape and no memory. What it returns is written with each weight decoded when
its turn comes.

Where a model has experts in a stack, its files have them one by one, and transformers
cuts the outlines. Each cut is then looked for in the model as `load` does when it reads
the files. Where that finds no place, as other things are computed of a weight, all floats
are made at once.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.checks import import_optional
from fp8manifold._base.tensor_writer import TensorToWrite, ready, write_tensors
from fp8manifold._doors.grids import Decoded
from fp8manifold._published.layout import places_of
from fp8manifold._published.replace_files import INDEX

_PATTERN: Final = "model{suffix}.safetensors"
_SHARD_SIZE: Final = "50GB"
"""What transformers' `save_pretrained` takes by itself."""


def files_of_tensors(
    model: Any, tensors: Mapping[str, Tensor | Decoded], options: Mapping[str, Any]
) -> dict[str, TensorToWrite] | None:
    """Return the tensors of a model's files by the names that transformers gives them.

    Args:
        model: of transformers.
        tensors: by the names of a state dict; tied ones are one object.
        options: of ``save_pretrained``.

    Returns:
        None where this version of transformers does not show what it writes, or
        computes with a weight in codes.
    """
    modeling = import_optional("transformers.modeling_utils", "hf", "save")
    remove_tied = getattr(modeling, "remove_tied_weights_from_state_dict", None)
    revert = getattr(modeling, "revert_weight_conversion", None)
    if remove_tied is None or revert is None or getattr(model, "hf_device_map", None):
        return None
    ignored = set(model._keys_to_ignore_on_save or ())
    tensors = {name: value for name, value in tensors.items() if name not in ignored}
    kept = _without_ties(remove_tied, model, tensors)
    # By the outline, which stays alive, so that no other object has its address.
    decoded: dict[int, Decoded] = {}
    outlines: dict[str, Tensor] = {}
    for name, value in kept.items():
        if isinstance(value, Tensor):
            outlines[name] = value
            continue
        outlines[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        decoded[id(outlines[name])] = value
    named = outlines
    if options.get("save_original_format", True):
        try:
            named = revert(model, dict(outlines))
        # It joins an outline with a float, or reads one.
        except (RuntimeError, NotImplementedError):
            return None
    cut = {
        name: tensor
        for name, tensor in named.items()
        if tensor.is_meta and id(tensor) not in decoded
    }
    parts = _parts_of(model, kept, cut)
    if parts is None:
        return None
    to_write = {}
    for name, tensor in named.items():
        floats = parts.get(name) or decoded.get(id(tensor))
        to_write[name] = ready(tensor) if floats is None else floats.to_write
    return to_write


def _without_ties(
    remove_tied: Any, model: Any, tensors: Mapping[str, Tensor | Decoded]
) -> dict[str, Tensor | Decoded]:
    """Return tensors without the further names of those that are tied."""
    # An element of its own for each, which transformers compares by its address.
    addresses = {
        id(value): torch.empty(1, device="cpu")
        for value in tensors.values()
        if isinstance(value, Decoded)
    }
    tokens = {name: addresses.get(id(value), value) for name, value in tensors.items()}
    kept: dict[str, Tensor | Decoded] = {}
    for name, token in remove_tied(tokens, model).items():
        kept[name] = tensors[name] if id(tensors[name]) in addresses else token
    return kept


def _parts_of(
    model: Any, tensors: Mapping[str, Tensor | Decoded], cut: Mapping[str, Tensor]
) -> dict[str, Decoded] | None:
    """Return the parts of weights in codes that tensors of the files are.

    Args:
        model: of transformers.
        tensors: by the names of a state dict.
        cut: what transformers has made of their outlines, by the names of files.

    Returns:
        None where transformers does not stack and join these tensors as it reads them.
    """
    parts: dict[str, Decoded] = {}
    if not cut:
        return parts
    try:
        places = places_of(model, {name: tuple(tensor.shape) for name, tensor in cut.items()})
    except ValueError:
        return None
    for name, tensor in cut.items():
        place = places.get(name)
        weight = None if place is None else tensors.get(place.target)
        if place is None or not isinstance(weight, Decoded) or weight.is_transposed:
            return None
        parts[name] = replace(weight, part=place.index)
        if parts[name].shape != tuple(tensor.shape) or weight.dtype is not tensor.dtype:
            return None
    return parts


def default_shard_size(model: Any) -> int | str:
    """Return the largest size of a file, as the first ``save_pretrained`` that has one."""
    for kind in type(model).__mro__:
        save_pretrained = vars(kind).get("save_pretrained")
        if not callable(save_pretrained):
            continue
        parameter = inspect.signature(save_pretrained).parameters.get("max_shard_size")
        if parameter is not None and isinstance(parameter.default, int | str):
            return parameter.default
    return _SHARD_SIZE


def write_shards(
    model: Any,
    tensors: Mapping[str, TensorToWrite],
    folder: Path,
    options: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors to one file, or to several and their index, as transformers does.

    Args:
        model: of transformers.
        tensors: by their names in files.
        folder: that has the other files.
        options: of ``save_pretrained``.
        metadata: of every file, beside what transformers writes.
    """
    hub = import_optional("huggingface_hub", "hf", "save")
    size = options.get("max_shard_size")
    if size is None:
        size = default_shard_size(model)
    split = hub.split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=_PATTERN,
        max_shard_size=size,
    )
    for file, names in split.filename_to_tensors.items():
        of_file = {name: tensors[name] for name in names}
        write_tensors(folder / file, of_file, {**metadata, "format": "pt"})
    if split.is_sharded:
        of_index = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": of_index, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
