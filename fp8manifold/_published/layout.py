"""The layout of a published folder: its description in a model's settings, and the
places of its tensors in a model.
"""

import json
import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold._base.checks import import_optional
from fp8manifold._base.wrappers import plain_name
from fp8manifold._published.found import quantization_of, stored_weights
from fp8manifold._published.places import Place
from fp8manifold._published.replaced import ADAPTER, INDEX
from fp8manifold._published.stored import Header

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
OF_SERVER: Final = "hf_quant_config.json"
DOCUMENTS: Final = (CONFIG, GENERATION, OF_SERVER)
WEIGHTS: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
)  #: Of files that may be a second copy of all weights.


def described(place: Path, tensors: Any) -> dict[str, Any]:
    """The description of a folder; ``tensors`` has ``names()``, ``header`` and
    ``metadata`` of its files.
    """
    files: dict[str, Any] = {}
    for name in tensors.names():
        header = tensors.header(name)
        said = files.setdefault(header.file, {"metadata": tensors.metadata(name), "tensors": {}})
        said["tensors"][name] = [header.dtype, list(header.shape)]
    documents = {
        name: (place / name).read_text("utf-8") for name in DOCUMENTS if (place / name).is_file()
    }
    if CONFIG not in documents:
        raise FileNotFoundError(
            f"{str(place)!r} has no {CONFIG}: give the folder of a transformers model"
        )
    # an adapter would be put over the weights that the model is trained to
    known = {*files, *DOCUMENTS, INDEX, ADAPTER}
    others = sorted(
        f.name
        for f in place.iterdir()
        if f.is_file() and f.name not in known and f.suffix not in WEIGHTS
    )
    made = {
        "source": str(place),
        "files": files,
        "documents": documents,
        "kept": {},
        "others": others,
    }
    if (place / INDEX).is_file():
        made["index"] = json.loads((place / INDEX).read_text("utf-8")).get("metadata", {})
    return made


class Layout:
    """The tensors of a folder by its description and, once it is found in a model,
    their places there.
    """

    def __init__(self, published: dict[str, Any]) -> None:
        self.published = published
        for name in (*published["files"], *published["documents"], *published["others"]):
            if (
                Path(name).name != name
            ):  # settings may come from anyone, and these are names of files to write
                raise ValueError(
                    f"the model's settings name {name!r} among its files: a plain file name is "
                    f"needed"
                )
        self.headers = {
            name: Header(dtype, tuple(shape), file)
            for file, said in published["files"].items()
            for name, (dtype, shape) in said["tensors"].items()
        }
        config, of_server = (
            json.loads(published["documents"].get(name, "null")) for name in (CONFIG, OF_SERVER)
        )
        self.stored = stored_weights(self.headers, quantization_of(config, of_server))
        self.weight_of = {
            name: each for each in self.stored.values() for name in (each.codes, each.scale)
        }
        self.extras = {name for each in self.stored.values() for name in each.extras}
        self.floats = [
            name for name in self.headers if name not in self.weight_of and name not in self.extras
        ]
        self.places: dict[str, Place] = {}

    def find(self, model: Any) -> None:
        """Look for every tensor in a model."""
        shapes = {name: self.headers[name].shape for name in self.floats}
        self.places = places_of(
            model, shapes | {name: each.shape for name, each in self.stored.items()}
        )

    @property
    def left(self) -> list[str]:
        """Tensors of floats, codes and scales that the model has no place for."""
        names = {name: each.name for name, each in self.weight_of.items()} | {
            name: name for name in self.floats
        }
        return [name for name, own in names.items() if own not in self.places]

    @property
    def copied(self) -> list[str]:
        """Tensors without a place that the settings do not hold: the folder has them."""
        return [name for name in self.left if name not in self.published["kept"]]

    def record_left(self) -> None:
        """Write to the settings which tensors never had a place in the model."""
        self.published["copied"] = self.copied

    def lost(self, model: Any) -> list[str]:
        """Tensors that had a place in the model when they were read and have none now.

        Settings of older versions do not say which had one: there, all but those that
        the model's class ignores.
        """
        never = self.published.get("copied")
        if never is None:
            return [name for name in self.copied if not is_ignored(model, name)]
        return sorted(set(self.copied) - set(never), key=self.copied.index)


def is_ignored(model: Any, name: str) -> bool:
    """True for a tensor of files that the model's class declares to have no place for."""
    patterns = (*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq")
    return any(re.search(pattern, name) for pattern in patterns)


def places_of(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """The place of each tensor of the files in a model of transformers, by its name;
    none if the model lacks it.

    Transformers renames tensors and puts several into one; a parameter that it makes in
    another way is refused.
    """
    loading = import_optional("transformers.core_model_loading", "hf", "load_fp8")
    conversions = import_optional(
        "transformers.conversion_mapping", "hf", "load_fp8"
    ).get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    for each in conversions:
        # of a model inside, by the name of its module
        if getattr(each, "scope_prefix", None):
            each.scope_prefix = plain_name(each.scope_prefix)
    own, prefix = entries_of(model), model.base_model_prefix
    found: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(shapes, key=loading.dot_natural_key):
        here, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
        if here not in own and name in own:
            here, pattern = loading.rename_source_key(name, [], [], prefix, own)
        if here in own:
            found.setdefault(here, {}).setdefault(pattern, []).append(name)
    operations = {pattern: each for each in converters for pattern in each.source_patterns}
    places: dict[str, Place] = {}
    for target, by_pattern in found.items():
        whole = tuple(own[target].shape)
        if None in by_pattern:
            made = {name: Place(target) for name in by_pattern[None]}
        else:
            made = _parts(target, by_pattern, operations[next(iter(by_pattern))], shapes)
        for name, place in made.items():
            _check_fits(name, shapes[name], place, whole)
        if sum(prod(shapes[name]) for name in made) != prod(whole):
            raise ValueError(
                f"{target!r} has shape {whole} in the model; {_all(made)} in the files do not "
                f"cover it"
            )
        places |= made
    return places


def entries_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that files have, by all their names without wrappers."""
    hidden = {
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    buffers = {
        name: value
        for name, value in model.named_buffers(remove_duplicate=False)
        if name not in hidden
    }
    entries = dict(model.named_parameters(remove_duplicate=False)) | buffers
    return {plain_name(name): value for name, value in entries.items()}


def _parts(
    target: str,
    by_pattern: Mapping[Any, list[str]],
    converter: Any,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Place]:
    """Places of tensors that are stacked, joined, or both, in the order in which
    transformers does it.
    """
    steps = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    kinds = [kind for kind, _ in steps]
    stacked, joined = ("MergeModulelist", 0) in steps, kinds[-1] == "Concatenate"
    known = kinds == ["MergeModulelist"] * stacked + ["Concatenate"] * joined
    if not known or len(converter.target_patterns) > 1 or not (joined or len(lists) == 1):
        names = [name for each in lists for name in each]
        raise ValueError(
            f"transformers makes {target!r} of {_all(names)} by {', '.join(kinds)}, which can't be "
            f"read"
        )
    groups = lists if stacked else [[name] for names in lists for name in names]
    dim = steps[-1][1] - stacked if joined else None
    ends = [0, *(0 if dim is None else shapes[names[0]][dim] for names in groups)]
    return {
        name: Place(target, _index(number if stacked else None, shapes[name], dim, span))
        for span, names in zip(pairwise(accumulate(ends)), groups, strict=True)
        for number, name in enumerate(names)
    }


def _index(
    number: int | None,
    shape: tuple[int, ...],
    dim: int | None = None,
    span: tuple[int, int] = (0, 0),
) -> Any:
    spans = [slice(*span) if axis == dim else slice(0, size) for axis, size in enumerate(shape)]
    return tuple(spans) if number is None else (number, *spans)


def _check_fits(name: str, shape: tuple[int, ...], place: Place, whole: tuple[int, ...]) -> None:
    ends = [entry.stop if isinstance(entry, slice) else entry + 1 for entry in place.index]
    inside = len(ends) == len(whole) and all(
        end <= size for end, size in zip(ends, whole, strict=True)
    )
    if not inside and (place.index or shape != whole):
        raise ValueError(
            f"{name!r} has shape {shape} in the files; the model has {place.target!r} of shape "
            f"{whole}"
        )


def _all(names: Any) -> str:
    first, *others = names
    return f"{first!r} and {len(others)} more" if others else repr(first)
