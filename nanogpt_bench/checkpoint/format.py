"""The format of checkpoints on disk: file names, contents, header.

The header of `step-N.safetensors` names every tensor as `part/name`, and has one text,
a JSON document with everything but tensors:

    {"format": 2, "texts": {"model": {"…": "…"}}, "facts": {"step": 100, "best": true,
    …}}

A tree such as an optimizer's state is taken apart by `capture_tree` into tensors by
name and an outline in JSON, in which a one-entry dict stands for what JSON can't write:
{"tensor": name}, {"float": "nan"}, {"tuple": [...]}, {"dict": [[key, value], ...]},
{"dtype": name}. {"class": ..., "parts": ..., "rest": ...} is a tensor subclass.
"""

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    >>> names = ("step-100.safetensors", "step-007.safetensors", "step-1")
    >>> tuple(step_of(name) for name in names)
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints by name, in increasing order.

    A checkpoint may be whole or broken.
    """
    numbers = []
    for name in _file_names(run_dir):
        number = step_of(name)
        if number is not None:
            numbers.append(number)
    return sorted(numbers)


def stray(run_dir: Path) -> Iterator[Path]:
    """Yield files that an interrupted save or removal has not removed.

    They are unfinished checkpoints, and digests without one.
    """
    names = set(_file_names(run_dir))
    for name in names:
        checkpoint = name.removesuffix(".sha256")
        is_digest = checkpoint != name and _STEP.fullmatch(checkpoint) is not None
        is_lone_digest = is_digest and checkpoint not in names
        if is_lone_digest or _LITTER.fullmatch(name):
            yield run_dir / CHECKPOINTS / name


def clean(run_dir: Path) -> None:
    for file in stray(run_dir):
        file.unlink()


def refuse_checkpoint_folders(run_dir: Path) -> None:
    """Refuse a run whose checkpoints are folders, as earlier versions wrote them."""
    for name in _file_names(run_dir):
        path = run_dir / CHECKPOINTS / name
        if _FORMER.fullmatch(name) and path.is_dir():
            raise BenchError(
                f"checkpoint {str(path)!r} is a folder, as earlier versions wrote them; this "
                "version can't read it; go on with the version that wrote it, or begin a new run"
            )


def _file_names(run_dir: Path) -> list[str]:
    try:
        return sorted(os.listdir(run_dir / CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass
class Contents:
    """The contents of a checkpoint, as plain tensors and JSON values only.

    Example:
        >>> weights = {"w": torch.ones(2, 3)}
        >>> contents = Contents(10, {"model": weights}, facts={"best": True})
        >>> contents.step, list(contents.tensors["model"])
        (10, ['w'])
    """

    #: optimizer steps completed
    step: int
    #: part -> name -> plain, contiguous CPU tensor that shares no memory with others
    tensors: dict[str, dict[str, Tensor]]
    #: part -> texts that belong to its tensors; `texts` in the header
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    #: everything else, without NaN and Inf; `best` is true if the validation loss at
    #: that step was the lowest so far
    facts: dict[str, Any] = field(default_factory=dict)


class BrokenCheckpoint(BenchError):
    """A checkpoint is not what was committed.

    `str(error)` says in one line what is wrong with it.
    """


class CheckpointNotWritten(BenchError):
    """A checkpoint could not be written; earlier ones are unchanged."""


FORMAT = 2
#: the most bytes of a header
HEADER = 1 << 25
_TEXT = "checkpoint"
#: safetensors' names of the dtypes that it holds
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def compose(contents: Contents) -> tuple[bytes, list[Tensor]]:
    """Return the header of a checkpoint's file, and the tensors that follow it.

    The widest types come first.

    Raises:
        ValueError: a tensor that a file can't hold, NaN among the facts, or a header
            too long for `read_head`.
    """
    named_tensors = {}
    for part, tensors in contents.tensors.items():
        for name, tensor in tensors.items():
            named_tensors[f"{part}/{name}"] = tensor
    ordered_names = sorted(
        named_tensors, key=lambda name: (-named_tensors[name].element_size(), name)
    )
    ordered_tensors = [named_tensors[name] for name in ordered_names]
    facts = {**contents.facts, "step": contents.step}
    text = json.dumps(
        {"format": FORMAT, "texts": contents.metadata, "facts": facts}, allow_nan=False
    )
    header: dict[str, Any] = {"__metadata__": {_TEXT: text}}
    start = 0
    for name, tensor in zip(ordered_names, ordered_tensors, strict=True):
        _check_tensor(name, tensor)
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    # What can't be read again must not be written.
    if len(data) > HEADER:
        raise ValueError(
            f"its header would have {len(data):,} bytes; at most {HEADER:,} are allowed"
        )
    _parse_header(data)
    return struct.pack("<Q", len(data)) + data, ordered_tensors


def _check_tensor(name: str, tensor: Tensor) -> None:
    is_dense = tensor.layout == torch.strided and tensor.is_contiguous()
    if tensor.dtype not in _DTYPE_NAMES or not is_dense:
        raise ValueError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}; only contiguous, dense tensors "
            "can be saved"
        )


def read_head(file: BinaryIO) -> Contents:
    """Return a checkpoint's contents without the tensors.

    They are read from the header of a file at its beginning.

    Raises:
        ValueError: a header that is too long or cut off, no JSON, or not of a
            checkpoint.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError("is cut off")
    size = int.from_bytes(prefix, "little")
    if size > HEADER:
        raise ValueError(f"has a header of {size:,} bytes; at most {HEADER:,} are allowed")
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"is cut off in its header of {size:,} bytes")
    return _parse_header(data)


def _parse_header(data: bytes) -> Contents:
    header = parse_json(data)
    texts = header.get("__metadata__") if isinstance(header, dict) else None
    text = texts.get(_TEXT) if isinstance(texts, dict) else None
    content = parse_json(text) if isinstance(text, str) else None
    if not isinstance(content, dict):
        raise ValueError("is not the checkpoint of a run")
    file_format = content.get("format")
    if file_format != FORMAT:
        raise ValueError(f"has format {str(file_format)[:20]}; this version reads format {FORMAT}")
    facts = content.get("facts")
    step = facts.get("step") if isinstance(facts, dict) else None
    if not isinstance(facts, dict) or not _is_step(step):
        raise ValueError("does not give its step")
    metadata = content.get("texts")
    if not isinstance(metadata, dict):
        raise ValueError("does not describe its tensors")
    if not all(isinstance(texts_of_part, Mapping) for texts_of_part in metadata.values()):
        raise ValueError("does not describe its tensors")
    return Contents(facts["step"], {}, metadata, facts)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


#: torch's dtypes by their names, such as "float32"
_DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
#: floats that JSON can't write
_FLOATS_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def capture_tree(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of nested dicts, lists, tuples and scalars, and an outline.

    The tensors are by name. The outline is the rest, for JSON. The tensors are copies:
    plain, contiguous, on the CPU, sharing no memory. A tensor subclass is taken apart
    by its `__tensor_flatten__`. Numbers that JSON can't write (NaN, Inf) and keys that
    are no strings survive.

    >>> tensors, outline = capture_tree({0: torch.ones(2), "loss": float("inf")})
    >>> list(tensors), outline
    (['0'], {'dict': [[0, {'tensor': '0'}], ['loss', {'float': 'inf'}]]})

    Raises:
        TypeError: a value of another type in the tree, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _outline(tree, "", tensors)


def restore_tree(tensors: Mapping[str, Tensor], outline: Any, classes: Iterable[type] = ()) -> Any:
    """Return the tree that `capture_tree` took apart.

    It has the tensors themselves, not copies. `classes` are the tensor subclasses that
    an outline may name; any other is refused.

    >>> restore_tree(*capture_tree([1, (2.5, float("nan")), {7: torch.tensor([3])}]))
    [1, (2.5, nan), {7: tensor([3])}]

    Raises:
        ValueError: an outline that `capture_tree` did not make, a missing tensor, or a
            class not in `classes`.
    """
    try:
        return _rebuild(outline, tensors, {kind.__name__: kind for kind in classes})
    except Exception as error:
        # An outline that does not fit can raise anything.
        reason = f"{type(error).__name__}: {shortened(printable(one_line(error)), 200)}"
        raise ValueError(f"its structure and its tensors do not fit together: {reason}") from None


def _outline(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the outline of a value at a path; its tensors are added to `tensors`."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return _outline_of_tensor(value, path, tensors)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            entry_path = _path_of_entry(path, key)
            # Only values have tensors that are saved.
            key_outline = _outline(key, entry_path, {})
            pairs.append([key_outline, _outline(item, entry_path, tensors)])
        return {"dict": pairs}
    if isinstance(value, tuple | list):
        items = []
        for index, item in enumerate(value):
            items.append(_outline(item, _path_of_entry(path, index), tensors))
        return {"tuple": items} if isinstance(value, tuple) else items
    raise TypeError(f"{path or 'the state'} has type {type(value).__name__}, which can't be saved")


def _path_of_entry(path: str, key: object) -> str:
    name = "/".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
    return f"{path}/{name}" if path else name


def _outline_of_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if hasattr(value, "__tensor_flatten__") and type(value) not in (Tensor, nn.Parameter):
        names, rest = value.__tensor_flatten__()
        parts = []
        for name in names:
            part_path = _path_of_entry(path, name)
            parts.append([name, _outline_of_tensor(getattr(value, name), part_path, tensors)])
        return {
            "class": type(value).__name__,
            "parts": parts,
            "rest": _outline(rest, _path_of_entry(path, "rest"), {}),
        }
    name = path or "value"
    # Keys 1 and "1" have one name, and so have "a/b" and b in a.
    while name in tensors:
        name += "'"
    tensors[name] = plain_copy(value)
    return {"tensor": name}


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor: plain, contiguous, on the CPU, sharing no memory."""
    plain = tensor.detach().as_subclass(Tensor)
    return torch.empty_like(plain, device="cpu", memory_format=torch.contiguous_format).copy_(plain)


def _rebuild(outline: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, Any]) -> Any:
    def rebuild(inner: Any) -> Any:
        return _rebuild(inner, tensors, classes)

    if isinstance(outline, list):
        return [rebuild(item) for item in outline]
    if not isinstance(outline, dict):
        return outline
    if "class" in outline:
        parts = {name: rebuild(part) for name, part in outline["parts"]}
        tensor_class = classes[outline["class"]]
        return tensor_class.__tensor_unflatten__(parts, rebuild(outline["rest"]), None, None)
    ((kind, content),) = outline.items()
    return _rebuild_marked(kind, content, tensors, rebuild)


def _rebuild_marked(
    kind: str, content: Any, tensors: Mapping[str, Tensor], rebuild: Callable[[Any], Any]
) -> Any:
    """Return what a one-entry dict of an outline stands for."""
    match kind:
        case "float":
            return _FLOATS_BY_NAME[content]
        case "dtype":
            return _DTYPES_BY_NAME[content]
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(rebuild(item) for item in content)
        case "dict":
            return {rebuild(key): rebuild(value) for key, value in content}
    raise KeyError(kind)
