"""Codes where float weights are to be read: every reader refuses them, in the same words, and reads nothing."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import each
from safetensors import torch as safetensors
from test_loading import Watched, state_of
from torch import Tensor, nn

from fp8manifold import load_quantized, quantize_model

WANTED = "here a weight must be float64, float32, float16 or bfloat16; decode it and multiply by its scales first"
NAME = "one.weight"


def codes(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: (x / x.abs().max() * 100).round().to(dtype)


def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, value).to(dtype)


#: scales as the layouts have them: of squares, of rows, of the tensor, of blocks as E8M0, of bitsandbytes' rows
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: filled(0.0003, torch.float32, -(-x.shape[0] // 128), -(-x.shape[1] // 128)),
    "row": lambda x: filled(0.0003, torch.bfloat16, x.shape[0], 1),
    "tensor": lambda x: torch.tensor(0.0003),
    "block": lambda x: filled(115, torch.uint8, x.shape[0], x.shape[1] // 32),
    "flat": lambda x: filled(0.0003, torch.float32, x.shape[0]),
}
F8, F8_5, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
#: by name: what a weight is, how a file calls that, and its scales' name and kind
LAYOUTS: dict[str, tuple[torch.dtype, str, str, str]] = {
    "DeepSeek, Qwen": (F8, "F8_E4M3", "weight_scale_inv", "square"),
    "compressed-tensors, rows": (F8, "F8_E4M3", "weight_scale", "row"),
    "compressed-tensors, ModelOpt, tensor": (F8, "F8_E4M3", "weight_scale", "tensor"),
    "MXFP8": (F8, "F8_E4M3", "weight_scale", "block"),
    "E5M2": (F8_5, "F8_E5M2", "weight_scale", "row"),
    "compressed-tensors, int8": (torch.int8, "I8", "weight_scale", "row"),
    "bitsandbytes": (torch.int8, "I8", "SCB", "flat"),
    "raw E4M3": (F8, "F8_E4M3", "", ""),
    "raw E5M2": (F8_5, "F8_E5M2", "", ""),
    "raw E8M0": (E8M0, "F8_E8M0", "", ""),
    "raw int8": (torch.int8, "I8", "", ""),
    "raw uint8": (torch.uint8, "U8", "", ""),
    "raw int32": (torch.int32, "I32", "", ""),
}


def in_codes(state: Mapping[str, Tensor], layout: str, wanted: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    dtype, _, beside, kind = LAYOUTS[layout]
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        made[name] = codes(dtype)(value) if wanted(name, value) else value.clone()
        if wanted(name, value) and beside:
            made[name.removesuffix("weight") + beside] = SCALES[kind](value)
    return made


def said(layout: str, name: str, file: str = "") -> str:
    dtype, in_file, beside, _ = LAYOUTS[layout]
    where, kind = (f" of {file!r}", in_file) if file else ("", str(dtype))
    scales = name.removesuffix("weight") + beside
    read = f"with the scales {scales!r}, which fm.load_fp8 can read"
    how = read if beside else f"and {name}_scale is missing"
    return f"{name}{where} holds codes ({kind}), {how}: {WANTED}"


class Net(nn.Module):
    def __init__(self, one: nn.Module | None = None) -> None:
        super().__init__()
        self.one = one or nn.Linear(64, 32, bias=False)
        self.two, self.norm = nn.Linear(32, 4), nn.LayerNorm(32)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def is_one(name: str, value: Tensor) -> bool:
    return name == NAME


@each("layout", LAYOUTS)
def test_load_quantized(layout: str, tmp_path: Path) -> None:
    state = in_codes(state_of(Net()), layout, is_one)
    safetensors.save_file(state, tmp_path / "part.safetensors")
    sources: list[tuple[Any, str]] = [(state, ""), (tmp_path, "part.safetensors")]
    for source, file in [*sources, *([(Watched(state), "")] if layout.startswith("raw") else [])]:
        with torch.device("meta"):
            model = Net()
        with pytest.raises(ValueError, match=f"^{re.escape(said(layout, NAME, file))}$"):
            load_quantized(model, source, "E4M3")
        assert model.one.weight.is_meta


@each("storage", ["fp8", "grid", "master", "embedded"])
@each("layout", [name for name in LAYOUTS if "weight_scale" not in LAYOUTS[name][2] or "int8" in name])
def test_load_state_dict(layout: str, storage: Any) -> None:
    """Float8 with scales beside it that are called ``weight_scale`` or ``weight_scale_inv`` is read."""
    embedded = storage == "embedded"
    net = Net(nn.Embedding(32, 64)) if embedded else Net()
    state = in_codes(state_of(net), layout, is_one)
    model: Any = quantize_model(net, "E4M3", "fp8" if embedded else storage, embeddings="E4M3" if embedded else None)
    before = torch.as_tensor(model.one.weight.detach()).clone()
    with pytest.raises(RuntimeError, match=re.escape(said(layout, NAME))):
        model.load_state_dict(state, strict=False)
    assert torch.equal(torch.as_tensor(model.one.weight.detach()), before)


@each("dtype", [torch.int8, torch.uint8, F8, E8M0])
@each("storage", ["fp8", "grid", "master"])
def test_layers_of_codes_are_not_quantised(dtype: torch.dtype, storage: Any) -> None:
    layer = nn.Linear(32, 4)
    layer.weight = nn.Parameter(codes(dtype)(torch.ones(4, 32)), requires_grad=False)
    with pytest.raises(TypeError, match=f"a weight has dtype {re.escape(str(dtype))}: float64, float32"):
        quantize_model(nn.Sequential(layer), "E4M3", storage)
