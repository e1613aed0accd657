"""Files of image models: ComfyUI's two conventions, read and written as state dicts.

The folders are made by hand, tensor by tensor.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8manifold as fm

E4M3 = torch.float8_e4m3fn
LAYOUTS = pytest.mark.parametrize("layout", ["comfy_quant", "scaled_fp8"])
SCALE = 0.0125


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def by_hand(layout: str, dtype: torch.dtype = E4M3) -> dict[str, Tensor]:
    """Return the tensors of a block with one layer in codes, an input scale and a norm."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(8, 16, generator=generator).to(dtype)
    scale, input_scale = torch.tensor(SCALE), torch.tensor(0.5)
    tensors = {"block.0.weight": codes, "block.1.weight": torch.ones(8, dtype=torch.bfloat16)}
    tensors["block.1.bias"] = torch.zeros(8, dtype=torch.bfloat16)
    if layout == "scaled_fp8":
        return tensors | {
            "block.0.scale_weight": scale,
            "block.0.scale_input": input_scale,
            "scaled_fp8": torch.empty(0, dtype=dtype),
        }
    form = str(dtype).removeprefix("torch.")
    return tensors | {
        "block.0.weight_scale": scale,
        "block.0.input_scale": input_scale,
        "block.0.comfy_quant": as_bytes(json.dumps({"format": form})),
    }


def written(tensors: dict[str, Tensor], folder: Path, **metadata: str) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors, path, {"format": "pt", **metadata})
    return path


@LAYOUTS
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=["E4M3", "E5M2"])
def test_a_file_is_read_and_written_back_to_the_byte(
    layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = written(by_hand(layout, dtype), tmp_path)
    state = fm.files.load_state(path, dtype=torch.float32)
    weight: Any = state["block.0.weight"]
    expected = by_hand(layout, dtype)["block.0.weight"].float() * torch.tensor(SCALE)
    assert torch.equal(weight.dequantize(), expected)
    fm.files.save_state(state, tmp_path / "again.safetensors", layout)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@LAYOUTS
def test_one_convention_becomes_the_other(layout: str, tmp_path: Path) -> None:
    state = fm.files.load_state(written(by_hand(layout), tmp_path))
    other = {"comfy_quant": "scaled_fp8", "scaled_fp8": "comfy_quant"}[layout]
    fm.files.save_state(state, tmp_path / "other.safetensors", other)
    tensors, expected = load_file(tmp_path / "other.safetensors"), by_hand(other)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(as_bits(tensors[name]), as_bits(tensor)), name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 8, bias=False), nn.LayerNorm(8))


@LAYOUTS
def test_a_module_of_any_class_takes_and_trains_them(layout: str, tmp_path: Path) -> None:
    path = written(by_hand(layout), tmp_path)
    with torch.device("meta"):
        model = Block().to(torch.bfloat16)
    fm.files.load_into(model, path, "as stored")
    codes = model.block[0].weight.codes.clone()
    assert torch.equal(codes, by_hand(layout)["block.0.weight"].view(torch.uint8))
    model.block[0].weight.grad = torch.ones(8, 16, dtype=torch.bfloat16)
    fm.optim.StiffnessAdamW([model.block[0].weight], lr=1e-2).step()
    fm.files.save_state(model.state_dict(), tmp_path / "trained.safetensors", layout)
    trained: Any = fm.files.load_state(tmp_path / "trained.safetensors")["block.0.weight"]
    assert torch.equal(trained.codes, model.block[0].weight.codes)
    assert not torch.equal(trained.codes, codes)


def test_a_format_in_the_header_is_read_too(tmp_path: Path) -> None:
    layers = {"layers": {"block.0": {"format": "nvfp4"}}}
    tensors = by_hand("comfy_quant")
    del tensors["block.0.comfy_quant"]
    path = written(tensors, tmp_path, _quantization_metadata=json.dumps(layers))
    with pytest.raises(
        ValueError, match=r"ComfyUI's format 'nvfp4', which can't be read: .*float8_e4m3fn"
    ):
        fm.files.load_state(path)


def with_blocks(tensors: dict[str, Tensor]) -> None:
    tensors["block.0.weight"] = torch.zeros(8, 64).to(E4M3)
    tensors["block.0.weight_scale"] = torch.full((8, 2), 127, dtype=torch.uint8)


def of_another_format(tensors: dict[str, Tensor]) -> None:
    tensors["block.0.comfy_quant"] = as_bytes('{"format": "int8_tensorwise"}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_blocks, "which ComfyUI writes in the order of a kernel"),
        (of_another_format, "ComfyUI's format 'int8_tensorwise'"),
        (lambda tensors: tensors.pop("block.0.weight_scale"), "its scale is missing"),
    ],
    ids=["blocks", "another format", "no scale"],
)
def test_codes_that_mean_something_else_are_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    tensors = by_hand("comfy_quant")
    change(tensors)
    with pytest.raises(ValueError, match=message):
        fm.files.load_state(written(tensors, tmp_path))


def coded(**options: Any) -> dict[str, Tensor]:
    return fm.quantize_model(nn.Sequential(nn.Linear(16, 4)), **options).state_dict()


@pytest.mark.parametrize(
    ("state", "layout", "message"),
    [
        (lambda: coded(), "comfy_quant", "a scale for each channel"),
        (lambda: coded(formats="E3M4", granularity="tensor"), "comfy_quant", "is in E3M4"),
        (lambda: coded(granularity="tensor"), "comfyui", "did you mean 'comfy_quant'"),
    ],
    ids=["rows", "a format without a dtype", "an unknown layout"],
)
def test_what_a_file_can_not_have_is_refused(
    state: Any, layout: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"earlier")
    with pytest.raises(ValueError, match=message):
        fm.files.save_state(state(), path, layout)
    assert path.read_bytes() == b"earlier"
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_load_names_what_reads_a_single_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fm\.files\.load_state"):
        fm.load(written(by_hand("comfy_quant"), tmp_path))
