"""Layouts of published files of codes: found by headers, read, and written back to the byte."""

from typing import Any

import pytest
import torch

from fp8manifold import FP8Tensor
from fp8manifold._published import Header, read_parts, stored_weights, written_parts

DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e8m0fnu: "F8_E8M0"}


def headers_of(tensors: dict[str, torch.Tensor]) -> dict[str, Header]:
    return {name: Header(DTYPES[x.dtype], tuple(x.shape), "model.safetensors") for name, x in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_squares_are_read_and_written_to_the_byte(dtype: torch.dtype) -> None:
    scale = 2.0 ** torch.randint(-20, 3, (3, 2))
    tensors: dict[str, Any] = {
        "a.weight": torch.randn(300, 200).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": scale.to(dtype),
    }
    (stored,) = stored_weights(headers_of(tensors), None).values()
    codes, scales = read_parts(stored, tensors.__getitem__)
    weight = FP8Tensor.from_codes(codes, scales, stored.format, block_size=stored.block_size)
    expanded = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    assert torch.equal(weight.dequantize(), tensors["a.weight"].float() * expanded)
    for name, made in written_parts(stored, weight).items():
        assert made.dtype == tensors[name].dtype
        assert torch.equal(made.view(torch.uint8), tensors[name].view(torch.uint8))
