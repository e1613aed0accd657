"""A published folder: its description, and where its tensors go in a model.

::

    folder       --describe_folder-->           description: files, tensors, documents, other files
    description  --FolderLayout-->              weights in codes, floats, extras
    model        --FolderLayout.find_places-->  the place of each tensor: a parameter, or a part

The description is kept in the model's settings, so that the folder can be written again
from the model alone: it is a dict in JSON's types, whose keys are a file format.
Transformers renames tensors, stacks experts and joins matrices when it reads a model.
``places_of`` asks it for these conversions, and follows the two that only move weights.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold._base.blocks import Index
from fp8manifold._base.checks import import_optional
from fp8manifold._base.wrappers import plain_name
from fp8manifold._published.find_weights import quantization_of, stored_weights
from fp8manifold._published.places import Place
from fp8manifold._published.replace_files import ADAPTER, INDEX, SIDE_FILE
from fp8manifold._published.stored_weight import Header

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
SERVER_CONFIG: Final = "hf_quant_config.json"
DOCUMENTS: Final = (CONFIG, GENERATION, SERVER_CONFIG)
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of files that may be a second copy of all weights."""


def describe_folder(folder: Path, tensors: Any) -> dict[str, Any]:
    """Return the description of a folder.

    ``tensors`` has ``names()``, ``header`` and ``metadata`` of its files.
    """
    files: dict[str, Any] = {}
    for name in tensors.names():
        header = tensors.header(name)
        file = files.setdefault(header.file, {"metadata": tensors.metadata(name), "tensors": {}})
        file["tensors"][name] = [header.dtype, list(header.shape)]
    documents = {}
    for name in DOCUMENTS:
        if (folder / name).is_file():
            documents[name] = (folder / name).read_text("utf-8")
    if CONFIG not in documents:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {CONFIG}: give the folder of a transformers model"
        )
    # An adapter would be put over the weights that the model is trained to.
    known_files = {*files, *DOCUMENTS, INDEX, ADAPTER, SIDE_FILE}
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.name not in known_files and path.suffix not in WEIGHT_SUFFIXES
    )
    description = {
        "source": str(folder),
        "files": files,
        "documents": documents,
        "kept": {},
        "others": others,
    }
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text("utf-8"))
        description["index"] = index.get("metadata", {})
    return description


class FolderLayout:
    """The tensors of a folder, by its description, and their places in a model.

    Attributes:
        published: the description.
        headers: of all tensors, by name.
        stored: weights in codes, by their names in a model.
        weight_of_tensor: the same weights, by the names of their codes and of their scales.
        extras: names of scales of activations.
        floats: names of all other tensors.
        places: where each weight and float is in a model; filled by :meth:`find_places`.

    Tensors that are ``left`` have no place in the model. The description keeps the
    values of some; the others are ``copied`` from the folder. Those that are ``lost``
    had a place once.
    """

    def __init__(self, published: dict[str, Any]) -> None:
        self.published = published
        _check_file_names(published)
        self.headers = {}
        for file, description in published["files"].items():
            for name, (dtype, shape) in description["tensors"].items():
                self.headers[name] = Header(dtype, tuple(shape), file)
        documents = published["documents"]
        config = json.loads(documents.get(CONFIG, "null"))
        server_config = json.loads(documents.get(SERVER_CONFIG, "null"))
        self.stored = stored_weights(self.headers, quantization_of(config, server_config))
        self.weight_of_tensor = {}
        self.extras: set[str] = set()
        for weight in self.stored.values():
            self.weight_of_tensor[weight.codes] = weight
            self.weight_of_tensor[weight.scale] = weight
            self.extras.update(weight.extras)
        self.floats = [
            name
            for name in self.headers
            if name not in self.weight_of_tensor and name not in self.extras
        ]
        self.places: dict[str, Place] = {}

    def find_places(self, model: Any) -> None:
        """Look for every tensor in a model."""
        shapes = {name: self.headers[name].shape for name in self.floats}
        shapes |= {name: weight.shape for name, weight in self.stored.items()}
        self.places = places_of(model, shapes)

    @property
    def left(self) -> list[str]:
        """Floats, codes and scales that the model has no place for."""
        names_in_model = {name: weight.name for name, weight in self.weight_of_tensor.items()}
        names_in_model |= {name: name for name in self.floats}
        return [
            name for name, model_name in names_in_model.items() if model_name not in self.places
        ]

    @property
    def copied(self) -> list[str]:
        """Tensors without a place that only the folder has, and not the settings."""
        return [name for name in self.left if name not in self.published["kept"]]

    def record_left(self) -> None:
        """Write to the settings which tensors never had a place in the model."""
        self.published["copied"] = self.copied

    def lost(self, model: Any) -> list[str]:
        """Return the tensors that had a place when they were read and have none now.

        Settings of older versions do not say which had one: there, all but those that
        the model's class ignores.
        """
        never_placed = self.published.get("copied")
        if never_placed is None:
            return [name for name in self.copied if not is_ignored(model, name)]
        return sorted(set(self.copied) - set(never_placed), key=self.copied.index)


def _check_file_names(published: Mapping[str, Any]) -> None:
    """Refuse paths: settings may come from anyone, and these files are written."""
    for name in (*published["files"], *published["documents"], *published["others"]):
        if Path(name).name != name:
            raise ValueError(
                f"the model's settings name {name!r} among its files: a plain file name is needed"
            )


def is_ignored(model: Any, name: str) -> bool:
    """Return whether a model's class declares that it ignores a tensor of files."""
    patterns = (*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq")
    return any(re.search(pattern, name) for pattern in patterns)


def entries_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers that files have, by all their plain names."""
    hidden = set()
    for owner, module in model.named_modules(remove_duplicate=False):
        prefix = f"{owner}." if owner else ""
        hidden |= {prefix + name for name in module._non_persistent_buffers_set}
    entries: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in hidden:
            entries[name] = buffer
    return {plain_name(name): value for name, value in entries.items()}


def places_of(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Return the place of each tensor of the files that the model has one for.

    Args:
        model: of transformers.
        shapes: of the tensors, by name.

    Raises:
        ValueError: a parameter that transformers makes of several tensors in another
            way than by stacking and joining them, or that they do not cover.
    """
    loading = import_optional("transformers.core_model_loading", "hf", "load")
    mapping = import_optional("transformers.conversion_mapping", "hf", "load")
    conversions = mapping.get_model_conversion_mapping(model)
    converters = [x for x in conversions if isinstance(x, loading.WeightConverter)]
    entries = entries_of(model)
    groups = _tensors_by_entry(model, shapes, conversions, entries)
    converter_of: dict[str | None, Any] = {}
    for converter in converters:
        converter_of.update(dict.fromkeys(converter.source_patterns, converter))
    places: dict[str, Place] = {}
    for target, names_by_pattern in groups.items():
        shape = tuple(entries[target].shape)
        if None in names_by_pattern:
            target_places = {name: Place(target) for name in names_by_pattern[None]}
        else:
            converter = converter_of[next(iter(names_by_pattern))]
            target_places = _places_of_parts(target, names_by_pattern, converter, shapes)
        for name, place in target_places.items():
            _check_place_fits(name, shapes[name], place, shape)
        if sum(prod(shapes[name]) for name in target_places) != prod(shape):
            raise ValueError(
                f"{target!r} has shape {shape} in the model; {_first_of(target_places)} in the "
                "files do not cover it"
            )
        places |= target_places
    return places


def _tensors_by_entry(
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    conversions: Sequence[Any],
    entries: Mapping[str, Tensor],
) -> dict[str, dict[str | None, list[str]]]:
    """Return names in files by the entry of the model that they go to.

    For each entry they are by the pattern of the converter that takes them; None for a
    tensor that goes there as it is.
    """
    loading = import_optional("transformers.core_model_loading", "hf", "load")
    renamings = [x for x in conversions if isinstance(x, loading.WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, loading.WeightConverter)]
    for conversion in conversions:
        # That of a model inside this one has the name of its module, with the names of
        # wrappers.
        if getattr(conversion, "scope_prefix", None):
            conversion.scope_prefix = plain_name(conversion.scope_prefix)
    prefix = model.base_model_prefix
    groups: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(shapes, key=loading.dot_natural_key):
        entry, pattern = loading.rename_source_key(name, renamings, converters, prefix, entries)
        # the model has the name of the files, and not what the rules make of it
        if entry not in entries and name in entries:
            entry, pattern = loading.rename_source_key(name, [], [], prefix, entries)
        if entry in entries:
            groups.setdefault(entry, {}).setdefault(pattern, []).append(name)
    return groups


def _places_of_parts(
    target: str,
    names_by_pattern: Mapping[Any, list[str]],
    converter: Any,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Place]:
    """Return the places of tensors that are stacked, joined, or both.

    They are in the order in which transformers does it.
    """
    operations = [(type(x).__name__, getattr(x, "dim", 0)) for x in converter.operations]
    operation_names = [name for name, _ in operations]
    name_lists = [
        names_by_pattern[pattern]
        for pattern in converter.source_patterns
        if pattern in names_by_pattern
    ]
    is_stacked = ("MergeModulelist", 0) in operations
    is_joined = operation_names[-1] == "Concatenate"
    expected_names = ["MergeModulelist"] * is_stacked + ["Concatenate"] * is_joined
    is_known = operation_names == expected_names and (is_joined or len(name_lists) == 1)
    if not is_known or len(converter.target_patterns) > 1:
        sources = _first_of(chain.from_iterable(name_lists))
        raise ValueError(
            f"transformers computes {target!r} from {sources} by {', '.join(operation_names)}, "
            "which is not supported"
        )
    # Each group is joined to the next: all experts of a pattern, or a single tensor.
    groups = name_lists if is_stacked else [[name] for name in chain.from_iterable(name_lists)]
    # The dimension that is joined, in a tensor of a file: the stack has one more.
    dim = operations[-1][1] - is_stacked if is_joined else None
    lengths = [0 if dim is None else shapes[names[0]][dim] for names in groups]
    spans = pairwise(accumulate([0, *lengths]))
    places = {}
    for span, names in zip(spans, groups, strict=True):
        for number, name in enumerate(names):
            index = _index(number if is_stacked else None, shapes[name], dim, span)
            places[name] = Place(target, index)
    return places


def _index(
    number: int | None,
    shape: tuple[int, ...],
    dim: int | None,
    span: tuple[int, int],
) -> Index:
    """Return the index of a tensor: its number in a stack, its span along ``dim``."""
    slices = [slice(*span) if axis == dim else slice(0, size) for axis, size in enumerate(shape)]
    return tuple(slices) if number is None else (number, *slices)


def _check_place_fits(
    name: str, shape: tuple[int, ...], place: Place, target_shape: tuple[int, ...]
) -> None:
    if place.index:
        fits = len(place.index) == len(target_shape)
        for entry, size in zip(place.index, target_shape, strict=False):
            end = entry.stop if isinstance(entry, slice) else entry + 1
            fits = fits and end <= size
    else:
        # A single number may have any number of dimensions in the files.
        fits = shape == target_shape or not target_shape
    if not fits:
        raise ValueError(
            f"{name!r} has shape {shape} in the files, but the model has {place.target!r} of shape "
            f"{target_shape}"
        )


def _first_of(names: Iterable[str]) -> str:
    """Return a text of several names."""
    first, *others = names
    return f"{first!r} and {len(others)} more" if others else repr(first)
