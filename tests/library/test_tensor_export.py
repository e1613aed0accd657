"""State dicts as plain tensors and strings: through a safetensors file and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
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


# --------------------------------------------------------------------------------------------------------- refusals
def flat() -> tuple[dict[str, Tensor], dict[str, str]]:
    return flatten_state_dict({"w": parameter()})


def described(**changes: Any) -> dict[str, str]:
    description = json.loads(flat()[1]["fp8:w"]) | changes
    return {"fp8:w": json.dumps({key: value for key, value in description.items() if value != "gone"})}


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' is of E4M3, but E5M2 is expected"):
        unflatten_state_dict(*flat(), like={"w": parameter("E5M2")})
    with pytest.raises(ValueError, match="'w' is of E4M3, but E4M3FNUZ is expected"):
        unflatten_state_dict(*flat(), like={"w": parameter("E4M3FNUZ")})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (described(format="E9M9"), "'w' can't be put together.*E9M9"),
        (described(format=8), "must be a str, not int"),
        (described(format="E2M1"), r"code \d+ is out of range for E2M1"),
        (described(block_size=32), r"needs \(4, 2\)"),
        (described(block_size="32"), r"block_size='32' must be 32, \(128, 128\) or None"),
        (described(rounding="up"), "rounding='up'"),
        (described(seed=-1), "seed=-1"),
        (described(seed="1"), "seed='1'"),
        (described(dtype="float16"), "dtype='float16' is unknown: one of float32, bfloat16"),
        (described(dtype="gone"), "expected the keys format, block_size"),
        (described(more=1), "expected the keys format, block_size"),
        (described(by_operator="gone"), "expected the keys format, block_size"),
        (described(draws="gone"), "expected the keys format, block_size"),
        ({"fp8:w": "{"}, "'w' can't be put together from '{'"),
        ({"fp8:w": "[]"}, "expected the keys"),
        ({"fp8:v": described()["fp8:w"]}, "lack 'v'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unflatten_state_dict(flat()[0], metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": torch.zeros(4, 64)}, "codes must be a uint8 tensor, not torch.float32"),
        ({"w_scale": torch.full((4, 1), 0.3)}, r"scale holds 0\.3"),
        ({"w_scale": torch.ones(3, 1)}, r"\(3, 1\).*needs \(4, 1\)"),
        ({"w": torch.zeros(5, 64, dtype=torch.uint8)}, r"needs \(5, 1\)"),
        ({"w_counter": torch.zeros(2, dtype=torch.int64)}, "counter"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Tensor], message: str) -> None:
    tensors, metadata = flat()
    with pytest.raises(ValueError, match=message):
        unflatten_state_dict(tensors | changes, metadata)


def test_what_can_not_be_exported_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state\['step'\] is of int"):
        flatten_state_dict({"step": 3})
    for part in ("w_scale", "w_counter", "w_remainder"):
        for state in ({"w": parameter(), part: torch.ones(1)}, {part: torch.ones(1), "w": parameter()}):
            with pytest.raises(ValueError, match="called like a part of it"):
                flatten_state_dict(state)
