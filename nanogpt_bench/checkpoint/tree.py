"""Nested containers of numbers and tensors, taken apart into named plain tensors and a JSON outline, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.system.errors import one_line, printable, shortened

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
    try:
        return _restored(outline, tensors, {kind.__name__: kind for kind in classes})
    except Exception as error:  # whatever comes of an outline that does not fit
        why = f"{type(error).__name__}: {shortened(printable(one_line(error)), 200)}"
        raise ValueError(f"the outline does not fit its tensors: {why}") from None


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
        return {"class": type(value).__name__, "parts": parts, "rest": _outline(rest, _below(path, "rest"), {})}
    name = path or "value"
    while name in tensors:  # keys 1 and "1", or "a/b" beside b in a
        name += "'"
    tensors[name] = plain_copy(value)
    return {"tensor": name}


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a tensor's values without its class: contiguous, on the CPU, with a memory of their own."""
    plain = tensor.detach().as_subclass(Tensor)
    return torch.empty_like(plain, device="cpu", memory_format=torch.contiguous_format).copy_(plain)


def _restored(outline: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, Any]) -> Any:
    def inner(part: Any) -> Any:
        return _restored(part, tensors, classes)

    if isinstance(outline, list):
        return [inner(item) for item in outline]
    if not isinstance(outline, dict):
        return outline
    if "class" in outline:
        parts = {name: inner(part) for name, part in outline["parts"]}
        return classes[outline["class"]].__tensor_unflatten__(parts, inner(outline["rest"]), None, None)
    ((kind, content),) = outline.items()
    made_of = {
        "float": lambda: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
        "dtype": lambda: _DTYPES[content],
        "tensor": lambda: tensors[content],
        "tuple": lambda: tuple(inner(item) for item in content),
        "dict": lambda: {inner(key): inner(value) for key, value in content},
    }
    return made_of[kind]()
