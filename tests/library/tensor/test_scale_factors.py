"""Scales `2^e f` with any factor f, as published files have them.

Stores of every granularity are compared with the exact products of code and scale.
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
from torch.distributed.tensor import DTensor, distribute_tensor

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._doors.exchange import layout_state_dict
from fp8manifold._native import _arrays

every_granularity = pytest.mark.parametrize(
    "granularity", ["tensor", "channel", "row", "block", "square"]
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def stored(granularity, fmt="E4M3", shape=(2, 140, 160), **options) -> fm.FP8Tensor:
    p = fm.FP8Tensor(normal(*shape, std=0.1), fmt, granularity=granularity)
    codes = p.codes.masked_fill(p.codes == p.format.sign_bit, 0)
    scale = p.scale * (1 + torch.rand(p.scale.shape, generator=torch.Generator().manual_seed(0)))
    return fm.FP8Tensor.from_codes(
        codes, scale, fmt, **{"seed": 3, "block_size": p.block_size, **options}
    )


def with_exact_values(granularity, fmt, dtype):
    """Return a store, and its values rounded to float32 and then to the dtype.

    The product of 8 bits and 24 is exact in float64.
    """
    p = stored(granularity, fmt, (2, 3, 64), dtype=dtype)
    assert p.kept_scale.dtype is torch.float32
    decoded = torch.tensor(
        [float(reference.decode(code, p.format)) for code in p.codes.flatten().tolist()]
    )
    wide = (decoded.view(p.shape).double() * p.expanded_scale().double()).float()
    assert (wide.bfloat16() != wide).any()
    return p, wide.to(dtype)


READINGS = {
    "whole": lambda p: p.dequantize(),
    "in parts": lambda p: torch.stack([p[0], p[1]]),
    "over float32": lambda p: p.to(torch.float32).to(p.dtype),
}


@every_dtype
@every_granularity
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E1M6"])
@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_values_are_code_times_scale_rounded_as_servers_do(read, fmt, granularity, dtype) -> None:
    p, expected = with_exact_values(granularity, fmt, dtype)
    assert torch.equal(read(p), expected)


@every_dtype
@every_granularity
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E1M6"])
def test_plain_pytorch_has_the_values_of_servers(fmt, granularity, dtype, monkeypatch) -> None:
    p, expected = with_exact_values(granularity, fmt, dtype)
    monkeypatch.setattr(_arrays, "library", lambda: None)
    assert torch.equal(p.dequantize(), expected)


@every_dtype
@every_granularity
def test_compiled_code_has_the_values_of_servers(granularity, dtype) -> None:
    p, expected = with_exact_values(granularity, "E4M3", dtype)
    torch._dynamo.reset()
    compiled = torch.compile(lambda w: w * 1.0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(p), expected)


#: Operators that change no value.
IDENTITIES = {
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
    "SGD": lambda p: torch.optim.SGD([with_gradient(p)], lr=0.0).step(),
    "fused": lambda p: torch.optim.AdamW([with_gradient(p)], lr=0.0, fused=True).step(),
}


def with_gradient(p):
    parameter = fm.FP8Parameter(p)
    parameter.grad = normal(*p.shape).to(p.dtype)
    return parameter


@every_dtype
@every_granularity
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E4M3", "E1M6"])
@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
def test_operators_that_change_no_value_change_no_code(
    identity, fmt, rounding, granularity, dtype
) -> None:
    """The quotient by the scale may be a hair off the value of the code."""
    p = stored(granularity, fmt, dtype=dtype, rounding=rounding)
    codes, scale = p.codes.clone(), p.scale.clone()
    identity(p)
    assert torch.equal(p.codes, codes)
    assert torch.equal(p.scale, scale)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E4M3", "E3M4", "E1M6"])
def test_halves_are_rounded_once(fmt, rounding) -> None:
    """Their quotient by the scale of a whole tensor is not rounded to bfloat16 first."""
    w = normal(10_000, std=0.1).bfloat16()
    options = {"granularity": "tensor", "rounding": rounding, "seed": 3}
    options["scale"] = 0.7 / fm.FloatFormat.from_string(fmt).max
    half, wide = fm.FP8Tensor(w, fmt, **options), fm.FP8Tensor(w.float(), fmt, **options)
    assert torch.equal(half.codes, wide.codes)
    values, new = half.dequantize(), w.flip(0)
    half.write(new)  # as fused optimizers do
    wide.write(new.float())
    # A value that the weight has already leaves its code, whatever that is.
    differs = half.codes != wide.codes
    assert torch.equal(new[differs], values[differs])


def test_a_scale_is_described_with_its_factor() -> None:
    p = fm.FP8Tensor(torch.ones(2, 2), "E4M3", scale=torch.tensor([[1.5 * 2.0**-7], [0.25]]))
    assert "scale=1.5*2^-7..2^-2" in repr(p)
    assert "scale=1.25*2^-3" in repr(fm.FP8Tensor(torch.ones(2), "E4M3", scale=1.25 * 2.0**-3))


@pytest.mark.parametrize("granularity", ["block", "square"])
def test_exponents_become_floats_for_all_that_share_them(granularity) -> None:
    p = fm.FP8Tensor(normal(140, 160), "E4M3", granularity=granularity)
    q = stored(granularity, shape=(140, 160))
    twin, version = p.detach(), p._version
    assert p.exponents is not None
    p.copy_(q)
    assert p._version > version
    assert p.exponents is None
    assert same_store(p, q)
    assert same_store(twin, q)
    p.set_scale_(0.5)
    assert (p.exponents, p.scale.unique().tolist()) == (None, [0.5])
    new = fm.FP8Tensor.from_codes(p.codes, p.scale, "E4M3", block_size=p.block_size)
    assert new.exponents is not None


@pytest.mark.parametrize("granularity", ["block", "square"])
def test_compiled_code_does_not_turn_exponents_into_floats(granularity) -> None:
    q = stored(granularity, shape=(140, 160))
    exponents = fm.FP8Tensor(normal(140, 160), "E4M3", granularity=granularity)
    with pytest.raises(Exception, match="can't set scales other than powers of two"):
        torch.compile(lambda a, b: a.copy_(b), backend="aot_eager")(exponents, q)


def layers(granularity, seed, **options):
    net = nn.Sequential(nn.Linear(160, 200), nn.ReLU(), nn.Linear(200, 96, bias=False))
    kinds = {"*": fm.LayerSpec("E4M3", granularity=granularity)}
    if granularity == "block":
        kinds["2"] = fm.LayerSpec("E4M3")
    return fm.quantize_model(net, kinds, "codes", seed=seed, **options)


def loaded_twin(net, granularity):
    twin = layers(granularity, 2)
    twin.load_state_dict(through_disk(net.state_dict()))
    return twin


def assigned_twin(net, granularity):
    twin = layers(granularity, 2, keep_remainder=True)
    state = {name: part.clone() for name, part in net.state_dict().items()}
    twin.load_state_dict(state, assign=True)
    return twin


def copied_twin(net, granularity):
    return copy.deepcopy(net)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize("make_twin", [loaded_twin, assigned_twin, copied_twin])
def test_layers_are_saved_and_read_again(make_twin, granularity) -> None:
    net, x = with_factors(layers(granularity, 1)), normal(4, 160)
    twin = make_twin(net, granularity)
    dtypes = {name: part.dtype for name, part in net.state_dict().items()}
    assert torch.equal(twin(x), net(x))
    assert {name: part.dtype for name, part in twin.state_dict().items()} == dtypes


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_weights_are_saved_and_read_again(granularity) -> None:
    net = with_factors(layers(granularity, 1))
    state = net.state_dict()
    assert same_store(fm.files.unflatten(state)["0.weight"], net[0].weight)
    assert same_store(through_disk({"w": net[0].weight.detach()})["w"], net[0].weight)


def layer_of_floats(granularity):
    """Return a layer, and its state but for the scale as other libraries save it."""
    layer = with_factors(layers(granularity, 1))[0]
    codes = layer.weight.codes.view(torch.float8_e4m3fn)
    return layer, {"weight": codes, "bias": layer.bias.detach()}


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        ("tensor", ()),
        ("tensor", (1,)),
        ("tensor", (1, 1)),
        ("channel", (200, 1)),
        ("channel", (200,)),
        ("block", (200, 5)),
        ("square", (2, 2)),
    ],
    ids=str,
)
def test_codes_of_other_libraries_are_read_with_their_scales(
    granularity, shape, dtype, name
) -> None:
    layer, state = layer_of_floats(granularity)
    loaded = layers(granularity, 2)[0]
    loaded.load_state_dict(state | {name: layer.weight.scale.to(dtype).view(shape)})
    assert torch.equal(loaded.weight.codes, layer.weight.codes)
    assert torch.equal(loaded.weight.scale, layer.weight.scale.to(dtype).float())


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("weight_scale", "weight_scale_2"),
        ("weight_scale", "weight_zero_point"),
        ("weight_scale", "weight_scale_inv"),
        ("weight_scale_inv", "weight_scale_2"),
        ("weight_scale_inv", "weight_zero_point"),
        ("weight_scale_inv", "weight_scale"),
    ],
)
def test_a_second_scale_is_refused(name, second, granularity) -> None:
    layer, state = layer_of_floats(granularity)
    state |= {name: layer.weight.scale, second: torch.ones(())}
    with pytest.raises(RuntimeError, match=r"at weight_scale.* and at weight_"):
        layers(granularity, 2)[0].load_state_dict(state)


@pytest.mark.filterwarnings("ignore:.*partial squares")
@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_what_was_exported_is_read_again(granularity, layout) -> None:
    layout = "fp8" if granularity == "square" else layout
    net, x = with_factors(layers(granularity, 1)), normal(4, 160)
    loaded = layers(granularity, 2)
    loaded.load_state_dict(layout_state_dict(net, layout)[0])
    assert torch.equal(loaded(x), net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_master_weights_in_half_precision_are_exported(granularity, dtype) -> None:
    layer = fm.QuantizedLinear(
        nn.Linear(64, 4).to(dtype), fm.LayerSpec("E4M3", granularity=granularity), "master"
    )
    assert layout_state_dict(layer, "torchao" if granularity == "tensor" else "compressed-tensors")[
        0
    ]


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("granularity", ["block", "square"])
def test_compiled_code_reads_the_scales_of_the_moment(granularity) -> None:
    """Code compiled for exponents is compiled once more for floats.

    The second matrix ends in partial squares.
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
            nn.Sequential(nn.Linear(64, 32)), fm.LayerSpec(fmt, products=products), "codes"
        )
    )
    x = normal(5, 64).requires_grad_()
    y, weight = net(x), net[0].weight
    y.sum().backward()
    operand = net[0].quantized_input(x).double()
    product = operand @ weight.dequantize().double().t() + net[0].bias.double()
    torch.testing.assert_close(y, product.float())
    exact = torch.ones(5, 32) @ weight.dequantize()
    assert (x.grad - exact).abs().max() < 0.1 * exact.abs().max()


def gather_rows(granularity) -> None:
    """Shard weights of which one process's rows have powers of two, and gather them.

    Both processes store float scales.
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
    targets = loaded.state_dict()
    loaded.load_state_dict(
        {name: distributed_as(targets[name], part) for name, part in state.items()}
    )
    local = [p._local_tensor for p in loaded.parameters()]
    dtypes = {rows.kept_scale.dtype for rows in local if isinstance(rows, fm.FP8Tensor)}
    assert dtypes == {torch.float32}
    with torch.no_grad():
        assert torch.equal(loaded(batch(0)), whole(batch(0)))
    loaded.reshard()
    gathered = get_model_state_dict(parts)
    for name, part in state.items():
        if not name.endswith("_counter"):
            assert torch.equal(full(gathered[name]), part), name


def full(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def distributed_as(target: Tensor, part: Tensor) -> Tensor:
    if not isinstance(target, DTensor):
        return part
    return distribute_tensor(part, target.device_mesh, target.placements)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_rows_of_processes_have_the_scales_of_the_whole(pools, granularity) -> None:
    pools[2].run(gather_rows, granularity)


def test_a_sharded_weight_keeps_its_kind_of_scales(pools) -> None:
    for message in pools[2].run(error_of_a_scale_of_rows):
        assert "set other scales before fully_shard" in message


def error_of_a_scale_of_rows() -> str:
    rows = sharded(model("block"))[0].weight._local_tensor
    try:
        rows.set_scale_(0.3)
    except RuntimeError as error:
        return str(error)
    return ""
