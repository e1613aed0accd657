"""FP8Parameter in a module: copies, files, devices and dtypes, torch's own helpers."""

import copy
import io
import pickle

import geoopt
import pytest
import torch
from optimizer_cases import normal, through_disk
from safetensors import torch as safetensors
from tensor_cases import (
    INPUT,
    TARGET,
    Net,
    every_granularity,
    loss_of,
    parameter,
    same_store,
    train,
)
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8manifold as fm


def stepped(net: Net, steps: int = 2) -> Net:
    with torch.no_grad():
        for p in net.stored:
            for _ in range(steps):
                p.mul_(0.99)
    return net


COPIES = {
    "clone": lambda p: p.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.load": through_disk,
    "to-copy": lambda p: p.to(torch.float32, copy=True),
    "bfloat16-and-back": lambda p: p.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("kind", [fm.FP8Parameter, fm.FP8Tensor])
@every_granularity
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_is_the_same_and_apart(make, granularity, kind) -> None:
    options = {
        "granularity": granularity,
        "rounding": "nearest",
        "seed": 11,
        "keep_remainder": True,
    }
    values = normal(4, 64)
    # They need the ends of the scales that blocks can have.
    values[0, :32], values[3, 32:] = 2.0**-100, 2.0**127
    p = kind(values, "E3M4", **options)
    q = make(p)
    assert type(q) is kind
    assert same_store(p, q)
    assert (q.rounding, q.seed, q.dtype, q.requires_grad) == (
        "nearest",
        11,
        torch.float32,
        p.requires_grad,
    )
    assert torch.equal(q.remainder, p.remainder)
    for part in ("codes", "scale", "counter", "remainder"):
        assert getattr(p, part).data_ptr() != getattr(q, part).data_ptr(), part
    with torch.no_grad():
        q.neg_()
    assert not torch.equal(p.codes, q.codes)


def test_files_are_one_byte_a_weight_and_saved_views_are_values() -> None:
    p, file = parameter(shape=(256, 1024)), io.BytesIO()
    torch.save(p, file)
    assert file.tell() < 256 * 1024 + 256 * 4 + 4000
    assert type(through_disk(p[1])) is Tensor
    assert torch.equal(through_disk(p[1]), p.dequantize()[1])
    assert torch.equal(copy.deepcopy(p[1].detach()), p.dequantize()[1])


def test_assigning_a_state_dict() -> None:
    net = stepped(Net())
    with torch.device("meta"):
        loaded = Net(granularity="tensor")
    assert all(p.is_meta and type(p) is fm.FP8Parameter for p in loaded.stored)
    loaded.load_state_dict(through_disk(net.state_dict()), assign=True)
    assert all(same_store(a, b) for a, b in zip(net.stored, loaded.stored, strict=True))
    assert all(
        type(p) is fm.FP8Parameter and p.requires_grad and not p.is_meta for p in loaded.stored
    )
    assert all(isinstance(p, geoopt.ManifoldParameter) for p in loaded.stored)
    assert torch.equal(net(INPUT), loaded(INPUT))


def test_floats_are_rounded_at_the_scale_that_is_there() -> None:
    net, floats = Net(rounding="nearest"), Net()
    for layer in (floats.first, floats.second):
        layer.weight = nn.Parameter(normal(*layer.weight.shape, seed=7, std=0.1))
    scales = [p.scale.clone() for p in net.stored]
    net.load_state_dict(through_disk(floats.state_dict()))
    for index, (p, scale, layer) in enumerate(
        zip(net.stored, scales, (floats.first, floats.second), strict=True)
    ):
        assert torch.equal(p.scale, scale), index
        assert torch.equal(p.codes, fm.encode(layer.weight.detach() / scale, "E4M3")), index


@pytest.mark.parametrize("swap", [False, True])
def test_moving_a_module_keeps_class_and_codes(swap) -> None:
    net = stepped(Net(keep_remainder=False))
    loss_of(net).backward()
    codes, identities = [p.codes.clone() for p in net.stored], [id(p) for p in net.stored]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for dtype in (torch.bfloat16, torch.float32):
            net.to(dtype)
            assert [id(p) for p in net.stored] == identities, dtype
            assert all(
                type(p) is fm.FP8Parameter and p.dtype == dtype and p.requires_grad
                for p in net.stored
            ), dtype
            assert all(p.grad.dtype == dtype for p in net.stored if p.grad is not None), dtype
            assert all(torch.equal(p.codes, c) for p, c in zip(net.stored, codes, strict=True)), (
                dtype
            )
            assert net(INPUT.to(dtype)).dtype == dtype, dtype
        net.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(type(p) is fm.FP8Parameter and p.is_meta and p.codes.is_meta for p in net.stored)
    assert net(torch.empty(3, 32, device="meta")).shape == (3, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused_by_modules_and_plain_elsewhere(dtype) -> None:
    net = Net()
    with pytest.raises((TypeError, RuntimeError), match="float32 or bfloat16, not"):
        net.to(dtype)
    converted = net.first.weight.to(dtype)
    assert type(converted) is Tensor
    assert converted.dtype == dtype
    layer = quantized()[0]
    with pytest.raises(TypeError, match=f"can't be {dtype}: take float32 or bfloat16"):
        layer.to(dtype)
    assert layer.bias.dtype == layer.weight.dtype == torch.float32


@every_granularity
def test_the_manifold_is_that_of_format_and_scale(granularity) -> None:
    p = parameter("E3M4", granularity=granularity, seed=8)
    manifold = p.manifold
    assert isinstance(manifold, fm.FP8Manifold)
    assert (manifold.format, manifold.rounding, int(manifold.seed_word)) == (
        p.format,
        "stochastic",
        8,
    )
    assert torch.equal(manifold.scale, p.expanded_scale())
    assert manifold.check_point_on_manifold(p)
    assert torch.equal(
        manifold.stiffness(p), fm.ulp(p / p.expanded_scale(), "E3M4") * p.expanded_scale()
    )
    p.rescale_(p.scale * 2)
    assert torch.equal(p.manifold.scale, p.expanded_scale())


def test_the_manifold_counts_its_draws_in_the_parameter() -> None:
    p = parameter(seed=8)
    step = 0.3 * p.manifold.stiffness(p)
    first, second = p.manifold.retr(p, step), p.manifold.retr(p, step)
    assert int(p.counter) == int(p.manifold.counter) == 2
    assert not torch.equal(first, second)
    with torch.no_grad():
        p.mul_(0.9)
    assert int(p.manifold.counter) == 3


def test_geoopts_methods() -> None:
    p = parameter(rounding="nearest")
    u = torch.ones(4, 64)
    values = p.dequantize()
    assert torch.equal(p.expmap(u), p.manifold.expmap(values, u))
    assert torch.equal(p.retr(u), p.manifold.retr(values, u))
    assert torch.equal(
        p.dist(torch.zeros(4, 64), p="g"), p.manifold.dist(values, torch.zeros(4, 64))
    )
    with torch.no_grad():
        assert p.proj_() is p
    assert torch.equal(p.dequantize(), values)


def test_a_layer_is_not_moved_while_a_graph_holds_its_weight() -> None:
    """Nothing of the layer is changed then; after the backward pass it can be moved."""
    layer = fm.quantize_model(nn.Sequential(nn.Linear(8, 4)), storage="codes")[0]
    loss = layer(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match="while a graph or a weak reference holds its weight"):
        layer.to(torch.bfloat16)
    assert layer.weight.dtype is layer.bias.dtype is torch.float32
    loss.backward()
    del loss
    assert layer.to(torch.bfloat16).weight.dtype is torch.bfloat16
    assert layer.weight.grad.dtype is torch.bfloat16


def quantized(**options):
    torch.manual_seed(0)
    return fm.quantize_model(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), "E5M2", **options
    )


# torch 2.13 uses itself what it has deprecated.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_an_exported_program_can_be_decomposed_unless_it_trains() -> None:
    model = quantized()
    program = torch.export.export(model, (INPUT,))
    with pytest.raises(RuntimeError, match="can require gradients"):
        program.run_decompositions()
    model.requires_grad_(False)
    program = torch.export.export(model, (INPUT,)).run_decompositions()
    assert torch.equal(program.module()(INPUT), model(INPUT))
    codes = [t for t in program.state_dict.values() if t.dtype == torch.uint8]
    assert [tuple(t.shape) for t in codes] == [(64, 32), (4, 64)]
    assert not any("fp8manifold" in str(node.target) for node in program.graph.nodes)


@every_granularity
def test_fake_tensors_are_quantized(granularity) -> None:
    spec = fm.LayerSpec(fm.OperandSpec("E2M1", granularity=granularity))
    with FakeTensorMode():
        model = fm.quantize_model(nn.Linear(64, 4), spec, "codes", keep_remainder=True)
        model(torch.ones(3, 64)).sum().backward()
    real_model = fm.quantize_model(nn.Linear(64, 4), spec, "codes", keep_remainder=True)
    assert type(model.weight) is fm.FP8Parameter
    for name in ("codes", "scale", "counter", "remainder"):
        fake = getattr(model.weight, name)
        real = getattr(real_model.weight, name)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype), name
    assert model.weight.grad.shape == (4, 64)


@pytest.mark.parametrize("policy", ["dynamic", "static", "delayed"])
def test_fake_master_weights_are_quantized(policy) -> None:
    spec = fm.LayerSpec("E4M3", "E4M3", policy=policy)
    with FakeTensorMode():
        model = fm.quantize_model(nn.Linear(64, 4), spec, "master")
        assert model(torch.ones(3, 64)).shape == (3, 4)


def test_fake_weights_on_a_grid_are_refused() -> None:
    message = "take storage='codes', or quantise a model"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        fm.quantize_model(nn.Linear(64, 4), "E4M3", "grid")


def test_a_single_value_is_formatted_as_a_number() -> None:
    p = fm.FP8Parameter(torch.tensor([[0.3, -0.7]]), "E4M3")
    assert f"{p.detach()[0, 0]:.2f} {p[0, 1]:+.3f} {p[0, 0]}" == "0.31 -0.688 0.3125"
    assert f"{fm.FP8Parameter(torch.tensor(0.3), 'E4M3'):.1e}" == "3.1e-01"
    assert f"{p}" == repr(p)


def test_weights_are_made_empty_by_accelerate() -> None:
    """Accelerate makes parameters again on the meta device; format and options stay."""
    import accelerate

    with accelerate.init_empty_weights():
        model = quantized(rounding="nearest", granularity="tensor", seed=3)
    expected = quantized(rounding="nearest", granularity="tensor", seed=3)
    for empty, full in (
        (model[0].weight, expected[0].weight),
        (model[2].weight, expected[2].weight),
    ):
        assert type(empty) is fm.FP8Parameter
        assert (empty.device.type, empty.requires_grad) == ("meta", True)
        assert (empty.format, empty.seed, empty.rounding) == (full.format, full.seed, full.rounding)
        assert empty.granularity == full.granularity
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    assert torch.equal(model(INPUT), expected(INPUT))


@every_granularity
def test_a_parameter_of_a_stored_tensor_is_its_parameter(granularity) -> None:
    stored = parameter("E3M4", granularity=granularity, keep_remainder=True).detach()
    p = fm.FP8Parameter(stored)
    assert same_store(p, stored)
    assert p.codes is stored.codes
    assert p.requires_grad
    assert not fm.FP8Parameter(stored, requires_grad=False).requires_grad
    assert fm.FP8Parameter(stored, "E5M2").format.name == "E5M2"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_a_network_learns_on_a_card(option) -> None:
    net = Net().cuda()
    compiled = torch.compile(net, fullgraph=True)
    optimizer = optim.AdamW(net.parameters(), 1e-2, **{option: True})
    first, last = (train(lambda x: compiled(x.cuda()).cpu(), optimizer, steps) for steps in (5, 35))
    assert last < 0.2 * first
    assert all(type(p) is fm.FP8Parameter and p.is_cuda for p in net.stored)


def test_gradient_helpers() -> None:
    net = Net()
    (1000 * loss_of(net)).backward()
    assert nn.utils.clip_grad_norm_(net.parameters(), 1.0) > 1
    total = torch.stack(
        [p.grad.square().sum() for p in net.parameters() if p.grad is not None]
    ).sum()
    assert total.item() == pytest.approx(1.0, rel=1e-4)
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    assert all(p.grad.abs().max() <= 0.01 for p in net.parameters() if p.grad is not None)
    net.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_parameters_to_vector_and_back() -> None:
    net = Net()
    vector = nn.utils.parameters_to_vector(net.parameters())
    assert type(vector) is Tensor
    assert vector.numel() == sum(p.numel() for p in net.parameters())
    assert torch.equal(vector[: 32 * 64].view(64, 32), net.first.weight.dequantize())
    nn.utils.vector_to_parameters(torch.zeros_like(vector), net.parameters())
    assert all(not p.detach().any() for p in net.parameters())
    assert all(type(p) is fm.FP8Parameter for p in net.stored)


def test_calling_with_other_parameters() -> None:
    net, stepped_net = Net(), stepped(Net())
    assert torch.equal(
        torch.func.functional_call(net, dict(stepped_net.named_parameters()), (INPUT,)),
        stepped_net(INPUT),
    )


def test_checkpointed_activations() -> None:
    net, again = Net(), Net()
    loss_of(net).backward()
    out = torch.utils.checkpoint.checkpoint(again, INPUT, use_reentrant=False)
    (out - TARGET).square().mean().backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("remainder", [False, True])
def test_a_tied_weight_comes_back_from_a_file_of_safetensors(remainder, tmp_path):
    def tied(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Embedding(7, 32), nn.Linear(32, 7, bias=False))
        net[1].weight = net[0].weight
        return fm.quantize_model(net, "E4M3", embeddings="E4M3", keep_remainder=remainder)

    saved, loaded = tied(0), tied(1)
    safetensors.save_model(saved, tmp_path / "model.safetensors")
    assert safetensors.load_model(loaded, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(loaded[1].weight.codes, saved[0].weight.codes)
    assert loaded[1].weight is loaded[0].weight


def test_a_tied_weight_that_a_state_lacks_altogether_is_missing():
    net = fm.quantize_model(nn.Sequential(nn.Embedding(7, 32)), None, embeddings="E4M3")
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
        net.load_state_dict({})


def test_data_of_another_shape_is_refused():
    p = fm.FP8Parameter(normal(10, 4), "E4M3")
    with pytest.raises(
        RuntimeError, match=r"\(10, 4\) can't take data of shape \(1, 4\): resize layers before"
    ):
        p.data = p.data[:1]


@pytest.mark.parametrize("index", [-1, 10])
def test_an_embedding_of_a_row_out_of_range_is_refused(index):
    p = fm.FP8Parameter(normal(10, 4), "E4M3")
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        nn.functional.embedding(torch.tensor([index]), p)


def test_an_address_of_floats_is_refused():
    p = fm.FP8Parameter(normal(10, 4), "E4M3")
    with pytest.raises(NotImplementedError, match="no address of floats"):
        p.data_ptr()


def test_modules_that_are_cast_under_autocast_train_on():
    layers = nn.Embedding(7, 4), nn.Conv1d(4, 4, 1)
    net = fm.quantize_model(
        nn.Sequential(*layers), None, embeddings="E4M3", parameters={"1.weight": "E4M3"}
    )
    with torch.autocast("cpu", torch.bfloat16):
        net.bfloat16()
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), 1e-2)
    for _ in range(2):
        net[1](net[0](torch.arange(6).view(2, 3)).mT).sum().backward()
        optimizer.step()
    assert net[0].weight.dtype is torch.bfloat16
