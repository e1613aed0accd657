"""Shards: the bytes that they take and send, compiled passes, averages, what ranks
agree on, and what is refused.
"""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from family_cases import make
from optimizer_cases import normal
from rank_cases import batch, loss_of, model, refusal
from rank_pool import Pool
from test_ranks_fsdp import own_rows, put_equal_gradients, sharded, step_alike, stored_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8manifold as fm
from fp8manifold.optim._backends import gathered as gathered_rows


class Wire(TorchDispatchMode):
    """Counts the bytes that this process gives to collectives, by their names."""

    def __init__(self):
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            inputs = args[1] if isinstance(args[1], Tensor) else args[0]
            tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
            self.sent[func._schema.name.removeprefix("c10d::")] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def bytes_counted(storage, products="decoded"):
    net = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 96, bias=False))
    if storage != "float":
        net = fm.quantize_model(net, "E4M3", storage, products=products)
    net = sharded(net, nested=False)
    with Wire() as wire:
        loss_of(net, batch(0)).backward()
    rows = [p._local_tensor for p in net.parameters()]
    parts = [x.codes if storage == "codes" else x for x in rows]
    group = net._get_fsdp_state()._fsdp_param_group
    outputs = chain.from_iterable(p.all_gather_outputs for p in group.fsdp_params)
    assert (
        sum(x.untyped_storage().nbytes() for x in outputs) == 0
    )  # the whole weights are gone after the pass
    return {
        "wire": dict(wire.sent),
        "shards": sum(x.untyped_storage().nbytes() for x in parts),
        "scales": sum(x.scale.nbytes for x in rows) if storage == "codes" else 0,
        "weights": sum(p.numel() for p in net.parameters()),
    }


def gathered_bytes(counts):
    return {name: count for name, count in counts["wire"].items() if "gather" in name}


@pytest.mark.parametrize("products", ["decoded", "fp8"])
def test_a_weight_is_one_byte_in_memory_and_on_the_wire(pair, products):
    codes = pair.run(bytes_counted, "codes", products)[0]
    floats = pair.run(bytes_counted, "float")[0]
    weights = codes["weights"]
    scales = 4 * (48 + 96) // 2
    assert floats["shards"] == 4 * weights // 2
    assert codes["shards"] == weights // 2
    assert codes["scales"] == scales
    codes_on_wire = gathered_bytes(codes)
    floats_on_wire = gathered_bytes(floats)
    assert codes_on_wire.keys() == floats_on_wire.keys()
    # One in the forward pass; the root is kept for the backward pass.
    passes = sum(floats_on_wire.values()) // (4 * weights // 2)
    assert passes in (1, 2)
    assert sum(floats_on_wire.values()) == passes * 4 * weights // 2
    assert sum(codes_on_wire.values()) == passes * (weights // 2 + scales)


def guarded(difference):
    """Return the error of a step, or whether it was skipped and changed nothing.

    The second process has another seed or a gradient of NaN, or each has another model.
    """
    rank = dist.get_rank()
    net = sharded(
        model(
            "tensor" if difference == "scale" else "channel",
            seed=rank if difference == "scale" else 0,
        )
    )
    if difference == "seed" and rank:
        net[0].weight._local_tensor.seed += 1
    optimizer = fm.optim.StiffnessAdamW(net.named_parameters(), lr=0.01)
    loss_of(net, batch(0)).backward()
    net.reshard()
    if difference == "nan" and rank == 1:
        net[0].weight.grad._local_tensor[0, 0] = torch.nan
    old_rows = stored_rows(net)
    message = refusal(optimizer.step)
    if message:
        return message
    return optimizer.skipped_steps, stored_rows(net) == old_rows


def test_ranks_skip_together(pair):
    assert pair.run(guarded, "nan") == [(1, True)] * 2


@pytest.mark.parametrize("difference", ["seed", "scale"])
def test_ranks_start_from_one_model(pair, difference):
    for message in pair.run(guarded, difference):
        assert "'0.weight'" in message
        assert "is not the same in every process" in message


def on_devices():
    """Never run so far: the same steps with NCCL, one device a process."""
    torch.cuda.set_device(dist.get_rank())
    whole, parts = model().cuda(), model().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(parts, mesh=mesh)
    optimizers = [
        make("StiffnessMuon", module.parameters(), moments="8bit") for module in (parts, whole)
    ]
    for step in range(3):
        step_alike(parts, whole, optimizers, step)
        with torch.no_grad():
            assert torch.equal(parts(batch(0).cuda()), whole(batch(0).cuda())), step
        parts.reshard()


def test_rows_are_gathered_in_the_order_of_the_tensors():
    """Collectives pair by their order: that of a set of names differs between
    interpreters.
    """
    p = fm.FP8Parameter(torch.linspace(-1, 1, 64), "E4M3", seed=1)
    p.grad = torch.ones(64)
    optimizer = fm.optim.StiffnessAdamW([p], moments="8bit", writeback="residual8")
    (slot,) = optimizer._begin(optimizer._slots())
    home, gathered = dict(slot.tensors), []
    slot.steps_all_rows = True

    def gather_rows(local_rows):
        gathered.append(local_rows)
        return local_rows.clone()

    slot.share = SimpleNamespace(gather_rows=gather_rows, local_rows=lambda whole: whole)
    with gathered_rows([slot]):
        assert all(
            slot.tensors[name] is not home[name]
            for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")
        )
        slot.tensors["exp_avg"].fill_(7)
    expected = [home[name] for name in ("weight", "exp_avg", "exp_avg_sq", "residual", "gradient")]
    assert all(
        rows is expected_rows for rows, expected_rows in zip(gathered, expected, strict=True)
    )
    assert slot.tensors["exp_avg"] is home["exp_avg"]
    assert bool((home["exp_avg"] == 7).all())


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU; has never run")
def test_shards_on_gpus_step_as_the_whole(tmp_path):
    pool = Pool(min(torch.cuda.device_count(), 3), tmp_path, "nccl")
    try:
        pool.run(on_devices)
    finally:
        pool.end()


def columns_stepped():
    whole = nn.Sequential(nn.Linear(1, 7, bias=False), nn.Linear(7, 1, bias=False))
    for i, p in enumerate(whole.parameters()):
        p.data = normal(*p.shape, seed=i, std=0.1)
    parts = sharded(copy.deepcopy(whole))
    optimizers = [
        fm.optim.StiffnessMuon([{"params": list(module.parameters())}], lr=0.1)
        for module in (parts, whole)
    ]
    for step in range(2):
        step_alike(parts, whole, optimizers, step)


def test_matrices_of_one_column_and_of_one_row(pair):
    pair.run(columns_stepped)


def compiled(granularity, rows):
    torch._dynamo.reset()
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # dynamo asks for it
    parts, whole = sharded(model(granularity, rows=rows)), model(granularity, rows=rows)
    graph = torch.compile(parts, backend="aot_eager")
    optimizer = fm.optim.StiffnessAdamW(parts.parameters(), lr=0.01)
    for step in range(2):
        out = graph(batch(step))
        if step == 0:
            torch.testing.assert_close(out, whole(batch(step)), rtol=1e-5, atol=1e-6)
        out.square().mean().backward()
        assert all(p.grad is not None for p in parts.parameters()), step
        optimizer.step()


@pytest.mark.parametrize(("granularity", "rows"), [("channel", 7), ("tensor", 24)])
def test_passes_in_a_graph(pair, granularity, rows):
    """Scales that FSDP does not fill are written between a graph's forward and its
    backward pass.
    """
    pair.run(compiled, granularity, rows)


def averaged(nested, ema):
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if ema else {}
    whole, parts = model(), model()
    part_average, whole_average = (
        fm.averaged_model(module, **options) for module in (parts, whole)
    )
    sharded(parts, nested=nested)
    sharded(part_average.module, nested=nested)
    optimizers = [
        fm.optim.StiffnessAdamW(module.parameters(), lr=0.01) for module in (parts, whole)
    ]
    for step in range(3):
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:  # after which a root is whole, and what is written into it is lost
            with torch.no_grad():
                torch.testing.assert_close(part_average(batch(0)), whole_average(batch(0)))
                assert torch.equal(parts(batch(0)), whole(batch(0))), step
        part_average.update_parameters(parts)
        whole_average.update_parameters(whole)
        for index, (p, q) in enumerate(
            zip(part_average.module.parameters(), whole_average.module.parameters(), strict=True)
        ):
            assert torch.equal(p._local_tensor, own_rows(q, p._local_tensor)), (step, index)


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_are_averaged_as_the_whole(pair, nested, ema):
    pair.run(averaged, nested, ema)


def refused_averages():
    parts, partly = sharded(model()), model()
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    rows = fm.averaged_model(model())
    sharded(rows.module)
    attempts = [
        lambda: fm.averaged_model(parts),
        lambda: fm.averaged_model(model()).update_parameters(parts),
        lambda: rows.update_parameters(model()),
        lambda: rows.update_parameters(partly),
    ]
    messages = [refusal(attempt) for attempt in attempts]
    assert rows.n_averaged == 0
    return messages


def test_averages_of_other_rows_are_refused_in_every_process(pair):
    first, second = pair.run(refused_averages)
    assert first == second
    for line in first:
        assert (
            "call averaged_model before fully_shard, then fully_shard on the average's module"
            in line
        )
        assert "\n" not in line


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def model_sharded_by_columns():
    return fully_shard(model(), mesh=mesh_of_all(), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def hybrid_parameters():
    mesh_shape = (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    return fully_shard(model(), mesh=mesh).parameters()


def parameter_of_columns():
    return nn.Parameter(DTensor.from_local(torch.zeros(4, 2), mesh_of_all(), [Shard(1)]))


def module_of_blocks():
    module = nn.Module()
    module.weight = fm.FP8Parameter(torch.ones(64), granularity="block")
    return module


ONLY_OURS = "only the optimizers of fp8manifold.optim"
ONE_PROCESS = "sharded, and this model is not: save the state with"


class Unsupported(NamedTuple):
    """A call with a sharded model, and what it is answered."""

    call: Callable
    pattern: str


UNSUPPORTED = {
    "init": Unsupported(lambda net: nn.init.zeros_(net[0].weight), ONLY_OURS),
    "add_": Unsupported(torch.no_grad()(lambda net: net[0].weight.add_(1.0)), ONLY_OURS),
    "rescale_": Unsupported(lambda net: net[0].weight._local_tensor.rescale_(1.0), ONLY_OURS),
    "half": Unsupported(lambda net: net.half(), "float32 or bfloat16"),
    "codes": Unsupported(lambda net: net[0].weight_codes(), "unshard"),
    "scale": Unsupported(lambda net: net[0].weight_scale(), "unshard"),
    "state of shards": Unsupported(
        lambda net: model().load_state_dict(net.state_dict()),
        f"{ONE_PROCESS} full_state_dict=True",
    ),
    "sync": Unsupported(fm.distributed.sync, "call sync.model. before fully_shard"),
    "wrapper": Unsupported(
        lambda net: fm.optim.StiffnessWrapper(torch.optim.SGD(net.parameters(), lr=0.1)),
        "StiffnessWrapper.*sharded",
    ),
    "fisher": Unsupported(
        lambda net: fm.optim.FisherNaturalGradient(net.parameters(), net, [batch(0)]),
        "FisherNaturalGradient.*sharded",
    ),
    "columns": Unsupported(
        lambda _: model_sharded_by_columns()(batch(0)), "storage='codes' is no longer in codes"
    ),
    "hybrid": Unsupported(lambda _: fm.optim.StiffnessAdamW(hybrid_parameters(), lr=0.1), "HSDP"),
    "tensor parallelism": Unsupported(
        lambda _: fm.optim.StiffnessAdamW([parameter_of_columns()], lr=0.1), "tensor parallelism"
    ),
    "blocks": Unsupported(
        lambda _: fully_shard(module_of_blocks(), mesh=mesh_of_all()), "granularity='tensor'"
    ),
    "rows": Unsupported(
        lambda net: fm.distributed.rows_of(batch(0)[:3], net[0].weight),
        r"^whole has shape \(3, 64\): 22 rows are needed$",
    ),
}


def refused_of_shards(name):
    call, pattern = UNSUPPORTED[name]
    net = sharded(model())
    message = refusal(lambda: call(net))
    assert re.search(pattern, message), message
    # torch says what a state has too many or too few of in lines of its own
    assert "\n" not in message or ONE_PROCESS in message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_so(pair, name):
    pair.run(refused_of_shards, name)
