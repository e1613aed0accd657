"""Layouts of published files of codes: found by headers alone, read, and written back
to the byte.
"""

from itertools import chain, product

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

from fp8manifold import decode
from fp8manifold._published import quantization_of, read_parts, stored_weights

FITTED = []
for kind, (_, shapes) in SHAPES.items():
    FITTED += product([kind], shapes)


@pytest.mark.parametrize(
    "scale", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0], ids=str
)
@pytest.mark.parametrize(("kind", "shape"), FITTED)
def test_every_shape_of_scales_is_read_and_written(
    kind: str, shape: tuple[int, ...], scale: torch.dtype
) -> None:
    tensors = {"a.weight": codes(SHAPES[kind][0]), "a.weight_scale": scales(shape, scale)}
    stored = only(tensors)
    assert (stored.name, stored.granularity, stored.shape) == (
        "a.weight",
        kind.split()[0],
        SHAPES[kind][0],
    )
    values = decode(tensors["a.weight"].view(torch.uint8), "E4M3") * scale_at(
        stored, tensors["a.weight_scale"]
    )
    for dtype in (torch.float32, torch.bfloat16):
        weight = weight_of(stored, tensors, dtype).dequantize()
        torch.testing.assert_close(weight, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert_written_as_read(stored, tensors)


@pytest.mark.parametrize(
    "dtype", [d for d in NAMES if NAMES[d].startswith("F8") and d != E8M0], ids=str
)
def test_every_float8_is_read_and_written(dtype: torch.dtype) -> None:
    tensors = {"a.weight": codes((5, 64), dtype), "a.weight_scale": scales((5, 1), torch.float32)}
    stored = only(tensors)
    values = tensors["a.weight"].float() * tensors["a.weight_scale"]
    torch.testing.assert_close(
        weight_of(stored, tensors).dequantize(), values, rtol=0, atol=0, equal_nan=True
    )
    assert_written_as_read(stored, tensors)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    lead=st.sampled_from([(), (2,)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, E8M0]),
)
def test_partial_squares_of_any_size(
    rows: int, columns: int, lead: tuple[int, ...], dtype: torch.dtype
) -> None:
    shape = (*lead, -(-rows // 128), -(-columns // 128))
    tensors = {"w": codes((*lead, rows, columns)), "w_scale_inv": scales(shape, dtype)}
    stored = only(tensors)
    expanded = weight_of(stored, tensors).expanded_scale().broadcast_to(stored.shape)
    scale = tensors["w_scale_inv"].float()
    i, j = torch.arange(rows) // 128, torch.arange(columns) // 128
    assert torch.equal(expanded, scale[..., i[:, None], j[None, :]])
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
def test_two_codes_in_a_byte_are_read_as_two_columns(
    dtype: torch.dtype, shape: tuple[int, ...], stored: tuple[int, ...], scale: torch.dtype
) -> None:
    packed = torch.randint(0, 256, shape, dtype=torch.uint8)
    tensors = {
        "e.down_blocks": packed.view(dtype),
        "e.down_scales": scales((*stored[:-1], 2), scale),
    }
    weight = only(tensors)
    assert (weight.name, weight.format.name, weight.granularity, weight.shape) == (
        "e.down",
        "E2M1",
        "block",
        stored,
    )
    bytes_in_order = packed.flatten().tolist()
    flat = list(chain.from_iterable((byte % 16, byte // 16) for byte in bytes_in_order))
    assert read_parts(weight, tensors.__getitem__)[0].flatten().tolist() == flat
    assert_written_as_read(weight, tensors)


@pytest.mark.parametrize(
    ("codes_name", "scale_name", "name"),
    [
        *(
            ("a.weight", f"a.{scale}", "a.weight")
            for scale in ("weight_scale_inv", "weight_scale", "scale")
        ),
        ("a.weight", "a.qscale_weight", "a.weight"),
        ("a._weight_qdata", "a._weight_scale", "a.weight"),
        (
            "mlp.experts.gate_up_proj",
            "mlp.experts.gate_up_proj_scale_inv",
            "mlp.experts.gate_up_proj",
        ),
        ("weight", "weight_scale", "weight"),
    ],
)
def test_names_of_codes_and_scales_give_that_of_the_weight(
    codes_name: str, scale_name: str, name: str
) -> None:
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
    assert (
        only({"a.weight": small, "a.weight_scale": torch.ones(5, 1).to(E8M0)}).granularity
        == "block"
    )


def test_extras_go_with_the_weight_whose_they_are() -> None:
    linear = {}
    for name in ("l.attn.q_proj", "l.attn.k_proj"):
        linear |= {f"{name}.weight": W, f"{name}.weight_scale": S, f"{name}.input_scale": ONE}
    experts = {}
    for name in ("l.experts.up", "l.experts.down"):
        experts |= {name: W, f"{name}_scale": S}
    loose_scales = {
        "l.attn.k_proj.k_scale": ONE,
        "l.attn.v_scale": ONE,
        "l.experts.down_activation_scale": ONE,
        "norm.scale": ONE,  # a model's own
        "l.layer_scale": ONE,
        "other.input_scale": ONE,  # of no weight in codes
    }
    weights = stored_weights(headers_of(linear | experts | loose_scales))
    assert {name: weight.extras for name, weight in weights.items()} == {
        "l.attn.q_proj.weight": ("l.attn.q_proj.input_scale", "l.attn.v_scale"),
        "l.attn.k_proj.weight": ("l.attn.k_proj.input_scale", "l.attn.k_proj.k_scale"),
        "l.experts.up": (),
        "l.experts.down": ("l.experts.down_activation_scale",),
    }


def test_settings_are_found_wherever_they_are_and_a_folder_of_floats_has_none() -> None:
    config = {"quant_method": "fp8"}
    assert quantization_of({"quantization_config": config}) == config
    assert quantization_of({"compression_config": config}) == config
    assert quantization_of({"text_config": {"quantization_config": config}}) == config
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
