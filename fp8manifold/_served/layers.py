"""Names of tensors, layer by layer: the unit in which a server takes them."""

from collections.abc import Iterable, Sequence
from typing import Final

#: The keys of names without a number, by whether they came before the first with one.
_BEFORE: Final = ("", -1)
_AFTER: Final = ("", -2)
Key = tuple[str, int]


def layer_key(name: str) -> Key | None:
    """Return what is before the first number of a name, and the number.

    >>> layer_key("model.layers.3.mlp.experts.7.weight")
    ('model.layers', 3)
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:position]), int(part)
    return None


def in_layers(names: Iterable[str]) -> list[list[str]]:
    """Group names: what precedes all layers, each layer, and what follows.

    Stacks of layers are in the order of their first names, and layers in that of their
    numbers.

    >>> in_layers(["embed.weight", "h.1.a", "h.0.a", "norm.weight", "h.1.b"])
    [['embed.weight'], ['h.0.a'], ['h.1.a', 'h.1.b'], ['norm.weight']]
    """
    groups: dict[Key, list[str]] = {_BEFORE: []}
    for name in names:
        key = layer_key(name)
        if key is None:
            key = _AFTER if len(groups.keys() - {_AFTER}) > 1 else _BEFORE
        groups.setdefault(key, []).append(name)
    before, after = groups.pop(_BEFORE), groups.pop(_AFTER, [])
    ordered = [groups[key] for key in _ordered(list(groups))]
    return [group for group in (before, *ordered, after) if group]


def _ordered(keys: Sequence[Key]) -> list[Key]:
    stacks = list(dict.fromkeys(stack for stack, _ in keys))
    return sorted(keys, key=lambda key: (stacks.index(key[0]), key[1]))
