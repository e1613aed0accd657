"""Scales of published files that stand for nothing, and what is refused by tensor and file."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from optimizer_cases import step_from
from published_cases import (
    E4M3,
    E8M0,
    ONE,
    SHAPES,
    S,
    Tensors,
    W,
    as_bytes,
    assert_written_as_read,
    codes,
    headers_of,
    only,
    scale_at,
    scales,
    weight_of,
)

from fp8manifold import FP8Parameter, FP8Tensor
from fp8manifold._published import read_parts, stored_weights, written_parts
from fp8manifold.optim import StiffnessAdamW

NAN, MINUS_ZERO = 127, 128


@pytest.mark.parametrize("kind", ["tensor", "channel", "square", "block"])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0], ids=str)
@pytest.mark.parametrize("code", [0, MINUS_ZERO, NAN])
def test_a_scale_of_zero_over_zeros_or_nan_comes_back(kind: str, scale: torch.dtype, code: int) -> None:
    """0 / 0 gives NaN, and E8M0 has no zero; the values do not depend on it."""
    shape, (first, *_) = SHAPES[kind]
    tensors = {"w": codes(shape), "w_scale": scales(first, scale)}
    tensors["w_scale"].view(-1)[:1].view(torch.uint8).zero_()
    stored = only(tensors)
    group = (scale_at(stored, torch.arange(tensors["w_scale"].numel()).view(first) + 1.0)) == 1
    tensors["w"].view(torch.uint8)[group] = code
    values = weight_of(stored, tensors).dequantize()
    assert torch.equal(values[group].isnan(), torch.full_like(values[group], code == NAN, dtype=torch.bool))
    assert code == NAN or torch.equal(values[group].signbit(), (values[group] == 0) & (code == MINUS_ZERO))
    assert_written_as_read(stored, tensors)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, E8M0], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "channel", "square", "block"])
def test_a_step_moves_what_had_a_scale_of_zero_and_it_is_written(kind: str, scale: torch.dtype) -> None:
    """Nothing where it has no gradient, and not one byte; otherwise at a scale that the file's dtype has."""
    shape, (first, *_) = SHAPES[kind]
    tensors = {"w": codes(shape), "w_scale": scales(first, scale)}
    drawn = tensors["w"].view(torch.uint8)
    drawn[(drawn & 127) > 125] = 125  # at the end of the range a scale is widened
    tensors["w_scale"].view(-1)[:1].view(torch.uint8).zero_()
    stored = only(tensors)
    group = (scale_at(stored, torch.arange(tensors["w_scale"].numel()).view(first) + 1.0)) == 1
    tensors["w"].view(torch.uint8)[group] = 0
    read, at = read_parts(stored, tensors.__getitem__)
    weight = FP8Parameter.from_codes(read.clone(), at.clone(), stored.format, block_size=stored.block_size, seed=1)
    optimizer = StiffnessAdamW([weight.requires_grad_()], lr=0.01, weight_decay=0.0)
    step_from(optimizer, weight, torch.zeros(shape))
    made = written_parts(stored, weight)
    assert {name: as_bytes(x) for name, x in made.items()} == {name: as_bytes(tensors[name]) for name in made}
    step_from(optimizer, weight, torch.ones(shape))
    again = written_parts(stored, weight)
    assert torch.equal(weight_of(stored, again).dequantize(), weight.dequantize())
    assert 0.003 < weight.dequantize()[group].abs().mean() < 0.1


def test_a_scale_of_zero_is_written_while_the_codes_are_zeros_alone() -> None:
    tensors = {"w": torch.zeros(2, 64).to(E4M3), "w_scale": torch.tensor([[0.0], [0.5]])}
    stored = only(tensors)
    weight = weight_of(stored, tensors)
    weight.codes[0, 3] = 56
    assert (written_parts(stored, weight)["w_scale"] > 0).all()
    weight.codes[0, 3] = 0
    assert written_parts(stored, weight)["w_scale"].tolist() == [[0.0], [0.5]]


TINY = torch.finfo(torch.float32).tiny
WRONG = {
    "negative": (torch.float32, -1.0),
    "NaN": (torch.float32, float("nan")),
    "Inf": (torch.float32, float("inf")),
    "-0": (torch.float32, -0.0),
    "subnormal": (torch.float32, TINY / 2),
    "subnormal bfloat16": (torch.bfloat16, TINY / 2),
    "0": (torch.float32, 0.0),
    "E8M0 0": (torch.uint8, 0),
    "E8M0 255": (torch.uint8, 255),
}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_other_scales_are_refused_by_tensor_and_file(kind: str, empty: bool) -> None:
    dtype, entry = WRONG[kind]
    tensors = {"a.weight": codes((4, 64)), "a.weight_scale": scales((4, 1), dtype)}
    tensors["a.weight"].view(torch.uint8)[2] = 0 if empty else 56
    tensors["a.weight_scale"][2] = entry
    stored = only(tensors)
    if empty and kind in ("0", "E8M0 0"):
        assert_written_as_read(stored, tensors)
        return
    with pytest.raises(ValueError, match=r"a\.weight_scale, of the codes a\.weight of 'model\.safetensors', holds"):
        read_parts(stored, tensors.__getitem__)


@pytest.mark.parametrize(("dtype", "mark"), [(torch.float32, 1 + 2.0**-7), (torch.uint8, 128)])
def test_a_scale_that_stands_for_zero_is_refused_over_zeros_alone(dtype: torch.dtype, mark: float) -> None:
    tensors = {"w": codes((4, 64)), "w_scale": scales((4, 1), dtype)}
    tensors["w_scale"][2] = mark
    assert_written_as_read(only(tensors), tensors)
    tensors["w"].view(torch.uint8)[2] = 0
    with pytest.raises(ValueError, match="w_scale, of the codes w of"):
        read_parts(only(tensors), tensors.__getitem__)


def test_an_inf_among_the_codes_is_refused_by_tensor_and_file() -> None:
    tensors = {"w": torch.full((2, 2), torch.inf).to(torch.float8_e5m2), "w_scale": ONE}
    with pytest.raises(ValueError, match=r"w of 'model\.safetensors': codes hold 124, which is Inf in E5M2"):
        read_parts(only(tensors), tensors.__getitem__)


# ------------------------------------------------------------------------------------------------------ what is refused


EIGHT = torch.zeros(4, 64, dtype=torch.int8)
REFUSED: dict[str, tuple[Tensors, Any, str]] = {
    "no scale": ({"a.weight": W}, None, "its scale is missing: neither a.weight_scale_inv nor a.weight_scale"),
    "another group": (
        {"a.weight": W, "a.weight_scale": scales((4, 4), torch.float32)},
        None,
        r"of F32 and shape \(4, 4\)",
    ),
    "columns": ({"a.weight": W, "a.weight_scale": scales((1, 64), torch.float32)}, None, r"shape \(1, 64\)"),
    "halves": (
        {"a.weight": codes((2, 6, 64)), "a.weight_scale_inv": scales((2, 2, 1), torch.float32)},
        None,
        r"shape \(2, 2, 1\)",
    ),
    "a second scale": ({"a.weight": W, "a.weight_scale": S, "a.weight_scale_2": ONE}, None, "and at a.weight_scale_2"),
    "a scale of scales": (
        {"w": W, "w_scale": S, "w_outer_scale_denominator": ONE},
        None,
        "and at w_outer_scale_denominator",
    ),
    "a scale of inputs for good": (
        {"a.weight": W, "a.weight_scale": S, "a.pre_quant_scale": S},
        {"quant_method": "modelopt"},
        "a.pre_quant_scale of .*, which may change what the weights of a do",
    ),
    "both scales": ({"a.weight": W, "a.weight_scale": S, "a.weight_scale_inv": S}, None, "and at a.weight_scale:"),
    "zero points": ({"a.weight": W, "a.weight_scale": S, "a.weight_zero_point": S}, None, "and at a.weight_zero_point"),
    "INT8": ({"a.weight": EIGHT, "a.weight_scale": S}, None, "a.weight of .* holds I8"),
    "bitsandbytes": ({"a.weight": EIGHT, "a.SCB": S}, {"quant_method": "bitsandbytes"}, r"at a\.SCB"),
    "bitsandbytes of 4 bits": (
        {"a.weight": torch.zeros(128, 1, dtype=torch.uint8), "a.weight.absmax": S},
        None,
        r"at a\.weight\.absmax",
    ),
    "GPTQ": ({"a.qweight": EIGHT.int(), "a.scales": S, "a.qzeros": EIGHT.int()}, None, "a.qweight of .* holds I32"),
    "NVFP4": (
        {"a.weight": EIGHT.view(torch.uint8), "a.weight_scale": codes((4, 8)), "a.weight_scale_2": ONE},
        None,
        "holds U8 .* at a.weight_scale of F8_E4M3 .*, and at a.weight_scale_2",
    ),
    "NVFP4 of compressed-tensors": (
        {"a.weight_packed": EIGHT.view(torch.uint8), "a.weight_scale": codes((4, 8)), "a.weight_global_scale": ONE},
        None,
        "a.weight_packed of .* and at a.weight_global_scale",
    ),
    "integers of 4 bits": (
        {"a.weight_packed": EIGHT.int(), "a.weight_scale": S, "a.weight_shape": EIGHT.int()},
        None,
        "a.weight_packed of .* holds I32",
    ),
    "scales in float64": ({"a.weight": W, "a.weight_scale": codes((4, 1))}, None, "at a.weight_scale of F8_E4M3"),
    "a scale of floats": (
        {"a.weight": torch.ones(4, 64), "a.weight_scale": S},
        None,
        "a.weight_scale of .* a.weight is F32",
    ),
    "a scale of nothing": (
        {"a.weight_scale_inv": S},
        None,
        "a.weight_scale_inv of .* as a scale, and a.weight is missing",
    ),
    "exponents of nothing": ({"a.s": S.to(E8M0)}, None, "a.s of .* holds F8_E8M0"),
    "codes called a scale": ({"a.upscale": W, "a.upscale_scale": S}, None, "a.upscale of .* holds F8_E4M3"),
    "E8M0 as codes": ({"a.weight": S.to(E8M0), "a.weight_scale": S}, None, "a.weight of .* holds F8_E8M0"),
    "our own": (
        {"a.weight": W.view(torch.uint8), "a.weight_scale": S, "a.weight_traits": EIGHT.int()},
        None,
        "codes of this library's own states",
    ),
    "scales in the order of a kernel": (
        {"a._weight_qdata": W, "a._weight_scale": torch.ones(4, 2).to(E8M0)},
        {"quant_method": "torchao"},
        "which torchao may have written in the order of a kernel",
    ),
    "bytes without a scale": ({"a.weight": EIGHT}, None, "a.weight of .* holds I8 .* its scale is missing"),
    "experts without a scale": ({"e.gate_up": W}, None, "e.gate_up of .* its scale is missing"),
    "MXFP6": (
        {"a.weight_packed": torch.zeros(4, 48, dtype=torch.uint8), "a.weight_scale": scales((4, 2), torch.uint8)},
        None,
        "a.weight_packed of .* holds U8",
    ),
    "FP4 at floats": (
        {"a.weight_packed": EIGHT.view(torch.uint8), "a.weight_scale": scales((4, 4), torch.float32)},
        None,
        "a.weight_packed of .* holds U8",
    ),
    "FP4 in groups of 16": (
        {"a.weight": EIGHT.view(torch.float4_e2m1fn_x2), "a.weight_scale": scales((4, 8), E8M0)},
        None,
        "a.weight of .* holds F4",
    ),
    "another method": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "quark"},
        "settings with quant_method='quark'",
    ),
    "other squares": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "fp8", "weight_block_size": [96, 128]},
        r"weight_block_size=\[96, 128\]",
    ),
    "other groups": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"group_size": 16}}}},
        "group_size=16",
    ),
    "asymmetric": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"symmetric": False}}}},
        "symmetric=False",
    ),
    "rotated": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
        "a transform_config",
    ),
    "sparse": (
        {"a.weight": W, "a.weight_scale": S},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "a sparsity_config",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_refused_by_tensor_and_file(kind: str) -> None:
    tensors, config, said = REFUSED[kind]
    with pytest.raises(ValueError, match=said) as caught:
        stored_weights(headers_of(tensors), config)
    (line,) = str(caught.value).splitlines()
    assert "of 'model.safetensors' holds " in line
    assert "read are float8" in line


@pytest.mark.parametrize("groups", [[{}], "all", {"g": 1}, {"g": {"weights": 8}}], ids=str)
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match=r"^config_groups=.* groups by their names are read$"):
        stored_weights(headers_of({"w": codes((4, 64)), "w_scale": S}), {"config_groups": groups})


def test_a_weight_in_another_layout_is_not_written() -> None:
    tensors = {"w": codes((4, 64)), "w_scale": S}
    stored, weight = only(tensors), weight_of(only(tensors), tensors)
    for other in (
        FP8Tensor.from_codes(weight.codes, weight.scale, "E4M3FNUZ"),
        FP8Tensor.from_codes(weight.codes, 0.5, "E4M3"),
        FP8Tensor.from_codes(weight.codes, torch.ones(4, 2), "E4M3", block_size=32),
        FP8Tensor.from_codes(weight.codes[:2].contiguous(), weight.scale[:2].contiguous(), "E4M3"),
    ):
        with pytest.raises(ValueError, match=r"in 'model\.safetensors': it can't be written so"):
            written_parts(stored, other)


@pytest.mark.parametrize(("dtype", "entry"), [("BF16", 1 + 2.0**-20), ("F16", 2.0**-30), ("U8", 3.0)])
def test_a_scale_that_the_file_has_no_number_for_is_not_written(dtype: str, entry: float) -> None:
    tensors = {"w": codes((4, 64)), "w_scale": S}
    stored, weight = only(tensors), weight_of(only(tensors), tensors)
    weight.set_scale_(entry)
    with pytest.raises(ValueError, match=f"w has a scale of {entry}.*, which is no {dtype} of w_scale"):
        written_parts(replace(stored, scale_dtype=dtype), weight)
