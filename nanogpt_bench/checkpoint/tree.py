"""Nested containers of numbers and tensors, taken apart into named plain tensors and a JSON outline, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.system.errors import one_line, printable, shortened

#: nothing that is saved is nested deeper; an outline that is was not made here
DEEPEST = 64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def capture_tree(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of nested dicts, lists, tuples and scalars by name, and the rest as an outline for JSON.

    The tensors are copies: plain, contiguous, on the CPU, with a memory of their own. A tensor subclass is taken apart
    by its `__tensor_flatten__`. Numbers that JSON has no word for (NaN, Inf) and keys that are no strings survive.

    >>> tensors, outline = capture_tree({"state": {0: torch.ones(2), "loss": float("inf")}})
    >>> list(tensors), outline
    (['state/0'], {'dict': [['state', {'dict': [[0, {'tensor': 'state/0'}], ['loss', {'float': 'inf'}]]}]]})

    Raises:
        TypeError: something else in the tree, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _outline(tree, "", tensors)


def restore_tree(tensors: Mapping[str, Tensor], outline: Any, classes: Iterable[type] = ()) -> Any:
    """Return the tree that `capture_tree` took apart; its plain tensors are held, not copied.

    `classes` are the tensor subclasses that an outline may name; it can't bring in any other.

    >>> restore_tree(*capture_tree([1, (2.5, float("nan")), {7: torch.tensor([3])}]))
    [1, (2.5, nan), {7: tensor([3])}]

    Raises:
        ValueError: an outline that `capture_tree` did not make, a tensor that is missing, or a class that is not one
            of `classes`.
    """
    return _Reader(tensors, {kind.__name__: kind for kind in classes}).read(outline, 0)


def _outline(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return _outline_of_tensor(value, path, tensors)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        pairs = [(key, _below(path, key), item) for key, item in value.items()]
        return {"dict": [[_outline(key, below, {}), _outline(item, below, tensors)] for key, below, item in pairs]}
    if isinstance(value, tuple | list):
        items = [_outline(item, _below(path, index), tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise TypeError(f"{path or 'the state'} is of {type(value).__name__}, which can't be saved")


def _below(path: str, key: object) -> str:
    name = "/".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
    return f"{path}/{name}" if path else name


def _outline_of_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if hasattr(value, "__tensor_flatten__") and type(value) not in (Tensor, nn.Parameter):
        names, rest = value.__tensor_flatten__()
        parts = [[name, _outline_of_tensor(getattr(value, name), _below(path, name), tensors)] for name in names]
        rest = _outline(rest, _below(path, "rest"), {})
        return {"class": type(value).__name__, "parts": parts, "rest": rest, "size": list(value.shape)}
    name = path or "value"
    while name in tensors:  # keys 1 and "1", or "a/b" beside b in a
        name += "'"
    tensors[name] = plain_copy(value)
    return {"tensor": name}


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a tensor's values without its class: contiguous, on the CPU, with a memory of their own."""
    plain = tensor.detach().as_subclass(Tensor)
    return torch.empty_like(plain, device="cpu", memory_format=torch.contiguous_format).copy_(plain)


class _Reader:
    """From outlines to what they stand for."""

    def __init__(self, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> None:
        self._tensors, self._classes = tensors, classes

    def read(self, outline: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"the outline is nested deeper than {DEEPEST} levels")
        if outline is None or isinstance(outline, bool | str | int | float):
            return outline
        if isinstance(outline, list):
            return [self.read(item, depth + 1) for item in outline]
        if not isinstance(outline, dict):
            raise ValueError(f"the outline holds a {type(outline).__name__}")
        if "class" in outline:
            return self._subclass(outline, depth)
        if len(outline) != 1 or (kind := next(iter(outline))) not in _KINDS:
            raise ValueError(f"the outline holds {_shown(outline)}, which stands for nothing")
        return getattr(self, _KINDS[kind])(outline[kind], depth)

    def _float(self, word: Any, depth: int) -> float:
        if word not in ("nan", "inf", "-inf"):
            raise ValueError(f"the outline holds the number {_shown(word)}; allowed: nan, inf, -inf")
        return float(word)

    def _dtype(self, name: Any, depth: int) -> torch.dtype:
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(f"the outline holds the dtype {_shown(name)}, which does not exist")
        return _DTYPES[name]

    def _tuple(self, items: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self.read(self._list(items), depth + 1))

    def _dict(self, pairs: Any, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in self._list(pairs):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"the outline holds {_shown(pair)} instead of a key and its value")
            found[self._key(pair[0], depth + 1)] = self.read(pair[1], depth + 1)
        return found

    def _key(self, outline: Any, depth: int) -> Any:
        key = self.read(outline, depth)
        try:
            hash(key)
        except TypeError:
            raise ValueError(f"the outline holds the key {_shown(outline)}") from None
        return key

    def _list(self, items: Any) -> list[Any]:
        if not isinstance(items, list):
            raise ValueError(f"the outline holds {_shown(items)} instead of a list")
        return items

    def _tensor(self, name: Any, depth: int) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"the outline names the tensor {_shown(name)}, which is missing")
        return self._tensors[name]

    def _subclass(self, outline: dict[str, Any], depth: int) -> Any:
        if outline.keys() != {"class", "parts", "rest", "size"} or not isinstance(outline["class"], str):
            raise ValueError(f"the outline holds {_shown(outline)}, which stands for nothing")
        kind: Any = self._classes.get(outline["class"])
        if kind is None:
            allowed = ", ".join(sorted(self._classes)) or "none"
            raise ValueError(f"the outline names the class {_shown(outline['class'])}; allowed: {allowed}")
        parts, rest = self._dict(outline["parts"], depth), self.read(outline["rest"], depth + 1)
        if not all(isinstance(part, Tensor) for part in parts.values()):
            raise ValueError(f"the outline holds {_shown(outline['parts'])} as the parts of a {kind.__name__}")
        try:
            made = kind.__tensor_unflatten__(parts, rest, None, None)
        except Exception as error:  # whatever the class makes of parts that don't fit
            why = shortened(printable(one_line(error)), 200)
            raise ValueError(f"the parts of a {kind.__name__} do not fit together: {why}") from None
        if list(made.shape) != outline["size"]:
            raise ValueError(f"a {kind.__name__} has the shape {list(made.shape)}, not {_shown(outline['size'])}")
        return made


_KINDS = {"float": "_float", "dtype": "_dtype", "tuple": "_tuple", "dict": "_dict", "tensor": "_tensor"}


def _shown(value: object) -> str:
    return shortened(printable(repr(value)), 60)
