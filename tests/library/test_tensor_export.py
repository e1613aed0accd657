"""State dicts as plain tensors and strings: through a safetensors file and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from optimizer_cases import normal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor_cases import INPUT, Net, every_format, every_granularity, parameter, same_store
from torch import Tensor

import fp8manifold as fm
from fp8manifold import flatten_state_dict, unflatten_state_dict


def through_safetensors(state: dict[str, Any], path: Path) -> dict[str, Tensor]:
    tensors, metadata = flatten_state_dict(state)
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as file:
        return unflatten_state_dict(load_file(path), file.metadata(), like=state)


@every_granularity
@every_format
def test_weights_survive_a_file(name: str, granularity: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"granularity": granularity, "rounding": "nearest", "dtype": torch.bfloat16}
    p = parameter(name, seed=2**40 + 1, keep_remainder=True, **options)
    p.rescale_(p.scale * 2)
    q = through_safetensors({"w": p}, tmp_path / "w.safetensors")["w"]
    assert isinstance(q, fm.FP8Parameter)
    assert same_store(p, q)
    assert (q.rounding, q.seed, q.dtype, int(q.counter)) == ("nearest", 2**40 + 1, torch.bfloat16, 1)
    assert (q.remainder, q.requires_grad) == (None, False)


def test_a_model_survives_a_file(tmp_path: Path) -> None:
    net, other = Net(), Net(granularity="channel", seed=5)
    with torch.no_grad():
        net.first.weight.mul_(0.9)
    other.load_state_dict(through_safetensors(net.state_dict(), tmp_path / "net.safetensors"))
    assert torch.equal(other(INPUT), net(INPUT))
    assert (tmp_path / "net.safetensors").stat().st_size < 4096 + 4 * 96 + 4 * (64 + 33) + 2000


def test_what_a_file_holds(tmp_path: Path) -> None:
    """Names, dtypes and a description anyone can read without this library: value = scale * decode(codes)."""
    w = parameter("E5M2", (3, 4))
    tensors, metadata = flatten_state_dict({"a.w": w, "b": normal(2)[::2]})
    assert {name: str(t.dtype) for name, t in tensors.items()} == {
        "a.w": "torch.float8_e5m2",
        "a.w_scale": "torch.float32",
        "a.w_counter": "torch.int64",
        "b": "torch.float32",
    }
    assert json.loads(metadata["fp8:a.w"])["format"] == "E5M2"
    assert all(isinstance(text, str) for text in metadata.values())
    assert all(t.is_contiguous() and type(t) is Tensor for t in tensors.values())
    assert torch.equal(tensors["a.w"].float() * tensors["a.w_scale"], w.dequantize())
    others = ("E3M4", "E4M3FNUZ", "E2M1", "E4M3_B8")  # of which safetensors, or torch, has no dtype
    assert {flatten_state_dict({"w": parameter(name)})[0]["w"].dtype for name in others} == {torch.uint8}


def test_without_stored_weights_nothing_changes() -> None:
    state = {"b": normal(3)}
    tensors, metadata = flatten_state_dict(state)
    assert metadata == {}
    assert torch.equal(unflatten_state_dict(tensors, None)["b"], state["b"])
    assert unflatten_state_dict(tensors, {"fp8": "no prefix", "format": "pt"}).keys() == state.keys()
