"""One verdict on each step over all processes that take it: they go on together, or are refused together."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8manifold._ranks import Ranks, ranks_of_each
from fp8manifold.optim._together import check_same_start, described, ranks_together

__all__ = ["in_every_process"]

_APART: Final = ("params", "param_names", "compile")
"""What of a group may differ: names, and how a step is run, which has the same bits."""

Fact = tuple[tuple[Any, ...], Any]
"""Where something is that has to be the same in all processes (its kind, group and place), and what it is here."""


def in_every_process(optimizer: Any, may_step: Callable[[], bool]) -> bool:
    """All-reduce a check, so that every process takes the step, leaves it out, or raises.

    The same all-reduce has a word of what the step depends on and must not differ: the options of the groups, which
    parameters have a gradient, and how far their states are.  The parameters themselves, and loaded states, are
    compared in all processes before the first step after one of them has begun or loaded a state.

    Args:
        optimizer: of this library.
        may_step: whether the step may be taken, by what there is here.

    Raises:
        RuntimeError: something differs, or another process raises.
        FloatingPointError: another process raises it.
        Exception: what ``may_step`` raises.
    """
    together, device = ranks_together(optimizer)
    if not together:
        return may_step()
    may, error = False, None
    try:
        may = may_step()
    except Exception as raised:  # of any kind: the others wait for the verdict
        error = raised
    verdict = [int(not may), _severity(error), int(not optimizer._has_started)]
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p): own.group for p, own in zip(everyone, ranks_of_each(everyone), strict=True) if own is not None}
    facts = [_facts(optimizer, ranks, held) for ranks in together]
    different = []
    for ranks, ours in zip(together, facts, strict=True):
        word = _word(ours) >> 2  # its negative and its own sign have room
        *verdict, most, least = ranks.largest(torch.tensor([*verdict, word, -word], device=device)).tolist()
        if most != -least:
            different.append((ranks, ours))
    for ranks, ours in different:
        raise RuntimeError(_difference(optimizer, ranks, ours, device)) from error
    left_out, severity, compares = verdict
    if error is not None:
        raise error
    if severity:
        raise _ELSEWHERE[severity]
    if compares:
        check_same_start(optimizer)
        optimizer._has_started = True
    return not left_out


_ELSEWHERE: Final = {
    1: FloatingPointError("a gradient is not finite, or its square is not, in another process"),
    2: RuntimeError("another process refuses this step, and says why"),
}


def _severity(error: Exception | None) -> int:
    return 0 if error is None else 1 if isinstance(error, FloatingPointError) else 2


def _facts(optimizer: Optimizer, ranks: Ranks, held: dict[int, Any]) -> list[Fact]:
    """What must not differ over some processes; of an optimizer that ZeRO makes for a part, the options alone.

    ``held`` has the process group of each parameter, by its identity.
    """
    in_parts = getattr(optimizer, "_elsewhere", None) is not None
    facts: list[Fact] = [(("the optimizer",), type(optimizer).__name__)]
    for i, group in enumerate(optimizer.param_groups):
        facts += [((name, i), _plain(value)) for name, value in group.items() if name not in _APART]
        for k, parameter in enumerate(() if in_parts else group["params"]):
            if held.get(id(parameter)) == ranks.group:
                facts.append((("whether there is a gradient", i, k), parameter.grad is not None))
                facts.append((("how far the state is", i, k), _progress(optimizer.state.get(parameter))))
    return facts


def _progress(state: dict[str, Any] | None) -> Any:
    return state and (int(state.get("step", 0)), state.get("stream"), sorted(state))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def _word(fact: object) -> int:
    return int.from_bytes(blake2b(repr(fact).encode(), digest_size=8).digest(), "little")


def _difference(optimizer: Optimizer, ranks: Ranks, facts: Sequence[Fact], device: torch.device) -> str:
    """The line that names what differs; every process of ``ranks`` asks for it."""
    count = torch.tensor([len(facts)], device=device)
    if not bool((ranks.gathered(count) == count).all()):
        return "the optimizers of the processes have other groups or numbers of parameters: make them of the same model"
    words = torch.tensor([[_word(fact) >> 1 for fact in facts]], device=device)
    differs = ranks.largest((ranks.gathered(words) != words).any(0).to(torch.int32))
    first = int(differs.nonzero()[0]) if bool(differs.any()) else 0
    what, *place = facts[first][0]
    where = "".join(f" of group {i}" for i in place[:1])
    if len(place) == 2:
        where = f" of {described(optimizer.param_groups[place[0]], *place)}"
    return f"{what}{where} is not the same in every process: give them all the same options, gradients and state"
