"""Layouts of published files of codes: found by headers alone, read, and written back to the byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published_cases import (
    E8M0,
    NAMES,
    ONE,
    SHAPES,
    S,
    W,
    assert_written_as_read,
    codes,
    headers_of,
    only,
    scale_at,
    scales,
    weight_of,
)
from torch import Tensor

from fp8manifold import decode
from fp8manifold._published import quantization_of, read_parts, stored_weights

FITTED = [(kind, shape) for kind, (_, shapes) in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0], ids=str)
@pytest.mark.parametrize(("kind", "shape"), FITTED)
def test_every_shape_of_scales_is_read_and_written(kind: str, shape: tuple[int, ...], scale: torch.dtype) -> None:
    tensors = {"a.weight": codes(SHAPES[kind][0]), "a.weight_scale": scales(shape, scale)}
    stored = only(tensors)
    assert (stored.name, stored.granularity, stored.shape) == ("a.weight", kind.split()[0], SHAPES[kind][0])
    values = decode(tensors["a.weight"].view(torch.uint8), "E4M3") * scale_at(stored, tensors["a.weight_scale"])
    for dtype in (torch.float32, torch.bfloat16):
        read = weight_of(stored, tensors, dtype).dequantize()
        torch.testing.assert_close(read, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert_written_as_read(stored, tensors)


@pytest.mark.parametrize("dtype", [d for d in NAMES if NAMES[d].startswith("F8") and d != E8M0], ids=str)
def test_every_float8_is_read_and_written(dtype: torch.dtype) -> None:
    tensors = {"a.weight": codes((5, 64), dtype), "a.weight_scale": scales((5, 1), torch.float32)}
    stored = only(tensors)
    values = tensors["a.weight"].float() * tensors["a.weight_scale"]
    torch.testing.assert_close(weight_of(stored, tensors).dequantize(), values, rtol=0, atol=0, equal_nan=True)
    assert_written_as_read(stored, tensors)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    lead=st.sampled_from([(), (2,)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, E8M0]),
)
def test_partial_squares_of_any_size(rows: int, columns: int, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = (*lead, -(-rows // 128), -(-columns // 128))
    tensors = {"w": codes((*lead, rows, columns)), "w_scale_inv": scales(shape, dtype)}
    stored = only(tensors)
    expanded = weight_of(stored, tensors).expanded_scale().broadcast_to(stored.shape)
    at = tensors["w_scale_inv"].float()
    i, j = torch.arange(rows) // 128, torch.arange(columns) // 128
    assert torch.equal(expanded, at[..., i[:, None], j[None, :]])
    assert_written_as_read(stored, tensors)


@pytest.mark.parametrize(
    ("dtype", "shape", "stored"),
    [
        (torch.uint8, (3, 4, 2, 16), (3, 4, 64)),  # gpt-oss
        (torch.uint8, (4, 32), (4, 64)),
        (torch.int8, (4, 32), (4, 64)),
        (torch.float4_e2m1fn_x2, (4, 32), (4, 64)),
    ],
)
@pytest.mark.parametrize("scale", [torch.uint8, E8M0])
def test_packed_codes(dtype: torch.dtype, shape: tuple[int, ...], stored: tuple[int, ...], scale: torch.dtype) -> None:
    packed = torch.randint(0, 256, shape, dtype=torch.uint8)
    tensors = {"e.down_blocks": packed.view(dtype), "e.down_scales": scales((*stored[:-1], 2), scale)}
    found = only(tensors)
    assert (found.name, found.format.name, found.granularity, found.shape) == ("e.down", "E2M1", "block", stored)
    flat = [code for byte in packed.flatten().tolist() for code in (byte % 16, byte // 16)]
    assert read_parts(found, tensors.__getitem__)[0].flatten().tolist() == flat
    assert_written_as_read(found, tensors)


# ----------------------------------------------------------------------------------------------------- names and extras


@pytest.mark.parametrize(
    ("codes_name", "scale_name", "name"),
    [
        *(("a.weight", f"a.{scale}", "a.weight") for scale in ("weight_scale_inv", "weight_scale", "scale")),
        ("a.weight", "a.qscale_weight", "a.weight"),
        ("a._weight_qdata", "a._weight_scale", "a.weight"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale_inv", "mlp.experts.gate_up_proj"),
        ("weight", "weight_scale", "weight"),
    ],
)
def test_names(codes_name: str, scale_name: str, name: str) -> None:
    stored = only({scale_name: S, codes_name: W})
    assert (stored.name, stored.codes, stored.scale) == (name, codes_name, scale_name)


def test_one_scale_that_may_have_two_names_has_that_of_its_layout() -> None:
    """So that all weights of a folder have the same."""
    small, one = codes((5, 32)), torch.ones(1, 1)
    assert only({"a.weight": small, "a.weight_scale": one}).granularity == "tensor"
    assert only({"a.weight": small, "a.weight_scale_inv": one}).granularity == "square"
    squares = {"config_groups": {"g": {"weights": {"block_structure": [128, 128]}}}}
    assert only({"a.weight": small, "a.weight_scale": one}, squares).granularity == "square"
    assert only({"a.weight": small, "a.weight_scale": torch.ones(5, 1)}).granularity == "channel"
    assert only({"a.weight": small, "a.weight_scale": torch.ones(5, 1).to(E8M0)}).granularity == "block"


def test_extras_go_with_the_weight_whose_they_are() -> None:
    linear = {
        f"l.attn.{k}.{n}": x
        for k in ("q_proj", "k_proj")
        for n, x in {"weight": W, "weight_scale": S, "input_scale": ONE}.items()
    }
    experts = {f"l.experts.{k}{n}": x for k in ("up", "down") for n, x in {"": W, "_scale": S}.items()}
    others = {
        "l.attn.k_proj.k_scale": ONE,
        "l.attn.v_scale": ONE,
        "l.experts.down_activation_scale": ONE,
        "norm.scale": ONE,  # a model's own
        "l.layer_scale": ONE,
        "other.input_scale": ONE,  # of no weight in codes
    }
    found = stored_weights(headers_of(linear | experts | others))
    assert {name: weight.extras for name, weight in found.items()} == {
        "l.attn.q_proj.weight": ("l.attn.q_proj.input_scale", "l.attn.v_scale"),
        "l.attn.k_proj.weight": ("l.attn.k_proj.input_scale", "l.attn.k_proj.k_scale"),
        "l.experts.up": (),
        "l.experts.down": ("l.experts.down_activation_scale",),
    }


def test_settings_are_found_wherever_they_are_and_a_folder_of_floats_has_none() -> None:
    own = {"quant_method": "fp8"}
    assert quantization_of({"quantization_config": own}) == own
    assert quantization_of({"compression_config": own}) == own
    assert quantization_of({"text_config": {"quantization_config": own}}) == own
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert quantization_of({}, modelopt) == {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert quantization_of({}) is None
    tensors = {
        "a.weight": torch.ones(2, 2),
        "mask": torch.ones(2, dtype=torch.uint8),
        "layer_scale": ONE,
        "layer": ONE,
        "position_ids": torch.zeros(2, dtype=torch.int32),
    }
    assert stored_weights(headers_of(tensors), {"quant_method": "something"}) == {}


# -------------------------------------------------------------------------------------------- what other libraries read


def scheme(strategy: str, **more: Any) -> Any:
    from compressed_tensors import quantization as package

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | more
    return package.QuantizationScheme(targets=["Linear"], weights=package.QuantizationArgs(**weights))


MX = {"group_size": 32, "scale_dtype": torch.uint8}
COMPRESSED: dict[str, tuple[str, Any, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "tensor": ("float-quantized", "tensor", {}, lambda w: w.abs().amax().view(1)),
    "channel": ("float-quantized", "channel", {}, lambda w: w.abs().amax(1, keepdim=True)),
    "block": (
        "naive-quantized",
        "block",
        {"block_structure": [128, 128]},
        lambda w: torch.stack([torch.stack([b.abs().amax() for b in row.split(128, 1)]) for row in w.split(128)]),
    ),
    "mxfp8": ("mxfp8-quantized", "group", MX, lambda w: w.unflatten(1, (-1, 32)).abs().amax(-1)),
    "mxfp4": ("mxfp4-pack-quantized", "group", MX | {"num_bits": 4}, lambda w: w.unflatten(1, (-1, 32)).abs().amax(-1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_what_compressed_tensors_writes_is_what_it_reads(kind: str, dtype: torch.dtype) -> None:
    """Its own scales and codes, rows and blocks of zeros among them, and its own decompressor."""
    from compressed_tensors import compressors as base
    from compressed_tensors.quantization.utils import helpers

    name, strategy, more, amax = COMPRESSED[kind]
    args = scheme(strategy, **more)
    w = (torch.randn(300, 256) * torch.logspace(-3, 1, 300)[:, None]).to(dtype)
    w[:150] = 0
    scale, _ = helpers.calculate_qparams(-amax(w), amax(w), args.weights)
    compressor = base.BaseCompressor.get_value_from_registry(name)
    made = compressor.compress({"weight": w, "weight_scale": scale}, args)
    tensors = {f"a.{entry}": x for entry, x in made.items()}
    stored = only(tensors, {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": more}}})
    theirs = compressor.decompress(made, args)["weight"]
    assert torch.equal(weight_of(stored, tensors, theirs.dtype).dequantize(), theirs)
    assert_written_as_read(stored, tensors)
    if "mx" in kind:
        assert (made["weight_scale"] == 0).any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "scale_shape", "scale"),
    [
        *(((256, 384), (2, 3), scale) for scale in (torch.float32, torch.bfloat16, E8M0)),
        ((256, 384), (256, 12), torch.uint8),
        ((3, 256, 128), (3, 2, 1), torch.float32),
        ((40, 50), (), torch.float32),
    ],
)
def test_transformers_reads_the_same(shape: Any, scale_shape: Any, scale: torch.dtype, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize(None)
    tensors = {"weight": codes(shape), "weight_scale_inv": scales(scale_shape, scale)}
    read = weight_of(only(tensors), tensors, dtype).dequantize()
    wanted = theirs._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], output_dtype=dtype)
    torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same_of_gpt_oss(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as theirs

    packed = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    tensors = {"e.down_proj_blocks": packed, "e.down_proj_scales": scales((3, 5, 4), torch.uint8)}
    read = weight_of(only(tensors, {"quant_method": "mxfp4"}), tensors, dtype).dequantize()
    wanted = theirs(packed, tensors["e.down_proj_scales"], dtype=dtype)
    assert torch.equal(read.transpose(1, 2), wanted)
    assert torch.equal(read.transpose(1, 2).signbit(), wanted.signbit())
