"""A model of floats in half the bytes: weights stay as a file of 16 bits has them, and are float32 while they are read.

What it computes is what the model of float32 weights computes, to the bit, as every float of 16 bits is a float32.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
#: bytes that say how long the description of a safetensors file is
_LENGTH = 8


def half_of_files(folder: Path) -> torch.dtype | None:
    """Return the dtype of 16 bits that all tensors of a folder's safetensors files have; None of any others."""
    kinds = {entry["dtype"] for file in folder.glob("*.safetensors") for entry in _entries(file)}
    return _HALVES.get(kinds.pop()) if len(kinds) == 1 else None


def _entries(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as opened:
        described = json.loads(opened.read(int.from_bytes(opened.read(_LENGTH), "little")))
    return [entry for name, entry in described.items() if name != "__metadata__"]


def computes_in_float32(model: nn.Module) -> bool:
    """Let a model of weights of 16 bits compute in float32; False, of one to be read as floats, where it may differ.

    Linear layers and embeddings keep their weights and decode them as they run; everything else becomes float32. What
    a model has computed when it was made, in 16 bits then, can't be told from what it would have been.
    """
    for module in model.modules():
        made = [module._buffers[name] for name in module._non_persistent_buffers_set]
        if any(x is not None and x.dtype in _HALVES.values() for x in made):
            return False
    kept = {id(module.weight) for module in model.modules() if _run_of(module) is not None}
    for module in model.modules():
        if (run := _run_of(module)) is not None:
            module.forward = partial(run, module)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return True


def _run_of(module: nn.Module) -> Any:
    """What stands for a module's forward pass, of those whose weight is decoded there."""
    if type(module) is nn.Linear:
        return _linear
    if type(module) is nn.Embedding and module.max_norm is None:
        return _embedding
    return _conv1d if type(module).__name__ == "Conv1D" else None


def _linear(module: Any, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight.float(), module.bias)


def _embedding(module: Any, rows: Tensor) -> Tensor:
    return functional.embedding(rows, module.weight).float()


def _conv1d(module: Any, x: Tensor) -> Tensor:
    flat = torch.addmm(module.bias, x.reshape(-1, x.shape[-1]), module.weight.float())
    return flat.view(*x.shape[:-1], module.nf)
