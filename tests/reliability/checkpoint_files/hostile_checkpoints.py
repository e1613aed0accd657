"""Checkpoint folders that someone means harm with."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
STATE = b'{"step": 5}'


class Payload:
    """Pickled, it runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def tensor_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, and any length given for it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def signed(content: Any) -> bytes:
    """A manifest of any content that ends with its own sha256, as it should."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    body = text.removesuffix(b"}") + b",\n"
    return body + f' "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def manifest_of(files: dict[str, bytes], **changes: Any) -> bytes:
    entries = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return signed({"format": 1, "step": 5, "best": False, "files": entries} | changes)


def made(files: dict[str, bytes], manifest: bytes | None = None) -> Callable[[Path], None]:
    """A checkpoint whose sizes and hashes are right, or one with a manifest of its own."""

    def make(folder: Path) -> None:
        for name, data in {**files, "manifest.json": manifest or manifest_of(files)}.items():
            (folder / name).write_bytes(data)

    return make


def with_tensors(data: bytes) -> Callable[[Path], None]:
    return made({"state.json": STATE, "model.safetensors": data})


def with_state(data: bytes) -> Callable[[Path], None]:
    return made({"state.json": data})


def with_files(files: Any) -> Callable[[Path], None]:
    return made({"state.json": STATE}, signed({"format": 1, "step": 5, "best": False, "files": files}))


def sparse(folder: Path) -> None:
    """A file of a terabyte that takes no room."""
    size = 1 << 40
    made({"state.json": STATE})(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    entries = {"size": size, "sha256": "0" * 64}
    state = {"size": len(STATE), "sha256": hashlib.sha256(STATE).hexdigest()}
    files = {"model.safetensors": entries, "state.json": state}
    (folder / "manifest.json").write_bytes(signed({"format": 1, "step": 5, "best": False, "files": files}))


def linked(folder: Path) -> None:
    data = Path("/etc/passwd").read_bytes()
    made({"state.json": STATE}, manifest_of({"state.json": STATE, "model.safetensors": data}))(folder)
    (folder / "model.safetensors").symlink_to("/etc/passwd")


STATE_ENTRY = {"size": len(STATE), "sha256": hashlib.sha256(STATE).hexdigest()}


def empty_tensors(number: int) -> bytes:
    return tensor_file({f"t{index}": entry(shape=[0], offsets=[0, 0]) for index in range(number)})


#: name -> how to make it; those in WHOLE are odd and nothing else, and are read
CASES: dict[str, Callable[[Path], None]] = {
    "manifest of 100 MB": made({"state.json": STATE}, b" " * (100 * MIB)),
    "manifest nested deep": made({"state.json": STATE}, signed(b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}")),
    "manifest with a long number": made({"state.json": STATE}, signed(b'{"format": ' + b"9" * 60_000 + b"}")),
    "manifest of another version": made({"state.json": STATE}, manifest_of({"state.json": STATE}, format=2)),
    "manifest with step as text": made({"state.json": STATE}, manifest_of({"state.json": STATE}, step="5")),
    "manifest with a negative step": made({"state.json": STATE}, manifest_of({"state.json": STATE}, step=-5)),
    "manifest with more keys": made({"state.json": STATE}, manifest_of({"state.json": STATE}, run="rm -rf /")),
    "manifest with a key twice": made(
        {"state.json": STATE}, signed(b'{"format": 1, "format": 1, "step": 5, "best": false, "files": {}}')
    ),
    "manifest that is pickled": made({"state.json": STATE}, pickle.dumps(Payload())),
    "manifest of a thousand files": with_files({f"f{n}.safetensors": STATE_ENTRY for n in range(500)}),
    "name above the folder": with_files({"state.json": STATE_ENTRY, "../../secret.safetensors": STATE_ENTRY}),
    "absolute name": with_files({"state.json": STATE_ENTRY, "/etc/passwd": STATE_ENTRY}),
    "name with a NUL": with_files({"state.json": STATE_ENTRY, "a\0.safetensors": STATE_ENTRY}),
    "name of Python code": with_files({"state.json": STATE_ENTRY, "model.py": STATE_ENTRY}),
    "name of a pickle": made({"state.json": STATE, "model.pt": pickle.dumps(Payload())}),
    "size of petabytes": with_files({"state.json": {**STATE_ENTRY, "size": 1 << 60}}),
    "size that is infinite": with_files({"state.json": {**STATE_ENTRY, "size": float("inf")}}),
    "size that is true": with_files({"state.json": {**STATE_ENTRY, "size": True}}),
    "file of a terabyte without content": sparse,
    "link to another file": linked,
    "state of ten million lists": with_state(b'{"step": 5, "a": [' + b"[]," * 10_000_000 + b"[]]}"),
    "state of brackets": with_state(b"]" * (30 * MIB)),
    "state nested deep": with_state(b'{"step": 5, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "state with a long number": with_state(b'{"step": ' + b"5" * 1_000_000 + b"}"),
    "state with NaN": with_state(b'{"step": 5, "loss": NaN}'),
    "state of another step": with_state(b'{"step": 6}'),
    "state that is a list": with_state(b"[5]"),
    "state in UTF-16": with_state('{"step": 6}'.encode("utf-16")),
    "state of bytes that are no text": with_state(b'{"step": 5, "a": "\xff\xfe"}'),
    "state of an unclosed text": with_state(b'{"step": 5, "a": "' + b'\\"' * 5_000_000),
    "state that is pickled": with_state(pickle.dumps(Payload())),
    "header of petabytes": with_tensors(tensor_file({}, length=1 << 50)),
    "header of all the file": with_tensors(tensor_file(b" " * (50 * MIB))),
    "header of more than the file": with_tensors(tensor_file(b"{}", length=1000)),
    "header nested deep": with_tensors(tensor_file(b"[" * 100_000)),
    "header of a million values": with_tensors(tensor_file({"a": [0] * 600_000})),
    "header that is a list": with_tensors(tensor_file([])),
    "header with other texts": with_tensors(tensor_file({"__metadata__": {"a": 1}})),
    "tensor of petabytes": with_tensors(tensor_file({"a": entry(shape=[1 << 50], offsets=[0, 1 << 50])}, b"x")),
    "tensor of more than 64 bits": with_tensors(tensor_file({"a": entry(shape=[1 << 40, 1 << 40])}, b"x")),
    "empty tensor of petabytes": with_tensors(tensor_file({"a": entry(shape=[0, 1 << 60, 1 << 60], offsets=[0, 0])})),
    "tensor of many dimensions": with_tensors(tensor_file({"a": entry(shape=[1] * 100_000)}, b"x")),
    "tensor of a negative size": with_tensors(tensor_file({"a": entry(shape=[-1])}, b"x")),
    "tensor beyond the file": with_tensors(tensor_file({"a": entry(shape=[9], offsets=[0, 9])}, b"x")),
    "tensors in each other": with_tensors(tensor_file({"a": entry(), "b": entry()}, b"x")),
    "tensor of no type": with_tensors(tensor_file({"a": entry("OBJECT")}, b"x")),
    "tensor of half bytes": with_tensors(tensor_file({"a": entry("F4", [2])}, b"x")),
    "tensors that are pickled": with_tensors(pickle.dumps(Payload())),
    "tensors that are a zip": with_tensors(b"PK\x03\x04" + bytes(200)),
    "no tensors at all": with_tensors(b""),
    "thirty thousand tensors": with_tensors(empty_tensors(30_000)),
    "twenty thousand tensors": with_tensors(empty_tensors(20_000)),
    "a tensor with a long name": with_tensors(tensor_file({"a" * MIB: entry()}, b"x")),
    "texts of a megabyte": with_tensors(tensor_file({"__metadata__": {"a": "x" * MIB}})),
    "made by someone else": with_tensors(tensor_file({"a": entry()}, b"x")),
}
WHOLE = ("twenty thousand tensors", "a tensor with a long name", "texts of a megabyte", "made by someone else")
