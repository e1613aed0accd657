"""Damages of a file that is read, each a function of its path; GARBAGE fits no reader."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], object]
#: a value that takes the key away
GONE = object()
MIB = 2**20
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


class Payload:
    """Pickled, it leaves a file behind when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def changed(make: Callable[[bytes], bytes]) -> Damage:
    """Another content, made of the one there is."""
    return lambda path: path.write_bytes(make(path.read_bytes()))


def cut(count: int = 5) -> Damage:
    return changed(lambda data: data[:-count])


def text(content: str | bytes) -> Damage:
    return changed(
        lambda _: content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    )


def append(content: str | bytes) -> Damage:
    def damage(path):
        with path.open("ab") as file:
            file.write(content.encode() if isinstance(content, str) else content)

    return damage


def flipped(place: int = 0) -> Damage:
    """One bit of a byte."""
    return changed(lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def without_line(number: int) -> Damage:
    return changed(
        lambda data: b"".join(
            line for n, line in enumerate(data.splitlines(True), 1) if n != number
        )
    )


def put(keys: str, value: Any) -> Damage:
    """Another value of a key, dotted where it lies deeper, in a file of JSON."""

    def damage(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        *sections, key = keys.split(".")
        section = content
        for name in sections:
            section = (
                section[int(name)] if isinstance(section, list) else section.setdefault(name, {})
            )
        section[key] = value
        if value is GONE:
            del section[key]
        path.write_text(json.dumps(content), encoding="utf-8")

    return damage


def tensors(**values: Any) -> Damage:
    """Replace tensors in a file of safetensors.

    Two underscores stand for a dot, and GONE leaves one out.
    """

    def damage(path):
        from safetensors.torch import load_file, save_file

        stored = load_file(path) | {
            name.replace("__", "."): value for name, value in values.items()
        }
        save_file({name: value for name, value in stored.items() if value is not GONE}, path)

    return damage


def tensor_file(shape: list[int], size: int) -> bytes:
    """A file of one tensor of that shape, whose data are said to take `size` bytes."""
    header = json.dumps(
        {"wte.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(20_000)


def gone() -> Damage:
    return lambda path: path.unlink()


def instead(make: Callable[[Path], object]) -> Damage:
    """Something else under the file's name."""
    return lambda path: (path.unlink(), make(path))


def signed(data: bytes) -> Damage:
    """Another content of a corpus' file, with the digest that belongs to it."""

    def damage(path):
        path.write_bytes(data)
        split, name, _ = path.name.split(".")
        put(f"splits.{split}.{name}_sha256", hashlib.sha256(data).hexdigest())(
            path.with_name("meta.json")
        )

    return damage


def renamed(name: str) -> Damage:
    return lambda path: path.rename(path.with_name(name))


def in_turn(*damages: Damage) -> Damage:
    return lambda path: [damage(path) for damage in damages]


def linked(target: str) -> Damage:
    return instead(lambda path: path.symlink_to(target))


#: by name; what is no file of any kind, or one that attacks
GARBAGE = {
    "gone": gone(),
    "empty": text(b""),
    "zeros": changed(lambda data: bytes(len(data))),
    "half": changed(lambda data: data[: len(data) // 2]),
    "of another kind": text("7"),
    "not UTF-8": text(b'{"seed": "\xff\xfe"}'),
    "in UTF-16": text("seed: 1\n".encode("utf-16")),
    "deep": text("[" * 100_000),
    "deep and whole": text('{"a":' * 5000 + "1" + "}" * 5000),
    "laughs": text(LAUGHS),
    "digits": text('{"step": ' + "9" * 100_000 + "}"),
    "every byte": text(bytes(range(256)) * 40),
    "merges": text("a: &a {x: 1}\nb: &b {<<: [*a, *a, *a]}\nc: {<<: [*b, *b], d: &d [*d]}\n"),
    "deep blocks": text("".join(" " * n + "a:\n" for n in range(900))),
    "wide": text("[" + "x," * 500_000 + "]"),
    "wide and whole": text("[" + "[]," * (2 * MIB) + "1]"),
    "sixties": text("seed: " + "1:" * 400_000 + "1"),
    "pickle": text(pickle.dumps(Payload())),
    "tag": text("seed: !!python/object/apply:os.system ['touch executed']\n"),
    "tag of a class": text("seed: !!python/object/new:subprocess.Popen [['touch', 'executed']]\n"),
    "tag of a module": text("seed: !!python/module:antigravity\n"),
    "class": text(
        json.dumps({"py/object": "os.system", "__reduce__": ["os.system", ["touch executed"]]})
    ),
    "huge": text(b" " * (9 * MIB) + b"{}"),
    "huge comment": text(b"# " + b"x" * (64 * MIB)),
    "header of a petabyte": text((2**50).to_bytes(8, "little") + b"{}" + bytes(200)),
    "folder": instead(Path.mkdir),
    "pipe": instead(os.mkfifo),
    "link to nothing": linked("nothing"),
    "endless": linked("/dev/zero"),
    "link to a secret": linked("/etc/passwd"),
}


def contents(folder: Path) -> dict[str, Any]:
    """Every path below a folder, with its bytes where it is an ordinary file."""
    paths = sorted(path for path in folder.rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else None
        for path in paths
    }
