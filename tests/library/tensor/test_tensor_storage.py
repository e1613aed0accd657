"""FP8Tensor as a store: its values, its bytes, and the values it refuses."""

import gc
import math

import geoopt
import pytest
import torch
from optimizer_cases import frozen, normal, same_bits
from tensor_cases import decoded, every_format, every_granularity, parameter, same_store
from torch import Tensor, nn

import fp8manifold as fm


@every_granularity
@every_format
def test_values_are_the_nearest_at_the_scale(name, granularity) -> None:
    w = normal(6, 96, std=0.1)
    p = fm.FP8Parameter(w, name, granularity=granularity)
    # Codes of few binades begin without headroom: their scales widen when they need it.
    few_binades = name in ("E2M5", "E1M6", "E2M3", "E2M1")
    scale = fm.storage_scale(w, name, granularity, headroom=1.0 if few_binades else None)
    wide = scale.repeat_interleave(32, -1) if granularity == "block" else scale
    assert p.codes.dtype == torch.uint8
    assert p.scale.dtype == torch.float32
    assert torch.equal(p.scale, scale)
    assert torch.equal(p.codes, fm.encode(w / wide, name))
    assert torch.equal(p.dequantize(), fm.round_to_grid(w / wide, name) * wide)
    assert torch.equal(p.dequantize().double(), decoded(p))
    assert torch.equal(p.expanded_scale().expand(w.shape), wide.expand(w.shape))
    assert (p.granularity, p.block_size) == (granularity, 32 if granularity == "block" else None)


@pytest.mark.parametrize(
    ("shape", "granularity", "scale_shape"),
    [
        ((4, 64), "tensor", ()),
        ((4, 64), "channel", (4, 1)),
        ((4, 64), "block", (4, 2)),
        ((4, 3, 2, 2), "channel", (4, 1, 1, 1)),
        ((2, 3, 32), "block", (2, 3, 1)),
        ((64,), "block", (2,)),
        # A scale for each weight would be four bytes more.
        ((64,), "channel", ()),
        ((), "channel", ()),
        ((0, 5), "channel", (0, 1)),
        ((3, 0), "channel", (3, 1)),
        ((3, 0), "block", (3, 0)),
        ((0,), "tensor", ()),
    ],
)
def test_shapes_of_scales(shape, granularity, scale_shape) -> None:
    p = fm.FP8Parameter(normal(*shape), "E4M3", granularity=granularity)
    assert tuple(p.scale.shape) == tuple(p.largest().shape) == scale_shape
    assert p.shape == p.codes.shape == p.dequantize().shape == shape
    assert p.is_contiguous()
    assert torch.equal(p.dequantize().double(), decoded(p))


@every_format
def test_every_code_survives(name) -> None:
    fmt = fm.FloatFormat.from_string(name)
    codes = torch.arange(2 * fmt.sign_bit, dtype=torch.int32).to(torch.uint8)
    codes = codes[~fm.decode(codes, fmt).isinf()]
    scale = torch.tensor([[2.0**-20], [1.0], [2.0**13]])
    values = fm.FP8Parameter.from_codes(codes.expand(3, -1).contiguous(), scale, fmt).dequantize()
    assert same_bits([values], [fm.decode(codes, fmt) * scale])
    again = fm.FP8Parameter(values, fmt, scale=scale)
    assert torch.equal(again.codes, fm.encode(fm.decode(codes, fmt), fmt).expand(3, -1))


@pytest.mark.parametrize(
    ("float_dtype", "dtype"),
    [
        (torch.float64, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_other_floats_are_rounded_once(float_dtype, dtype) -> None:
    w = normal(3, 40).to(float_dtype)
    p = fm.FP8Parameter(w, "E4M3")
    assert p.dtype == dtype
    assert torch.equal(p.codes, fm.encode(w.double() / p.scale, "E4M3"))
    tie = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert fm.FP8Tensor(tie, "E4M3", scale=1.0).item() == 1.125


def test_a_parameter_of_every_family() -> None:
    p, t = parameter(), fm.FP8Tensor(normal(3, 3))
    assert all(
        isinstance(p, kind)
        for kind in (nn.Parameter, geoopt.ManifoldParameter, fm.FP8Tensor, Tensor)
    )
    assert p.requires_grad
    assert p.is_leaf
    assert not isinstance(t, geoopt.ManifoldParameter)
    assert not t.requires_grad
    coarse = fm.FP8Parameter.from_float(normal(2, 2), "E5M2", seed=3)
    assert type(coarse) is fm.FP8Parameter
    assert (
        fm.FP8Parameter(coarse, rounding="nearest").format
        == fm.FP8Tensor(coarse).format
        == coarse.format
    )
    vector = fm.FP8Tensor.from_codes(
        torch.tensor([56, 57], dtype=torch.uint8), torch.tensor([0.5]), "E4M3"
    )
    assert vector.fill_(3.0).tolist() == [3.0, 3.0]
    assert type(nn.Parameter(t)) is fm.FP8Tensor
    assert isinstance(nn.Parameter(t), nn.Parameter)


@every_format
def test_the_remainder_is_what_rounding_left(name) -> None:
    """Code plus remainder is the weight's chart coordinate, to half of 1/256 of a step.

    Or as near as int8 comes to it.
    """
    w = normal(5, 200, std=0.3)
    p = fm.FP8Parameter(w, name, keep_remainder=True)
    assert p.remainder is not None
    assert p.remainder.dtype == torch.int8
    assert p.remainder.shape == w.shape
    coordinate = fm.to_chart(w.double() / p.scale, name)
    stored = fm.to_chart(fm.decode(p.codes, name, torch.float64), name) + p.remainder / 256
    assert ((stored - coordinate).abs() <= 1 / 512).logical_or(p.remainder == 127).all()
    assert p.remainder.unique().numel() > 100
    assert parameter(name).remainder is None


def test_it_is_one_byte_a_weight() -> None:
    """All tensors that come alive with a parameter, by their storage: no float copy."""
    w = normal(64, 4096)

    def live() -> dict[int, Tensor]:
        gc.collect()
        return {id(x): x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)}

    live_before = live()
    p = fm.FP8Parameter(w, "E4M3")
    storages = [x.untyped_storage() for key, x in live().items() if key not in live_before]
    new_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    parts = (p.codes, p.scale, p.counter)
    assert new_bytes == sum(part.untyped_storage().nbytes() for part in parts)
    assert new_bytes == 64 * 4096 + 64 * 4 + 8


@pytest.mark.parametrize(
    "call", ["linear", "bias", "tokens", "matmul", "slice", "embedding", "autocast"]
)
def test_autograd_keeps_codes(call) -> None:
    """Of tensors of the weight's size the backward pass saves nothing but its codes."""
    x, b = normal(5, 64, seed=1).requires_grad_(), normal(48, seed=2)
    calls = {
        "linear": lambda p: nn.functional.linear(x, p),
        "bias": lambda p: nn.functional.linear(x, p, b),
        "tokens": lambda p: nn.functional.linear(x[None], p, b),
        "matmul": lambda p: x @ p.T,
        "slice": lambda p: x[:4] * p[:4],
        "embedding": lambda p: nn.functional.embedding(torch.arange(6), p),
        "autocast": lambda p: nn.functional.linear(x, p, b),
    }
    results, stored = [], parameter(shape=(48, 64))
    for p in (stored, nn.Parameter(stored.dequantize())):
        x.grad, saved = None, []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            ),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=call == "autocast"),
        ):
            y = calls[call](p)
        if p is stored:
            large = [t.shape for t in saved if type(t) is Tensor and t.numel() > x.numel()]
            assert large == []
        y.float().square().sum().backward()
        results.append(frozen([y, p.grad, x.grad]))
    assert results[0] == results[1]


@every_format
def test_it_never_holds_inf_and_nan_only_where_there_is_a_code(name) -> None:
    fmt = fm.FloatFormat.from_string(name)
    p = fm.FP8Tensor(torch.tensor([math.inf, -math.inf, 0.0]), name, scale=1.0)
    assert p.tolist() == [fmt.max, -fmt.max, 0.0]
    if fmt.nan_code is None:
        with pytest.raises(ValueError, match="no code for NaN"):
            fm.FP8Tensor(torch.tensor([math.nan]), name, scale=1.0)
        with pytest.raises(ValueError, match="no code for NaN"):
            p[0] = math.nan
        assert (p.tolist(), int(p.counter)) == ([fmt.max, -fmt.max, 0.0], 0)
    else:
        assert fm.FP8Tensor(torch.tensor([math.nan]), name, scale=1.0).isnan().all()
    if fmt.inf_code is not None:
        with pytest.raises(ValueError, match="Inf"):
            fm.FP8Tensor.from_codes(
                torch.tensor([fmt.inf_code | fmt.sign_bit], dtype=torch.uint8), p.scale, name
            )


@every_granularity
@every_format
def test_parts_make_the_tensor(name, granularity) -> None:
    p = parameter(name, granularity=granularity, seed=2**31)
    q = fm.FP8Parameter.from_codes(p.codes, p.scale, name, block_size=p.block_size, seed=2**31)
    assert same_store(p, q)
    assert q.codes.data_ptr() == p.codes.data_ptr()
    assert (q.seed, q.rounding, q.requires_grad) == (2**31, "stochastic", False)
