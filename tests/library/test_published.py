"""Layouts of published files of codes: found by headers alone, read, and written back to the byte."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8manifold import FP8Tensor, decode
from fp8manifold._published import Header, StoredWeight, quantization_of, read_parts, stored_weights, written_parts

NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
Tensors = dict[str, Tensor]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def headers_of(tensors: Tensors) -> dict[str, Header]:
    def shape(x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-1], 2 * x.shape[-1]) if x.dtype == torch.float4_e2m1fn_x2 else tuple(x.shape)

    return {name: Header(NAMES[x.dtype], shape(x), "model.safetensors") for name, x in tensors.items()}


def only(tensors: Tensors, config: Any = None) -> StoredWeight:
    (stored,) = stored_weights(headers_of(tensors), config).values()
    return stored


def weight_of(stored: StoredWeight, tensors: Tensors, dtype: torch.dtype = torch.float32) -> FP8Tensor:
    codes, scale = read_parts(stored, tensors.__getitem__)
    return FP8Tensor.from_codes(codes, scale, stored.format, block_size=stored.block_size, dtype=dtype)


def as_bytes(x: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return x.dtype, tuple(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist()


def assert_written_as_read(stored: StoredWeight, tensors: Tensors) -> None:
    made = written_parts(stored, weight_of(stored, tensors))
    assert set(made) == {stored.codes, stored.scale}
    assert {name: as_bytes(x) for name, x in made.items()} == {name: as_bytes(tensors[name]) for name in made}


# ------------------------------------------------------------------------------------------- every shape of every scale


def codes(shape: tuple[int, ...], dtype: torch.dtype = E4M3) -> Tensor:
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8)
    if dtype == torch.float8_e5m2:  # no Inf, which no writer has
        drawn[(drawn & 127) == 124] = 0
    return drawn.view(dtype)


def scales(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype in (torch.uint8, E8M0):
        return torch.randint(90, 140, shape, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape) + 0.01).to(dtype)


def scale_at(stored: StoredWeight, scale: Tensor) -> Tensor:
    """The float32 scale of every weight, one at a time."""
    if scale.dtype in (torch.uint8, E8M0):
        scale = torch.tensor([2.0 ** (b - 127) for b in scale.view(torch.uint8).flatten().tolist()]).view(scale.shape)
    flat, shape = scale.float().flatten().tolist(), stored.shape
    down, across = -(-shape[-2] // 128) if len(shape) > 1 else 1, -(-shape[-1] // 128)
    out = torch.empty(shape)
    for place in range(out.numel()):
        row, column = divmod(place, shape[-1])
        matrix, row_there = divmod(row, shape[-2] if len(shape) > 1 else 1)
        index = {
            "tensor": 0,
            "channel": place // (out.numel() // shape[0]),
            "row": row,
            "block": place // 32,
            "square": (matrix * down + row_there // 128) * across + column // 128,
        }[stored.granularity]
        out.view(-1)[place] = flat[index]
    return out


#: shape of the weight, and what its scales may look like beside it
SHAPES: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "tensor": ((5, 7), [(), (1,), (1, 1)]),
    "channel": ((5, 7), [(5, 1), (5,)]),
    "channel of three": ((3, 5, 7), [(3, 1, 1), (3,)]),
    "row": ((3, 5, 7), [(3, 5, 1)]),
    "block": ((5, 64), [(5, 2)]),
    "block of three": ((2, 3, 64), [(2, 3, 2)]),
    "square": ((130, 13), [(2, 1), (2, 1, 1, 1)]),
    "square of columns": ((3, 140), [(1, 2), (1, 1, 2, 1)]),
    "square of three": ((2, 130, 3), [(2, 2, 1)]),
    "tensor of a vector": ((7,), [(), (1,)]),
}
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


W, S = codes((4, 64)), scales((4, 1), torch.float32)
ONE = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("codes_name", "scale_name", "name"),
    [
        ("a.weight", "a.weight_scale_inv", "a.weight"),
        ("a.weight", "a.weight_scale", "a.weight"),
        ("a.weight", "a.scale", "a.weight"),
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


def test_settings_wherever_they_are() -> None:
    own = {"quant_method": "fp8"}
    assert quantization_of({"quantization_config": own}) == own
    assert quantization_of({"compression_config": own}) == own
    assert quantization_of({"text_config": {"quantization_config": own}}) == own
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert quantization_of({}, modelopt) == {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert quantization_of({}) is None


def test_a_folder_of_floats_has_none() -> None:
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
    package = pytest.importorskip("compressed_tensors.quantization")
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
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    base = pytest.importorskip("compressed_tensors.compressors")
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
        ((256, 384), (2, 3), torch.float32),
        ((256, 384), (2, 3), torch.bfloat16),
        ((256, 384), (2, 3), E8M0),
        ((256, 384), (256, 12), torch.uint8),
        ((3, 256, 128), (3, 2, 1), torch.float32),
        ((40, 50), (), torch.float32),
    ],
)
def test_transformers_reads_the_same(shape: Any, scale_shape: Any, scale: torch.dtype, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    tensors = {"weight": codes(shape), "weight_scale_inv": scales(scale_shape, scale)}
    read = weight_of(only(tensors), tensors, dtype).dequantize()
    wanted = theirs._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], output_dtype=dtype)
    torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same_of_gpt_oss(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    packed = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    tensors = {"e.down_proj_blocks": packed, "e.down_proj_scales": scales((3, 5, 4), torch.uint8)}
    read = weight_of(only(tensors, {"quant_method": "mxfp4"}), tensors, dtype).dequantize()
    wanted = theirs(packed, tensors["e.down_proj_scales"], dtype=dtype)
    assert torch.equal(read.transpose(1, 2), wanted)
    assert torch.equal(read.transpose(1, 2).signbit(), wanted.signbit())


# -------------------------------------------------------------------------------------------------- scales of no weight


NAN, MINUS_ZERO = 127, 128


@pytest.mark.parametrize("kind", ["tensor", "channel", "square", "block"])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0], ids=str)
@pytest.mark.parametrize("code", [0, MINUS_ZERO, NAN])
def test_a_scale_of_zero_over_zeros_or_nan_comes_back(kind: str, scale: torch.dtype, code: int) -> None:
    """What 0 / 0 gives, and what E8M0 has for zeros; the values do not depend on it."""
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


@pytest.mark.parametrize(("dtype", "mark"), [(torch.float32, TINY * (1 + 2.0**-23)), (torch.uint8, 1)])
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
