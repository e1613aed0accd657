"""Scales of blocks and of squares: a byte each, read as float32, the same to the bit
wherever they go and are used.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import frozen, normal, snapshot, step_from, take_steps, with_factors
from paths import PATHS, by
from safetensors.torch import load_file, save_file
from tensor_cases import decoded, parameter, same_store
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from nanogpt_bench.setup.memory import memory_of

#: the ends, 1, and the neighbours of what bytes can be mistaken for
EXPONENTS = (-126, -125, -1, 0, 1, 2, 126, 127)


def extreme() -> fm.FP8Parameter:
    """Four rows of two blocks at all of these scales; the smallest subnormals of E4M3
    at 2^-126 are in float32.
    """
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    codes[codes & 127 == 127] = 0
    scale = torch.tensor([2.0**e for e in EXPONENTS]).view(4, 2)
    options = {"seed": 3, "counter": 5, "requires_grad": True}
    return fm.FP8Parameter.from_codes(codes, scale, "E4M3", block_size=32, **options)


def test_a_block_has_one_byte() -> None:
    p = parameter(shape=(16, 128), granularity="block")
    held = {
        name: (getattr(p, name).dtype, getattr(p, name).nbytes)
        for name in p.__tensor_flatten__()[0]
    }
    scales = (torch.uint8, p.numel() // 32)
    assert held == {
        "codes": (torch.uint8, p.numel()),
        "kept_scale": scales,
        "counter": (torch.int64, 8),
    }
    assert memory_of([p]) == p.numel() + p.numel() // 32 + 8
    assert (p.scale.dtype, p.scale.shape, p.granularity) == (torch.float32, (16, 4), "block")
    assert all(parameter(granularity=other).exponents is None for other in ("tensor", "channel"))


def test_scales_are_read_as_the_float32_that_they_are() -> None:
    p = extreme()
    assert p.exponents.flatten().tolist() == [e + 127 for e in EXPONENTS]
    assert p.scale.flatten().tolist() == [2.0**e for e in EXPONENTS]
    assert torch.equal(p.expanded_scale(), p.scale.repeat_interleave(32, -1))
    expected, rows = (
        decoded(p).float(),
        torch.tensor([3, 0, 3]),
    )  # beyond float32 at 2^126 and 2^127
    assert torch.equal(p.dequantize(), expected)
    assert torch.equal(nn.functional.embedding(rows, p), expected[rows])
    assert "scale=2^-126..2^127" in repr(p)


def test_every_scale_that_there_is() -> None:
    """254 of them, by the constructor, by number and by tensor."""
    scales = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    p = fm.FP8Parameter.from_codes(
        torch.zeros(254, 32, dtype=torch.uint8), scales[:, None], "E4M3", block_size=32
    )
    assert p.exponents.flatten().tolist() == list(range(1, 255))
    assert torch.equal(p.scale[:, 0], scales)
    for scale in (2.0**-126, 2.0**127):
        assert (
            fm.FP8Parameter(torch.zeros(2, 32), granularity="block", scale=scale).scale.tolist()
            == [[scale]] * 2
        )
    for fill, exponent in (
        (3e38, 120),
        (1e-38, -126),
    ):  # what the largest and the smallest weights ask for
        w = torch.full((1, 32), fill)
        assert (
            fm.FP8Parameter(w, "E4M3", granularity="block", headroom=1.0).scale.item()
            == 2.0**exponent
        )


def test_what_shares_memory_sees_a_new_scale() -> None:
    p = extreme()
    shared = [p.detach(), p.data, fm.FP8Parameter(p), p.view_as(p)]
    version, before = p._version, p.exponents
    assert p.set_scale_(0.5) is p
    assert p.exponents is before
    assert p._version > version
    assert p.scale.unique().tolist() == [0.5]
    for other in shared:
        assert torch.equal(other, p.dequantize())
    p.scale = p.scale * 2
    p.scale *= 2
    assert p.exponents is before
    assert shared[0].scale.unique().tolist() == [2.0]
    shared[0].rescale_(8.0)
    assert p.scale.unique().tolist() == [8.0]


@pytest.mark.parametrize("granularity", ["block", "square"])
def test_scales_narrow_and_are_refitted_in_their_memory(granularity) -> None:
    p = parameter("E4M3", (200, 192), granularity=granularity, rounding="nearest", headroom=1.0)
    values, memory = p.dequantize(), p.exponents
    p.rescale_(64 * p.scale)
    assert p.adapt_scale_(headroom=1.0)
    torch.testing.assert_close(p.dequantize(), values, rtol=2**-4, atol=1e-4)
    with torch.no_grad():
        p.copy_(1000 * values)
        torch.testing.assert_close(p.dequantize(), 1000 * values, rtol=2**-4, atol=0.1)
        p.copy_(fm.FP8Tensor(values, "E4M3", granularity=granularity))
        torch.testing.assert_close(p.dequantize(), values, rtol=2**-4, atol=1e-4)
        p.normal_(std=1e-6)
    assert (p.scale < 1e-6).all()
    assert p.exponents is memory


def through_safetensors(p, folder):
    source, target = (
        nn.ParameterDict({"w": x}) for x in (p, parameter(granularity="block", seed=9))
    )
    save_file(source.state_dict(), folder / "w")
    target.load_state_dict(read := load_file(folder / "w"))
    assert read["w_scale"].dtype == torch.uint8
    assert same_store(fm.unflatten_state_dict(read)["w"], p)
    return target["w"]


def through_checkpoint(p, folder):
    if torch.__version__ < (2, 9):  # which asks for a storage
        return copy.deepcopy(p)
    q = parameter(granularity="block", seed=9)
    dcp.save({"w": p.detach()}, checkpoint_id=folder)
    dcp.load({"w": q.detach()}, checkpoint_id=folder)
    return q


def through_meta(p, folder):
    layer = nn.Linear(64, 4, bias=False, device="meta")
    layer.weight = fm.FP8Parameter(p.detach().to("meta"))
    assert layer.weight.exponents.is_meta
    layer.to_empty(device="cpu")
    assert layer.weight.scale.unique().tolist() == [1.0]
    layer.load_state_dict({"weight": p.detach()})
    return layer.weight


TRIPS = {
    "safetensors": through_safetensors,
    "distributed checkpoint": through_checkpoint,
    "meta": through_meta,
    "copy_": lambda p, _: parameter(granularity="block", seed=9).detach().copy_(p.detach()),
    "shared": lambda p, _: copy.deepcopy(p).share_memory_(),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_extreme_scales_come_back_to_the_bit(trip, tmp_path) -> None:
    p = extreme()
    back = trip(p, tmp_path)
    assert same_store(back, p)
    assert torch.equal(back.exponents, p.exponents)
    assert back.exponents.dtype == torch.uint8
    assert back.exponents.data_ptr() != p.exponents.data_ptr()
    assert torch.equal(back.dequantize(), p.dequantize())


def test_scales_that_were_cast_as_they_were_read_are_refused() -> None:
    """As distributed checkpoints do, which copy into what is there."""
    exponents = nn.ParameterDict({"w": extreme()}).state_dict()
    floats = nn.ParameterDict({"w": extreme().detach().set_scale_(3.0)}).state_dict()
    for state, cast, was in (
        (exponents, torch.float32, "exponents"),
        (floats, torch.uint8, "torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"w_scale is {cast}, and was {was} when it was saved"):
            fm.unflatten_state_dict(state | {"w_scale": state["w_scale"].to(cast)})


@pytest.mark.usefixtures("cpp_compiler")
def test_a_scale_is_read_in_compiled_code() -> None:
    torch._dynamo.reset()
    p = extreme()
    read = torch.compile(
        lambda w: (w.scale + 0.0, w.expanded_scale() + 0.0, w * 1.0), fullgraph=True
    )
    for _ in range(2):
        for ours, its in zip(read(p), (p.scale, p.expanded_scale(), p.dequantize()), strict=True):
            assert torch.equal(ours, its)
        p.set_scale_(p.scale.flip(0))


#: whole squares, one partial, partial ones of runs of 64, 32 and 1, and matrices of
#: matrices
SHAPES = ((256, 128), (5, 7), (130, 64), (200, 192), (257, 160), (130, 131), (2, 140, 256))


def weight(shape, name="E4M3", seed=0, *, factors=False, **options) -> fm.FP8Parameter:
    w = normal(*shape, seed=seed) * torch.exp2(
        4 * normal(*shape[:-1], 1, seed=seed + 1).clamp(-1, 1)
    )
    p = fm.FP8Parameter(w, name, granularity="square", **{"seed": seed, **options})
    return with_factors(p, factors)


def squares(shape):
    starts = [(i, j) for i in range(0, shape[-2], 128) for j in range(0, shape[-1], 128)]
    return [
        ((..., slice(i, i + 128), slice(j, j + 128)), (..., i // 128, j // 128)) for i, j in starts
    ]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1), (0, 5), (4200, 260)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_square_is_what_it_is_alone(shape, dtype) -> None:
    w = normal(*shape, seed=2).to(dtype)
    kept = w.numel() < 2**20
    p = fm.FP8Tensor(w, "E4M3", granularity="square", keep_remainder=kept)
    assert (p.granularity, p.block_size) == ("square", (128, 128))
    assert (p.exponents.dtype, p.scale.dtype) == (torch.uint8, torch.float32)
    assert p.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    for where, scale in squares(shape) if len(shape) == 2 else ():
        alone = fm.FP8Tensor(w[where], "E4M3", granularity="tensor", keep_remainder=kept)
        assert torch.equal(p.scale[scale], alone.scale)
        assert torch.equal(p.codes[where], alone.codes)
        assert torch.equal(p.dequantize()[where], alone.dequantize())
        assert torch.equal(p.largest()[scale], alone.largest())
        assert not kept or torch.equal(p.remainder[where], alone.remainder)
    assert torch.equal(p.dequantize(), (fm.decode(p.codes, "E4M3") * p.expanded_scale()).to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_views_and_rows_are_decoded_alone(shape) -> None:
    p = weight(shape)
    values = p.dequantize()
    for view in (
        lambda x: x[1:],
        lambda x: x[-1],
        lambda x: x.mT,
        lambda x: x.split(1)[1],
        lambda x: x.unbind()[0],
    ):
        assert torch.equal(view(p), view(values))
    if len(shape) == 2:
        rows = torch.tensor([[shape[0] - 1, 0], [3, 3]])
        assert torch.equal(nn.functional.embedding(rows, p), values[rows])
        x = normal(3, shape[-1], seed=5)
        assert torch.equal(nn.functional.linear(x, p), nn.functional.linear(x, values))


def test_nan_is_kept_and_no_scale_sees_it() -> None:
    codes = torch.zeros(130, 130, dtype=torch.uint8)
    codes[0, 0], codes[0, 1], codes[129, 129] = 127, 56, 128
    p = fm.FP8Tensor.from_codes(codes, torch.full((2, 2), 0.5), "E4M3", block_size=(128, 128))
    assert p[0, 0].isnan()
    assert p.largest().tolist() == [[0.5, 0.0], [0.0, 0.0]]


STEPS = {
    "adamw": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, stiffness=1.0, **o),
    "adamw bfloat16": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, moments="bfloat16", **o),
    "adamw 8bit": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, moments="8bit", **o),
    "residual8": lambda p, **o: optim.StiffnessAdamW(p, lr=0.02, writeback="residual8", **o),
    "muon": lambda p, **o: optim.StiffnessMuon(p, lr=0.05, **o),
    "muon 8bit": lambda p, **o: optim.StiffnessMuon(p, lr=0.05, moments="8bit", **o),
    "lion": lambda p, **o: optim.StiffnessLion(p, lr=0.02, **o),
    "sgd": lambda p, **o: optim.StiffnessSGD(p, lr=0.1, momentum=0.9, **o),
    "riemannian": lambda p, **o: optim.RiemannianAdam(p, lr=1.0, **o),
}


@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("kind", STEPS)
def test_paths_have_the_same_bits(kind, factors) -> None:
    shapes = SHAPES[:-1] if kind.startswith("muon") else SHAPES
    twins = [
        [weight(shape, seed=i, factors=factors) for i, shape in enumerate(shapes)] for _ in PATHS
    ]
    made = [by(path, STEPS[kind](p, seed=3)) for p, path in zip(twins, PATHS, strict=True)]
    take_steps(made, twins, range(4))
    for i, (native, eager) in enumerate(zip(*twins, strict=True)):
        assert same_store(native, eager)
        assert not torch.equal(native.codes, weight(tuple(native.shape), seed=i).codes)
    states = [frozen(snapshot(each)["state"]["state"]) for each in made]
    assert states[0] == states[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_at_equal_scales_it_is_the_step_of_one_scale(shape, writeback, path) -> None:
    w = normal(*shape, seed=7).clamp(-3, 3)
    both = [
        fm.FP8Parameter(w, granularity=kind, scale=2.0**-4, seed=1) for kind in ("square", "tensor")
    ]
    for p in both:
        optimizer = by(path, optim.StiffnessAdamW([p], lr=0.02, writeback=writeback, seed=5))
        take_steps([optimizer], [[p]], range(3))
    assert torch.equal(both[0].codes, both[1].codes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@pytest.mark.parametrize("columns", [256, 192, 131])
def test_a_square_widens_as_a_whole(columns, writeback, path) -> None:
    """Whatever else shares its rows stays; values stay on average, and those that the
    wider grid holds stay all.
    """
    fmt = fm.FloatFormat.from_string("E4M3")
    codes = torch.full((200, columns), fmt.max_code - 2, dtype=torch.uint8)
    codes[:, 1::2] -= 8  # an even spacing lower
    codes[150, 3] = fmt.max_code
    p = fm.FP8Parameter.from_codes(
        codes, torch.ones(2, 2), fmt, block_size=(128, 128), requires_grad=True, seed=2
    )
    before = p.dequantize()
    optimizer = by(path, optim.StiffnessAdamW([p], lr=0.0, weight_decay=0.0, writeback=writeback))
    step_from(optimizer, p, torch.ones(200, columns))
    assert p.scale.tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert optimizer.widened_scales == 1
    assert torch.equal(
        p.dequantize(), before
    )  # subnormals apart, each value of E4M3 is one of twice its scale, too
