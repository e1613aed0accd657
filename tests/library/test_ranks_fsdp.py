"""Weights that several processes hold by rows: one byte a weight, and the steps of one process to the bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_cases import VALID, make
from optimizer_cases import bits_of, normal
from rank_cases import batch, loss_of, model
from rank_pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8manifold as fm
from fp8manifold._shards import FP8Shard


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(3, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


def sharded(net: Any, *, nested: bool = True, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net if nested else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def own_rows(whole: Tensor, part: Tensor) -> Tensor:
    each = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * each :][: part.shape[0]]


def check_same(net: nn.Module, alone: nn.Module, *, seeds: bool = True) -> None:
    """The own rows of every parameter have the bits of the whole one's."""
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        held: Any = p._local_tensor
        if isinstance(q, fm.FP8Tensor):
            assert isinstance(held, FP8Shard), name
            assert torch.equal(held.codes, own_rows(q.codes, held.codes)), name
            scale = own_rows(q.scale, held.codes) if q.scale.dim() else q.scale
            assert torch.equal(held.scale, scale), name
            assert held.counter == q.counter
            assert held.seed == q.seed or not seeds
        else:
            assert bits_of(held) == bits_of(own_rows(q, held)), name


def put_equal_gradients(net: nn.Module, alone: nn.Module, step: int) -> None:
    """What a reduction would have left: the same bits, by rows here and whole there."""
    for i, (p, q) in enumerate(zip(net.parameters(), alone.parameters(), strict=True)):
        q.grad = normal(*q.shape, seed=1000 * step + i, std=0.3).to(q.device, q.dtype)
        part = own_rows(q.grad, p._local_tensor).clone()
        p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=q.shape, stride=q.stride())


# ------------------------------------------------------------------------------------------------------ steps
def stepped(name: str, writeback: str, moments: str, net: dict[str, Any], options: dict[str, Any]) -> int:
    """Steps of rows and of the whole from equal gradients; how many scales were widened."""
    whole = model(**net, keep_remainder=writeback.startswith("residual"))
    parts = sharded(model(**net, keep_remainder=writeback.startswith("residual")))
    options = {"writeback": writeback, "moments": moments, "refresh_every": 2, **options}
    optimizers = [make(name, each.parameters(), **options) for each in (parts, whole)]
    for step in range(4):
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()
        check_same(parts, whole)
        if step == 1:  # the first forward pass may put other memory in the place of the parameters
            with torch.no_grad():
                assert torch.equal(parts(batch(0)), whole(batch(0)))
            parts.reshard()  # after a forward pass the root stays whole
    ours, its = optimizers
    assert ours.bounded_share == its.bounded_share
    assert ours.widened_scales == its.widened_scales
    return int(ours.widened_scales)


COMBINATIONS = [c for c in VALID if c[0] != "FisherNaturalGradient"]
#: every optimizer, every write-back and every kind of averages, in the default run
SOME = COMBINATIONS[1::5]


@pytest.mark.parametrize("combination", SOME, ids=lambda c: "-".join(c))
def test_rows_are_stepped_as_the_whole(pool: Pool, combination: tuple[str, str, str]) -> None:
    """22, 64 and 5 rows in 3 processes: none of which has as many as the others."""
    pool.run(stepped, *combination, {"granularity": "channel"}, {})


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize(
    "combination",
    [
        ("StiffnessAdamW", "residual4", "8bit"),
        ("StiffnessAdamW", "stochastic", "bfloat16"),
        ("StiffnessMuon", "residual8", "8bit"),
        ("StiffnessMuon", "momentum", "bfloat16"),
        ("RiemannianAdam", "stochastic", "8bit"),
    ],
    ids=lambda c: "-".join(c),
)
def test_every_granularity(pair: Pool, combination: tuple[str, str, str], granularity: str) -> None:
    pair.run(stepped, *combination, {"granularity": granularity}, {})


@pytest.mark.parametrize("moments", ["float32", "8bit"])
@pytest.mark.parametrize("name", ["StiffnessAdamW", "StiffnessMuon"])
def test_rows_of_floats(pair: Pool, name: str, moments: str) -> None:
    """Matrices and vectors that are alike in all but their shapes."""
    pair.run(stepped, name, "stochastic", moments, {"storage": "float"}, {})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c))
def test_every_combination(
    pool: Pool, pair: Pool, combination: tuple[str, str, str], granularity: str, size: int
) -> None:
    for net in ({}, {"rows": 7}, {"storage": "float"}):
        (pair if size == 2 else pool).run(stepped, *combination, {"granularity": granularity, **net}, {})


def trained(net: dict[str, Any], options: dict[str, Any], *, nested: bool = True, clip: bool = False) -> Any:
    """A real run of two processes, and one process with the batches of both: halves and sums of two are exact."""
    whole, parts = model(**net), sharded(model(**net), nested=nested, **options)
    optimizers = [fm.optim.StiffnessMuon.for_model(each, 0.02, moments="8bit") for each in (parts, whole)]
    losses = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        own = loss_of(parts, batch(step, dist.get_rank()))
        own.backward()
        both = [loss_of(whole, batch(step, rank)) for rank in range(2)]
        (both[0] / 2 + both[1] / 2).backward()
        assert own.item() == both[dist.get_rank()].item()
        if clip:
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 1e-3) for each in (parts, whole)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-6, atol=0)
            parts.reshard()
            for p, q in zip(parts.parameters(), whole.parameters(), strict=True):  # but for the norm's last bit
                torch.testing.assert_close(p.grad._local_tensor, own_rows(q.grad, p._local_tensor), rtol=1e-5, atol=0)
                p.grad._local_tensor.copy_(own_rows(q.grad, p._local_tensor))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(own.item())
    parts.reshard()
    check_same(parts, whole)
    return losses


@pytest.mark.parametrize(
    "case",
    [
        ({"granularity": "channel"}, {}, {}),
        ({"granularity": "tensor"}, {}, {"nested": False}),
        ({"granularity": "block"}, {"reshard_after_forward": False}, {}),
        ({"rows": 7}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
        ({}, {}, {"clip": True}),
        ({"storage": "master"}, {}, {}),
    ],
    ids=["nested", "as one", "kept whole", "offloaded", "clipped", "master"],
)
def test_a_run_of_two_processes_is_one_processs(pair: Pool, case: Any) -> None:
    net, options, how = case
    first, second = pair.run(trained, net, options, **how)
    assert first != second


def in_bfloat16() -> None:
    """Weights appear in bfloat16 while they are whole; the shards and the gradients stay what they are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole, parts = model().to(torch.bfloat16), sharded(model(), mp_policy=policy)
    loss = loss_of(parts, batch(0))
    assert loss.item() == loss_of(whole, batch(0).bfloat16()).item()
    loss.backward()
    for p in parts.parameters():
        assert p.dtype == p.grad.dtype == torch.float32
    before = stored_rows(parts)
    fm.optim.StiffnessAdamW(parts.parameters(), lr=0.01).step()
    assert stored_rows(parts) != before


def stored_rows(net: nn.Module) -> list[bytes]:
    return [bits_of(p._local_tensor) for p in net.parameters()]  # type: ignore[operator]


def test_mixed_precision(pair: Pool) -> None:
    pair.run(in_bfloat16)


class Vectors(nn.Module):
    """A one-byte vector and a one-byte batch of matrices beside floats of as many dimensions; one row, and few rows."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate([(50,), (4, 6, 64), (1, 64), (2, 3)]):
            values = normal(*shape, seed=i, std=0.1)
            granularity: Any = "block" if i == 1 else "channel"
            setattr(self, f"codes{i}", fm.FP8Parameter(values, "E4M3", granularity=granularity, seed=i, headroom=2.0))
            setattr(self, f"floats{i}", nn.Parameter(values.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((p * x[0, 0]).sum() for p in self.parameters()), torch.zeros(()))


def vectors_stepped(name: str, writeback: str, moments: str) -> tuple[int, float]:
    whole, parts = Vectors(), fully_shard(Vectors(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = {"writeback": writeback, "moments": moments, "refresh_every": 1}
    optimizers = [make(name, each.parameters(), **options) for each in (parts, whole)]
    for step in range(5):
        put_equal_gradients(parts, whole, step)
        for p, q in zip(parts.parameters(), whole.parameters(), strict=True):  # one way, so that scales get too narrow
            q.grad.abs_().neg_()
            p.grad._local_tensor.abs_().neg_()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = OPTIONS_OF_LARGE_STEPS.get(name, 0.2)
            optimizer.step()
        check_same(parts, whole)
    ours, its = optimizers
    for (p, state), twin in zip(ours.state.items(), its.state.values(), strict=True):
        for key, value in state.items():
            if isinstance(value, DTensor):
                numbers = value.full_tensor()[: p.shape[0]].flatten()
                assert torch.equal(numbers, twin[key].flatten()) or key == "residual", key
            elif isinstance(value, Tensor):
                assert torch.equal(value, twin[key]), key
            else:
                assert value == twin[key], key
    assert ours.widened_scales == its.widened_scales
    return ours.widened_scales, ours.bounded_share


OPTIONS_OF_LARGE_STEPS = {"RiemannianAdam": 8.0, "Madam": 0.8}


@pytest.mark.parametrize(
    "combination",
    [
        ("StiffnessAdamW", "residual4", "8bit"),
        ("StiffnessAdamW", "residual8", "8bit"),
        ("StiffnessMuon", "momentum", "float32"),
        ("StiffnessMuon", "residual4", "8bit"),
        ("StiffnessLion", "stochastic", "8bit"),
        ("Madam", "residual4", "bfloat16"),
        ("RiemannianAdam", "residual8", "8bit"),
    ],
    ids=lambda c: "-".join(c),
)
def test_vectors_batches_single_rows_and_wider_scales(pool: Pool, combination: tuple[str, str, str]) -> None:
    each = pool.run(vectors_stepped, *combination)
    assert each[0] == each[1] == each[2]
    assert each[0][0] > 0


# ------------------------------------------------------------------------------------------------------ bytes
class Wire(TorchDispatchMode):
    """Counts the bytes that this process gives to collectives, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = args[1] if isinstance(args[1], Tensor) else args[0]
            tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
            self.sent[func._schema.name.removeprefix("c10d::")] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def bytes_counted(storage: str) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 96, bias=False))
    if storage != "float":
        net = fm.quantize_model(net, "E4M3", storage)
    net = sharded(net, nested=False)
    with Wire() as wire:
        loss_of(net, batch(0)).backward()
    held = [p._local_tensor for p in net.parameters()]
    parts = [x.codes if storage == "fp8" else x for x in held]
    scales = sum(x.scale.nbytes for x in held) if storage == "fp8" else 0
    group = net._get_fsdp_state()._fsdp_param_group
    whole = sum(x.untyped_storage().nbytes() for p in group.fsdp_params for x in p.all_gather_outputs)
    assert whole == 0  # the whole weights are gone after the pass
    return {
        "wire": dict(wire.sent),
        "shards": sum(x.untyped_storage().nbytes() for x in parts),
        "scales": scales,
        "weights": sum(p.numel() for p in net.parameters()),
    }


def test_a_weight_is_one_byte_in_memory_and_on_the_wire(pair: Pool) -> None:
    codes, floats = (pair.run(bytes_counted, storage)[0] for storage in ("fp8", "float"))
    weights = codes["weights"]
    assert floats["shards"] == 4 * weights // 2
    assert codes["shards"] == weights // 2
    assert codes["scales"] == 4 * (48 + 96) // 2
    ours, theirs = [{k: v for k, v in each["wire"].items() if "gather" in k} for each in (codes, floats)]
    assert ours.keys() == theirs.keys()
    passes = sum(theirs.values()) // (4 * weights // 2)  # one in the forward pass; the root is kept for the other
    assert passes in (1, 2)
    assert sum(theirs.values()) == passes * 4 * weights // 2
    assert sum(ours.values()) == passes * (weights // 2 + 4 * (48 + 96) // 2)


# ------------------------------------------------------------------------------------------ guard and refusals
def guarded(what: str) -> Any:
    rank = dist.get_rank()
    net = sharded(model("tensor" if what == "scale" else "channel", seed=rank if what == "scale" else 0))
    if what == "seed" and rank:
        net[0].weight._local_tensor.seed += 1
    optimizer = fm.optim.StiffnessAdamW(net.named_parameters(), lr=0.01)
    loss_of(net, batch(0)).backward()
    net.reshard()
    if what == "nan" and rank == 1:
        net[0].weight.grad._local_tensor[0, 0] = torch.nan
    before = stored_rows(net)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return optimizer.skipped_steps, stored_rows(net) == before


def test_ranks_skip_together_and_start_from_one_model(pair: Pool) -> None:
    assert pair.run(guarded, "nan") == [(1, True)] * 2
    for what in ("seed", "scale"):
        for said in pair.run(guarded, what):
            assert "'0.weight'" in said
            assert "is not the same in every process" in said


def on_devices() -> None:
    """Never run so far: the same steps with NCCL, one device a process."""
    torch.cuda.set_device(dist.get_rank())
    whole, parts = model().cuda(), model().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(parts, mesh=mesh)
    optimizers = [make("StiffnessMuon", each.parameters(), moments="8bit") for each in (parts, whole)]
    for step in range(3):
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()
        check_same(parts, whole)
        with torch.no_grad():
            assert torch.equal(parts(batch(0).cuda()), whole(batch(0).cuda()))
        parts.reshard()


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU; has never run")
def test_rows_on_gpus(tmp_path: Path) -> None:
    pool = Pool(min(torch.cuda.device_count(), 3), tmp_path, "nccl")
    try:
        pool.run(on_devices)
    finally:
        pool.end()


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            said[name] = str(error)

    rank, size = dist.get_rank(), dist.get_world_size()
    net = sharded(model())
    weight = net[0].weight
    attempt("fill", lambda: nn.init.zeros_(weight))
    attempt("add", lambda: weight.add_(1.0) if torch.no_grad().__enter__() is None else None)
    attempt("rescale", lambda: weight._local_tensor.rescale_(1.0))
    attempt("half", lambda: net.half())
    attempt("codes", lambda: net[0].weight_codes())
    attempt("scale", lambda: net[0].weight_scale())
    attempt("sync", lambda: fm.distributed.sync(net))
    attempt("flatten", lambda: fm.flatten_state_dict(net.state_dict()))
    attempt("wrapper", lambda: fm.optim.StiffnessWrapper(torch.optim.SGD(net.parameters(), lr=0.1)))
    attempt("fisher", lambda: fm.optim.FisherNaturalGradient(net.parameters(), net, [batch(0)]))
    other = model()
    attempt("columns", lambda: fully_shard(other, mesh=mesh_of(size), shard_placement_fn=lambda p: Shard(p.dim() - 1)))
    hybrid = fully_shard(model(), mesh=init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard")))
    attempt("hybrid", lambda: fm.optim.StiffnessAdamW(hybrid.parameters(), lr=0.1))
    attempt("tensor parallel", lambda: parallelize_module(model(), mesh_of(size), {"0": ColwiseParallel()}))
    columns = DTensor.from_local(torch.zeros(4, 2), mesh_of(size), [Shard(1)])
    attempt("columns of floats", lambda: fm.optim.StiffnessAdamW([nn.Parameter(columns)], lr=0.1))
    blocks = nn.Module()
    blocks.weight = fm.FP8Parameter(torch.ones(64), granularity="block")
    attempt("blocks of a vector", lambda: fully_shard(blocks, mesh=mesh_of(size)))
    assert rank < size
    return said


def mesh_of(size: int) -> Any:
    return init_device_mesh("cpu", (size,))


REFUSED = {
    "fill": "written by the optimizers of fp8manifold.optim",
    "add": "written by the optimizers of fp8manifold.optim",
    "rescale": "written by the optimizers of fp8manifold.optim",
    "half": "float32 or bfloat16",
    "codes": "unshard",
    "scale": "unshard",
    "flatten": "full_state_dict=True",
    "sync": "call sync.model. before fully_shard",
    "wrapper": "StiffnessWrapper.*sharded",
    "fisher": "FisherNaturalGradient.*sharded",
    "columns": "along its first dimension only",
    "hybrid": "HSDP",
    "tensor parallel": "take fully_shard",
    "columns of floats": "tensor parallelism",
    "blocks of a vector": "granularity='tensor'",
}


def test_what_is_not_supported_says_so(pair: Pool) -> None:
    for said in pair.run(refusals):
        assert said.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.search(pattern, said[name]), (name, said[name])
            assert "\n" not in said[name]
