"""Code that takes an FP8Tensor for memory of floats works, or is refused.

Such code: collectives, sharding, sharing between processes, writing of files.
"""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from optimizer_cases import normal
from safetensors import torch as safetensors
from tensor_cases import parameter, same_store
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8manifold as fm

WAYS = "use DistributedDataParallel, or storage='codes' or 'master' with fully_shard"
STATE = r"use its module's state_dict\(\)"


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zeros() -> Tensor:
    return torch.zeros(4, 64)


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "all_reduce of a view": lambda p: dist.all_reduce(p[0]),
    "broadcast of a view": lambda p: dist.broadcast(p[0], 0),
    "all_gather_into_tensor": lambda p: dist.all_gather_into_tensor(zeros(), p),
    "gather": lambda p: dist.gather(p, [zeros()]),
    "reduce_scatter_tensor": lambda p: dist.reduce_scatter_tensor(zeros(), p),
    "all_to_all_single": lambda p: dist.all_to_all_single(p, zeros()),
    "send": lambda p: dist.isend(p, 0),
    "recv": lambda p: dist.irecv(p, 0),
}


# torch 2.14 has new names for some of them.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("call", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collectives_are_refused(call) -> None:
    p = parameter()
    original = p.clone()
    with pytest.raises(
        RuntimeError, match=r"an FP8Tensor.*codes.*use torch\.distributed\.broadcast"
    ):
        call(p.detach())
    assert same_store(p, original)


def test_a_list_of_them_is_refused_by_scatter_and_decoded_by_reduce_scatter() -> None:
    """PyTorch does not look into such lists; nothing is written to a null address."""
    p, out = parameter(), zeros()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        dist.scatter(zeros(), [p.detach()])
    dist.reduce_scatter(out, [p.detach()])
    assert torch.equal(out, p.dequantize())


def test_parts_can_be_sent() -> None:
    p = parameter()
    for part in (p.codes, p.scale, p.counter):
        dist.broadcast(part, 0)
    model = fm.quantize_model(nn.Sequential(nn.Linear(64, 4, bias=False)), "E4M3", "codes")
    original = copy.deepcopy(model[0].weight)
    nn.parallel.DistributedDataParallel(model)  # sends a single parameter flat when it starts
    assert same_store(model[0].weight, original)
    objects = [p]
    dist.broadcast_object_list(objects, 0)
    assert same_store(objects[0], parameter())


def layer(storage):
    return fm.quantize_model(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)), "E4M3", storage)


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (1,))


def in_pieces(model):
    """The pieces that two processes of FSDP's first version hold."""
    for layer in model.children():
        layer.weight.data = layer.weight.detach().reshape(-1)[: layer.weight.numel() // 2]
    return model


WRAPS = {
    "flat": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "rows": lambda model: fully_shard(model, mesh=mesh()),
    "replicated": lambda model: distribute_module(model, mesh()),
    "columns": lambda model: parallelize_module(model, mesh(), {"?": ColwiseParallel()}),
    "in pieces": in_pieces,
}
#: Sharding by other means warns of itself in some releases of torch.
without_torch_warnings = pytest.mark.filterwarnings(
    *(f"ignore::{kind}Warning" for kind in ("Deprecation", "Future", "User"))
)


@pytest.mark.parametrize("wrap", ["flat", "replicated"])
@without_torch_warnings
def test_a_layer_does_not_run_with_floats_in_place_of_its_codes(wrap) -> None:
    model = WRAPS[wrap](layer("codes"))
    with pytest.raises(RuntimeError, match=rf"storage='codes' is no longer in codes.*{WAYS}"):
        model(normal(8, 64))


def distributed_rows(model):
    return distribute_tensor(model[0].weight, mesh(), [Shard(0)])


@pytest.mark.parametrize("wrap", [distributed_rows, WRAPS["columns"]], ids=["rows", "columns"])
@without_torch_warnings
def test_codes_are_not_cut_by_others(wrap) -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        wrap(layer("codes"))


@without_torch_warnings
def test_an_optimizer_steps_no_rows_without_their_scales() -> None:
    parameter = nn.Parameter(DTensor.from_local(layer("codes")[0].weight, mesh()))
    with pytest.raises(ValueError, match="became a DTensor without its scales"):
        fm.optim.StiffnessAdamW([parameter], lr=0.1)


@pytest.mark.parametrize("wrap", [name for name in WRAPS if name != "in pieces"])
@without_torch_warnings
def test_a_sharded_layer_of_a_grid_does_not_run(wrap) -> None:
    """It has lost its manifold, whatever steps it."""
    model = WRAPS[wrap](layer("grid"))
    with pytest.raises(RuntimeError, match=rf"storage='grid' has lost its manifold.*{WAYS}"):
        model(normal(8, 64))


@pytest.mark.parametrize("kind", ["StiffnessAdamW", "RiemannianAdam", "StiffnessSGD"])
@pytest.mark.parametrize("wrap", ["flat", "replicated", "in pieces"])
@without_torch_warnings
def test_optimizers_refuse_sharded_weights_of_a_grid(wrap, kind) -> None:
    """They take rows and columns of floats: only the layer knows these were on a grid."""
    model = WRAPS[wrap](layer("grid"))
    parameters = [p for p in model.parameters() if p.dim() == 2] or list(model.parameters())
    message = (
        "tensor parallelism, HSDP and their combinations"
        if wrap == "replicated"
        else rf"is sharded.*{WAYS}"
    )
    with pytest.raises(ValueError, match=message):
        getattr(fm.optim, kind)(parameters, lr=0.1)


def test_processes_share_the_parts() -> None:
    p = parameter(rounding="nearest")
    assert not p.is_shared()
    assert p.share_memory_() is p
    assert p.is_shared()
    assert p[0].is_shared()
    child = multiprocessing.get_context("fork").Process(target=p.detach().zero_)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not p.any()
    assert p[0].share_memory_().is_shared()
    model = layer("codes").share_memory()
    assert model[0].weight.is_shared()
    assert type(model[0].weight) is fm.FP8Parameter


ACCESSES = {
    "torch.from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.storage(),
    "address of the storage": lambda p: p.untyped_storage().data_ptr(),
    "share_memory_": lambda p: p.untyped_storage().share_memory_(),
    "copy_": lambda p: p[0].untyped_storage().copy_(torch.zeros(4).untyped_storage()),
    "share_filename": lambda p: p.untyped_storage()._share_filename_cpu_(),
}


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
def test_memory_full_of_floats_is_refused(access) -> None:
    with pytest.raises(RuntimeError, match=STATE):
        access(parameter().detach())


def test_memory_for_dlpack_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(parameter().detach())


def test_other_libraries_write_the_state_and_not_the_tensor(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=STATE):
        safetensors.save_file({"w": parameter().detach()}, tmp_path / "a")
    saved, loaded = layer("codes"), layer("codes")
    with torch.no_grad():
        saved[0].weight.mul_(0.5)
    safetensors.save_model(saved, str(tmp_path / "b"))
    safetensors.load_model(loaded, str(tmp_path / "b"))
    assert same_store(saved[0].weight, loaded[0].weight)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
