"""Scales of published files that stand for nothing, and what is refused by tensor and
file.
"""

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
from torch import Tensor

from fp8manifold import FP8Parameter, FP8Tensor
from fp8manifold._published import read_parts, stored_weights, written_parts
from fp8manifold.optim import StiffnessAdamW

NAN, MINUS_ZERO = 127, 128


def emptied(kind: str, scale: torch.dtype, code: int) -> tuple[Tensors, Any, Tensor]:
    """Return tensors whose first scale is 0, what they store, and a mask.

    The mask is of the weights under that scale, all of which have the same `code`.
    """
    shape, (first, *_) = SHAPES[kind]
    tensors = {"w": codes(shape), "w_scale": scales(first, scale)}
    drawn = tensors["w"].view(torch.uint8)
    drawn[(drawn & 127) > 125] = 125  # at the end of the range a scale is widened
    tensors["w_scale"].view(-1)[:1].view(torch.uint8).zero_()
    stored = only(tensors)
    group = scale_at(stored, torch.arange(tensors["w_scale"].numel()).view(first) + 1.0) == 1
    drawn[group] = code
    return tensors, stored, group


@pytest.mark.parametrize("kind", ["tensor", "channel", "square", "block"])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0])
@pytest.mark.parametrize("code", [0, MINUS_ZERO, NAN])
def test_a_scale_of_zero_over_zeros_or_nan_comes_back(
    kind: str, scale: torch.dtype, code: int
) -> None:
    """0 / 0 gives NaN, and E8M0 has no zero; the values do not depend on it."""
    tensors, stored, group = emptied(kind, scale, code)
    values = weight_of(stored, tensors).dequantize()
    assert torch.equal(
        values[group].isnan(), torch.full_like(values[group], code == NAN, dtype=torch.bool)
    )
    assert code == NAN or torch.equal(
        values[group].signbit(), (values[group] == 0) & (code == MINUS_ZERO)
    )
    assert_written_as_read(stored, tensors)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, E8M0])
@pytest.mark.parametrize("kind", ["tensor", "channel", "square", "block"])
def test_a_step_moves_what_had_a_scale_of_zero_and_it_is_written(
    kind: str, scale: torch.dtype
) -> None:
    """Without a gradient not one byte changes.

    With one the weights move, at a scale that the file's dtype has.
    """
    tensors, stored, group = emptied(kind, scale, 0)
    old_codes, old_scale = read_parts(stored, tensors.__getitem__)
    weight = FP8Parameter.from_codes(
        old_codes.clone(), old_scale.clone(), stored.format, block_size=stored.block_size, seed=1
    )
    optimizer = StiffnessAdamW([weight.requires_grad_()], lr=0.01, weight_decay=0.0)
    step_from(optimizer, weight, torch.zeros(weight.shape))
    parts = written_parts(stored, weight)
    assert {name: as_bytes(x) for name, x in parts.items()} == {
        name: as_bytes(tensors[name]) for name in parts
    }
    step_from(optimizer, weight, torch.ones(weight.shape))
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
    with pytest.raises(
        ValueError, match=r"a\.weight_scale, of the codes a\.weight of 'model\.safetensors', holds"
    ):
        read_parts(stored, tensors.__getitem__)


@pytest.mark.parametrize(("dtype", "stand_in"), [(torch.float32, 1 + 2.0**-7), (torch.uint8, 128)])
def test_a_scale_that_stands_for_zero_is_refused_over_zeros_alone(
    dtype: torch.dtype, stand_in: float
) -> None:
    """In memory this number stands for a scale of 0; a file that has it would be ambiguous."""
    tensors = {"w": codes((4, 64)), "w_scale": scales((4, 1), dtype)}
    tensors["w_scale"][2] = stand_in
    assert_written_as_read(only(tensors), tensors)
    tensors["w"].view(torch.uint8)[2] = 0
    with pytest.raises(ValueError, match="w_scale, of the codes w of"):
        read_parts(only(tensors), tensors.__getitem__)


def test_an_inf_among_the_codes_is_refused_by_tensor_and_file() -> None:
    tensors = {"w": torch.full((2, 2), torch.inf).to(torch.float8_e5m2), "w_scale": ONE}
    with pytest.raises(
        ValueError, match=r"w of 'model\.safetensors': codes hold 124, which is Inf in E5M2"
    ):
        read_parts(only(tensors), tensors.__getitem__)


def a(weight: Tensor | None = W, **companions: Tensor) -> Tensors:
    """Tensors ``a.weight``, which may be missing, and ``a.weight_...``."""
    parts = {} if weight is None else {"a.weight": weight}
    return parts | {f"a.weight_{name}": tensor for name, tensor in companions.items()}


F32, F8 = torch.float32, codes((4, 8))
EIGHT = torch.zeros(4, 64, dtype=torch.int8)
BYTES, WORDS = EIGHT.view(torch.uint8), EIGHT.int()
REFUSED: dict[str, tuple[Tensors, str]] = {
    "no scale": (a(), "its scale is missing: neither a.weight_scale_inv nor a.weight_scale"),
    "another group": (a(scale=scales((4, 4), F32)), r"of F32 and shape \(4, 4\)"),
    "columns": (a(scale=scales((1, 64), F32)), r"shape \(1, 64\)"),
    "halves": (a(codes((2, 6, 64)), scale_inv=scales((2, 2, 1), F32)), r"shape \(2, 2, 1\)"),
    "a second scale": (a(scale=S, scale_2=ONE), "and at a.weight_scale_2"),
    "a scale of scales": (
        {"w": W, "w_scale": S, "w_outer_scale_denominator": ONE},
        "and at w_outer_scale_denominator",
    ),
    "both scales": (a(scale=S, scale_inv=S), "and at a.weight_scale:"),
    "zero points": (a(scale=S, zero_point=S), "and at a.weight_zero_point"),
    "INT8": (a(EIGHT, scale=S), "a.weight of .* holds I8"),
    "bitsandbytes of 4 bits": (
        {"a.weight": BYTES[:, :1], "a.weight.absmax": S},
        r"at a\.weight\.absmax",
    ),
    "GPTQ": ({"a.qweight": WORDS, "a.scales": S, "a.qzeros": WORDS}, "a.qweight of .* holds I32"),
    "NVFP4": (
        a(BYTES, scale=F8, scale_2=ONE),
        "holds U8 .* at a.weight_scale of F8_E4M3 .*, and at a.weight_scale_2",
    ),
    "NVFP4 of compressed-tensors": (
        a(None, packed=BYTES, scale=F8, global_scale=ONE),
        "a.weight_packed of .* and at a.weight_global_scale",
    ),
    "integers of 4 bits": (
        a(None, packed=WORDS, scale=S, shape=WORDS),
        "a.weight_packed of .* holds I32",
    ),
    "scales in float64": (a(scale=codes((4, 1))), "at a.weight_scale of F8_E4M3"),
    "a scale of floats": (a(torch.ones(4, 64), scale=S), "a.weight_scale of .* a.weight is F32"),
    "a scale of nothing": (
        a(None, scale_inv=S),
        "a.weight_scale_inv of .* as a scale, and a.weight is missing",
    ),
    "exponents of nothing": ({"a.s": S.to(E8M0)}, "a.s of .* holds F8_E8M0"),
    "codes called a scale": (
        {"a.upscale": W, "a.upscale_scale": S},
        "a.upscale of .* holds F8_E4M3",
    ),
    "E8M0 as codes": (a(S.to(E8M0), scale=S), "a.weight of .* holds F8_E8M0"),
    "our own": (
        a(W.view(torch.uint8), scale=S, traits=WORDS),
        "codes of this library's own states",
    ),
    "bytes without a scale": (a(EIGHT), "a.weight of .* holds I8 .* its scale is missing"),
    "experts without a scale": ({"e.gate_up": W}, "e.gate_up of .* its scale is missing"),
    "MXFP6": (
        a(None, packed=BYTES[:, :48], scale=scales((4, 2), torch.uint8)),
        "a.weight_packed of .* holds U8",
    ),
    "FP4 at floats": (
        a(None, packed=BYTES, scale=scales((4, 4), F32)),
        "a.weight_packed of .* holds U8",
    ),
    "FP4 in groups of 16": (
        a(EIGHT.view(torch.float4_e2m1fn_x2), scale=scales((4, 8), E8M0)),
        "a.weight .* holds F4",
    ),
}
#: likewise, with the method of config.json
OF_METHODS: dict[str, tuple[Tensors, str]] = {
    "modelopt": (
        a(scale=S) | {"a.pre_quant_scale": S},
        "a.pre_quant_scale of .*, which may change what the weights of",
    ),
    "bitsandbytes": ({"a.weight": EIGHT, "a.SCB": S}, r"at a\.SCB"),
    "torchao": (
        {"a._weight_qdata": W, "a._weight_scale": torch.ones(4, 2).to(E8M0)},
        "which torchao may have written in the order of a kernel",
    ),
}
#: settings beside codes and scales that are read
SETTINGS: dict[str, dict[str, Any]] = {
    "settings with quant_method='quark'": {"quant_method": "quark"},
    r"weight_block_size=\[96, 128\]": {"quant_method": "fp8", "weight_block_size": [96, 128]},
    "group_size=16": {"config_groups": {"g": {"weights": {"group_size": 16}}}},
    "symmetric=False": {"config_groups": {"g": {"weights": {"symmetric": False}}}},
    "a transform_config": {"transform_config": {"config_groups": {"u": {}}}},
    "a sparsity_config": {"sparsity_config": {"format": "sparse-24-bitmask"}},
}
CASES: list[tuple[Tensors, Any, str]] = [
    (tensors, None, words) for tensors, words in REFUSED.values()
]
CASES += [
    (tensors, {"quant_method": method}, words) for method, (tensors, words) in OF_METHODS.items()
]
CASES += [
    (a(scale=S), {"quant_method": "compressed-tensors", **settings}, words)
    for words, settings in SETTINGS.items()
]


@pytest.mark.parametrize(
    ("tensors", "config", "words"), CASES, ids=[*REFUSED, *OF_METHODS, *SETTINGS]
)
def test_what_is_not_known_is_refused_by_tensor_and_file(
    tensors: Tensors, config: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        stored_weights(headers_of(tensors), config)
    (line,) = str(caught.value).splitlines()
    assert "of 'model.safetensors' holds " in line
    assert "fp8manifold reads float8" in line


@pytest.mark.parametrize("groups", [[{}], "all", {"g": 1}, {"g": {"weights": 8}}])
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match=r"^config_groups=.* groups by name are needed$"):
        stored_weights(headers_of(PLAIN), {"config_groups": groups})


PLAIN = {"w": codes((4, 64)), "w_scale": S}


@pytest.mark.parametrize(
    "change",
    [
        lambda w: FP8Tensor.from_codes(w.codes, w.scale, "E4M3FNUZ"),
        lambda w: FP8Tensor.from_codes(w.codes, 0.5, "E4M3"),
        lambda w: FP8Tensor.from_codes(w.codes, torch.ones(4, 2), "E4M3", block_size=32),
        lambda w: FP8Tensor.from_codes(w.codes[:2].clone(), w.scale[:2].clone(), "E4M3"),
    ],
    ids=["format", "tensor", "block", "shape"],
)
def test_a_weight_in_another_layout_is_not_written(change: Any) -> None:
    stored = only(PLAIN)
    changed = change(weight_of(stored, PLAIN))
    with pytest.raises(ValueError, match=r"in 'model\.safetensors': it can't be written back"):
        written_parts(stored, changed)


@pytest.mark.parametrize(
    ("dtype", "entry"), [("BF16", 1 + 2.0**-20), ("F16", 2.0**-30), ("U8", 3.0)]
)
def test_a_scale_that_the_file_has_no_number_for_is_not_written(dtype: str, entry: float) -> None:
    stored, weight = only(PLAIN), weight_of(only(PLAIN), PLAIN)
    weight.set_scale_(entry)
    with pytest.raises(
        ValueError, match=f"w has the scale {entry}.*: {dtype} of w_scale can't hold it"
    ):
        written_parts(replace(stored, scale_dtype=dtype), weight)
