"""Scales of blocks and of squares.

Such a scale is a power of two and is stored as one byte, its exponent. It is read as
float32. Here it survives, to the bit, every copy, file and step.
"""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import frozen, normal, snapshot, step_from, take_steps, with_factors
from paths import PATHS, on_path
from safetensors.torch import load_file, save_file
from tensor_cases import decoded, parameter, same_store
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from nanogpt_bench.setup.memory import memory_of

#: Both ends, 1, and the neighbours of values that bytes can be mistaken for.
EXPONENTS = (-126, -125, -1, 0, 1, 2, 126, 127)


def extreme() -> fm.FP8Parameter:
    """Return a weight of four rows of two blocks, one block at each of EXPONENTS."""
    # The smallest subnormal of E4M3 at a scale of 2^-126 is a float32.
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    codes[codes & 127 == 127] = 0
    scale = torch.tensor([2.0**e for e in EXPONENTS]).view(4, 2)
    options = {"seed": 3, "counter": 5, "requires_grad": True}
    return fm.FP8Parameter.from_codes(codes, scale, "E4M3", block_size=32, **options)


def test_a_block_has_one_byte() -> None:
    p = parameter(shape=(16, 128), granularity="block")
    parts = {name: getattr(p, name) for name in p.__tensor_flatten__()[0]}
    assert {name: (part.dtype, part.nbytes) for name, part in parts.items()} == {
        "codes": (torch.uint8, p.numel()),
        "kept_scale": (torch.uint8, p.numel() // 32),
        "counter": (torch.int64, 8),
    }
    assert memory_of([p]) == p.numel() + p.numel() // 32 + 8
    assert (p.scale.dtype, p.scale.shape, p.granularity) == (torch.float32, (16, 4), "block")
    assert all(
        parameter(granularity=granularity).exponents is None
        for granularity in ("tensor", "channel")
    )


def test_scales_are_read_as_the_float32_that_they_are() -> None:
    p = extreme()
    assert p.exponents.flatten().tolist() == [e + 127 for e in EXPONENTS]
    assert p.scale.flatten().tolist() == [2.0**e for e in EXPONENTS]
    assert torch.equal(p.expanded_scale(), p.scale.repeat_interleave(32, -1))
    expected = decoded(p).float()  # beyond float32 at 2^126 and 2^127
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(p.dequantize(), expected)
    assert torch.equal(nn.functional.embedding(rows, p), expected[rows])
    assert "scale=2^-126..2^127" in repr(p)


def test_every_scale_that_there_is() -> None:
    """All 254 are stored by their exponent and read back."""
    scales = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    p = fm.FP8Parameter.from_codes(
        torch.zeros(254, 32, dtype=torch.uint8), scales[:, None], "E4M3", block_size=32
    )
    assert p.exponents.flatten().tolist() == list(range(1, 255))
    assert torch.equal(p.scale[:, 0], scales)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_the_ends_are_scales_by_number(scale) -> None:
    p = fm.FP8Parameter(torch.zeros(2, 32), granularity="block", scale=scale)
    assert p.scale.tolist() == [[scale]] * 2


@pytest.mark.parametrize(("fill", "exponent"), [(3e38, 120), (1e-38, -126)])
def test_the_largest_and_the_smallest_weights_have_a_scale(fill, exponent) -> None:
    w = torch.full((1, 32), fill)
    p = fm.FP8Parameter(w, "E4M3", granularity="block", headroom=1.0)
    assert p.scale.item() == 2.0**exponent


def test_what_shares_memory_sees_a_new_scale() -> None:
    p = extreme()
    shared = [p.detach(), p.data, fm.FP8Parameter(p), p.view_as(p)]
    version, old_exponents = p._version, p.exponents
    assert p.set_scale_(0.5) is p
    assert p.exponents is old_exponents
    assert p._version > version
    assert p.scale.unique().tolist() == [0.5]
    for sharing in shared:
        assert torch.equal(sharing, p.dequantize())
    p.scale = p.scale * 2
    p.scale *= 2
    assert p.exponents is old_exponents
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
    source = nn.ParameterDict({"w": p})
    target = nn.ParameterDict({"w": parameter(granularity="block", seed=9)})
    save_file(source.state_dict(), folder / "w")
    state = load_file(folder / "w")
    target.load_state_dict(state)
    assert state["w_scale"].dtype == torch.uint8
    assert same_store(fm.files.unflatten(state)["w"], p)
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


@pytest.mark.parametrize(
    ("scale", "cast", "saved"),
    [(None, torch.float32, "exponents"), (3.0, torch.uint8, "torch.float32")],
    ids=["exponents", "floats"],
)
def test_scales_that_were_cast_while_reading_are_refused(scale, cast, saved) -> None:
    """Distributed checkpoints cast so: they copy into the tensor of the target."""
    p = extreme()
    if scale is not None:
        p = p.detach().set_scale_(scale)
    state = nn.ParameterDict({"w": p}).state_dict()
    state["w_scale"] = state["w_scale"].to(cast)
    with pytest.raises(ValueError, match=f"w_scale is {cast}, but was {saved} when it was saved"):
        fm.files.unflatten(state)


@pytest.mark.usefixtures("cpp_compiler")
def test_a_scale_is_read_in_compiled_code() -> None:
    torch._dynamo.reset()
    p = extreme()
    read_scale = torch.compile(
        lambda w: (w.scale + 0.0, w.expanded_scale() + 0.0, w * 1.0), fullgraph=True
    )
    for _ in range(2):
        expected = (p.scale, p.expanded_scale(), p.dequantize())
        for index, (compiled, eager) in enumerate(zip(read_scale(p), expected, strict=True)):
            assert torch.equal(compiled, eager), index
        p.set_scale_(p.scale.flip(0))


#: Whole squares, one partial square, partial squares that end in runs of 64, 32 and 1
#: columns, and a stack of matrices.
SHAPES = ((256, 128), (5, 7), (130, 64), (200, 192), (257, 160), (130, 131), (2, 140, 256))


def weight(shape, name="E4M3", seed=0, *, factors=False, **options) -> fm.FP8Parameter:
    w = normal(*shape, seed=seed) * torch.exp2(
        4 * normal(*shape[:-1], 1, seed=seed + 1).clamp(-1, 1)
    )
    p = fm.FP8Parameter(w, name, granularity="square", **{"seed": seed, **options})
    return with_factors(p, factors)


class Square(NamedTuple):
    """Indices of one square: of its weights in the matrix, and of its scale."""

    weights: tuple[slice, slice]
    scale: tuple[int, int]


def squares(rows, columns):
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            yield Square((slice(i, i + 128), slice(j, j + 128)), (i // 128, j // 128))


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1), (0, 5), (4200, 260)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_square_is_quantized_as_it_is_alone(shape, dtype) -> None:
    w = normal(*shape, seed=2).to(dtype)
    options = {"keep_remainder": w.numel() < 2**20}
    p = fm.FP8Tensor(w, "E4M3", granularity="square", **options)
    assert (p.granularity, p.block_size) == ("square", (128, 128))
    assert (p.exponents.dtype, p.scale.dtype) == (torch.uint8, torch.float32)
    assert p.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    for square in squares(*shape) if len(shape) == 2 else ():
        alone = fm.FP8Tensor(w[square.weights], "E4M3", granularity="tensor", **options)
        assert torch.equal(p.scale[square.scale], alone.scale), square
        assert torch.equal(p.codes[square.weights], alone.codes), square
        assert torch.equal(p.dequantize()[square.weights], alone.dequantize()), square
        assert torch.equal(p.largest()[square.scale], alone.largest()), square
        if p.remainder is not None:
            assert torch.equal(p.remainder[square.weights], alone.remainder), square
    assert torch.equal(p.dequantize(), (fm.decode(p.codes, "E4M3") * p.expanded_scale()).to(dtype))


VIEWS = {
    "slice": lambda x: x[1:],
    "last": lambda x: x[-1],
    "transpose": lambda x: x.mT,
    "split": lambda x: x.split(1)[1],
    "unbind": lambda x: x.unbind()[0],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_has_the_values_of_the_whole(view, shape) -> None:
    p = weight(shape)
    assert torch.equal(view(p), view(p.dequantize()))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) == 2])
def test_layers_read_the_values_of_the_whole(shape) -> None:
    p = weight(shape)
    values, rows = p.dequantize(), torch.tensor([[shape[0] - 1, 0], [3, 3]])
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


@pytest.mark.parametrize("factors", [False, True], ids=["powers of two", "factors"])
@pytest.mark.parametrize("kind", STEPS)
def test_paths_have_the_same_bits(kind, factors) -> None:
    """Native and eager steps of every optimizer leave the same weights and states."""
    shapes = SHAPES[:-1] if kind.startswith("muon") else SHAPES
    twins = [
        [weight(shape, seed=i, factors=factors) for i, shape in enumerate(shapes)] for _ in PATHS
    ]
    optimizers = [
        on_path(path, STEPS[kind](p, seed=3)) for p, path in zip(twins, PATHS, strict=True)
    ]
    take_steps(optimizers, twins, range(4))
    for i, (native, eager) in enumerate(zip(*twins, strict=True)):
        assert same_store(native, eager), i
        assert not torch.equal(native.codes, weight(tuple(native.shape), seed=i).codes), i
    states = [frozen(snapshot(optimizer)["state"]["state"]) for optimizer in optimizers]
    assert states[0] == states[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_squares_of_one_scale_step_as_a_tensor_of_one_scale(shape, writeback, path) -> None:
    w = normal(*shape, seed=7).clamp(-3, 3)
    squares, whole = (
        fm.FP8Parameter(w, granularity=kind, scale=2.0**-4, seed=1) for kind in ("square", "tensor")
    )
    for p in (squares, whole):
        optimizer = on_path(path, optim.StiffnessAdamW([p], lr=0.02, writeback=writeback, seed=5))
        take_steps([optimizer], [[p]], range(3))
    assert torch.equal(squares.codes, whole.codes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@pytest.mark.parametrize("columns", [256, 192, 131])
def test_a_square_widens_as_a_whole(columns, writeback, path) -> None:
    """Squares in the same rows keep their scale, and the values stay.

    Subnormals apart, every value of E4M3 is one of twice its scale, too.
    """
    fmt = fm.FloatFormat.from_string("E4M3")
    codes = torch.full((200, columns), fmt.max_code - 2, dtype=torch.uint8)
    codes[:, 1::2] -= 8  # an even spacing lower
    codes[150, 3] = fmt.max_code
    p = fm.FP8Parameter.from_codes(
        codes, torch.ones(2, 2), fmt, block_size=(128, 128), requires_grad=True, seed=2
    )
    old_values = p.dequantize()
    optimizer = on_path(
        path, optim.StiffnessAdamW([p], lr=0.0, weight_decay=0.0, writeback=writeback)
    )
    step_from(optimizer, p, torch.ones(200, columns))
    assert p.scale.tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert optimizer.widened_scales == 1
    assert torch.equal(p.dequantize(), old_values)
