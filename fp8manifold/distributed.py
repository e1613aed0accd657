"""The same model in every process.

- ``sync`` sends the first process's model to all. From then on a hook of the model
  compares, once, what the processes train, and the optimizers agree on scales and
  skipped steps.
- ``rows_of`` makes a DTensor of a whole tensor, and ``in_rows_of`` one of local rows.
- ``digest`` is one number for a state, however its rows are divided among processes: a
  sum over all elements of a hash of name, place and bits.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fp8manifold._ranks import ALONE, Ranks, Replicas, Share, local_of, replicas, share_of, spread
from fp8manifold.nn._scalers import share_magnitudes
from fp8manifold.tensor import FP8Tensor

__all__ = ["check_digest", "digest", "in_rows_of", "rows_of", "sync"]

DIGEST_KEY: Final = "digest"
"""The key under which a state has its digest."""
_DTYPES_OF_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# odd numbers of 64 bits, as signed ones: the golden ratio's, and those of SplitMix64
_GOLDEN: Final = -0x61C8864680B583EB
_FIRST_FACTOR: Final = -0x40A7B892E31B1A47
_SECOND_FACTOR: Final = -0x6B2FB644ECCEEE15
_BLOCK: Final = 2**20


def sync(model: nn.Module, group: Any = None) -> None:
    """Give every process the model of the first one, to the bit, to train it together.

    It sends codes, scales, counters, seeds, remainders of the first rounding, ordinary
    parameters and buffers. From then on the magnitudes of delayed and global scales are
    the largest over the processes, this library's optimizers skip a step in all
    processes if a gradient is not finite in one, and their first step compares the
    parameters. The first pass under DDP or ``fully_shard`` compares which parameters
    each process trains. Call it in every process before ``ZeroRedundancyOptimizer`` and
    ``fully_shard``; DDP calls it for a model with one-byte weights that has not been
    synced, whatever ``init_sync`` is.

    Args:
        model: a model with the same layers, formats and shapes in every process; NaN,
            Inf, -0 and empty tensors as they are.
        group: the process group; None takes the default one.

    Raises:
        RuntimeError: no process group; a model that is sharded already, or that differs
            between processes (before anything changes); later, if processes train
            different parameters, or if the model runs in a ``Join`` without
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
    """Return the rows of a whole tensor that this process has, as a DTensor.

    The tensor may be an entry of a state.

    ``load_state_dict`` of a sharded model takes whole one-byte weights as they are, and
    cuts their rows itself.

    Args:
        whole: the tensor, the same in every process, with as many rows as ``like``;
            NaN, Inf, -0 and an empty tensor as they are.
        like: a tensor that is spread over processes, as by ``fully_shard``; for any
            other tensor ``whole`` is returned.

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
    return spread(like, share.local_rows(whole).clone().to(share.local.device))


def in_rows_of(parameter: Tensor, own: Tensor) -> Tensor:
    """Return a DTensor of all rows of a parameter, from those that this process has.

    Args:
        parameter: a parameter after ``fully_shard``; for any other, ``own`` is returned
            unchanged.
        own: the rows of this process, of any dtype, an empty tensor if there are none;
            NaN, Inf and -0 as they are.

    Raises:
        AttributeError: after ``fully_shard``, ``own`` is not a tensor.

    Example:
        >>> in_rows_of(nn.Parameter(torch.zeros(2, 2)), torch.ones(2, 3)).shape
        torch.Size([2, 3])

    Source: ``DTensor.from_local`` of torch.
    """
    return spread(parameter, own)


@torch.no_grad()
def _send(model: nn.Module, ranks: Ranks) -> None:
    """Give every process the tensors of the first one; raise if the models differ."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    hidden_buffers = {
        f"hidden buffer {name}": buffer
        for name, buffer in model.named_buffers()
        if name not in state
    }
    tensors = {
        name: value.detach().contiguous() for name, value in (state | hidden_buffers).items()
    }
    outline = _outline(model, tensors)
    first_outline = {
        name: _Entry(*entry)
        for name, entry in json.loads(_send_text(json.dumps(outline), ranks, device)).items()
    }
    refusal = _describe_difference(outline, first_outline)
    if ranks.any_true(refusal is not None, device):
        raise RuntimeError(f"the models differ: {refusal or 'another process says where'}")
    for name, tensor in tensors.items():
        memory = tensor if ranks.rank == 0 else tensor.new_empty(first_outline[name].shape)
        tensors[name] = ranks.broadcast(memory)
    if ranks.rank == 0:
        return
    for name, buffer in hidden_buffers.items():
        buffer.copy_(tensors.pop(name))
    model.load_state_dict(tensors, strict=False)


class _Entry(NamedTuple):
    """What processes compare of a tensor, or of an attribute, which has no shape."""

    shape: Any
    kind: str


def _outline(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, _Entry]:
    """Return what has to be equal in every process; seeds and rounding need not be."""
    outline = {
        name: _Entry(list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()
    }
    for name, p in model.named_parameters():
        outline[f"requires_grad of {name}"] = _Entry(None, str(p.requires_grad))
        if isinstance(p, FP8Tensor):
            kind = f"{p.format.name}, {p.block_size}, {p.dtype}"
            outline[f"format of {name}"] = _Entry(None, kind)
    return outline


def _describe_difference(local: dict[str, _Entry], first: dict[str, _Entry]) -> str | None:
    """Return the first difference from the first process's model, in words, or None."""
    one_sided = sorted(local.keys() ^ first.keys())
    if one_sided:
        return f"{one_sided[0]!r} is in one of them only"
    for name, entry in local.items():
        present, wanted = entry, first[name]
        # a scale that has seen no tensor yet does not know its shape
        may_grow = name.endswith((".history", ".value"))
        if present.kind == wanted.kind and (present.shape == wanted.shape or may_grow):
            continue
        if present.shape is None:
            return f"the {name} is {present.kind} here, and {wanted.kind} there"
        return (
            f"{name!r} is {present.kind} of shape {tuple(present.shape)} here, and "
            f"{wanted.kind} of shape {tuple(wanted.shape)} there"
        )
    return None


def _send_text(text: str, ranks: Ranks, device: torch.device) -> str:
    """Return the first process's text, in every process."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = ranks.broadcast(torch.tensor([len(data)], device=device))
    data = ranks.broadcast(data if ranks.rank == 0 else data.new_empty(int(size)))
    return bytes(data.cpu().tolist()).decode()


def _start_together(wrapper: nn.Module, name: str, model: Any) -> None:
    """Call :func:`sync` where DDP takes a model.

    DDP itself would send one-byte weights as floats.
    """
    if not isinstance(wrapper, DistributedDataParallel) or not isinstance(model, nn.Module):
        return
    if any(_has_codes(module) and module not in replicas for module in model.modules()):
        sync(model, wrapper.process_group)
    else:
        _compare_now(model)


def _has_codes(module: nn.Module) -> bool:
    return any(isinstance(parameter, FP8Tensor) for parameter in module._parameters.values())


register_module_module_registration_hook(_start_together)


def refuse_uneven_inputs(model: nn.Module) -> None:
    """Have a model raise, in every process, in a ``Join`` that leaves some behind."""
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
            "torch's Join continues with the processes that have batches left, but this model's "
            "steps and scales need all processes: give each the same number of batches, or Join "
            "throw_on_early_termination=True"
        )


class _Comparison:
    """A forward hook that compares, once, which parameters the processes train.

    Their dtypes and shapes are compared too. It does so in the first pass in which they
    reduce gradients together, or where DDP takes the model. Without it that reduction
    would add up bytes of different parameters, and gloo would end the process without a
    message.
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
        words = torch.tensor([list(map(_hash, kinds))], device=device)
        table = self.ranks.gather(words).cpu()
        columns = (table != table[0]).any(0).nonzero().flatten().tolist()
        if not columns:
            return
        column = columns[0]
        differs = table[:, column] != words[0, column].cpu()
        processes = differs.nonzero().flatten().tolist()
        raise RuntimeError(
            f"{self.ranks.names[column]!r} is {kinds[column]} in process {self.ranks.rank}, and "
            f"something else in {', '.join(map(str, processes))}: freeze and cast the same "
            "parameters in every process, before the model is wrapped"
        )


def _reduces_gradients(model: nn.Module) -> bool:
    """Return True in a pass for which DDP or ``fully_shard`` needs every process."""
    if DistributedDataParallel._active_ddp_module is not None:
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def _compare_now(model: nn.Module) -> None:
    """Compare the parameters of a model that has been synced."""
    for hook in list(model._forward_pre_hooks.values()):
        if isinstance(hook, _Comparison):
            hook.compare(model)


def _compare_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Have a model compare its parameters over the processes that train it."""
    hooks = model._forward_pre_hooks
    earlier = [key for key, hook in hooks.items() if isinstance(hook, _Comparison)]
    for key in earlier:
        del hooks[key]
    model.register_forward_pre_hook(_Comparison(ranks))


@torch.no_grad()
def digest(state: Mapping[str, Any]) -> Tensor:
    r"""Return one number for all of a state.

    .. math:: \sum_{name} \sum_i \mathrm{mix}(key_{name}, i, bits_i) \bmod 2^{64}

    It depends on names, shapes, dtypes, and on every bit of every tensor and its place.

    The sum is the same however rows are divided among processes.
    ``torch.distributed.checkpoint`` has no checksums of its own. The digest detects
    damage, not forgery. NaN and -0 count by their bits, empty tensors by their name.

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
    entries = [(name, value) for name, value in _leaves(state, "") if name != DIGEST_KEY]
    share = _first_share(entries)
    ranks: Ranks = ALONE if share is None else share.ranks
    device: Any = "cpu" if share is None else share.local.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, value in entries:
        total += _entry_sum(name, value, ranks).to(total.device)
    return ranks.total(total)


def check_digest(state: Mapping[str, Any]) -> None:
    """Raise in every process if a state does not match the digest that it holds.

    The digest is the entry ``digest``, made by :func:`digest`.

    Args:
        state: as in :func:`digest`, after ``dcp.load``.

    Raises:
        RuntimeError: the state is not the one whose digest it holds.
        TypeError, ValueError: as :func:`digest`; it has no digest.

    Example:
        >>> state = {"step": 3}
        >>> check_digest(state | {"digest": digest(state)})
    """
    if not isinstance(state.get(DIGEST_KEY), Tensor):
        raise ValueError(
            "the state has no digest: save state['digest'] = fp8manifold.distributed.digest(state)"
        )
    differs = int(state[DIGEST_KEY]) != int(digest(state))
    share = _first_share(_leaves(state, ""))
    if share is not None:
        differs = share.ranks.any_true(differs, share.local.device)
    if differs:
        raise RuntimeError(
            "the state is not the one whose digest was saved: what was read is damaged, or "
            "incomplete"
        )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield everything that is no container, by its path."""
    if not isinstance(value, Mapping | list | tuple):
        yield name, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        yield from _leaves(item, f"{name}/{key}" if name else str(key))


def _first_share(entries: Iterable[tuple[str, Any]]) -> Share | None:
    """Return the share of the first entry that is spread by rows, or None."""
    for _, value in entries:
        share = _row_share(value)
        if share is not None:
            return share
    return None


def _row_share(value: Any) -> Share | None:
    """Return the share of a tensor that is spread by rows.

    It is None for one that is whole in every process.
    """
    if not isinstance(value, Tensor):
        return None
    share = share_of(value)
    if share is None or not share.placements[0].is_shard(0):
        return None
    return share


def _entry_sum(name: str, value: Any, ranks: Ranks) -> Tensor:
    """Return this process's part of the sum for one entry.

    What every process has is counted in the first one only.
    """
    is_first = ranks.rank == 0
    # a tensor of codes is refused below: a state dict has its parts, plain tensors
    if not isinstance(value, Tensor) or isinstance(value, FP8Tensor):
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(
                f"state entry {name!r} has type {type(value).__name__}: a tensor, number or string "
                "is needed"
            )
        return torch.tensor(_hash(name, value) if is_first else 0, device="cpu")
    share = _row_share(value)
    local = local_of(value)
    first_part = _hash(name, tuple(value.shape), value.dtype) if is_first else 0
    total = torch.tensor(first_part, device="cpu")
    if share is not None:
        begin = share.first_row * local.shape[1:].numel()
        return total + _sum_of_elements(_hash(name, ""), local, begin).cpu()
    if is_first:
        return total + _sum_of_elements(_hash(name, ""), local, 0).cpu()
    return total


def _hash(*parts: object) -> int:
    """Return 64 bits, as a signed number."""
    data = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def _sum_of_elements(key: int, tensor: Tensor, begin: int) -> Tensor:
    """Return the sum of one mixed word per element.

    The word depends on the element's bits and on its place in the whole tensor, in
    which the first one is at ``begin``.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    contents = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1)
    bits_of_all = contents.view(_DTYPES_OF_BITS[tensor.element_size()])
    for start in range(0, bits_of_all.numel(), _BLOCK):
        bits = bits_of_all[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(begin + start, begin + start + bits.numel(), device=bits.device)
        total += _mix(_mix(places * _GOLDEN + key) ^ bits).sum()
    return total


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of 64-bit words; shifts are of unsigned words."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST_FACTOR
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND_FACTOR
    return x ^ ((x >> 31) & (2**33 - 1))
