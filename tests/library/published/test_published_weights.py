"""Weights of published FP8 folders, by their headers: read as their publishers read them, written to the byte."""

from pathlib import Path

import pytest
import torch
from fp8_folders import LAYOUTS, make, tensors_of
from fp8_served import decoded, quantization_of
from safetensors import safe_open

import fp8manifold as fm
from fp8manifold._published import Header, read_parts, stored_weights, written_parts

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business


def headers_of(folder: Path) -> dict[str, Header]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                found[name] = Header(part.get_dtype(), tuple(part.get_shape()), file.name)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_read_as_their_publisher_reads_them_and_written_to_the_byte(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "published")
    files, values = tensors_of(folder), decoded(folder)
    stored = stored_weights(headers_of(folder), quantization_of(folder))
    assert {each.codes for each in stored.values()} == set(values)
    for each in stored.values():
        codes, scale = read_parts(each, files.__getitem__)
        weight = fm.FP8Tensor.from_codes(codes, scale, each.format, dtype=torch.float32, block_size=each.block_size)
        assert weight.shape == each.shape
        expected = values[each.codes]
        torch.testing.assert_close(weight.dequantize().to(expected.dtype), expected, rtol=0, atol=0)
        for part, tensor in written_parts(each, weight).items():
            assert tensor.dtype == files[part].dtype
            assert tensor.shape == files[part].shape
            assert torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (tensor, files[part])))
