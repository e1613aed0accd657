"""Scales `2^e f` as published files have them: stores of every granularity against the
exact products.
"""

import copy

import pytest
import torch
from optimizer_cases import normal, through_disk, with_factors
from rank_cases import batch, loss_of, model
from tensor_cases import same_store
from test_ranks_fsdp import sharded
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._native import _arrays
from fp8manifold.exchange import exported_state_dict

every_granularity = pytest.mark.parametrize(
    "granularity", ["tensor", "channel", "row", "block", "square"]
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def made(granularity, fmt="E4M3", shape=(2, 140, 160), **options) -> fm.FP8Tensor:
    p = fm.FP8Tensor(normal(*shape, std=0.1), fmt, granularity=granularity)
    codes = p.codes.masked_fill(p.codes == p.format.sign_bit, 0)
    scale = p.scale * (1 + torch.rand(p.scale.shape, generator=torch.Generator().manual_seed(0)))
    return fm.FP8Tensor.from_codes(
        codes, scale, fmt, **{"seed": 3, "block_size": p.block_size, **options}
    )


@every_dtype
@every_granularity
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E1M6"])
def test_values_are_code_times_scale_rounded_as_servers_do(
    fmt, granularity, dtype, monkeypatch
) -> None:
    """To float32, and then to the dtype; a product of 8 bits and 24 is exact in
    float64.
    """
    p = made(granularity, fmt, (2, 3, 64), dtype=dtype)
    assert p.kept_scale.dtype is torch.float32
    known = torch.tensor(
        [float(reference.decode(code, p.format)) for code in p.codes.flatten().tolist()]
    )
    wide = (known.view(p.shape).double() * p.expanded_scale().double()).float()
    assert (wide.bfloat16() != wide).any()
    torch._dynamo.reset()
    read = torch.compile(lambda w: w * 1.0, fullgraph=True, backend="aot_eager")
    with monkeypatch.context() as plain:
        plain.setattr(_arrays, "library", lambda: None)
        eager = p.dequantize()
    for values in (
        p.dequantize(),
        eager,
        read(p) if fmt == "E4M3" else eager,
        torch.stack([p[0], p[1]]),
        p.to(torch.float32).to(dtype),
    ):
        assert torch.equal(values, wide.to(dtype))


LEAVES = {
    "add_": lambda p: p.add_(0.0),
    "mul_": lambda p: p.mul_(1.0),
    "clamp_": lambda p: p.clamp_(-1e9, 1e9),
    "copy_": lambda p: p.copy_(p.dequantize()),
    "copy_ in float32": lambda p: p.copy_(p.dequantize().float()),
    "lerp_": lambda p: p.lerp_(torch.ones(p.shape), 0.0),
    "foreach": lambda p: torch._foreach_add_([p], 0.0),
    "a view": lambda p: p[1].mul_(1.0),
    "data": lambda p: setattr(p, "data", p.data),
    "rescale_": lambda p: p.rescale_(p.scale.clone()),
    "adapt_scale_": lambda p: p.adapt_scale_(),
    "SGD": lambda p: torch.optim.SGD([stepped(p)], lr=0.0).step(),
    "fused": lambda p: torch.optim.AdamW([stepped(p)], lr=0.0, fused=True).step(),
}


def stepped(p):
    parameter = fm.FP8Parameter(p)
    parameter.grad = normal(*p.shape).to(p.dtype)
    return parameter


@every_dtype
@every_granularity
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E4M3", "E1M6"])
def test_an_operator_that_changes_no_value_changes_no_code(
    fmt, rounding, granularity, dtype
) -> None:
    """Stochastic rounding too, of a quotient that may be a hair off the code's value."""
    p = made(granularity, fmt, dtype=dtype, rounding=rounding)
    codes, scale = p.codes.clone(), p.scale.clone()
    for name, leave in LEAVES.items():
        leave(p)
        assert torch.equal(p.codes, codes), name
        assert torch.equal(p.scale, scale), name


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E4M3", "E3M4", "E1M6"])
def test_halves_are_rounded_once(fmt, rounding) -> None:
    """Their quotient by the scale of a whole tensor is not rounded to bfloat16 first."""
    w = normal(10_000, std=0.1).bfloat16()
    options = {"granularity": "tensor", "rounding": rounding, "seed": 3}
    options["scale"] = 0.7 / fm.FloatFormat.from_string(fmt).max
    half, wide = (fm.FP8Tensor(values, fmt, **options) for values in (w, w.float()))
    assert torch.equal(half.codes, wide.codes)
    shown, new = half.dequantize(), w.flip(0)
    half.write(new)  # as fused optimizers do
    wide.write(new.float())
    apart = half.codes != wide.codes
    assert torch.equal(new[apart], shown[apart])  # what it shows already leaves its code


def test_a_scale_is_described_with_its_factor() -> None:
    p = fm.FP8Tensor(torch.ones(2, 2), "E4M3", scale=torch.tensor([[1.5 * 2.0**-7], [0.25]]))
    assert "scale=1.5*2^-7..2^-2" in repr(p)
    assert "scale=1.25*2^-3" in repr(fm.FP8Tensor(torch.ones(2), "E4M3", scale=1.25 * 2.0**-3))


@pytest.mark.parametrize("granularity", ["block", "square"])
def test_exponents_become_floats_for_all_that_share_them(granularity) -> None:
    p, q = (
        fm.FP8Tensor(normal(140, 160), "E4M3", granularity=granularity),
        made(granularity, shape=(140, 160)),
    )
    twin, version = p.detach(), p._version
    assert p.exponents is not None
    p.copy_(q)
    assert p._version > version
    assert p.exponents is None
    assert same_store(p, q)
    assert same_store(twin, q)
    p.set_scale_(0.5)
    assert (p.exponents, p.scale.unique().tolist()) == (None, [0.5])
    assert (
        fm.FP8Tensor.from_codes(p.codes, p.scale, "E4M3", block_size=p.block_size).exponents
        is not None
    )
    exponents = fm.FP8Tensor(normal(140, 160), "E4M3", granularity=granularity)
    with pytest.raises(Exception, match="can't set scales other than powers of two"):
        torch.compile(lambda a, b: a.copy_(b), backend="aot_eager")(exponents, q)


def layers(granularity, seed, **options):
    net = nn.Sequential(nn.Linear(160, 200), nn.ReLU(), nn.Linear(200, 96, bias=False))
    kinds = {"*": fm.LayerSpec("E4M3", granularity=granularity)}
    if granularity == "block":
        kinds["2"] = fm.LayerSpec("E4M3")
    return fm.quantize_model(net, kinds, "fp8", seed=seed, **options)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_layers_are_saved_and_read_again(granularity) -> None:
    net, x = with_factors(layers(granularity, 1)), normal(4, 160)
    state = net.state_dict()
    others = [
        layers(granularity, 2),
        layers(granularity, 2, keep_remainder=True),
        copy.deepcopy(net),
    ]
    others[0].load_state_dict(through_disk(state))
    others[1].load_state_dict({name: part.clone() for name, part in state.items()}, assign=True)
    for other in others:
        assert torch.equal(other(x), net(x))
        assert {name: part.dtype for name, part in other.state_dict().items()} == {
            n: x.dtype for n, x in state.items()
        }
    assert same_store(fm.unflatten_state_dict(state)["0.weight"], net[0].weight)
    assert same_store(through_disk({"w": net[0].weight.detach()})["w"], net[0].weight)


@pytest.mark.parametrize("exported", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("granularity", "shapes"),
    [
        ("tensor", [(), (1,), (1, 1)]),
        ("channel", [(200, 1), (200,)]),
        ("block", [(200, 5)]),
        ("square", [(2, 2)]),
    ],
)
def test_codes_of_other_libraries_are_read_with_their_scales(
    granularity, shapes, dtype, exported
) -> None:
    whole = with_factors(layers(granularity, 1))[0]
    codes, bias = whole.weight.codes.view(torch.float8_e4m3fn), whole.bias.detach()
    for shape in shapes:
        layer = layers(granularity, 2)[0]
        layer.load_state_dict(
            {"weight": codes, "bias": bias, exported: whole.weight.scale.to(dtype).view(shape)}
        )
        assert torch.equal(layer.weight.codes, whole.weight.codes)
        assert torch.equal(layer.weight.scale, whole.weight.scale.to(dtype).float())
    for more in ("weight_scale_2", "weight_zero_point", "weight_scale", "weight_scale_inv"):
        if more != exported:
            said = {
                "weight": codes,
                "bias": bias,
                exported: whole.weight.scale,
                more: torch.ones(()),
            }
            with pytest.raises(RuntimeError, match=r"at weight_scale.* and at weight_"):
                layers(granularity, 2)[0].load_state_dict(said)


@pytest.mark.filterwarnings("ignore:.*partial squares")
@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_what_was_exported_is_read_again(granularity, layout) -> None:
    layout = "fp8" if granularity == "square" else layout
    net, x = with_factors(layers(granularity, 1)), normal(4, 160)
    other = layers(granularity, 2)
    other.load_state_dict(exported_state_dict(net, layout)[0])
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_master_weights_in_half_precision_are_exported(granularity, dtype) -> None:
    layer = fm.QuantizedLinear(
        nn.Linear(64, 4).to(dtype), fm.LayerSpec("E4M3", granularity=granularity), "master"
    )
    assert exported_state_dict(
        layer, "torchao" if granularity == "tensor" else "compressed-tensors"
    )[0]


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("granularity", ["block", "square"])
def test_compiled_code_reads_the_scales_of_the_moment(granularity) -> None:
    """Code compiled for exponents is compiled once more for floats; the second matrix
    ends in partial squares.
    """
    torch._dynamo.reset()
    net, x = layers(granularity, 1), normal(4, 160)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        with_factors(net)
    assert counter.frame_count == 2


@pytest.mark.parametrize("products", ["fp8", "int8"])
def test_products_of_codes_take_the_scales_that_there_are(products) -> None:
    fmt = "E4M3" if products == "fp8" else "E1M6"
    net = with_factors(
        fm.quantize_model(
            nn.Sequential(nn.Linear(64, 32)), fm.LayerSpec(fmt, products=products), "fp8"
        )
    )
    x = normal(5, 64).requires_grad_()
    y, weight = net(x), net[0].weight
    y.sum().backward()
    taken = net[0].quantized_input(x).double()
    torch.testing.assert_close(
        y, (taken @ weight.dequantize().double().t() + net[0].bias.double()).float()
    )
    exact = torch.ones(5, 32) @ weight.dequantize()
    assert (x.grad - exact).abs().max() < 0.1 * exact.abs().max()


def gathered(granularity) -> None:
    """Rows that two processes hold, of which one has powers of two alone: both hold
    floats, and gather them.
    """
    whole = with_factors(model(granularity))
    first = whole[0].weight
    if granularity != "tensor":
        scale = first.scale.clone()
        scale[: len(scale) // 2] = 0.25
        first.set_scale_(scale)
    parts, state = sharded(copy.deepcopy(whole)), whole.state_dict()
    with torch.no_grad():
        assert torch.equal(parts(batch(0)), whole(batch(0)))
    parts.reshard()
    loss_of(parts, batch(1)).backward()
    loaded = sharded(model(granularity, seed=5))
    loaded.load_state_dict(
        {name: _like(part, loaded.state_dict()[name]) for name, part in state.items()}
    )
    kinds = [
        x.kept_scale.dtype
        for p in loaded.parameters()
        if isinstance(x := p._local_tensor, fm.FP8Tensor)
    ]
    assert set(kinds) == {torch.float32}
    with torch.no_grad():
        assert torch.equal(loaded(batch(0)), whole(batch(0)))
    loaded.reshard()
    full = {
        name: part.full_tensor() if hasattr(part, "full_tensor") else part
        for name, part in get_model_state_dict(parts).items()
    }
    assert all(
        torch.equal(full[name], part)
        for name, part in state.items()
        if not name.endswith("_counter")
    )


def _like(part, own) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return (
        distribute_tensor(part, own.device_mesh, own.placements)
        if isinstance(own, DTensor)
        else part
    )


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_rows_of_processes_have_the_scales_of_the_whole(pools, granularity) -> None:
    pools[2].run(gathered, granularity)


def test_a_sharded_weight_keeps_its_kind_of_scales(pools) -> None:
    assert all("set other scales before fully_shard" in said for said in pools[2].run(set_in_rows))


def set_in_rows() -> str:
    rows = sharded(model("block"))[0].weight._local_tensor
    try:
        rows.set_scale_(0.3)
    except RuntimeError as error:
        return str(error)
    return ""
