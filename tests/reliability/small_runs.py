"""Runs of half a second that differ in what a checkpoint has to hold.

Also what must be equal after a fault.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nanogpt_bench.checkpoint import Contents

STEPS = 24
#: what depends on the clock, and on the machine and what else it does
MACHINE = frozenset(
    {
        *("time/elapsed_s", "time/tokens_per_s", "memory/peak_bytes", "shadow/overhead", "mfu"),
        *(
            "time",
            "seconds",
            "training_seconds",
            "elapsed_s",
            "tokens_per_s",
            "shadow_overhead",
            "environment",
        ),
        # of the state of the shadow, the alerts and the files of records, whose times
        # have as many digits as they have
        *("overheads", "plain_step", "ages", "bytes"),
    }
)
BASE: dict[str, object] = {
    f"model.{name}": n for name, n in (("n_layer", 1), ("n_head", 2), ("n_embd", 16))
}
BASE |= {
    "model.block_size": 8,
    "train.max_steps": STEPS,
    "train.batch_size": 2,
    "optimizer.warmup_steps": 4,
}
BASE |= {
    "eval.interval": 6,
    "eval.batches": 1,
    "monitor.interval": 4,
    "checkpoint.every": 3,
    "checkpoint.keep": 2,
}
#: random bits, ULP residuals, 8-bit averages, amax histories, dropout's generator, a
#: shadow, float baselines
RESIDUAL8 = {
    "model.storage": "codes",
    "optimizer.name": "stiffness_adamw",
    "optimizer.writeback": "residual8",
}
OPERANDS = '"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2", "policy": "delayed"'
DELAYED = f'{{"*": {{{OPERANDS}, "history": 16, "granularity": "tensor"}}}}'
KINDS: Mapping[str, Mapping[str, object]] = {
    "codes stochastic": {"rule": "stochastic", "model.format": "E4M3", "model.dropout": 0.1},
    "codes residual8": {
        "model.format": "E5M2",
        "optimizer.moments": "8bit",
        "optimizer.lr": 2e-3,
        **RESIDUAL8,
    },
    "codes riemannian": {"rule": "riemannian", "model.format": "E3M4"},
    "master delayed": {
        "rule": "master",
        "model.formats": DELAYED,
        "shadow.enabled": True,
        "shadow.interval": 4,
    },
    "bf16": {"rule": "bf16-mixed", "model.dropout": 0.1, "train.accumulation": 2},
}


def words(kind: str, corpus: Path, overrides: Mapping[str, object] | None = None) -> list[str]:
    """Return the command line that starts a kind of run, or goes on with it.

    `more` are settings of its own.
    """
    settings = {**BASE, "data.dir": str(corpus), **KINDS[kind], **(overrides or {})}
    options = [
        f"--{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]
    return [
        "run",
        "bf16_baseline.yaml" if kind == "bf16" else "e4m3.yaml",
        "--name",
        "r",
        "--resume",
        *options,
    ]


def traces(run_dir: Path) -> dict[str, Any]:
    """Return all that a finished run left, by name.

    What depends on the clock or the machine is left out.
    """
    contents: dict[str, Any] = {}
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if (
            path.is_dir()
            or path.name in ("environment.json", "SHA256SUMS")
            or path.suffix == ".sha256"
        ):
            contents[name] = None  # what digests say follows from the files
        elif path.suffix == ".json":
            contents[name] = without_machine(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix == ".jsonl":
            contents[name] = recorded(path.parent, path.name)
        elif path.suffix == ".safetensors":
            contents[name] = _tensors(path)
        else:
            contents[name] = path.read_bytes()
    return contents


def recorded(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = (run_dir / name).read_text(encoding="utf-8").splitlines()
    return [without_machine(json.loads(line)) for line in lines]


def contents_bits(contents: Contents) -> dict[str, tuple[torch.dtype, bytes]]:
    bits = {}
    for part, tensors in contents.tensors.items():
        for name, tensor in tensors.items():
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            bits[f"{part}/{name}"] = (tensor.dtype, data)
    return bits


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, and its texts.

    What depends on the clock or the machine is left out.

    Dtype, shape and bytes by name, so that every bit counts, those of NaN too.
    """
    named = {
        name: tensor
        for name, tensor in load_file(path).items()
        if name.rpartition("/")[2] not in MACHINE
    }
    with safe_open(path, framework="pt") as file:
        texts = {key: without_machine(json.loads(text)) for key, text in file.metadata().items()}
    return texts | {
        name: (t.dtype, t.shape, t.flatten().view(torch.uint8).numpy().tobytes())
        for name, t in named.items()
    }


def without_machine(content: Any) -> Any:
    """Return JSON's content without the keys of `MACHINE`, at any depth.

    A state's dicts are lists of pairs.
    """
    if isinstance(content, dict):
        return {key: without_machine(value) for key, value in content.items() if key not in MACHINE}
    if not isinstance(content, list):
        return content
    return [without_machine(value) for value in content if not _pair_of_machine(value)]


def _pair_of_machine(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] in MACHINE
    )


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of two runs that differ, or that one of them lacks."""
    return sorted(
        name
        for name in {*first, *second}
        if name not in first or name not in second or first[name] != second[name]
    )
