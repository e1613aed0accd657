"""Replicas in several processes: an exact start, ranks that stay identical, and steps
that are one process' own.
"""

import copy
import gc
import os
import pickle
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from family_cases import VALID, make
from optimizer_cases import bits_of, frozen
from rank_cases import batch, combined, loss_of, model, refusal, seeds, stored, synced, train_on
from tensor_cases import parameter
from test_ranks_fsdp import BORDER, near_the_border, sharded
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fp8manifold as fm
from fp8manifold._ranks import ranks_of, replicas
from fp8manifold.distributed import refuse_uneven_inputs


def equal_everywhere(results):
    assert all(one == results[0] for one in results[1:])


def started(granularity):
    """A model that is another one in every rank, and what it is after the start."""
    rank = dist.get_rank()
    net = model(granularity, seed=rank, keep_remainder=True)
    net.register_buffer("hidden", torch.full((3,), float(rank)), persistent=False)
    if rank == 0:
        net[0].weight.counter.fill_(7)
        net[0].weight.codes[0, 0] = 127  # NaN
    old_state = bits_with_remainders(net)
    fm.distributed.sync(net)
    return old_state, bits_with_remainders(net), net.hidden.tolist()


def linear(net):
    return [layer for layer in net if isinstance(layer, nn.Linear)]


def bits_with_remainders(net):
    return stored(net), seeds(net), [bits_of(layer.weight.remainder) for layer in linear(net)]


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_every_rank_starts_from_the_first_ones_model(pool, granularity):
    results = pool.run(started, granularity)
    first = results[0][0]
    for old_state, new_state, hidden in results:
        assert new_state == first
        assert hidden == [0.0] * 3
        assert (old_state == first) == (old_state is first)


def started_by_ddp(storage, **options):
    """Models that are others in every rank after DDP's own start, and after two steps."""
    rank = dist.get_rank()
    net = model(
        storage=storage, seed=rank, **({"keep_remainder": True} if storage == "codes" else {})
    )
    wrapped = DistributedDataParallel(net, **options)
    if storage == "codes":
        assert bits_with_remainders(net) == bits_with_remainders(model(seed=0, keep_remainder=True))
        assert all(p.detach().shape == p.shape for p in net.parameters())
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    for step in range(2):
        train_on(wrapped, optimizer, batch(step, rank))
    return stored(net)


@pytest.mark.parametrize("storage", ["codes", "master", "grid"])
def test_ddps_own_start_sends_codes(pool, storage):
    equal_everywhere(pool.run(started_by_ddp, storage))


def test_ddp_without_its_own_start_sends_codes_too(pair):
    equal_everywhere(pair.run(started_by_ddp, "codes", init_sync=False))


def as_launched():  # the variables by which libraries find a launcher's processes
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        ACCELERATE_USE_CPU="true",
    )


def prepared():
    from accelerate import Accelerator

    as_launched()
    accelerator = Accelerator(cpu=True)
    net = model(seed=dist.get_rank())
    wrapped, optimizer = accelerator.prepare(
        net, fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    )
    assert isinstance(wrapped, DistributedDataParallel)
    for step in range(2):
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped, batch(step, dist.get_rank())))
        optimizer.step()
    return stored(net), seeds(net)


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
def test_accelerate_starts_several_processes(pair):
    results = pair.run(prepared)
    equal_everywhere(results)
    assert results[0][1] == seeds(model(seed=0))
    assert results[0][0] != stored(model(seed=0))


def by_accelerates_plugin():
    """What Accelerate's FSDP2 says; it takes processes with GPUs only, so its state is
    told that there are some.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    as_launched()
    accelerator, net = Accelerator(cpu=True), model()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    state = AcceleratorState._shared_state
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    plugin_state = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    with mock.patch.dict(state, plugin_state):
        assert accelerator.is_fsdp2
        return refusal(lambda: accelerator.prepare(net, optimizer))


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
def test_accelerates_fsdp2_plugin_is_refused_by_what_to_do(pair):
    for message in pair.run(by_accelerates_plugin):
        assert "to shard it, call fully_shard in place of Accelerate's FSDP2 plugin" in message


def sharded_before_accelerate(*, with_accelerate):
    """The rows of this process after two steps of a model that was sharded by hand."""
    from accelerate import Accelerator

    as_launched()
    accelerator = Accelerator(cpu=True)
    net = sharded(synced(model()))
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    clip, backward = nn.utils.clip_grad_norm_, torch.Tensor.backward
    if with_accelerate:
        optimizer = accelerator.prepare(optimizer)
        clip, backward = accelerator.clip_grad_norm_, accelerator.backward
    for step in range(2):
        optimizer.zero_grad()
        backward(loss_of(net, batch(step, dist.get_rank())))
        clip(net.parameters(), 0.5)
        optimizer.step()
    return [bits_of(p._local_tensor) for p in net.parameters()]


@pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
def test_accelerate_trains_a_model_that_was_sharded_before(pair):
    rows = pair.run(sharded_before_accelerate, with_accelerate=True)
    assert rows == pair.run(sharded_before_accelerate, with_accelerate=False)


def trained_by_others(folder):
    """Six steps of transformers' Trainer, and a resume from its checkpoint after three."""
    from hf_cases import llama
    from surgery_models import model_bits
    from test_huggingface import DELAYED, losses, trained

    as_launched()
    runs = []
    for name in ("whole", "cut"):
        net = fm.quantize_model(
            llama(), {"*": DELAYED, "mlp": "E4M3"}, "codes", tied="leave", seed=dist.get_rank()
        )
        resume = Path(folder, "whole", "checkpoint-3") if name == "cut" else None
        trainer = trained(net, Path(folder, name), "muon", resume)
        assert isinstance(trainer.model_wrapped, DistributedDataParallel), name
        runs.append((model_bits(net)["tensors"], losses(trainer)[-3:]))
    assert runs[0][0] == runs[1][0]
    return {
        name: values
        for name, values in runs[0][0].items()
        if not name.endswith("gradient_scaler.value")
    }


@pytest.mark.slow
def test_a_trainer_runs_and_resumes_in_several_processes(pair, tmp_path):
    equal_everywhere(pair.run(trained_by_others, str(tmp_path)))


def another(difference, start):
    """Return the error of a start where the second process has another model."""
    rank = dist.get_rank()
    net = model(
        "tensor" if difference == "granularity" and rank else "channel",
        rows=7 if difference == "rows" and rank else 22,
    )
    if difference == "format" and rank:
        net = fm.quantize_model(fm.dequantize_model(net), "E5M2", "codes")
    return refusal(
        lambda: fm.distributed.sync(net) if start == "sync" else DistributedDataParallel(net)
    )


@pytest.mark.parametrize(
    ("difference", "start", "words"),
    [
        ("rows", "sync", "is torch.* of shape"),
        ("granularity", "sync", "weight.scale"),
        ("format", "sync", "E5M2"),
        ("format", "DDP", "E5M2"),
    ],
)
def test_other_models_are_refused_in_every_rank(pair, difference, start, words):
    first, second = pair.run(another, difference, start)
    assert first == "the models differ: another process says where"
    assert re.search(f"^the models differ: .*{words}", second)


def frozen_in_one(moment, wrapper, change):
    """What a step says where one process has frozen or cast a weight."""
    net = model("tensor")

    def alter():
        if dist.get_rank() == 1 and change == "frozen":
            net[2].weight.requires_grad_(False)
        elif dist.get_rank() == 1:
            net[2].bias.data = net[2].bias.data.bfloat16()

    def step():
        if moment == "before sync":
            alter()
        fm.distributed.sync(net)
        if moment == "after sync":
            alter()
        if wrapper == "FSDP":
            wrapped = sharded(net)
        else:
            wrapped = DistributedDataParallel(net, init_sync=wrapper == "DDP")
        if moment == "after wrapping":
            alter()
        train_on(wrapped, fm.optim.StiffnessAdamW(net.parameters(), 0.01), batch(0))

    return refusal(step)


AT_SYNC = ["another process says where", "requires_grad of 2.weight is False here, and True"]
FROZEN = [
    "'2.weight' is trained, float32 of shape (64, 22) in process 0, and something else in 1",
    "'2.weight' is frozen, float32 of shape (64, 22) in process 1, and something else in 0",
]
CAST = ["'2.bias' is trained, float32", "'2.bias' is trained, bfloat16"]


@pytest.mark.parametrize(
    ("moment", "wrapper", "change", "lines"),
    [
        ("before sync", "DDP", "frozen", AT_SYNC),
        ("after sync", "DDP", "frozen", FROZEN),
        ("after sync", "DDP without init_sync", "frozen", FROZEN),
        ("after wrapping", "DDP", "frozen", FROZEN),
        ("after sync", "FSDP", "frozen", FROZEN),
        ("after wrapping", "FSDP", "frozen", FROZEN),
        ("after sync", "DDP", "cast", CAST),
        ("after sync", "DDP without init_sync", "cast", CAST),
    ],
)
def test_what_one_process_alone_freezes_is_told_in_all(pair, moment, wrapper, change, lines):
    for line, message in zip(lines, pair.run(frozen_in_one, moment, wrapper, change), strict=True):
        assert line in message


def test_without_processes_there_is_nothing_to_sync():
    with pytest.raises(RuntimeError, match="there is no process group"):
        fm.distributed.sync(model())


def changed_after_the_start(name):
    net = synced(model())
    if dist.get_rank() == 1:
        p = net.get_parameter(name)
        words = p.codes if isinstance(p, fm.FP8Tensor) else p.data.view(torch.int32)
        words.view(-1)[0] ^= 1
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)
    loss_of(net, batch(0)).backward()
    old_state, message = stored(net), refusal(optimizer.step)
    assert stored(net) == old_state
    return message


def backward_beside(wrapped, alone, step):
    """A pass of this rank's batch, whose averaged gradients one process takes too."""
    wrapped.zero_grad()
    loss_of(wrapped, batch(step, dist.get_rank())).backward()
    for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
        q.grad = p.grad.clone()


def trained(name, writeback, moments, granularity, border=False, **options_of_case):
    """Ranks under DDP, and in each of them one process that steps the averaged
    gradients.
    """
    net = synced(model(granularity, seed=dist.get_rank(), keep_remainder=True))
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net, init_sync=False)
    options = {"writeback": writeback, "moments": moments, "refresh_every": 2, **options_of_case}
    for layer, twin in zip(linear(net), linear(alone), strict=True):
        twin.weight.remainder = layer.weight.remainder.clone()
    optimizers = [make(name, module.parameters(), **options) for module in (net, alone)]
    for step in range(5 if border else 4):
        backward_beside(wrapped, alone, step)
        for optimizer in optimizers:
            optimizer.step()
        if step == 0 and border:
            near_the_border(*optimizers)
    state, state_alone = [frozen(optimizer.state_dict()) for optimizer in optimizers]
    assert state == state_alone
    assert stored(net) == stored(alone)
    return stored(net), state


COMBINATIONS = [c for c in VALID if c[0] != "FisherNaturalGradient"]
#: every optimizer, every write-back and every kind of averages, in the default run
SAMPLE = COMBINATIONS[::4]


@pytest.mark.parametrize("combination", SAMPLE, ids=lambda c: "-".join(c))
def test_ranks_stay_identical_and_one_process(pair, combination):
    equal_everywhere(pair.run(trained, *combination, "channel"))


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c))
def test_ranks_stay_identical_in_every_combination(pool, combination, granularity):
    equal_everywhere(pool.run(trained, *combination, granularity))


@combined(
    "RiemannianAdam-stochastic-8bit StiffnessMuon-stochastic-8bit StiffnessAdamW-residual8-bfloat16"
)
def test_ranks_dither_as_one_process(pool, combination):
    equal_everywhere(pool.run(trained, *combination, "channel", border=True, draws="dither"))


def dithered_by_themselves():
    """torch's SGD, for which the tensors draw, as the first process made them."""
    net = model(seed=dist.get_rank())
    for p in net.parameters():
        if isinstance(p, fm.FP8Tensor) and dist.get_rank() == 0:  # what the others are sent
            p.draws = "dither"
            p.counter.fill_(BORDER)
    fm.distributed.sync(net)
    assert {p.draws for p in net.parameters() if isinstance(p, fm.FP8Tensor)} == {"dither"}
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net, init_sync=False)
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (net, alone)]
    for step in range(5):
        backward_beside(wrapped, alone, step)
        for optimizer in optimizers:
            optimizer.step()
    assert stored(net) == stored(alone)
    return stored(net)


def test_tensors_that_dither_do_so_in_every_process(pool):
    equal_everywhere(pool.run(dithered_by_themselves))


def with_nan_in_one(on_nonfinite, kind):
    """A gradient that is not finite in the last rank only, and no averaging that would
    spread it.
    """
    net = synced(model())
    optimizer = make(kind, net.parameters(), on_nonfinite=on_nonfinite)
    old_state, messages = stored(net), ""
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(step)).backward()
        if step == 0 and dist.get_rank() == dist.get_world_size() - 1:
            net[0].weight.grad[0, 0] = torch.inf
        messages += refusal(optimizer.step)
        assert step or stored(net) == old_state, step
    return optimizer.skipped_steps, messages, stored(net) != old_state


@pytest.mark.parametrize("kind", ["StiffnessAdamW", "RiemannianAdam"])
def test_no_rank_skips_a_step_alone(pair, kind):
    assert pair.run(with_nan_in_one, "skip", kind) == [(1, "", True)] * 2
    (_, first, _), (_, last, _) = pair.run(with_nan_in_one, "raise", kind)
    assert "not finite, or its square is not, in another process" in first
    assert "on_nonfinite='skip'" in last


def magnitudes(scale):
    """The history of delayed scales, over ranks with batches of other sizes, and over
    one with all of them.
    """
    delayed = fm.OperandSpec("E4M3", policy="delayed", history=4)
    gradient = delayed if scale == "delayed" else fm.OperandSpec("E4M3", scale="global")
    spec = fm.LayerSpec("E4M3", activation=delayed, gradient=gradient)
    net = synced(fm.quantize_model(model(storage="float"), spec, "codes", seed=3))
    wrapped = DistributedDataParallel(net, init_sync=False)
    largest = []
    for step in range(3):
        batches = [batch(step, rank) * 2.0**rank for rank in range(dist.get_world_size())]
        largest.append(max(float(x.abs().max()) for x in batches))
        loss_of(wrapped, batches[dist.get_rank()]).backward()
    assert net[0].activation_scaler.history.tolist() == [0.0, *largest]
    return {
        name: bits_of(x)
        for name, x in net.state_dict().items()
        if name.endswith((".history", "amax.value"))
    }


@pytest.mark.parametrize("scale", ["delayed", "global"])
def test_delayed_scales_remember_the_largest_of_all_ranks(pool, scale):
    results = pool.run(magnitudes, scale)
    assert len(results[0]) > 3
    equal_everywhere(results)


class Choosing(nn.Module):
    """Three layers, of which each process may run others before the last.

    Experts do so, and layers that are left out.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, runs):
        for name in runs.split():
            x = self.get_submodule(name)(x)
        return self.last(x)


SHARED = {
    "activation": {"activation": {"format": "E4M3", "policy": "delayed"}},
    "weight": {"weight": {"format": "E4M3", "policy": "delayed", "granularity": "channel"}},
    "gradient": {"gradient": {"activation": {"format": "E5M2", "policy": "delayed"}}},
    "global": {"gradient": {"activation": {"format": "E5M2", "scale": "global"}}},
}


def remembered(net):
    return {
        name: bits_of(x) for name, x in net.named_buffers() if name.endswith(("history", "running"))
    }


def with_other_layers(spec, runs):
    """Return the error where each rank runs its own layers, or else their histories.

    `runs` has the names of a rank's layers, in their order.
    """
    rank = dist.get_rank()
    net = synced(
        fm.quantize_model(
            Choosing(), fm.LayerSpec(**{"weight": "E4M3", **SHARED[spec]}), storage="master"
        )
    )
    wrapped = DistributedDataParallel(net, init_sync=False, find_unused_parameters=True)
    wrapped(batch(0, rank), "first second").square().sum().backward()
    old_scales = remembered(net)
    try:
        wrapped(100.0 * batch(1, rank), runs[rank]).square().sum().backward()
    except RuntimeError as error:
        assert remembered(net) == old_scales or runs[0].split()[0] == runs[1].split()[0]
        return str(error)
    net.eval()
    net(
        batch(rank, rank), "first" if rank else "second"
    )  # in evaluation a rank may run what it likes
    return remembered(net)


@pytest.mark.parametrize("spec", SHARED)
@pytest.mark.parametrize(
    "runs", [["first", "second"], ["first second", "second first"], ["first second", "first"]]
)
def test_ranks_that_run_other_layers_share_no_scales(pair, spec, runs):
    for message in pair.run(with_other_layers, spec, runs):
        assert "another process does not run" in message
        assert "take policy='dynamic'" in message
        assert "\n" not in message


@pytest.mark.parametrize("spec", SHARED)
@pytest.mark.parametrize("runs", ["first second", "second", "", "first first"])
def test_ranks_that_leave_out_the_same_layers_share_scales(pair, spec, runs):
    results = pair.run(with_other_layers, spec, [runs, runs])
    assert not isinstance(results[0], str), results[0]
    equal_everywhere(results)


def of_other_sizes():
    net = synced(nn.Sequential(fm.Scale("E4M3", "channel", "delayed")))
    return refusal(lambda: net(batch(0)[: 2 + dist.get_rank()]))


def sent(asynchronous):
    rank = dist.get_rank()
    p = parameter(seed=rank, granularity="block", rounding="nearest", keep_remainder=True)
    p.counter.fill_(rank)
    version = p._version
    work = dist.broadcast(p.detach(), 1, async_op=asynchronous)
    if asynchronous:
        work.wait()
    assert p._version > version
    with pytest.raises(RuntimeError, match=r"use torch\.distributed\.broadcast"):
        dist.broadcast(p.detach()[0], 1)
    return bits_of(p)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_broadcast_sends_every_part(pool, asynchronous):
    results = pool.run(sent, asynchronous)
    equal_everywhere(results)
    p = parameter(seed=1, granularity="block")
    p.counter.fill_(1)
    assert results[0] == bits_of(p)


def moved_after_the_start(storage, differs):
    """A model that is moved between ``sync`` and its first step is the same model
    still, in step with its replicas.
    """
    rank = dist.get_rank()
    net = (
        synced(model(seed=rank, storage=storage))
        .to("cpu")
        .float()
        .to(torch.bfloat16)
        .float()
        .share_memory()
    )
    optimizer = fm.optim.StiffnessAdamW([net[0].weight, net[4].weight], lr=0.01)
    if differs and rank:
        net[4].weight.codes[0, 0] ^= 1
    for step in range(2):
        optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.full(p.shape, 0.1 * (step + 1))
        if step == 1 and rank:
            net[0].weight.grad[0, 0] = torch.nan
        message = refusal(optimizer.step)
        if message:
            return message
    assert optimizer.skipped_steps == 1
    return stored(net)


@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
def test_a_model_may_be_moved_after_the_start(pair, storage):
    equal_everywhere(pair.run(moved_after_the_start, storage, False))


def whose_model_is_gone():
    net = synced(model())
    assert not ranks_of(copy.deepcopy(net).parameters())
    assert len(ranks_of(net.parameters())) == 1
    gc.collect()  # what earlier cases left in cycles
    old_count = len(replicas)
    del net
    gc.collect()
    return old_count - len(replicas)


def test_nothing_keeps_a_model_alive(pair):
    assert pair.run(whose_model_is_gone) == [5 - 1] * 2  # the layers that have parameters


def with_uneven_inputs(scales, **options):
    """The error where a process has a batch less than another, the steps until then,
    and the weights.
    """
    activation = None if scales == "none" else {"format": "E4M3", "policy": scales}
    net = synced(
        fm.quantize_model(
            model(storage="float"), fm.LayerSpec("E4M3", activation=activation), "codes"
        )
    )
    fm.distributed.sync(net)
    wrapped = DistributedDataParallel(net, init_sync=False)
    optimizer = fm.optim.StiffnessAdamW(net.parameters(), lr=0.01)

    def run():
        with Join([wrapped], **options):
            for step in range(2 + dist.get_rank()):
                train_on(wrapped, optimizer, batch(step))

    message = refusal(run)
    steps = next((int(state["step"]) for state in optimizer.state.values()), 0)
    return message, steps, stored(net)


@pytest.mark.parametrize("scales", ["none", "delayed"])
def test_joining_processes_are_refused_before_anybody_waits(pair, scales):
    advice = "give each the same number of batches, or Join throw_on_early_termination=True"
    for message, steps, _ in pair.run(with_uneven_inputs, scales, limit=60):
        assert message.endswith(advice), steps
        assert steps == 0, steps


def test_joining_processes_that_end_together_are_taken(pair):
    results = pair.run(with_uneven_inputs, "delayed", throw_on_early_termination=True)
    for message, steps, _ in results:
        assert "exhausted" in message, steps
        assert steps == 2, steps
    equal_everywhere([weights for _, _, weights in results])


def test_one_process_joins_itself():
    net = nn.Sequential(nn.Linear(2, 2))
    refuse_uneven_inputs(net)
    assert copy.deepcopy(net)(torch.ones(1, 2)).shape == (1, 2)
    pickle.loads(pickle.dumps(net))


def sharded_state(name, writeback, moments):
    """Each rank steps some of the parameters and sends them; one process steps them
    all.
    """
    rank = dist.get_rank()
    net = synced(model(seed=rank))
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net, init_sync=False)
    options = {"writeback": writeback, "moments": moments, "lr": 0.01}
    options |= {"float_lr": 0.01} if name == "RiemannianAdam" else {}
    kind = getattr(fm.optim, name)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=kind, **options)
    optimizer_alone = kind(alone.parameters(), **options)
    for step in range(4):
        backward_beside(wrapped, alone, step)
        if step == 2 and rank == 0:  # a rank that would step while the other skips
            net[4].weight.grad.fill_(torch.nan)
        if step != 2:
            optimizer_alone.step()
        optimizer.step()
    for index, (p, q) in enumerate(zip(net.parameters(), alone.parameters(), strict=True)):
        # the noise of floats' moments is told apart by their order in the optimizer
        assert bits_of(p) == bits_of(q) or (
            moments != "float32" and not isinstance(p, fm.FP8Tensor)
        ), index
    return stored(net)


@combined(
    "StiffnessAdamW-residual8-float32 StiffnessAdamW-stochastic-8bit "
    "StiffnessLion-stochastic-float32 RiemannianAdam-nearest-float32"
)
def test_zero_redundancy_is_one_process(pair, combination):
    equal_everywhere(pair.run(sharded_state, *combination))


def in_buckets():
    p, kind = [fm.FP8Parameter(torch.ones(2, 4)) for _ in range(2)], fm.optim.StiffnessAdamW
    return refusal(lambda: ZeroRedundancyOptimizer(p, kind, parameters_as_bucket_view=True, lr=0.1))


def with_one_parameter(outcome):
    """Two ranks and one parameter: one of them steps it, the other agrees on the step
    and receives it.
    """
    rank, gradient = dist.get_rank(), torch.full((8, 64), 0.5)
    net = synced(
        fm.quantize_model(nn.Sequential(nn.Linear(64, 8, bias=False)), "E4M3", "codes", seed=rank)
    )
    alone = copy.deepcopy(net)
    options = {"lr": 0.01, "on_nonfinite": "raise" if outcome == "raises" else "skip"}
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=fm.optim.StiffnessAdamW, **options
    )
    optimizer_alone = fm.optim.StiffnessAdamW(alone.parameters(), **options)
    for step in range(3):
        net[0].weight.grad, alone[0].weight.grad = gradient.clone(), gradient.clone()
        if step == 1 and outcome != "steps":
            net[0].weight.grad[0, 0] = torch.nan
        try:
            optimizer.step()
        except FloatingPointError:
            return "raised"
        if step != 1 or outcome == "steps":
            optimizer_alone.step()
    assert stored(net) == stored(alone)
    return stored(net)


@pytest.mark.parametrize("outcome", ["steps", "skips", "raises"])
def test_zero_redundancy_with_a_rank_that_has_no_parameter(pair, outcome):
    results = pair.run(with_one_parameter, outcome)
    equal_everywhere(results)
    assert (results[0] == "raised") == (outcome == "raises")


DIFFERS = "is not the same in every process"


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (partial(changed_after_the_start, "2.weight"), f"'2.weight' {DIFFERS} (1 of 7 are not)"),
        (partial(changed_after_the_start, "1.bias"), f"'1.bias' {DIFFERS} (1 of 7 are not)"),
        (partial(moved_after_the_start, "codes", True), f"'4.weight' {DIFFERS}"),
        (of_other_sizes, "another shape of magnitudes there"),
        (in_buckets, "give parameters_as_bucket_view=False"),
    ],
)
def test_every_process_is_told(pair, work, line):
    assert all(line in message for message in pair.run(work))
