"""Agreement between processes: the same start, the same options, one verdict on finite gradients."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8manifold._ranks import Ranks, Replicas, bytes_of, local_of, ranks_of, ranks_of_each, share_of
from fp8manifold.optim._native_step import sum_of_squares
from fp8manifold.optim._slot import Slot, steps_taken
from fp8manifold.tensor import FP8Tensor

_NONE: Final[Mapping[Tensor, Any]] = MappingProxyType({})


def _know_others(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Tell the optimizer that steps a process' part for ``ZeroRedundancyOptimizer`` who steps the other parts.

    A process may have no parameter at all, and no other way to know who waits for its verdict.
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


def described(group: dict[str, Any], i: int, k: int) -> str:
    """A parameter in words: its name where the groups have names, its position and shape always."""
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
            states = {} if getattr(optimizer, "elsewhere", None) else optimizer.state
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
    each = [0 if p is None else _word_of_start(p, states.get(p, {})) for p in parameters]
    words = torch.tensor([each], dtype=torch.int64, device=device)
    different = (ranks.gathered(words) != words).any(0).to(torch.int32)
    if bool((different := ranks.largest(different)).any()):
        name = names[int(different.nonzero()[0])]
        raise RuntimeError(
            f"{name} is not the same in every process ({int(different.sum())} of {len(names)} are not): call "
            "fp8manifold.distributed.sync(model) before the model is wrapped, and load the same state everywhere"
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


# Finite gradients


_SHOWN: Final = 3
_DOT = 2**30
"""Elements of a product: those of a GPU are counted in 31 bits."""


def all_finite(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> bool:
    """Check gradients by one sum of squares a tensor, and exactly only where the sum of those is not finite.

    Raises:
        ValueError: a sparse or complex gradient.
        FloatingPointError: a gradient is not finite and its group has ``on_nonfinite="raise"``.
    """
    for slot in slots:
        parameter = slot.parameter
        assert parameter.grad is not None
        if parameter.grad.is_sparse or parameter.grad.is_complex():
            kind = "sparse" if parameter.grad.is_sparse else str(parameter.grad.dtype)
            raise ValueError(
                f"{type(optimizer).__name__} takes dense real gradients only: that of a parameter of shape "
                f"{tuple(parameter.shape)} is {kind}"
            )
    if _squares_sum_up(slots):
        return True
    each = [squares_are_finite(slot) for slot in slots]  # any of them may raise
    return all(each)


def _squares_sum_up(slots: Sequence[Slot]) -> bool:
    """True where the squares of all gradients have a finite sum: then all of them are finite."""
    gradients = [local_of(slot.parameter.grad) for slot in slots]
    if all(type(g) is Tensor and g.dtype is torch.float32 and g.is_cpu and g.is_contiguous() for g in gradients):
        total = sum_of_squares([g.data_ptr() for g in gradients], [g.numel() for g in gradients])
        if total is not None:
            return math.isfinite(total)
    sums: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        sums.setdefault(gradient.device, []).append(_sum_of_squares(gradient))
    return all(math.isfinite(torch.stack(each).sum()) for each in sums.values())


def _sum_of_squares(gradient: Tensor) -> Tensor:
    parts = gradient.reshape(-1).split(_DOT)
    wide = (part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts)
    squares = [torch.dot(part, part).to(torch.float32) for part in wide]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def _squares_hold(gradient: Tensor, factor: float = 1.0) -> bool:
    """True where every ``(factor g)^2`` is finite in the dtype that is computed in."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    wide = wide * factor
    return bool((wide * wide).isfinite().all())


def squares_are_finite(slot: Slot, factor: float = 1.0) -> bool:
    """True where every ``(factor g)^2`` is finite; not checked for a factor below 1.

    Raises:
        FloatingPointError: one is not and the group has ``on_nonfinite="raise"``.
    """
    if factor < 1 or _squares_hold(local_of(slot.parameter.grad), factor):
        return True
    if slot.group["on_nonfinite"] == "raise":
        raise FloatingPointError(
            f"a gradient of shape {tuple(slot.parameter.shape)} is not finite, or its square is not: "
            "on_nonfinite='skip' leaves such steps out"
        )
    return False


def warn_of_skips(optimizer: Any, culprits: Sequence[Tensor] | None) -> None:
    """Name the parameters because of which a step is left out.

    Args:
        optimizer: with ``skipped_in_row``.
        culprits: those parameters; None: by the gradients that there are now.

    Warns:
        RuntimeWarning: always.
    """
    found = _culprits(optimizer) if culprits is None else names_of(optimizer, culprits)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    reason = (
        f"the gradient (or its square) of {', '.join(found[:_SHOWN])}{more} is not finite"
        if found
        else "the cause is not in the gradients here"
    )
    warnings.warn(
        f"{type(optimizer).__name__} has left out {optimizer.skipped_in_row} steps in a row, nothing is trained: "
        f"{reason}. Look for NaN in the loss or lower the learning rate; on_nonfinite='raise' stops at the first such "
        "step",
        RuntimeWarning,
        stacklevel=2,
    )


def warn_of_one(optimizer: Any, parameter: Tensor) -> None:
    """Warn that a parameter's own step, in a backward pass, was left out.

    Warns:
        RuntimeWarning: always.
    """
    warnings.warn(
        f"step_in_backward: the gradient (or its square) of {''.join(names_of(optimizer, [parameter]))} is not finite: "
        "its step was left out, those of other parameters were taken",
        RuntimeWarning,
        stacklevel=2,
    )


def names_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[str]:
    """Parameters in words, as :func:`described` has them, in the optimizer's order."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        described(group, i, k)
        for i, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
        if id(parameter) in wanted
    ]


def _culprits(optimizer: Any) -> list[str]:
    factor = optimizer._gradient_factor
    slots = [slot for slot in optimizer._slots() if not _squares_hold(local_of(slot.parameter.grad), factor(slot))]
    return names_of(optimizer, [slot.parameter for slot in slots])


# One verdict in every process


_APART: Final = ("params", "param_names")
"""Entries of a group that may differ: parameters, and their names."""

Fact = tuple[tuple[Any, ...], Any]
"""A fact that has to be the same in all processes: its kind, group and place, and its value here."""


def are_several() -> bool:
    """Whether processes may step together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def in_every_process(optimizer: Any, may_step: Callable[[], bool]) -> bool:
    """All-reduce a check, so that every process takes the step, leaves it out, or raises.

    The same all-reduce has a word of what the step depends on and must not differ: the options of the groups, which
    parameters have a gradient, and how far their states are.  The parameters themselves, and loaded states, are
    compared in all processes before the first step after one of them has begun or loaded a state.

    Raises:
        RuntimeError: something differs, or another process raises.
        FloatingPointError: another process raises it.
        Exception: what ``may_step`` raises.
    """
    if not are_several():
        return may_step()
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
    """Facts that must not differ over some processes; of an optimizer that ZeRO makes for a part, the options alone.

    ``held`` has the process group of each parameter, by its identity.
    """
    in_parts = getattr(optimizer, "elsewhere", None) is not None
    facts: list[Fact] = [(("the optimizer",), type(optimizer).__name__)]
    for i, group in enumerate(optimizer.param_groups):
        facts += [((name, i), _plain(value)) for name, value in group.items() if name not in _APART]
        for k, parameter in enumerate(() if in_parts else group["params"]):
            if held.get(id(parameter)) == ranks.group:
                facts.append((("whether there is a gradient", i, k), parameter.grad is not None))
                facts.append((("how far the state is", i, k), _progress(optimizer.state.get(parameter))))
    return facts


def _progress(state: dict[str, Any] | None) -> Any:
    return state and (steps_taken(state), state.get("stream"), sorted(state))


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
