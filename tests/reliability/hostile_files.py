"""Files that attack: what each is called, where it lies, and the command that meets it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: what an attack that succeeds leaves behind
CANARY = "executed"
MIB = 2**20
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
PICKLE = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()

#: content of a YAML file
YAML: dict[str, str | bytes] = {
    "laughs": LAUGHS,
    "tag-apply": f"seed: !!python/object/apply:os.system ['touch {CANARY}']\n",
    "tag-new": f"seed: !!python/object/new:subprocess.Popen [['touch', '{CANARY}']]\n",
    "tag-module": "seed: !!python/module:antigravity\n",
    "merges": "a: &a {x: 1}\nb: &b {<<: [*a, *a, *a]}\nc: {<<: [*b, *b], d: &d [*d]}\n",
    "deep": "seed: " + "[" * 100_000,
    "deep-blocks": "".join(" " * n + "a:\n" for n in range(900)),
    "wide": "[" + "x," * 500_000 + "]",
    "digits": "seed: " + "9" * 900_000,
    "sixties": "seed: " + "1:" * 400_000 + "1",
    "utf-16": "seed: 1\n".encode("utf-16"),
    "binary": bytes(range(256)) * 4000,
    "pickle": PICKLE,
    "huge": b"# " + b"x" * (64 * MIB),
}
#: content of a JSON file
JSON: dict[str, str | bytes] = {
    "deep": "[" * 1_000_000,
    "deep-whole": '{"a":' * 5000 + "1" + "}" * 5000,
    "wide": "[" + "[]," * (2 * MIB) + "1]",
    "digits": '{"step": ' + "9" * 100_000 + "}",
    "pickle": PICKLE,
    "huge": b" " * (64 * MIB) + b"{}",
    "number": "7",
    "class": json.dumps({"py/object": "os.system", "__reduce__": ["os.system", [f"touch {CANARY}"]]}),
}
RUN_JSON = ("summary.json", "environment.json", "weights.json", "metrics.jsonl", "alerts.jsonl", "histograms.jsonl")


@dataclass(frozen=True)
class Attack:
    """One command against files that `lay` writes into an empty folder; `codes` are the ways it may end."""

    name: str
    lay: Callable[[Path], object]
    words: tuple[str, ...]
    codes: tuple[int, ...] = (2,)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def lay_run(folder: Path) -> None:
    """A small whole run folder."""
    write(folder / "config.yaml", "rule: nearest\nseed: 1\nmodel: {formats: {'*': E4M3}}\n")
    lines = [
        json.dumps({"step": step, "train/loss": 3.0 - step / 10, "val/loss": 3.0 - step / 10}) for step in range(9)
    ]
    write(folder / "metrics.jsonl", "\n".join(lines) + "\n")
    summary = {"name": "a", "rule": "nearest", "format": "E4M3", "seed": 1, "status": "finished", "steps": 8}
    write(folder / "summary.json", json.dumps({**summary, "final_val_loss": 2.2, "best_val_loss": 2.2}))
    write(folder / "environment.json", json.dumps({"python": "3"}))


def _in_run(name: str, content: str | bytes) -> Callable[[Path], None]:
    def lay(folder: Path) -> None:
        lay_run(folder / "run")
        write(folder / "run" / name, content)

    return lay


def _link(name: str) -> Callable[[Path], None]:
    def lay(folder: Path) -> None:
        lay_run(folder / "run")
        write(folder / "secret", '{"step": 1, "password": "hunter2"}')
        (folder / "run" / name).unlink(missing_ok=True)
        (folder / "run" / name).symlink_to(folder / "secret")

    return lay


def _gpt2(config: dict[str, object], weights: bytes) -> Callable[[Path], None]:
    def lay(folder: Path) -> None:
        write(folder / "gpt2" / "config.json", json.dumps(config))
        write(folder / "gpt2" / "model.safetensors", weights)

    return lay


SHAPE: dict[str, object] = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8}
SHAPE |= {"vocab_size": 257}
REPORT = ("report", "run", "--out", "page")
FROM_GPT2 = ("run", "bf16_baseline", "--data.dir=corpus", "--model.init_from=gpt2", "--model.block_size=8")


def tensors(shape: list[int], size: int) -> bytes:
    """A safetensors file with one tensor of that shape, its data claimed to take `size` bytes."""
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(20_000)


def attacks(full: bool) -> Iterator[Attack]:
    """Every attack; without `full`, a sample with one of every kind."""
    few = ("laughs", "tag-apply", "deep", "utf-16", "huge")
    for name, content in YAML.items():
        yield Attack(f"config {name}", lambda f, c=content: write(f / "a.yaml", c), ("run", "a.yaml"))
        if full or name in few[:2]:
            yield Attack(f"sweep {name}", lambda f, c=content: write(f / "a.yaml", c), ("sweep", "a.yaml"))
        if full or name in few[:1]:
            yield Attack(f"config of a run {name}", _in_run("config.yaml", content), REPORT, (0,))
    for name, content in JSON.items():
        for file in RUN_JSON if full else ("metrics.jsonl",) if name == "wide" else ():
            yield Attack(f"{file} {name}", _in_run(file, content), REPORT, (0,))
        if full or name in ("deep", "huge"):
            meta = ("run", "bf16_baseline", "--data.dir=bad")
            yield Attack(f"meta.json {name}", lambda f, c=content: write(f / "bad" / "meta.json", c), meta)
    yield from _odd_places(full)
    yield from _weights(full)


def _odd_places(full: bool) -> Iterator[Attack]:
    yield Attack("config is a folder", lambda f: (f / "a.yaml").mkdir(), ("run", "a.yaml"))
    yield Attack("config is a pipe", lambda f: os.mkfifo(f / "a.yaml"), ("run", "a.yaml"))
    for name in ("config.yaml", "summary.json", "metrics.jsonl") if full else ("config.yaml",):
        yield Attack(f"link in a run {name}", _link(name), REPORT, (0,))
    for name in ("../out", "/tmp/out", ".hidden", "a/b", "..", "") if full else ("../out",):
        yield Attack(f"name {name!r}", lambda f: None, ("run", "bf16_baseline", f"--name={name}", "--data.dir=corpus"))


def _weights(full: bool) -> Iterator[Attack]:
    petabyte = struct.pack("<Q", 2**50) + b"{}"
    yield Attack("header of a petabyte", _gpt2(SHAPE, petabyte + bytes(20_000)), FROM_GPT2)
    yield Attack("a billion layers", _gpt2(SHAPE | {"n_layer": 10**9}, petabyte), FROM_GPT2)
    yield Attack("weights that are a pickle", _gpt2(SHAPE, PICKLE * 500), FROM_GPT2)
    if full:
        yield Attack("tensor of a petabyte", _gpt2(SHAPE, tensors([2**25, 2**23], 2**50)), FROM_GPT2)
        yield Attack("tensor of another size", _gpt2(SHAPE, tensors([2**25, 2**23], 20_000)), FROM_GPT2)
        yield Attack("width of a billion", _gpt2(SHAPE | {"n_embd": 10**9}, petabyte), FROM_GPT2)
