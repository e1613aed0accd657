"""The processes that step a model together: who they are, and whether they start from the same one."""

import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8manifold._ranks import Ranks, Replicas, ranks_of, share_of
from fp8manifold.tensor import FP8Tensor

__all__ = ["check_same_start", "described", "ranks_elsewhere", "ranks_together"]

_NONE: Final[Mapping[Tensor, Any]] = MappingProxyType({})


def ranks_elsewhere() -> tuple[list[Ranks], torch.device] | None:
    """Those of all parameters of a ``ZeroRedundancyOptimizer`` that makes the optimizer of this process' part.

    A process may have none of them, and no other way to know who waits for its verdict.
    """
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None:
        return None
    code, frame = zero.ZeroRedundancyOptimizer._init_local_optimizer.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            optimizer = frame.f_locals["self"]
            return ranks_of(optimizer._all_params), optimizer._all_params[0].device
        frame = frame.f_back  # type: ignore[assignment]
    return None


def ranks_together(optimizer: Optimizer) -> tuple[list[Ranks], torch.device]:
    """The processes that step together with this one, and where they agree."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    if everyone:
        return ranks_of(everyone), everyone[0].device
    return getattr(optimizer, "_elsewhere", None) or ([], torch.device("cpu"))


def described(group: dict[str, Any], i: int, k: int) -> str:
    """By name where the groups have names (``model.named_parameters()``), by position and shape always."""
    names = group.get("param_names")
    name = f"{names[k]!r}, " if names else ""
    return f"parameter {k} of group {i} ({name}shape {tuple(group['params'][k].shape)})"


def check_same_start(optimizer: Optimizer) -> None:
    """Compare one word for each parameter over the processes.

    Replicas have all their bits in it, their states among them; shares what they must not differ in: format, seed,
    counter, whether there is a remainder, and the scale where there is one for all rows.

    Raises:
        RuntimeError: one is not the same everywhere, in every process.
    """
    for ranks in ranks_together(optimizer)[0]:
        if isinstance(ranks, Replicas):
            states = {} if getattr(optimizer, "_elsewhere", None) else optimizer.state
            _compare(ranks, ranks.parameters(), [repr(name) for name in ranks.names], states)
            continue
        shared = [
            (p, described(group, i, k))
            for i, group in enumerate(optimizer.param_groups)
            for k, p in enumerate(group["params"])
            if (share := share_of(p)) is not None and share.ranks.group == ranks.group
        ]
        _compare(ranks, [p for p, _ in shared], [name for _, name in shared])


def _compare(
    ranks: Ranks, parameters: Sequence[Tensor | None], names: list[str], states: Mapping[Tensor, Any] = _NONE
) -> None:
    device = next((p.device for p in parameters if p is not None), torch.device("cpu"))
    each = [0 if p is None else _word(p, states.get(p, {})) for p in parameters]
    words = torch.tensor([each], dtype=torch.int64, device=device)
    different = (ranks.gathered(words) != words).any(0).to(torch.int32)
    if bool((different := ranks.largest(different)).any()):
        name = names[int(different.nonzero()[0])]
        raise RuntimeError(
            f"{name} is not the same in every process ({int(different.sum())} of {len(names)} are not): call "
            "fp8manifold.distributed.sync(model) before the model is wrapped, and load the same state everywhere"
        )


def _word(parameter: Tensor, state: dict[str, Any]) -> int:
    share = share_of(parameter)
    held = parameter.detach() if share is None else share.local
    digest = blake2b(repr((tuple(parameter.shape), str(parameter.dtype))).encode(), digest_size=8)
    parts = [held] if share is None else []
    if isinstance(held, FP8Tensor):
        digest.update(repr(held._traits().flat).encode())
        parts = [held.counter, *([held.codes] if share is None else [])]
        parts += [held.scale] if share is None or not held.scale.dim() else []
        digest.update(repr(held.remainder is not None).encode())
        parts += [] if share is not None or held.remainder is None else [held.remainder]
    parts += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    for part in parts:
        digest.update(part.as_subclass(Tensor).reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)
