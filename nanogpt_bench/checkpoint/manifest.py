"""manifest.json: the size and SHA-256 of every file of a checkpoint, and last its own SHA-256.

    {"format": 1, "step": 100, "best": true,
     "files": {"model.safetensors": {"size": 1234, "sha256": "…"}, "state.json": {…}},
     "sha256": "…"}

The last line's digest is that of all bytes before that line, so that no byte of the file can change unseen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.checkpoint.bounded_json import parse
from nanogpt_bench.checkpoint.layout import STATE, TENSOR_FILE

FORMAT = 1
#: bytes in a manifest, and files named in it
LIMIT = 1 << 16
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
    if len(data) > LIMIT:
        raise ValueError(f"is longer than the {LIMIT:,} bytes allowed")
    body, last = data[:-_LAST_SIZE], _LAST.fullmatch(data[-_LAST_SIZE:])
    if last is None:
        raise ValueError("does not end with its own sha256: it is cut off, changed, or no manifest")
    if hashlib.sha256(body).hexdigest() != last[1].decode():
        raise ValueError("does not have the sha256 it ends with")
    return _checked(parse(data, limit=LIMIT, unique=True))


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
