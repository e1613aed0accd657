"""A parser fed by a fuzzer that watches which lines an input reaches: `guided.py TARGET SECONDS FOLDER`.

FOLDER holds the inputs to begin with, and those that reached something new when it ends. The first failure ends it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["nanogpt_bench", "fp8manifold.formats", "yaml"]):
    import parsed
    import torch

    from nanogpt_bench.checkpoint.format import capture_tree
    from nanogpt_bench.sweep import file as sweep_file

import fp8manifold as fm
from nanogpt_bench.config.settings import FOLDER

WEIGHT = fm.FP8Tensor(torch.linspace(-1, 1, 64).view(2, 32), "E4M3", granularity="block")
TENSORS, OUTLINE = capture_tree({"a": [WEIGHT, (1, torch.ones(2))], 3: float("nan"), "b": torch.float32})
INPUT = Path(tempfile.mkdtemp()) / "x.yaml"


def config(data: bytes) -> None:
    INPUT.write_bytes(data)
    parsed.is_taken(partial(parsed.config, INPUT, []))


def overrides(data: bytes) -> None:
    INPUT.write_bytes(b"")
    parsed.is_taken(partial(parsed.config, INPUT, data.decode("utf-8", "surrogateescape").split("\n")))


def sweep(data: bytes) -> None:
    INPUT.write_bytes(data)
    parsed.is_taken(partial(parsed.sweep, INPUT, []))


def name(data: bytes) -> None:
    parsed.is_taken(partial(parsed.format_name, data.decode("utf-8", "surrogateescape")), ValueError)


def tree(data: bytes) -> None:
    try:
        outline = json.loads(data)
    except (ValueError, RecursionError):
        return
    parsed.is_taken(partial(parsed.tree, TENSORS, outline), ValueError)


def texts(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("*.yaml")]


#: what is fuzzed, and what it begins with
TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "config": (config, texts(FOLDER)),
    "overrides": (overrides, [b"--train.max_steps=3\n--model.formats.attn=E4M3", b"--rule\nnearest\n--seed=1"]),
    "sweep": (sweep, texts(sweep_file.FOLDER)),
    "name": (name, [b"E4M3FNUZ_B-3", b"P3109_8P4F", b"e5m2ieee"]),
    "tree": (tree, [json.dumps(OUTLINE).encode()]),
}


def main() -> None:
    once, seeds = TARGETS[sys.argv[1]]
    folder = Path(sys.argv[3])
    for place, data in enumerate(seeds):
        (folder / f"seed-{place}").write_bytes(data)
    options = [f"-max_total_time={sys.argv[2]}", "-max_len=2048", f"-artifact_prefix={folder}/failed-", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, str(folder)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
