"""Patches in a file of safetensors.

::

    changes      uint8   JSON: [name, shape] of each patch
    0.gaps       uint8   of the first: how far each index is from the one before, 7 bits
                         a byte, the lowest first; 128 is added where more follow
    0.values     the dtype of the tensor

Entries that change lie close together, so an index takes one or two bytes.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.checks import import_optional
from fp8manifold._served.patch import Patch, check_patch

CHANGES_FILE: Final = "changes.safetensors"
_LIST: Final = "changes"
_BITS: Final = 7
_MORE: Final = 1 << _BITS
_MOST_BYTES: Final = 9
"""Bytes of one gap, at most: 63 bits."""


def write_changes(folder: str | Path, patches: Iterable[Patch]) -> None:
    """Write patches to ``changes.safetensors`` of a folder, replacing earlier ones.

    A patch takes one byte for each changed code, and one or two for its position.

    Args:
        folder: created if it is missing.
        patches: of :meth:`ServedChanges.since_last`.

    Nothing is pickled, and a reader sees the earlier file or the new one.

    Raises:
        ImportError: safetensors is missing.
        TypeError, ValueError: a patch that could fit no tensor.

    Example:
        >>> import torch
        >>> import fp8manifold as fm
        >>> from tempfile import mkdtemp
        >>> changed = torch.tensor([300]), torch.tensor([7], dtype=torch.uint8)
        >>> folder = mkdtemp()
        >>> fm.write_changes(folder, [fm.Patch("w", (40, 40), torch.uint8, *changed)])
        >>> fm.read_changes(folder)[0].indices.tolist()
        [300]
    """
    save_file = import_optional("safetensors.torch", "hf", "write_changes").save_file
    patches = list(patches)
    tensors = {_LIST: _as_bytes([[patch.name, list(patch.shape)] for patch in patches])}
    for number, patch in enumerate(patches):
        check_patch(patch)
        tensors[f"{number}.gaps"] = encoded_gaps(patch.indices.cpu())
        tensors[f"{number}.values"] = patch.values.detach().cpu().contiguous().clone()
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        save_file(tensors, Path(temporary) / CHANGES_FILE)
        os.replace(Path(temporary) / CHANGES_FILE, Path(folder) / CHANGES_FILE)


def read_changes(folder: str | Path) -> list[Patch]:
    """Read the patches that :func:`write_changes` wrote.

    Args:
        folder: as in :func:`write_changes`.

    Raises:
        ImportError: safetensors is missing.
        FileNotFoundError: no ``changes.safetensors`` there.
        TypeError, ValueError: a file that is incomplete, or that holds no patches.

    Example:
        >>> import fp8manifold as fm
        >>> fm.read_changes("nowhere")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: 'nowhere/changes.safetensors' does not exist: ...
    """
    path = Path(folder) / CHANGES_FILE
    tensors = _tensors_of(path)
    described = _described(tensors, path)
    expected = {_LIST}
    for number in range(len(described)):
        expected |= {f"{number}.gaps", f"{number}.values"}
    if tensors.keys() != expected:
        odd = min(tensors.keys() ^ expected)
        raise ValueError(
            f"{str(path)!r} is not a file of write_changes: {odd!r} is missing or not expected"
        )
    return [
        _patch_of(name, tuple(shape), number, tensors, path)
        for number, (name, shape) in enumerate(described)
    ]


def _tensors_of(path: Path) -> dict[str, Tensor]:
    load_file = import_optional("safetensors.torch", "hf", "read_changes").load_file
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist: give a folder of write_changes")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    # safetensors raises a class of its own
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a complete safetensors file: {error}") from None
    return tensors


def _described(tensors: dict[str, Tensor], path: Path) -> list[Any]:
    """Return (name, shape) of each patch of a file, as its list says."""
    described: Any = None
    if _LIST in tensors:
        with suppress(ValueError, TypeError, RecursionError):
            described = json.loads(bytes(tensors[_LIST].numpy()))
    if not isinstance(described, list) or not all(_is_description(entry) for entry in described):
        raise ValueError(f"{str(path)!r} has no list of changes: give a folder of write_changes")
    return described


def _is_description(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    name, shape = entry
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return isinstance(name, str) and is_shape and prod(shape) < 2**63


def _patch_of(
    name: str, shape: tuple[int, ...], number: int, tensors: dict[str, Tensor], path: Path
) -> Patch:
    values, gaps = tensors[f"{number}.values"], tensors[f"{number}.gaps"]
    if gaps.dtype is not torch.uint8 or gaps.dim() != 1 or values.dim() != 1:
        raise ValueError(f"{str(path)!r} is damaged: the places of {name!r} are not bytes")
    indices = decoded_gaps(gaps, len(values), prod(shape))
    if indices is None:
        raise ValueError(
            f"{str(path)!r} is damaged: the places of {name!r} are not {len(values)} of "
            f"{prod(shape)}"
        )
    patch = Patch(name, shape, values.dtype, indices, values)
    check_patch(patch)
    return patch


def _as_bytes(document: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def encoded_gaps(indices: Tensor) -> Tensor:
    """Return the gaps between ascending indices, in groups of 7 bits.

    >>> encoded_gaps(torch.tensor([0, 2, 300])).tolist()
    [0, 1, 169, 2]
    """
    indices = indices.to(torch.int64)
    before = torch.cat([indices.new_full((1,), -1), indices[:-1]])
    gaps = indices - before - 1
    lengths = torch.ones_like(gaps)
    for count in range(1, _MOST_BYTES):
        lengths += gaps >= 1 << (_BITS * count)
    group, position = _groups(lengths)
    is_last = position == lengths[group] - 1
    bits = (gaps[group] >> (_BITS * position)) & (_MORE - 1)
    return torch.where(is_last, bits, bits | _MORE).to(torch.uint8)


def decoded_gaps(stream: Tensor, count: int, size: int) -> Tensor | None:
    """Return indices below a size from their gaps; None if these are not ``count``."""
    stream = stream.to(torch.int64)
    ends = (stream < _MORE).nonzero().view(-1)
    is_whole = len(ends) == count <= size and (not len(stream) or int(stream[-1]) < _MORE)
    if not is_whole:
        return None
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])[:count]
    lengths = ends - starts + 1
    if bool((lengths > _MOST_BYTES).any()):
        return None
    group, position = _groups(lengths)
    bits = (stream & (_MORE - 1)) << (_BITS * position)
    gaps = torch.zeros(count, dtype=torch.int64, device=bits.device).index_add_(0, group, bits)
    if bool((gaps >= size).any()):
        return None
    indices = (gaps + 1).cumsum(0) - 1
    # A sum that wraps around is not ascending, which `check_patch` refuses.
    return indices if size > torch.iinfo(torch.int32).max else indices.to(torch.int32)


def _groups(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each byte the number of its gap, and the place of the byte in it."""
    group = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return group, torch.arange(len(group), device=group.device) - starts[group]
