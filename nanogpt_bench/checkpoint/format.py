"""What a checkpoint consists of on disk: folder names, contents, manifest.json and files of tensors.

    {"format": 1, "step": 100, "best": true,
     "files": {"model.safetensors": {"size": 1234, "sha256": "…"}, "state.json": {…}},
     "sha256": "…"}

The last line's digest of a manifest is that of all bytes before that line, so that no byte of it can change unseen. A
header or a document that claims too much is refused before it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.untrusted import parse_json

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
#: a file of tensors; nothing else may lie in a checkpoint beside MANIFEST and STATE
TENSOR_FILE = re.compile(r"[a-z][a-z0-9_]{0,31}\.safetensors")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LITTER = re.compile(rf"\.({_STEP.pattern})\.(partial|aside)")


def step_folder(run_dir: Path, step: int) -> Path:
    """Return where the checkpoint of a step belongs."""
    return run_dir / CHECKPOINTS / f"step-{step}"


def partial_folder(folder: Path) -> Path:
    """Return where a checkpoint is while it is written, or while it is removed."""
    return folder.with_name(f".{folder.name}.partial")


def aside_folder(folder: Path) -> Path:
    """Return where a checkpoint waits while another takes its place."""
    return folder.with_name(f".{folder.name}.aside")


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, None for any other name.

    >>> step_of("step-100"), step_of("step-007"), step_of(".step-1.partial")
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint by its name, whole or not, in increasing order."""
    return sorted(step for name in _names(run_dir) if (step := step_of(name)) is not None)


def clean(run_dir: Path) -> None:
    """Remove what an interrupted save or removal left behind; a checkpoint that had stepped aside steps back.

    Raises:
        OSError: the litter can't be removed.
    """
    parent = run_dir / CHECKPOINTS
    for name in _names(run_dir):
        match = _LITTER.fullmatch(name)
        if match is None:
            continue
        if match[3] == "aside" and not os.path.lexists(parent / match[1]):
            os.rename(parent / name, parent / match[1])
        elif (parent / name).is_symlink() or not (parent / name).is_dir():
            (parent / name).unlink()
        else:
            shutil.rmtree(parent / name)


def _names(run_dir: Path) -> list[str]:
    try:
        return sorted(os.listdir(run_dir / CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass
class Contents:
    """Everything a checkpoint holds, free of any class that a reader would need to know.

    Example:
        >>> import torch
        >>> contents = Contents(10, {"model": {"w": torch.ones(2, 3)}}, facts={"best": True})
        >>> contents.step, list(contents.tensors["model"])
        (10, ['w'])
    """

    #: optimizer steps completed
    step: int
    #: file stem -> name -> plain, contiguous CPU tensor that shares its memory with no other
    tensors: dict[str, dict[str, Tensor]]
    #: file stem -> the texts in that file's header
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    #: state.json, without NaN and Inf; `best` is true if no validation loss had been lower at that step
    facts: dict[str, Any] = field(default_factory=dict)


class BrokenCheckpoint(BenchError):
    """A checkpoint is not what was committed; `str(error)` is one line that says what is wrong with which file."""


class CheckpointNotWritten(BenchError):
    """A checkpoint could not be written; those before it are as they were."""


#: values in a document; each takes some 200 bytes once it is read
VALUES = 1 << 18
#: lists and mappings inside each other: an optimizer's state is an outline of outlines
DEPTH = 100


def parse(data: bytes, *, limit: int, unique: bool = False) -> Any:
    """Return the content of a JSON document of at most `limit` bytes; `unique` refuses a name given twice.

    Raises:
        ValueError: it is beyond the bounds, or no JSON (NaN is none).
    """
    return parse_json(data, VALUES, most_bytes=limit, deepest=DEPTH, nan=False, unique=unique)


FORMAT = 1
#: bytes in a manifest, and files named in it
MANIFEST_LIMIT = 1 << 16
FILES = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LAST = re.compile(rb' "sha256": "([0-9a-f]{64})"\n\}\n')
_LAST_SIZE = len(b' "sha256": ""\n}\n') + 64
#: no file is larger than 64 bits can say
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Entry:
    """One file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; `best` is true if no validation loss had been lower at that step."""

    step: int
    best: bool
    files: Mapping[str, Entry]


def compose(manifest: Manifest) -> bytes:
    """Return the content of manifest.json.

    >>> manifest = Manifest(3, False, {"state.json": Entry(2, "0" * 64)})
    >>> decompose(compose(manifest)) == manifest
    True
    """
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "best": manifest.best,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in manifest.files.items()},
    }
    body = json.dumps(content, indent=1).removesuffix("\n}").encode() + b",\n"
    return body + f' "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def decompose(data: bytes) -> Manifest:
    """Return the manifest in the bytes of manifest.json.

    Raises:
        ValueError: a byte of it has changed, or it is not of this format.
    """
    if len(data) > MANIFEST_LIMIT:
        raise ValueError(f"is longer than the {MANIFEST_LIMIT:,} bytes allowed")
    body, last = data[:-_LAST_SIZE], _LAST.fullmatch(data[-_LAST_SIZE:])
    if last is None:
        raise ValueError("does not end with its own sha256: it is cut off, changed, or no manifest")
    if hashlib.sha256(body).hexdigest() != last[1].decode():
        raise ValueError("does not have the sha256 it ends with")
    return _checked(parse(data, limit=MANIFEST_LIMIT, unique=True))


def _checked(content: Any) -> Manifest:
    if not isinstance(content, dict) or not _whole(content.get("format")):
        raise ValueError("has no format version")
    if content["format"] != FORMAT:
        raise ValueError(f"is of format {content['format']}, this version reads format {FORMAT}")
    if set(content) != {"format", "step", "best", "files", "sha256"}:
        raise ValueError("needs exactly the keys format, step, best, files, sha256")
    step, best, files = content["step"], content["best"], content["files"]
    if not _whole(step) or not isinstance(best, bool) or not isinstance(files, dict):
        raise ValueError("needs a whole number as step, true or false as best and a mapping as files")
    if not 1 <= len(files) <= FILES or STATE not in files:
        raise ValueError(f"needs from 1 to {FILES} files, {STATE} among them")
    return Manifest(step, best, {_name(name): _entry(name, entry) for name, entry in files.items()})


def _name(name: str) -> str:
    if name != STATE and not TENSOR_FILE.fullmatch(name):
        raise ValueError(f"names the file {name[:80]!r}; allowed: {STATE} and NAME.safetensors")
    return name


def _entry(name: str, entry: Any) -> Entry:
    if not isinstance(entry, dict) or set(entry) != {"size", "sha256"} or not _whole(entry["size"]):
        raise ValueError(f"needs size and sha256 for {name!r}")
    if not isinstance(entry["sha256"], str) or not _DIGEST.fullmatch(entry["sha256"]):
        raise ValueError(f"needs 64 hexadecimal digits as sha256 of {name!r}")
    return Entry(entry["size"], entry["sha256"])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


#: bytes of a header: some ten thousand tensors
HEADER = 1 << 21
#: a header's length comes before it
PREFIX = 8
#: the types that can be written and read; E8M0 can only be written
TYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"),
)
DIMENSIONS = 64


def to_bytes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file of contiguous CPU tensors that share no memory.

    Raises:
        ValueError: a tensor that is none of these, or so many that `from_bytes` would refuse them.
    """
    try:
        data = save(tensors, metadata or None)
    except RuntimeError as error:
        raise ValueError(one_line(error)) from None
    read_header(data)
    return data


def from_bytes(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors with memory of their own, and the texts in the header.

    Raises:
        ValueError: no safetensors file, or one whose tensors torch can't hold.
    """
    metadata = read_header(data)
    try:
        return load(data), metadata
    except (SafetensorError, RuntimeError, AssertionError, KeyError) as error:
        raise ValueError(one_line(error)) from None


def header_size(data: bytes) -> int:
    """Return the length that the first bytes of a file give its header, without those bytes.

    Raises:
        ValueError: there are not even these bytes.
    """
    if len(data) < PREFIX:
        raise ValueError(f"is no safetensors file: {len(data)} bytes")
    return int.from_bytes(data[:PREFIX], "little")


def read_header(data: bytes) -> dict[str, str]:
    """Check the header in the first bytes of a file and return the texts in it; where the data lie is not checked.

    Raises:
        ValueError: a header that is too long, cut off, no JSON, or of tensors that can't be read.
    """
    size = header_size(data)
    if size > HEADER:
        raise ValueError(f"has a header of {size:,} bytes, more than the {HEADER:,} allowed")
    if len(data) < PREFIX + size:
        raise ValueError(f"is cut off in its header of {size:,} bytes")
    header = parse(data[PREFIX : PREFIX + size], limit=HEADER)
    if not isinstance(header, dict):
        raise ValueError("has a header that is no mapping")
    metadata = header.pop("__metadata__", None) or {}
    for name, entry in header.items():
        _check_tensor(name, entry)
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("has a header whose __metadata__ is no mapping of texts")
    return metadata


def _check_tensor(name: str, entry: Any) -> None:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if dtype not in TYPES:
        raise ValueError(f"has a tensor {name[:80]!r} of type {str(dtype)[:20]!r}, which can't be read")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError(f"has a tensor {name[:80]!r} without a shape of at most {DIMENSIONS} dimensions")
    # torch computes strides of empty tensors too
    if not all(isinstance(size, int) for size in shape) or prod(max(size, 1) for size in shape) >= 2**63:
        raise ValueError(f"has a tensor {name[:80]!r} larger than 64 bits can say")
