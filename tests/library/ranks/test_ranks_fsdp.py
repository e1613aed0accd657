"""Weights that several processes hold by rows: one byte a weight, and the steps of one
process to the bit.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from family_cases import VALID, make
from optimizer_cases import bits_of, frozen, normal
from paths import on_path
from rank_cases import batch, combined, loss_of, model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp8manifold as fm
from fp8manifold._shards import FP8Shard
from fp8manifold.random_bits import EPOCH


def sharded(net, *, nested=True, **options):
    """Shard a model by rows over all processes, each linear layer by itself if `nested`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net if nested else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def own_rows(whole, part):
    """Return the rows of the whole that this process has in `part`."""
    count = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * count :][: part.shape[0]]


def check_same(net, alone, *, seeds=True):
    """The own rows of every parameter have the bits of the whole one's."""
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        rows = p._local_tensor
        if isinstance(q, fm.FP8Tensor):
            assert isinstance(rows, FP8Shard), name
            assert torch.equal(rows.codes, own_rows(q.codes, rows.codes)), name
            scale = own_rows(q.scale, rows.codes) if q.scale.dim() else q.scale
            assert torch.equal(rows.scale, scale), name
            assert rows.counter == q.counter, name
            assert rows.seed == q.seed or not seeds, name
        else:
            assert bits_of(rows) == bits_of(own_rows(q, rows)), name


def put_equal_gradients(net, alone, step):
    """Gradients as a reduction leaves them: the same bits, by rows here and whole
    there.
    """
    for i, (p, q) in enumerate(zip(net.parameters(), alone.parameters(), strict=True)):
        q.grad = normal(*q.shape, seed=1000 * step + i, std=0.3).to(q.device, q.dtype)
        part = own_rows(q.grad, p._local_tensor).clone()
        p.grad = DTensor.from_local(
            part, p.device_mesh, p.placements, shape=q.shape, stride=q.stride()
        )


def step_alike(parts, whole, optimizers, step):
    put_equal_gradients(parts, whole, step)
    for optimizer in optimizers:
        optimizer.step()
    check_same(parts, whole)


#: writes that are behind each parameter when the steps begin that are compared: the
#: third is of another epoch
BORDER = EPOCH - 2


def near_the_border(*optimizers):
    """Let states that have begun be as far as the last writes of an epoch of dithered
    draws.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            assert int(state["step"]) == 1
            state["step"] += BORDER - 1


def stepped(
    name,
    writeback,
    moments,
    net,
    path="native",
    border=False,
    dtype=torch.float32,
    **options_of_case,
):
    """Step rows and the whole from equal gradients, and return how many scales widened.

    `net` has options of the model. With `border` the steps pass a border between epochs of
    dithered draws.
    """
    whole, parts = (
        model(**net, keep_remainder=writeback.startswith("residual")).to(dtype) for _ in range(2)
    )
    parts = sharded(parts)
    options = {"writeback": writeback, "moments": moments, "refresh_every": 2, **options_of_case}
    optimizers = [
        on_path(path, make(name, module.parameters(), **options)) for module in (parts, whole)
    ]
    for step in range(5 if border else 4):
        step_alike(parts, whole, optimizers, step)
        if step == 0 and border:
            near_the_border(*optimizers)
        if step == 1:  # the first forward pass may put other memory in the place of the parameters
            with torch.no_grad():
                assert torch.equal(parts(batch(0).to(dtype)), whole(batch(0).to(dtype))), step
            parts.reshard()  # after a forward pass the root stays whole
    part_optimizer, whole_optimizer = optimizers
    assert part_optimizer.bounded_share == whole_optimizer.bounded_share
    assert not border or {int(state["step"]) for state in part_optimizer.state.values()} == {
        BORDER + 4
    }
    return same_count(part_optimizer, whole_optimizer)


def same_count(part_optimizer, whole_optimizer, name="widened_scales"):
    """Return a count of scales, the same in all processes together as in one with all rows."""
    count = torch.tensor(getattr(part_optimizer, name))
    torch.distributed.all_reduce(count)
    assert int(count) == getattr(whole_optimizer, name)
    return int(count)


def stepped_from_zeros(name, granularity, options):
    """Parameters of zeros, parameters with rows of zeros, and a scale that is far too
    large.
    """
    whole = model(granularity=granularity)
    for i, p in enumerate(p for p in whole.parameters() if isinstance(p, fm.FP8Tensor)):
        p.codes[i:].zero_()
        p.scale[0 if p.scale.dim() and i else ...] *= 2.0**12
    parts = sharded(copy.deepcopy(whole))
    optimizers = [
        make(name, module.parameters(), writeback="residual8", **options)
        for module in (parts, whole)
    ]
    for step in range(4):
        step_alike(parts, whole, optimizers, step)
    assert same_count(*optimizers, "fitted_scales") > 0
    for index, (p, q) in enumerate(zip(parts.parameters(), whole.parameters(), strict=True)):
        assert optimizers[0].state[p].get("reference") == optimizers[1].state[q].get("reference"), (
            index
        )


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize(
    ("name", "stiffness"),
    [
        ("StiffnessAdamW", 0.0),
        ("StiffnessAdamW", 1.0),
        ("StiffnessMuon", 0.0),
        ("StiffnessAdafactor", 0.0),
    ],
)
def test_rows_of_zeros_begin_as_the_whole_does(pool, name, stiffness, granularity):
    options = {"stiffness": stiffness, "moments": "8bit", "refresh_every": 2}
    pool.run(stepped_from_zeros, name, granularity, options)


COMBINATIONS = [c for c in VALID if c[0] != "FisherNaturalGradient"]
#: every optimizer, every write-back and every kind of averages, in the default run
SAMPLE = COMBINATIONS[1::5]
#: combinations that are stepped by torch's own operators; the others are stepped natively,
#: as by default
EAGER = [
    *SAMPLE[2::5],
    ("StiffnessMuon", "residual8", "8bit"),
    ("StiffnessSGD", "residual8", "bfloat16"),
]


def path_of(combination):
    return "eager" if combination in EAGER else "native"


@pytest.mark.parametrize("combination", SAMPLE, ids=lambda c: "-".join(c))
def test_rows_are_stepped_as_the_whole(pool, combination):
    """22, 64 and 5 rows in 3 processes: none has as many as the others; every other
    case has scales of any kind.
    """
    net = {"granularity": "channel", "factors": SAMPLE.index(combination) % 2 == 0}
    pool.run(stepped, *combination, net, path_of(combination))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@combined(
    "StiffnessAdamW-residual8-8bit StiffnessAdamW-stochastic-bfloat16 StiffnessMuon-residual8-8bit "
    "StiffnessMuon-momentum-bfloat16 RiemannianAdam-stochastic-8bit StiffnessAdafactor-stochastic-8bit"
)
def test_shards_of_every_granularity_step_as_the_whole(
    pools, combination, granularity, factors, size
):
    pools[size].run(stepped, *combination, {"granularity": granularity, "factors": factors})


@pytest.mark.parametrize("moments", ["float32", "8bit"])
@pytest.mark.parametrize("name", ["StiffnessAdamW", "StiffnessMuon", "StiffnessAdafactor"])
@pytest.mark.parametrize("net", [{"storage": "float"}, {"rows": 7}])
def test_rows_of_floats_and_of_odd_columns(pair, name, moments, net):
    pair.run(stepped, name, "stochastic", moments, net)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "writeback", "moments"), COMBINATIONS)
@pytest.mark.parametrize(
    ("granularity", "path"), [("channel", "native"), ("tensor", "eager"), ("block", "native")]
)
def test_rows_dither_as_the_whole(pool, name, writeback, moments, granularity, path):
    net = {"granularity": granularity}
    pool.run(stepped, name, writeback, moments, net, path, border=True, draws="dither")


@pytest.mark.parametrize("name", ["RiemannianAdam", "RiemannianSGD"])
def test_rows_draw_by_the_weights_own(pool, name):
    pool.run(stepped, name, "stochastic", "8bit", {"draws": "dither"}, border=True, draws=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["StiffnessAdamW", "StiffnessMuon", "StiffnessAdafactor", "RiemannianAdam", "RiemannianSGD"],
)
def test_rows_of_halves_draw_as_the_whole(pair, name, dtype):
    path = "eager" if (name, dtype) == ("StiffnessMuon", torch.float16) else "native"
    pair.run(stepped, name, "stochastic", "float32", {"storage": "float"}, path, dtype=dtype)


#: options of the model by how it differs from the plain one
NETS = {
    "plain": {},
    "7 rows": {"rows": 7},
    "floats": {"storage": "float"},
    "factors": {"factors": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["pair", "pool"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c))
def test_every_combination(request, combination, granularity, net, processes):
    """Natively, and in one of the six by torch's own operators."""
    path = "eager" if (granularity, processes) == ("block", "pool") else "native"
    workers = request.getfixturevalue(processes)
    workers.run(stepped, *combination, {"granularity": granularity, **NETS[net]}, path)


def trained(net, options, *, nested=True, clip=False):
    whole, parts = model(**net), sharded(model(**net), nested=nested, **options)
    optimizers = [
        fm.optim.StiffnessMuon.for_model(module, 0.02, moments="8bit") for module in (parts, whole)
    ]
    losses = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(parts, batch(step, dist.get_rank()))
        loss.backward()
        losses_of_whole = [loss_of(whole, batch(step, rank)) for rank in range(2)]
        (losses_of_whole[0] / 2 + losses_of_whole[1] / 2).backward()
        assert loss.item() == losses_of_whole[dist.get_rank()].item(), step
        if clip:
            norms = [
                nn.utils.clip_grad_norm_(module.parameters(), 1e-3) for module in (parts, whole)
            ]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-6, atol=0)
            parts.reshard()
            for p, q in zip(
                parts.parameters(), whole.parameters(), strict=True
            ):  # but for the norm's last bit
                torch.testing.assert_close(
                    p.grad._local_tensor, own_rows(q.grad, p._local_tensor), rtol=1e-5, atol=0
                )
                p.grad._local_tensor.copy_(own_rows(q.grad, p._local_tensor))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    parts.reshard()
    check_same(parts, whole)
    return losses


@pytest.mark.skipif(
    torch.__version__ < (2, 9),
    reason="products of torch 2.8 depend in their last bit on where a tensor lies",
)
@pytest.mark.parametrize(
    ("net", "options", "keywords"),
    [
        ({}, {}, {}),
        ({"granularity": "tensor"}, {}, {"nested": False}),
        ({"granularity": "block"}, {"reshard_after_forward": False}, {}),
        ({"rows": 7}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
        ({}, {}, {"clip": True}),
        ({"storage": "master"}, {}, {}),
    ],
    ids=["nested", "as one", "kept whole", "offloaded", "clipped", "master"],
)
def test_a_run_of_two_processes_is_one_processs(pair, net, options, keywords):
    first, second = pair.run(trained, net, options, **keywords)
    assert first != second


def in_bfloat16():
    """Weights appear in bfloat16 while they are whole; the shards and the gradients
    stay what they are.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole, parts = model().to(torch.bfloat16), sharded(model(), mp_policy=policy)
    loss = loss_of(parts, batch(0))
    assert loss.item() == loss_of(whole, batch(0).bfloat16()).item()
    loss.backward()
    for p in parts.parameters():
        assert p.dtype == p.grad.dtype == torch.float32
    old_rows = stored_rows(parts)
    fm.optim.StiffnessAdamW(parts.parameters(), lr=0.01).step()
    assert stored_rows(parts) != old_rows


def stored_rows(net):
    return [bits_of(p._local_tensor) for p in net.parameters()]


def test_weights_under_mixed_precision_keep_float32_gradients(pair):
    pair.run(in_bfloat16)


class Vectors(nn.Module):
    """One-byte vectors and a one-byte batch of matrices beside floats like them; odd
    ones, one row, and few rows.
    """

    def __init__(self):
        super().__init__()
        for i, shape in enumerate([(50,), (4, 6, 64), (1, 64), (2, 3), (51,)]):
            values, options = (
                normal(*shape, seed=i, std=0.1),
                {"granularity": "block" if i == 1 else "channel"},
            )
            setattr(
                self, f"codes{i}", fm.FP8Parameter(values, "E4M3", seed=i, headroom=2.0, **options)
            )
            setattr(self, f"floats{i}", nn.Parameter(values.clone()))

    def forward(self, x):
        return sum(((p * x[0, 0]).sum() for p in self.parameters()), torch.zeros(()))


def vectors_stepped(name, writeback, moments, path):
    whole, parts = (
        Vectors(),
        fully_shard(Vectors(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    )
    options = {"writeback": writeback, "moments": moments, "refresh_every": 1}
    optimizers = [
        on_path(path, make(name, module.parameters(), **options)) for module in (parts, whole)
    ]
    for step in range(5):
        put_equal_gradients(parts, whole, step)
        for p, q in zip(
            parts.parameters(), whole.parameters(), strict=True
        ):  # one way, so that scales get too narrow
            q.grad.abs_().neg_()
            p.grad._local_tensor.abs_().neg_()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = {"RiemannianAdam": 8.0}.get(name, 0.2)
            optimizer.step()
        check_same(parts, whole)
    part_optimizer, whole_optimizer = optimizers
    for (p, state), twin in zip(
        part_optimizer.state.items(), whole_optimizer.state.values(), strict=True
    ):
        for key, value in state.items():
            if isinstance(value, DTensor):
                assert torch.equal(
                    value.full_tensor()[: p.shape[0]].flatten(), twin[key].flatten()
                ), key
            else:
                assert frozen(value) == frozen(twin[key]), key
    return same_count(part_optimizer, whole_optimizer), part_optimizer.bounded_share


@combined(
    "StiffnessAdamW-residual8-8bit StiffnessMuon-momentum-float32 StiffnessMuon-residual8-8bit "
    "StiffnessLion-stochastic-8bit StiffnessSGD-residual8-bfloat16 RiemannianAdam-residual8-8bit"
)
def test_vectors_batches_single_rows_and_wider_scales(pool, combination):
    results = pool.run(vectors_stepped, *combination, path_of(combination))
    assert results[0] == results[1] == results[2]
    assert results[0][0] > 0
