"""The shards of all processes are together what a single process serves, byte for byte."""

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_folders import make
from rank_cases import batch, model, train_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8manifold as fm
from fp8manifold._published.places import Place
from fp8manifold._published.stored_weight import StoredWeight, written_parts
from fp8manifold._served.unit import CodesUnit

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4


def as_bytes(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def sharded(net):
    """Shard a model by rows over all processes."""
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def shards_of(source):
    """Return (name, bytes, first byte, dtype, shape) of what a process has."""
    return [
        (name, as_bytes(x), place.offset * x.element_size(), str(x.dtype), place.shape)
        for name, x, place in source
    ]


def union(of_ranks):
    """Put shards together; each byte comes from one process."""
    whole, dtypes = {}, {}
    for shards in of_ranks:
        for name, data, start, dtype, shape in shards:
            dtypes.setdefault(name, (dtype, tuple(shape)))
            assert dtypes[name] == (dtype, tuple(shape))
            for place, byte in enumerate(data, start):
                assert whole.setdefault(name, {}).setdefault(place, byte) == byte
                whole[name][place] = byte
    total = sum(len(data) for _, data, *_ in chain.from_iterable(of_ranks))
    assert total == sum(map(len, whole.values())), "a byte came twice"
    joined = {name: bytes(x[i] for i in range(len(x))) for name, x in whole.items()}
    return {name: (*dtypes[name], data) for name, data in joined.items()}


def served(source):
    return {name: (str(x.dtype), tuple(x.shape), as_bytes(x)) for name, x in source}


def of_net(options):
    """Return the shards and metadata of a process, after steps of the whole model."""
    net = model(**options)
    # before, as a mean over three processes is rounded
    train(net)
    sharded(net)
    weights = fm.served_weights(net)
    with pytest.raises(TypeError, match=r"is sharded, and each process has a part .* shards\(\)"):
        list(weights)
    with pytest.raises(TypeError, match=r"is sharded: .* share_scales_\(\) before fully_shard"):
        weights.share_scales_()
    shards = shards_of(weights.shards())
    # each process has each name, for those who gather one by one
    assert [name for name, *_ in shards] == [metadata.name for metadata in weights.metadata()]
    return shards, weights.metadata(), weights.config


def train(net):
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=3e-2)
    for step in range(STEPS):
        train_on(net, optimizer, batch(step))


def of_folder(folder):
    net = fm.load(folder)
    return shards_of(fm.served_weights(sharded(net)).shards())


def of_net_alone(options):
    net = model(**options)
    train(net)
    weights = fm.served_weights(net)
    return served(weights), weights.config


CASES = {
    "rows": {"granularity": "channel"},
    "rows, few": {"granularity": "channel", "rows": 7},
    "rows, none in some": {"granularity": "channel", "rows": 2},
    "tensor": {"granularity": "tensor"},
    "blocks": {"granularity": "block"},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_shards_of_all_processes_are_the_bytes_of_one(pools, options, size):
    single, config = pools[1].run(of_net_alone, options)[0]
    results = pools[size].run(of_net, options)
    assert union([shards for shards, _, _ in results]) == single
    assert [rank_config for _, _, rank_config in results] == [config] * size
    declared = {x.name: (str(x.dtype), x.shape) for x in results[0][1]}
    assert declared == {name: (dtype, shape) for name, (dtype, shape, _) in single.items()}


PUBLISHED = [
    "rows",
    "rows, experts",
    "mxfp8",
    "tensor",
    "tensor, shared",
    "gpt-oss",
    "modelopt, kv",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shards_of_a_published_model_are_its_folder(pools, name: str, tmp_path: Path):
    folder = make(name, tmp_path / "published")
    expected = served(fm.served_weights(fm.load(folder)))
    assert union(pools[2].run(of_folder, folder)) == expected


def of_part(place):
    """Return the shards of a part of a weight, as of a fused q, k and v."""
    net = sharded(model("channel"))
    rows = place[0].stop - place[0].start
    stored = StoredWeight(
        name="k",
        codes="k",
        scale="k_scale",
        format=net[2].weight_format,
        granularity="channel",
        shape=(rows, 22),
        code_dtype="F8_E4M3",
        code_shape=(rows, 22),
        scale_dtype="F32",
        scale_shape=(rows, 1),
        file="model.safetensors",
    )
    unit = CodesUnit(stored, Place("2.weight", place), net[2].weight, written_parts)
    return shards_of(unit.shards(dist.get_rank() == 0))


@pytest.mark.parametrize("first", [0, 8, 30, 48])
def test_a_part_of_fused_rows_is_cut_where_the_processes_are(pools, first):
    place = (slice(first, first + 16), slice(0, 22))
    layer = model("channel")[2]
    parts = union(pools[3].run(of_part, place))
    assert parts["k"][2] == as_bytes(layer.weight.codes[place])
    assert parts["k_scale"][2] == as_bytes(layer.weight.scale[place[0]])


def changes_of_rank(options):
    """Return the patches of a process after a step, and its shards before it."""
    net = sharded(model(**options))
    weights = fm.served_weights(net)
    before = shards_of(weights.shards())
    changes = fm.ServedChanges(weights)
    train(net)
    patches = changes.since_last()
    assert changes.since_last() == []
    flat = [(p.name, p.shape, p.indices, p.values.view(torch.uint8), str(p.dtype)) for p in patches]
    return before, flat, shards_of(weights.shards())


def test_patches_of_all_processes_bring_a_whole_copy_up_to_date(pools):
    results = pools[3].run(changes_of_rank, CASES["rows"])
    before, after = (union([result[i] for result in results]) for i in (0, 2))
    assert before != after
    tensors = {}
    for name, (dtype, shape, data) in before.items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)
    for _, patches, _ in results:
        typed = []
        for name, shape, indices, values, dtype in patches:
            kind = getattr(torch, dtype.removeprefix("torch."))
            typed.append(fm.Patch(name, shape, kind, indices, values.view(kind)))
        fm.apply_changes(tensors, typed)
    assert {name: as_bytes(x) for name, x in tensors.items()} == {
        name: data for name, (_, _, data) in after.items()
    }


def changes_after_a_forward_pass():
    """Return what has changed after a pass that leaves the outermost layer whole."""
    net = sharded(model("channel"))
    weights = fm.served_weights(net)
    before, changes = shards_of(weights.shards()), fm.ServedChanges(weights)
    with torch.no_grad():
        net(batch(0))
    assert not isinstance(net[0].weight, DTensor)
    return changes.since_last() == [] and shards_of(weights.shards()) == before


def test_a_forward_pass_without_a_backward_changes_no_shards(pools):
    assert pools[2].run(changes_after_a_forward_pass) == [True, True]


def changes_of_a_replica():
    net = model("channel")
    weights = fm.served_weights(net)
    changes = fm.ServedChanges(weights)
    train(net)
    names = [metadata.name for metadata in weights.metadata()]
    sizes = [tensor.numel() for _, tensor, _ in weights.shards()]
    return {patch.name for patch in changes.since_last()}, names, sizes


def test_a_process_that_has_the_whole_model_has_all_changes(pools):
    (first, names, sizes), (second, _, others) = pools[2].run(changes_of_a_replica)
    assert first == second
    assert first & {"0.weight", "4.weight"}
    # but of what all have only one process is the source
    assert len(sizes) == len(names)
    assert all(sizes)
    assert others == [0] * len(names)


def of_some_processes():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    net = model("channel")
    fully_shard(net[2], mesh=DeviceMesh.from_group(group, "cpu"))
    return shards_of(fm.served_weights(net).shards())


def test_a_model_that_some_processes_share_comes_from_these(pools):
    expected = served(fm.served_weights(model("channel")))
    assert union(pools[3].run(of_some_processes)) == expected


def of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"over a mesh of 2 dimensions.* HSDP .*not supported"):
        fm.served_weights(fully_shard(model("channel"), mesh=mesh))
    return True


def test_rows_that_are_spread_in_another_way_are_refused(pools):
    assert pools[2].run(of_two_dimensions) == [True, True]
