"""The same verdict in every process that takes a step, and checks that start, options
and gradients are the same.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8manifold._ranks import Ranks, Replicas, bytes_of, ranks_by_parameter, ranks_of, share_of
from fp8manifold.optim._slot import describe_parameter, steps_taken
from fp8manifold.tensor import FP8Tensor


def _know_others(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Tell the optimizer of a part under ZeRO its processes: it may have no parameter
    to find them by.
    """
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    if getattr(part := optimizer.optim, "elsewhere", 0) is None:
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        part.elsewhere = ranks_of(everyone), everyone[0].device


register_optimizer_step_pre_hook(_know_others)


def ranks_together(optimizer: Optimizer) -> tuple[list[Ranks], torch.device]:
    """The processes that step together with this one, and where they agree."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    if everyone:
        return ranks_of(everyone), everyone[0].device
    return getattr(optimizer, "elsewhere", None) or ([], torch.device("cpu"))


def check_same_start(optimizer: Optimizer) -> None:
    """Compare one word for each parameter over the processes; raise RuntimeError in all
    where one differs.

    The word of a replica has all its bits, its state's among them; that of a share only
    what must not differ: format, seed, counter, whether there is a remainder, and the
    scale if there is one for all rows.
    """
    for ranks in ranks_together(optimizer)[0]:
        states: Mapping[Tensor, Any] = {}
        if isinstance(ranks, Replicas):
            states = {} if getattr(optimizer, "elsewhere", None) else optimizer.state
            parameters, names = ranks.parameters(), [repr(name) for name in ranks.names]
        else:
            shared = [
                (p, describe_parameter(group, i, k))
                for i, group in enumerate(optimizer.param_groups)
                for k, p in enumerate(group["params"])
                if (share := share_of(p)) is not None and share.ranks.group == ranks.group
            ]
            parameters, names = [p for p, _ in shared], [name for _, name in shared]
        device = next((p.device for p in parameters if p is not None), torch.device("cpu"))
        each = [0 if p is None else _word_of_start(p, states.get(p, {})) for p in parameters]
        words = torch.tensor([each], dtype=torch.int64, device=device)
        different = ranks.largest((ranks.gather(words) != words).any(0).to(torch.int32))
        if bool(different.any()):
            name = names[int(different.nonzero()[0])]
            raise RuntimeError(
                f"{name} is not the same in every process ({int(different.sum())} of {len(names)} "
                f"are not): call "
                "fp8manifold.distributed.sync(model) before the model is wrapped, and load the "
                "same state everywhere"
            )


def _word_of_start(parameter: Tensor, state: dict[str, Any]) -> int:
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
        digest.update(bytes_of(part.detach().as_subclass(Tensor)).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


Fact = tuple[tuple[Any, ...], Any]
"""A fact that has to be the same in all processes: its kind, group and place, and its
value here.
"""


def is_distributed() -> bool:
    """True where processes may step together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def in_every_process(optimizer: Any, may_step: Callable[[], bool]) -> bool:
    """All-reduce a check, so that every process takes the step, leaves it out, or
    raises.

    The same all-reduce has a word of the options, of which parameters have a gradient,
    and of how far states are. Parameters and loaded states are compared before the
    first step after one process has begun or loaded a state.
    """
    if not is_distributed():
        return may_step()
    together, device = ranks_together(optimizer)
    if not together:
        return may_step()
    may, error = False, None
    try:
        may = may_step()
    except Exception as raised:  # of any kind: the other processes wait for the verdict
        error = raised
    severity = 0 if error is None else 1 if isinstance(error, FloatingPointError) else 2
    verdict = [int(not may), severity, int(not optimizer._has_started)]
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    held = {
        id(p): own.group
        for p, own in zip(everyone, ranks_by_parameter(everyone), strict=True)
        if own is not None
    }
    facts = [_facts(optimizer, ranks, held) for ranks in together]
    different = []
    for ranks, ours in zip(together, facts, strict=True):
        word = _word(ours) >> 2  # its negative and its own sign have room
        *verdict, most, least = ranks.largest(
            torch.tensor([*verdict, word, -word], device=device)
        ).tolist()
        if most != -least:
            different.append((ranks, ours))
    for ranks, ours in different:
        raise RuntimeError(_difference(optimizer, ranks, ours, device)) from error
    left_out, severity, compares = verdict
    if error is not None:
        raise error
    if severity == 1:
        raise FloatingPointError(
            "a gradient is not finite, or its square is not, in another process"
        )
    if severity:
        raise RuntimeError("another process refuses this step, and says why")
    if compares:
        check_same_start(optimizer)
        optimizer._has_started = True
    return not left_out


def _facts(optimizer: Optimizer, ranks: Ranks, held: dict[int, Any]) -> list[Fact]:
    """Facts that must not differ over some processes, by the process group of each
    parameter's identity.
    """
    in_parts = (
        getattr(optimizer, "elsewhere", None) is not None
    )  # under ZeRO options are all that is shared
    facts: list[Fact] = [(("the optimizer",), type(optimizer).__name__)]
    for i, group in enumerate(optimizer.param_groups):
        facts += [
            ((name, i), _plain(value))
            for name, value in group.items()
            if name not in ("params", "param_names")
        ]
        for k, parameter in enumerate(() if in_parts else group["params"]):
            if held.get(id(parameter)) == ranks.group:
                facts.append((("whether there is a gradient", i, k), parameter.grad is not None))
                state = optimizer.state.get(parameter)
                progress = state and (steps_taken(state), state.get("stream"), sorted(state))
                facts.append((("how far the state is", i, k), progress))
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def _word(fact: object) -> int:
    return int.from_bytes(blake2b(repr(fact).encode(), digest_size=8).digest(), "little")


def _difference(
    optimizer: Optimizer, ranks: Ranks, facts: Sequence[Fact], device: torch.device
) -> str:
    """The line that names what differs; every process of ``ranks`` calls this."""
    count = torch.tensor([len(facts)], device=device)
    if not bool((ranks.gather(count) == count).all()):
        return "the optimizers of the processes have other groups or numbers of parameters: make them of the same model"
    words = torch.tensor([[_word(fact) >> 1 for fact in facts]], device=device)
    differs = ranks.largest((ranks.gather(words) != words).any(0).to(torch.int32))
    first = int(differs.nonzero()[0]) if bool(differs.any()) else 0
    what, *place = facts[first][0]
    where = "".join(f" of group {i}" for i in place[:1])
    if len(place) == 2:
        where = f" of {describe_parameter(optimizer.param_groups[place[0]], *place)}"
    return f"{what}{where} is not the same in every process: give them all the same options, gradients and state"
