"""Names of a file's tensors in a model of transformers, which renames tensors and puts several into one."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final

from torch import Tensor, nn

from fp8manifold._base.checks import needed
from fp8manifold._published.places import Place

_BY: Final = "load_fp8"


def places_of(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Where a model of transformers has each tensor; names that it has no place for are left out.

    Args:
        model: with or without values.
        shapes: of the tensors, by their names in the files.

    Raises:
        ValueError: transformers makes something else of several tensors than one that has them as parts, or parts do
            not cover a parameter.
    """
    loading = needed("transformers.core_model_loading", "hf", _BY)
    conversions = needed("transformers.conversion_mapping", "hf", _BY).get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
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
                f"{target!r} has shape {whole} in the model, and {_all(made)} in the files do not cover it"
            )
        places |= made
    return places


def entries_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that files have, by all their names."""
    hidden = {
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False) if name not in hidden}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def _parts(
    target: str, by_pattern: Mapping[Any, list[str]], converter: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Place]:
    """Places of tensors that are stacked, joined, or both, in the order in which transformers does it."""
    steps = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    kinds = [kind for kind, _ in steps]
    stacked, joined = ("MergeModulelist", 0) in steps, kinds[-1] == "Concatenate"
    known = kinds == ["MergeModulelist"] * stacked + ["Concatenate"] * joined
    if not known or len(converter.target_patterns) > 1 or not (joined or len(lists) == 1):
        names = [name for each in lists for name in each]
        raise ValueError(f"transformers makes {target!r} of {_all(names)} by {', '.join(kinds)}, which is not read")
    groups = lists if stacked else [[name] for names in lists for name in names]
    dim = steps[-1][1] - stacked if joined else None
    ends = [0, *(0 if dim is None else shapes[names[0]][dim] for names in groups)]
    return {
        name: Place(target, _index(number if stacked else None, shapes[name], dim, span))
        for span, names in zip(pairwise(accumulate(ends)), groups, strict=True)
        for number, name in enumerate(names)
    }


def _index(number: int | None, shape: tuple[int, ...], dim: int | None = None, span: tuple[int, int] = (0, 0)) -> Any:
    spans = [slice(*span) if axis == dim else slice(0, size) for axis, size in enumerate(shape)]
    return tuple(spans) if number is None else (number, *spans)


def _check_fits(name: str, shape: tuple[int, ...], place: Place, whole: tuple[int, ...]) -> None:
    ends = [entry.stop if isinstance(entry, slice) else entry + 1 for entry in place.index]
    inside = len(ends) == len(whole) and all(end <= size for end, size in zip(ends, whole, strict=True))
    if not inside and (place.index or shape != whole):
        raise ValueError(
            f"{name!r} has shape {shape} in the files, and the model has {place.target!r} of shape {whole}"
        )


def _all(names: Any) -> str:
    first, *others = names
    return f"{first!r} and {len(others)} more" if others else repr(first)
