"""Scales of blocks: a byte each, read as float32, written in one way, and the same to the bit wherever they go."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from laws import each
from rank_cases import batch, loss_of, model
from rank_pool import Pool
from safetensors.torch import load_file, save_file
from tensor_cases import decoded, parameter, same_store
from test_ranks_fsdp import check_same, sharded
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.setup.memory import memory_of

#: the ends, 1, and the neighbours of what bytes can be mistaken for
EXPONENTS = (-126, -125, -1, 0, 1, 2, 126, 127)


def extreme(**options: Any) -> fm.FP8Parameter:
    """Four rows of two blocks at all of these scales; the smallest subnormals of E4M3 at 2^-126 are in float32."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    codes[codes & 127 == 127] = 0
    scale = torch.tensor([2.0**e for e in EXPONENTS]).view(4, 2)
    options = {"seed": 3, "counter": 5, "requires_grad": True, **options}
    return fm.FP8Parameter.from_codes(codes, scale, "E4M3", block_size=32, **options)


def test_a_block_has_one_byte() -> None:
    p = parameter(shape=(16, 128), granularity="block")
    assert {
        name: (x.dtype, x.nbytes) for name, x in {name: getattr(p, name) for name in p.__tensor_flatten__()[0]}.items()
    } == {"codes": (torch.uint8, p.numel()), "kept_scale": (torch.uint8, p.numel() // 32), "counter": (torch.int64, 8)}
    assert memory_of([p]) == p.numel() + p.numel() // 32 + 8
    assert (p.scale.dtype, p.scale.shape, p.granularity) == (torch.float32, (16, 4), "block")
    for granularity in ("tensor", "channel"):
        other = parameter(granularity=granularity)
        assert other.exponents is None
        assert other.scale.data_ptr() == other.scale.data_ptr()  # memory, as it is for them


def test_scales_are_read_as_the_float32_that_they_are() -> None:
    p = extreme()
    assert p.exponents is not None
    assert p.exponents.flatten().tolist() == [e + 127 for e in EXPONENTS]
    assert p.scale.flatten().tolist() == [2.0**e for e in EXPONENTS]
    assert torch.equal(p.expanded_scale(), p.scale.repeat_interleave(32, -1))
    expected = decoded(p).float()  # beyond float32 at 2^126 and 2^127
    assert torch.equal(p.dequantize(), expected)
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(nn.functional.embedding(rows, p), expected[rows])
    assert "scale=2^-126..2^127" in repr(p)


def test_every_scale_that_there_is() -> None:
    """254 of them, by the constructor, by number and by tensor."""
    scales = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    p = fm.FP8Parameter.from_codes(torch.zeros(254, 32, dtype=torch.uint8), scales[:, None], "E4M3", block_size=32)
    assert p.exponents is not None
    assert p.exponents.flatten().tolist() == list(range(1, 255))
    assert torch.equal(p.scale[:, 0], scales)
    for scale in (2.0**-126, 2.0**127):
        assert fm.FP8Parameter(torch.zeros(2, 32), granularity="block", scale=scale).scale.tolist() == [[scale]] * 2
    for fill, exponent in ((3e38, 120), (1e-38, -126)):  # what the largest and the smallest weights ask for
        w = torch.full((1, 32), fill)
        assert fm.FP8Parameter(w, "E4M3", granularity="block", headroom=1.0).scale.item() == 2.0**exponent


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
    assert shared[0].scale.unique().tolist() == [2.0]  # type: ignore[attr-defined]
    shared[0].rescale_(8.0)  # type: ignore[operator]
    assert p.scale.unique().tolist() == [8.0]


@each("granularity", ["block", "square"])
def test_scales_narrow_and_are_refitted_in_their_memory(granularity: Any) -> None:
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


def through_state_dict(p: fm.FP8Parameter, folder: Path) -> Any:
    source, target = (nn.ParameterDict({"w": x}) for x in (p, parameter(granularity="block", seed=9)))
    target.load_state_dict(source.state_dict())
    return target["w"]


def through_safetensors(p: fm.FP8Parameter, folder: Path) -> Any:
    tensors = nn.ParameterDict({"w": p}).state_dict()
    assert tensors["w_scale"].dtype == torch.uint8
    save_file(tensors, folder / "w")
    return fm.unflatten_state_dict(load_file(folder / "w"))["w"]


def through_checkpoint(p: fm.FP8Parameter, folder: Path) -> Any:
    if torch.__version__ < (2, 9):  # which asks for a storage
        return copy.deepcopy(p)
    q = parameter(granularity="block", seed=9)
    dcp.save({"w": p.detach()}, checkpoint_id=folder)
    dcp.load({"w": q.detach()}, checkpoint_id=folder)
    return q


def through_meta(p: fm.FP8Parameter, folder: Path) -> Any:
    layer = nn.Linear(64, 4, bias=False, device="meta")
    layer.weight = fm.FP8Parameter(p.detach().to("meta"))
    assert isinstance(layer.weight.exponents, Tensor)
    assert layer.weight.exponents.is_meta
    layer.to_empty(device="cpu")
    assert layer.weight.scale.unique().tolist() == [1.0]
    layer.load_state_dict({"weight": p.detach()})
    return layer.weight


TRIPS: dict[str, Callable[[fm.FP8Parameter, Path], Any]] = {
    "state_dict": through_state_dict,
    "safetensors": through_safetensors,
    "distributed checkpoint": through_checkpoint,
    "meta": through_meta,
    "copy_": lambda p, _: parameter(granularity="block", seed=9).detach().copy_(p.detach()),
    "shared": lambda p, _: copy.deepcopy(p).share_memory_(),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_extreme_scales_come_back_to_the_bit(trip: Any, tmp_path: Path) -> None:
    p = extreme()
    back = trip(p, tmp_path)
    assert same_store(back, p)
    assert torch.equal(back.exponents, p.exponents)
    assert back.exponents.dtype == torch.uint8
    assert back.exponents.data_ptr() != p.exponents.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(back.dequantize(), p.dequantize())


def test_scales_that_were_cast_as_they_were_read_are_refused() -> None:
    """As distributed checkpoints do, which copy into what is there."""
    exponents = nn.ParameterDict({"w": extreme()}).state_dict()
    floats = nn.ParameterDict({"w": extreme().detach().set_scale_(3.0)}).state_dict()
    for state, cast, was in ((exponents, torch.float32, "exponents"), (floats, torch.uint8, "torch.float32")):
        with pytest.raises(ValueError, match=f"w_scale is {cast}, and was {was} when it was saved"):
            fm.unflatten_state_dict(state | {"w_scale": state["w_scale"].to(cast)})


@pytest.mark.usefixtures("cpp_compiler")
def test_a_scale_is_read_in_compiled_code() -> None:
    torch._dynamo.reset()
    p = extreme()
    read = torch.compile(lambda w: (w.scale + 0.0, w.expanded_scale() + 0.0, w * 1.0), fullgraph=True)
    for _ in range(2):
        for ours, its in zip(read(p), (p.scale, p.expanded_scale(), p.dequantize()), strict=True):
            assert torch.equal(ours, its)
        p.set_scale_(p.scale.flip(0))


def sharded_blocks(rows: int) -> tuple[int, int]:
    """Bytes of the own rows, which the passes gather with extreme scales among them."""
    whole = model("block", rows=rows)
    first = whole[0].weight
    scale = first.scale
    scale[0, 0], scale[-1, -1] = 2.0**-126, 2.0**20
    first.set_scale_(scale)
    parts = sharded(copy.deepcopy(whole))
    with torch.no_grad():
        assert torch.equal(parts(batch(0)), whole(batch(0)))
    parts.reshard()
    loss_of(parts, batch(1)).backward()
    parts.reshard()
    check_same(parts, whole)
    own: Any = parts[0].weight
    full, rows_held = parts.state_dict()["0.weight_scale"].full_tensor(), own._local_tensor.exponents
    assert torch.equal(full, first.exponents)
    return rows_held.nbytes, own._local_tensor.codes.nbytes


@pytest.mark.parametrize("rows", [22, 7])
def test_rows_hold_a_byte_a_block(pools: dict[int, Pool], rows: int) -> None:
    """Rows that 2 divides, sent with the codes, and rows that neither 2 nor 3 divides, gathered beforehand."""
    for size in (1, 2, 3):
        each = pools[size].run(sharded_blocks, rows)
        assert sum(scales for scales, _ in each) == 2 * rows
        assert all(32 * scales == codes for scales, codes in each)
