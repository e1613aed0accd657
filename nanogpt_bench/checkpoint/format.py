"""The format of checkpoints on disk: file names, contents, and the header with
everything but tensors.

The header of `step-N.safetensors` names every tensor as `part/name`, and has one text,
a JSON document:

    {"format": 2, "texts": {"model": {"…": "…"}}, "facts": {"step": 100, "best": true,
    …}}
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from nanogpt_bench.system.errors import BenchError, one_line, printable, shortened
from nanogpt_bench.system.untrusted import parse_json

CHECKPOINTS = "checkpoints"
_FORMER = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_STEP = re.compile(_FORMER.pattern + r"\.safetensors")
_LITTER = re.compile(rf"\.{_STEP.pattern}\.part")


def step_file(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step-{step}.safetensors"


def sum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def part_file(path: Path) -> Path:
    """Return the name of a checkpoint while it is written."""
    return path.with_name(f".{path.name}.part")


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, None for any other name.

    >>> step_of("step-100.safetensors"), step_of("step-007.safetensors"), step_of("step-1")
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints by their names, whole or broken, in
    increasing order.
    """
    return sorted(step for name in _names(run_dir) if (step := step_of(name)) is not None)


def stray(run_dir: Path) -> Iterator[Path]:
    """Files that an interrupted save or removal left behind: unfinished checkpoints,
    and digests without one.
    """
    names = set(_names(run_dir))
    for name in names:
        stem, dot, last = name.rpartition(".")
        alone = dot + last == ".sha256" and _STEP.fullmatch(stem) is not None and stem not in names
        if alone or _LITTER.fullmatch(name):
            yield run_dir / CHECKPOINTS / name


def clean(run_dir: Path) -> None:
    for file in stray(run_dir):
        file.unlink()


def check_layout(run_dir: Path) -> None:
    """Refuse a run whose checkpoints are folders, as earlier versions wrote them."""
    for name in _names(run_dir):
        path = run_dir / CHECKPOINTS / name
        if _FORMER.fullmatch(name) and path.is_dir():
            raise BenchError(
                f"checkpoint {str(path)!r} is a folder, the layout of an earlier version, which "
                f"this one does not "
                "read; go on with the version that wrote it, or begin a new run"
            )


def _names(run_dir: Path) -> list[str]:
    try:
        return sorted(os.listdir(run_dir / CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass
class Contents:
    """The contents of a checkpoint, as plain tensors and JSON values only.

    Example:
        >>> contents = Contents(10, {"model": {"w": torch.ones(2, 3)}}, facts={"best": True})
        >>> contents.step, list(contents.tensors["model"])
        (10, ['w'])
    """

    #: optimizer steps completed
    step: int
    #: part -> name -> plain, contiguous CPU tensor that shares no memory with others
    tensors: dict[str, dict[str, Tensor]]
    #: part -> texts that belong to its tensors
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    #: everything else, without NaN and Inf; `best` is true if the validation loss at
    #: that step was the lowest so far
    facts: dict[str, Any] = field(default_factory=dict)


class BrokenCheckpoint(BenchError):
    """A checkpoint is not what was committed; `str(error)` says in one line what is
    wrong with it.
    """


class CheckpointNotWritten(BenchError):
    """A checkpoint could not be written; earlier ones are unchanged."""


FORMAT = 2
#: the most bytes of a header
HEADER = 1 << 25
_TEXT = "checkpoint"
_DTYPES = dict(
    zip(
        (
            *(
                torch.bool,
                torch.uint8,
                torch.int8,
                torch.uint16,
                torch.int16,
                torch.uint32,
                torch.int32,
                torch.uint64,
            ),
            *(
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.float32,
                torch.float64,
                torch.complex64,
            ),
            *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        ),
        (
            *(
                "BOOL",
                "U8",
                "I8",
                "U16",
                "I16",
                "U32",
                "I32",
                "U64",
                "I64",
                "F16",
                "BF16",
                "F32",
                "F64",
                "C64",
            ),
            *("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"),
        ),
        strict=True,
    )
)


def compose(contents: Contents) -> tuple[bytes, list[Tensor]]:
    """Return the header of a checkpoint's file and the tensors that follow it, the
    widest types first.

    Raises ValueError for a tensor that a file can't hold, NaN among the facts, or a
    header too long for `read_head`.
    """
    named = {
        f"{part}/{name}": value
        for part, tensors in contents.tensors.items()
        for name, value in tensors.items()
    }
    ordered = dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))
    facts = {**contents.facts, "step": contents.step}
    text = json.dumps(
        {"format": FORMAT, "texts": contents.metadata, "facts": facts}, allow_nan=False
    )
    header: dict[str, Any] = {"__metadata__": {_TEXT: text}}
    end = 0
    for name, tensor in ordered.items():
        if (
            tensor.dtype not in _DTYPES
            or tensor.layout != torch.strided
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"tensor {name!r} of {tensor.dtype}, {tensor.layout}: dense, contiguous ones are "
                f"written"
            )
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    _parsed(data)
    return struct.pack("<Q", len(data)) + data, list(ordered.values())


def read_head(file: BinaryIO) -> Contents:
    """Return a checkpoint's contents without the tensors, from the header of a file at
    its beginning.

    Raises ValueError for a header that is too long or cut off, no JSON, or not of a
    checkpoint.
    """
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > HEADER:
        raise ValueError(
            f"has a header of {size:,} bytes; allowed: {HEADER:,}"
            if len(prefix) == 8
            else "is cut off"
        )
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"is cut off in its header of {size:,} bytes")
    return _parsed(data)


def _parsed(data: bytes) -> Contents:
    header = parse_json(data)
    texts = header.get("__metadata__") if isinstance(header, dict) else None
    text = texts.get(_TEXT) if isinstance(texts, dict) else None
    content = parse_json(text) if isinstance(text, str) else None
    if not isinstance(content, dict):
        raise ValueError("is no checkpoint of a run")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"is of format {str(content.get('format'))[:20]}, this version reads format {FORMAT}"
        )
    facts, metadata = content.get("facts"), content.get("texts")
    step = facts.get("step") if isinstance(facts, dict) else None
    if (
        not isinstance(facts, dict)
        or not isinstance(step, int)
        or isinstance(step, bool)
        or step < 0
    ):
        raise ValueError("gives no step")
    if not isinstance(metadata, dict) or not all(
        isinstance(found, Mapping) for found in metadata.values()
    ):
        raise ValueError("has no metadata of its tensors")
    return Contents(step, {}, metadata, facts)


_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def capture_tree(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of nested dicts, lists, tuples and scalars by name, and the
    rest as an outline for JSON.

    The tensors are copies: plain, contiguous, on the CPU, sharing no memory. A tensor
    subclass is taken apart by its `__tensor_flatten__`. Numbers that JSON can't write
    (NaN, Inf) and keys that are no strings survive.

    >>> tensors, outline = capture_tree({"state": {0: torch.ones(2), "loss": float("inf")}})
    >>> list(tensors), outline
    (['state/0'], {'dict': [['state', {'dict': [[0, {'tensor': 'state/0'}], ['loss', {'float': 'inf'}]]}]]})

    Raises:
        TypeError: a value of another type in the tree, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _outline(tree, "", tensors)


def restore_tree(tensors: Mapping[str, Tensor], outline: Any, classes: Iterable[type] = ()) -> Any:
    """Return the tree that `capture_tree` took apart, with the tensors themselves, not
    copies.

    `classes` are the tensor subclasses that an outline may name; any other is refused.

    >>> restore_tree(*capture_tree([1, (2.5, float("nan")), {7: torch.tensor([3])}]))
    [1, (2.5, nan), {7: tensor([3])}]

    Raises:
        ValueError: an outline that `capture_tree` did not make, a missing tensor, or a
            class not in `classes`.
    """
    try:
        return _restored(outline, tensors, {kind.__name__: kind for kind in classes})
    except Exception as error:  # an outline that does not fit can raise anything
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
        return {
            "dict": [
                [_outline(key, below, {}), _outline(item, below, tensors)]
                for key, below, item in pairs
            ]
        }
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
        parts = [
            [name, _outline_of_tensor(getattr(value, name), _below(path, name), tensors)]
            for name in names
        ]
        return {
            "class": type(value).__name__,
            "parts": parts,
            "rest": _outline(rest, _below(path, "rest"), {}),
        }
    name = path or "value"
    while name in tensors:  # keys 1 and "1" have the same name, and so have "a/b" and b in a
        name += "'"
    tensors[name] = plain_copy(value)
    return {"tensor": name}


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor as a plain one: contiguous, on the CPU, sharing no
    memory.
    """
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
        return classes[outline["class"]].__tensor_unflatten__(
            parts, inner(outline["rest"]), None, None
        )
    ((kind, content),) = outline.items()
    made_of = {
        "float": lambda: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
        "dtype": lambda: _BY_NAME[content],
        "tensor": lambda: tensors[content],
        "tuple": lambda: tuple(inner(item) for item in content),
        "dict": lambda: {inner(key): inner(value) for key, value in content},
    }
    return made_of[kind]()
