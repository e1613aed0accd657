"""Tiny random GPT-2 checkpoints in Hugging Face's layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SETTINGS = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
}
SETTINGS |= {"n_positions": 32, "vocab_size": 61}


def tensors(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the names and in the shapes of GPT-2."""
    generator, width = torch.Generator().manual_seed(0), settings["n_embd"]
    shapes = {
        "wte.weight": (settings["vocab_size"], width),
        "wpe.weight": (settings["n_positions"], width),
    }
    layers = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    layers |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    layers |= {"ln_1": (width,), "ln_2": (width,)}
    modules = {"ln_f": (width,)}
    for block in range(settings["n_layer"]):
        modules |= {f"h.{block}.{name}": shape for name, shape in layers.items()}
    for name, shape in modules.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def write(folder: Path, **changed: Any) -> Path:
    """Write a checkpoint whose config.json has these settings changed (None: left out)."""
    settings = {key: value for key, value in {**SETTINGS, **changed}.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors({**SETTINGS, **settings}), folder / "model.safetensors")
    return folder


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """Write a checkpoint again with its tensors edited in place."""
    stored = load_file(folder / "model.safetensors")
    edit(stored)
    save_file(stored, folder / "model.safetensors")
    return folder
