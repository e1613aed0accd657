"""The same model in every process: an exact start, the scales and skipped steps that
processes share, and digests.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fp8manifold._ranks import ALONE, Ranks, Replicas, Share, replicas, share_of, spread
from fp8manifold.nn._scalers import share_magnitudes
from fp8manifold.tensor import FP8Tensor

__all__ = ["check_digest", "digest", "in_rows_of", "rows_of", "sync"]

NAME: Final = "digest"  #: The key under which a state holds its digest.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: odd numbers of 64 bits (the golden ratio's, and those of SplitMix64), as signed ones
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BLOCK: Final = 2**20


def sync(model: nn.Module, group: Any = None) -> None:
    """Give every process the model of the first one, to the bit, and let them train it
    together.

    It sends codes, scales, counters, seeds, remainders of the first rounding, ordinary
    parameters and buffers. From then on the magnitudes of delayed and global scales are
    the largest over the processes, this library's optimizers skip a step in all
    processes if a gradient is not finite in one, and their first step compares the
    parameters. The first pass under DDP or ``fully_shard`` compares which parameters
    each process trains. Call it in every process before ``ZeroRedundancyOptimizer`` and
    ``fully_shard``; DDP calls it for a model with one-byte weights that has not been
    synced, whatever ``init_sync`` is.

    Args:
        model: of the same layers, formats and shapes in every process; NaN, Inf, -0 and
            empty tensors as they are.
        group: the process group; None takes the default one.

    Raises:
        RuntimeError: no process group; a model that is sharded already, or that differs
            between processes (before anything changes); later, if processes train other
            parameters than each other, or if the model runs in a ``Join`` without
            ``throw_on_early_termination=True``.

    Example:
        >>> import torch.distributed as dist, fp8manifold as fm
        >>> def train(rank, model):  # in each process of torchrun
        ...     dist.init_process_group("gloo")
        ...     fm.distributed.sync(model)
        ...     return nn.parallel.DistributedDataParallel(model, init_sync=False)

    Source: Li et al. 2020 (PyTorch Distributed, arXiv 2006.15704) for replicas that
    start equal.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    for name, parameter in model.named_parameters():
        if share_of(parameter) is not None:
            raise RuntimeError(f"{name} is sharded already: call sync(model) before fully_shard")
    ranks = Replicas(group or torch.distributed.group.WORLD, model)
    _send(model, ranks)
    share_magnitudes(model, ranks)
    refuse_uneven_inputs(model)
    _compare_parameters(model, ranks)


@torch.no_grad()
def rows_of(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor, such as an entry of a state, that this process holds,
    as a DTensor.

    ``load_state_dict`` of a sharded model takes whole one-byte weights as they are, and
    cuts their rows itself.

    Args:
        whole: the same in every process, with as many rows as ``like``; NaN, Inf, -0
            and an empty tensor as they are.
        like: spread over processes, as by ``fully_shard``; with any other tensor
            ``whole`` is returned.

    Raises:
        ValueError: another number of rows.

    Example:
        >>> weight = torch.zeros(4, 2)
        >>> rows_of(weight, nn.Parameter(torch.zeros(4, 2))) is weight
        True

    Source: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277).
    """
    share = share_of(like)
    if share is None:
        return whole
    if whole.shape[:1] != share.shape[:1]:
        raise ValueError(f"whole has shape {tuple(whole.shape)}: {share.shape[0]} rows are needed")
    return spread(like, share.own(whole).clone().to(share.local.device))


def in_rows_of(parameter: Tensor, own: Tensor) -> Tensor:
    """A DTensor of all rows of a parameter, from a tensor with one row for each that
    this process holds.

    Args:
        parameter: after ``fully_shard``; with any other ``own`` is returned as it is.
        own: of any dtype; NaN, Inf and -0 as they are; no rows are an empty tensor.

    Raises:
        AttributeError: after ``fully_shard``, ``own`` is no tensor.

    Example:
        >>> in_rows_of(nn.Parameter(torch.zeros(2, 2)), torch.ones(2, 3)).shape
        torch.Size([2, 3])

    Source: ``DTensor.from_local`` of torch.
    """
    return spread(parameter, own)


@torch.no_grad()
def _send(model: nn.Module, ranks: Ranks) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    hidden = {f"hidden buffer {name}": b for name, b in model.named_buffers() if name not in state}
    tensors = {name: value.detach().contiguous() for name, value in (state | hidden).items()}
    own: dict[str, Any] = {name: [list(x.shape), str(x.dtype)] for name, x in tensors.items()}
    for name, p in model.named_parameters():  # seeds and rounding may differ: they are sent
        own[f"requires_grad of {name}"] = [None, str(p.requires_grad)]
        if isinstance(p, FP8Tensor):
            own[f"format of {name}"] = [None, f"{p.format.name}, {p.block_size}, {p.dtype}"]
    first_own = json.loads(_text_sent(json.dumps(own), ranks, device))
    refusal = _difference(own, first_own)
    if ranks.any(refusal is not None, device):
        raise RuntimeError(f"the models differ: {refusal or 'another process says where'}")
    for name, tensor in tensors.items():
        tensors[name] = ranks.sent(
            tensor if ranks.rank == 0 else tensor.new_empty(first_own[name][0])
        )
    if ranks.rank == 0:
        return
    for name, buffer in hidden.items():
        buffer.copy_(tensors.pop(name))
    model.load_state_dict(tensors, strict=False)


def _difference(own: dict[str, Any], first: dict[str, Any]) -> str | None:
    """The first difference from the first process's model, in words, or None."""
    if strange := sorted(own.keys() ^ first.keys()):
        return f"{strange[0]!r} is in one of them only"
    for name, (shape, dtype) in own.items():
        grows = name.endswith(
            (".history", ".value")
        )  # a scale that has seen no tensor yet does not know its shape
        if dtype != first[name][1] or (shape != first[name][0] and not grows):
            if shape is None:
                return f"the {name} is {dtype} here, and {first[name][1]} there"
            there = f"{first[name][1]} of shape {tuple(first[name][0])} there"
            return f"{name!r} is {dtype} of shape {tuple(shape)} here, and {there}"
    return None


def _text_sent(text: str, ranks: Ranks, device: torch.device) -> str:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = ranks.sent(torch.tensor([len(data)], device=device))
    data = ranks.sent(data if ranks.rank == 0 else data.new_empty(int(size)))
    return bytes(data.cpu().tolist()).decode()


def _start_together(wrapper: nn.Module, name: str, model: Any) -> None:
    """Call :func:`sync` where DDP takes a model, whose own start would send one-byte
    weights as floats.
    """
    if isinstance(wrapper, DistributedDataParallel) and isinstance(model, nn.Module):
        stored = [
            m
            for m in model.modules()
            if any(isinstance(p, FP8Tensor) for p in m._parameters.values())
        ]
        if any(module not in replicas for module in stored):
            sync(model, wrapper.process_group)
        else:
            _compare_now(model)


register_module_module_registration_hook(_start_together)


def refuse_uneven_inputs(model: nn.Module) -> None:
    """Have a model raise, in every process, where it is run in a ``Join`` that would
    leave some of them behind.
    """
    if _check_inputs not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_inputs)


def _check_inputs(model: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or wrapper.process_group.size() == 1:
        return
    join = wrapper._join_config
    if join.enable and not join.throw_on_early_termination:
        raise RuntimeError(
            "torch's Join goes on with the processes that have batches left, and this model's "
            "steps and scales need all processes: give each the same number of batches, or Join "
            "throw_on_early_termination=True"
        )


class _Comparison:
    """A forward hook that compares, once, which parameters processes train, and their
    dtypes and shapes.

    It does so in the first pass in which they reduce gradients together, or where DDP
    takes the model. Without it the bytes of that reduction would be of other numbers in
    one process, which ends in gloo without a line.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.has_compared = False

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if self.has_compared or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if _reduces_gradients(model):
            self.has_compared = True
            self.compare(model)

    def compare(self, model: nn.Module) -> None:
        """Raise RuntimeError in every process if a parameter differs in one."""
        if not isinstance(self.ranks, Replicas):
            return
        kinds = self.ranks.kinds()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        words = torch.tensor([[_key(kind) for kind in kinds]], device=device)
        table = self.ranks.gathered(words).cpu()
        columns = (table != table[0]).any(0).nonzero().flatten().tolist()
        if not columns:
            return
        column = columns[0]
        others = (table[:, column] != words[0, column].cpu()).nonzero().flatten().tolist()
        raise RuntimeError(
            f"{self.ranks.names[column]!r} is {kinds[column]} in process {self.ranks.rank}, and "
            f"something else in {', '.join(map(str, others))}: freeze and cast the same parameters "
            "in every process, before the model is wrapped"
        )


def _reduces_gradients(model: nn.Module) -> bool:
    """True in a pass that every process of DDP or ``fully_shard`` has to take part in."""
    if DistributedDataParallel._active_ddp_module is not None:
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def _compare_now(model: nn.Module) -> None:
    for hook in list(model._forward_pre_hooks.values()):
        if isinstance(hook, _Comparison):
            hook.compare(model)


def _compare_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Have a model compare its parameters over the processes that train it."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Comparison)]:
        del hooks[key]
    model.register_forward_pre_hook(_Comparison(ranks))


@torch.no_grad()
def digest(state: Mapping[str, Any]) -> Tensor:
    """One number for all of a state: names, shapes, dtypes, every bit of every tensor,
    and its place.

    .. math:: \\sum_{name} \\sum_i \\mathrm{mix}(key_{name}, i, bits_i) \\bmod 2^{64}

    The sum is the same however rows are divided among processes.
    ``torch.distributed.checkpoint`` has no checksums of its own; this tells damage, not
    forgery. Of NaN and -0 the bits count; empty tensors count by their name.

    Args:
        state: nested dicts and lists of tensors, DTensors of rows, numbers, strings and
            None; an entry ``digest`` on top is left out. All processes call it, with
            the same names.

    Returns:
        int64 of shape ``()``, the same in every process.

    Raises:
        TypeError: something else in the state.

    Example:
        >>> state = {"model": {"w": torch.arange(4.0)}}
        >>> state["digest"] = digest(state)
        >>> check_digest(state)

    Source: Clarke et al. 2003 (multiset hashes); SplitMix64 (Steele et al. 2014).
    """
    found = [(name, value) for name, value in _leaves(state, "") if name != NAME]
    shares = [share for _, value in found if (share := _share(value)) is not None]
    ranks: Ranks = shares[0].ranks if shares else ALONE
    total = torch.zeros((), dtype=torch.int64, device=shares[0].local.device if shares else "cpu")
    for name, value in found:
        total += _word(name, value, ranks).to(total.device)
    return ranks.total(total)


def check_digest(state: Mapping[str, Any]) -> None:
    """Raise, in every process, unless a state is the one whose :func:`digest` it has
    under ``digest``.

    Args:
        state: as in :func:`digest`, after ``dcp.load``.

    Raises:
        RuntimeError: the state is another.
        TypeError, ValueError: as :func:`digest`; it has no digest.

    Example:
        >>> state = {"step": 3}
        >>> check_digest(state | {"digest": digest(state)})
    """
    if not isinstance(state.get(NAME), Tensor):
        raise ValueError(
            "the state has no digest: save state['digest'] = fp8manifold.distributed.digest(state)"
        )
    differs = int(state[NAME]) != int(digest(state))
    share = next(
        (share for _, value in _leaves(state, "") if (share := _share(value)) is not None), None
    )
    if share is not None:
        differs = share.ranks.any(differs, share.local.device)
    if differs:
        raise RuntimeError(
            "the state is not the one whose digest was saved: what was read is damaged, or "
            "incomplete"
        )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no container, by its path."""
    if not isinstance(value, Mapping | list | tuple):
        yield name, value
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(each, f"{name}/{key}" if name else str(key))


def _share(value: Any) -> Share | None:
    """The own rows of a tensor that is spread by rows; None for one that is whole in
    every process.
    """
    share = share_of(value) if isinstance(value, Tensor) else None
    return share if share is not None and share.placements[0].is_shard(0) else None


def _word(name: str, value: Any, ranks: Ranks) -> Tensor:
    """An entry's part of the sum; what every process holds is counted in the first one
    only.
    """
    share, first = _share(value), ranks.rank == 0
    if not isinstance(value, Tensor) or isinstance(value, FP8Tensor):
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(
                f"state entry {name!r} is of {type(value).__name__}: a tensor, number or string is "
                f"needed"
            )
        return torch.tensor(_key(name, value) if first else 0)
    held = getattr(value, "_local_tensor", value)
    row = 0 if share is None else min(ranks.rank * share.rows, share.shape[0])
    word = torch.tensor(_key(name, tuple(value.shape), value.dtype) if first else 0)
    if share is not None or first:
        begin = row * held.shape[1:].numel() if share is not None else 0
        word = word + _sum(_key(name, ""), held, begin).cpu()
    return word


def _key(*parts: object) -> int:
    return int.from_bytes(
        blake2b(repr(parts).encode(), digest_size=8).digest(), "little", signed=True
    )


def _sum(key: int, tensor: Tensor, begin: int) -> Tensor:
    """The sum of one mixed word per element, of its place in the whole tensor and its
    bits.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = (
        tensor.detach()
        .as_subclass(Tensor)
        .contiguous()
        .reshape(-1)
        .view(_BITS[tensor.element_size()])
    )
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(begin + start, begin + start + bits.numel(), device=bits.device)
        total += _mixed(_mixed(place * _GOLDEN + key) ^ bits).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; shifts are of unsigned words."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))
