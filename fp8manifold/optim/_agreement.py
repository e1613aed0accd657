"""One verdict on a step in all processes that take it together.

A process that steps while another does not waits for it forever in the next collective,
or trains another model. So whatever may refuse a step is decided together, before
anything changes::

    in_every_process(optimizer, may_step)
        may_step()           the checks of this process: True, False, or an error
        one all-reduce       of the verdicts, and of a word of the facts that must agree:
                             options, which parameters have gradients, how far states are
        check_same_start     before the first step: do parameters and states agree?

An error in one process becomes an error in all: its own there, one that points to it in
the others. Where facts differ, each process names the first one that does.

Processes step together if they share a parameter: as replicas that
`fp8manifold.distributed.sync` has registered, as shards, or under
``ZeroRedundancyOptimizer``, where each steps parameters of its own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8manifold._base.param_groups import parameters_of
from fp8manifold._ranks import Ranks, Replicas, bytes_of, ranks_by_parameter, ranks_of, share_of
from fp8manifold.optim._slot import describe_parameter, steps_taken
from fp8manifold.tensor import FP8Tensor

_ZERO: Final = "torch.distributed.optim.zero_redundancy_optimizer"


def _never() -> bool:
    return False


is_distributed: Callable[[], bool] = _never
"""Return True if processes may step together: torch's function, if it was built with it.

It is bound at import, which saves a call in every step.
"""
if torch.distributed.is_available():
    is_distributed = torch.distributed.is_initialized


def watch_for_zero() -> None:
    """Register the hook that ``ZeroRedundancyOptimizer`` needs, if that is imported.

    Its constructor makes the optimizer of a part, so it is imported by then.
    """
    if _ZERO in sys.modules:
        _register_hook()


@cache
def _register_hook() -> None:
    """Register the hook, once in a process."""
    register_optimizer_step_pre_hook(_tell_processes)


def _tell_processes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Tell the optimizer of a part under ZeRO its processes.

    It may have no parameter to find them by.
    """
    zero = sys.modules.get(_ZERO)
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    part = optimizer.optim
    # other libraries' optimizers have no such attribute
    if getattr(part, "zero_processes", 0) is None:
        parameters = parameters_of(optimizer)
        part.zero_processes = ranks_of(parameters), parameters[0].device


def ranks_together(optimizer: Optimizer) -> tuple[list[Ranks], torch.device]:
    """Return the processes that step together with this one, and where they agree."""
    parameters = parameters_of(optimizer)
    if parameters:
        return ranks_of(parameters), parameters[0].device
    return getattr(optimizer, "zero_processes", None) or ([], torch.device("cpu"))


def check_same_start(optimizer: Optimizer) -> None:
    """Compare parameters over the processes; raise RuntimeError in all if one differs.

    One word for each parameter is compared. That of a replica has all its bits, its
    state's among them. That of a share has only what must not differ: format, seed,
    counter, whether there is a remainder, and the scale if there is one for all rows.
    """
    for ranks in ranks_together(optimizer)[0]:
        states: Mapping[Tensor, Any] = {}
        parameters: list[Tensor | None] = []
        names = []
        if isinstance(ranks, Replicas):
            # under ZeRO each process has the states of its own part
            if not getattr(optimizer, "zero_processes", None):
                states = optimizer.state
            parameters = ranks.parameters()
            names = [repr(name) for name in ranks.names]
        else:
            for i, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    share = share_of(parameter)
                    if share is not None and share.ranks.group == ranks.group:
                        parameters.append(parameter)
                        names.append(describe_parameter(group, i, k))
        device = next((p.device for p in parameters if p is not None), torch.device("cpu"))
        words = [0 if p is None else _word_of_start(p, states.get(p, {})) for p in parameters]
        differs = _differs(ranks, words, device)
        if bool(differs.any()):
            name = names[int(differs.nonzero()[0])]
            raise RuntimeError(
                f"{name} is not the same in every process ({int(differs.sum())} of {len(names)} "
                f"are not): call "
                "fp8manifold.distributed.sync(model) before the model is wrapped, and load the "
                "same state everywhere"
            )


def _differs(ranks: Ranks, words: list[int], device: torch.device) -> Tensor:
    """Return for each word 1 if it differs between any two processes, else 0."""
    row = torch.tensor([words], dtype=torch.int64, device=device)
    return ranks.largest((ranks.gather(row) != row).any(0).to(torch.int32))


def _word_of_start(parameter: Tensor, state: dict[str, Any]) -> int:
    """Return a digest of a parameter, and of its state if it is whole."""
    share = share_of(parameter)
    is_whole = share is None
    local = parameter.detach() if share is None else share.local
    digest = blake2b(repr((tuple(parameter.shape), str(parameter.dtype))).encode(), digest_size=8)
    tensors: list[Tensor] = []
    if isinstance(local, FP8Tensor):
        digest.update(repr(local._traits().flat).encode())
        tensors.append(local.counter)
        if is_whole:
            tensors.append(local.codes)
        if is_whole or not local.scale.dim():
            tensors.append(local.scale)
        digest.update(repr(local.remainder is not None).encode())
        if is_whole and local.remainder is not None:
            tensors.append(local.remainder)
    elif is_whole:
        tensors.append(local)
    tensors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    for tensor in tensors:
        digest.update(bytes_of(tensor.detach().as_subclass(Tensor)).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


class Fact(NamedTuple):
    """A fact that has to be the same in all processes, and its value in this one."""

    what: str
    #: the position of its group, and that of its parameter in the group, if it has them
    place: tuple[int, ...]
    value: Any


class _Severity(IntEnum):
    """What the checks of a process end with; the worst of all processes counts."""

    NO_ERROR = 0
    NOT_FINITE = 1
    OTHER_ERROR = 2


def in_every_process(optimizer: Any, may_step: Callable[[], bool]) -> bool:
    """All-reduce a check, so that all processes take the step, skip it, or raise.

    The same all-reduce has a word of the options, of which parameters have a gradient,
    and of how far states are. Parameters and loaded states are compared before the
    first step after one process has begun or loaded a state.
    """
    if not is_distributed():
        return may_step()
    together, device = ranks_together(optimizer)
    if not together:
        return may_step()
    may = False
    error: Exception | None = None
    try:
        may = may_step()
    except Exception as raised:
        # of any kind: the other processes wait for the verdict
        error = raised
    severity = _severity_of(error)
    verdict = [int(not may), int(severity), int(not optimizer._has_started)]
    # Every all-reduce runs before anything is raised: the other processes wait for it.
    facts_by_ranks = _facts_by_ranks(optimizer, together)
    disagreements = []
    for ranks, facts in zip(together, facts_by_ranks, strict=True):
        # two bits are free, for the sign of the word and that of its negative
        word = _word(facts) >> 2
        reduced = ranks.largest(torch.tensor([*verdict, word, -word], device=device)).tolist()
        # the worst so far goes into the next all-reduce
        *verdict, largest_word, negative_of_least = reduced
        if largest_word != -negative_of_least:
            disagreements.append((ranks, facts))
    if disagreements:
        ranks, facts = disagreements[0]
        raise RuntimeError(_difference(optimizer, ranks, facts, device)) from error
    is_skipped, worst, must_compare = verdict
    if error is not None:
        raise error
    _raise_for_others(worst)
    if must_compare:
        check_same_start(optimizer)
        optimizer._has_started = True
    return not is_skipped


def _severity_of(error: Exception | None) -> _Severity:
    if error is None:
        return _Severity.NO_ERROR
    if isinstance(error, FloatingPointError):
        return _Severity.NOT_FINITE
    return _Severity.OTHER_ERROR


def _raise_for_others(severity: int) -> None:
    """Raise if another process raises, by the worst severity of all processes."""
    if severity == _Severity.NOT_FINITE:
        raise FloatingPointError(
            "a gradient is not finite, or its square is not, in another process"
        )
    if severity == _Severity.OTHER_ERROR:
        raise RuntimeError("another process refuses this step, and says why")


def _facts_by_ranks(optimizer: Optimizer, together: Sequence[Ranks]) -> list[list[Fact]]:
    """Return the facts that must not differ over each of some sets of processes."""
    parameters = parameters_of(optimizer)
    groups_by_id = {}
    for parameter, ranks in zip(parameters, ranks_by_parameter(parameters), strict=True):
        if ranks is not None:
            groups_by_id[id(parameter)] = ranks.group
    return [_facts(optimizer, ranks, groups_by_id) for ranks in together]


def _facts(optimizer: Optimizer, ranks: Ranks, groups_by_id: dict[int, Any]) -> list[Fact]:
    """Return facts that must not differ over some processes.

    Args:
        optimizer: whose options, gradients and states they are about.
        ranks: the processes.
        groups_by_id: the process group of each parameter, by the parameter's identity.
    """
    # under ZeRO options are all that is shared
    has_parts = getattr(optimizer, "zero_processes", None) is not None
    facts = [Fact("the optimizer", (), type(optimizer).__name__)]
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names"):
                facts.append(Fact(name, (i,), _plain(value)))
        if has_parts:
            continue
        for k, parameter in enumerate(group["params"]):
            if groups_by_id.get(id(parameter)) != ranks.group:
                continue
            has_gradient = parameter.grad is not None
            facts.append(Fact("whether there is a gradient", (i, k), has_gradient))
            state = optimizer.state.get(parameter)
            progress = state and (steps_taken(state), state.get("stream"), sorted(state))
            facts.append(Fact("how far the state is", (i, k), progress))
    return facts


def _plain(value: Any) -> Any:
    """Return an option in a form whose ``repr`` is the same in every process."""
    if isinstance(value, Tensor):
        return value.tolist()
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return value


def _word(fact: object) -> int:
    """Return 64 bits that stand for the ``repr`` of facts."""
    return int.from_bytes(blake2b(repr(fact).encode(), digest_size=8).digest(), "little")


def _difference(
    optimizer: Optimizer, ranks: Ranks, facts: Sequence[Fact], device: torch.device
) -> str:
    """Return the line that names what differs; every process of ``ranks`` calls this."""
    count = torch.tensor([len(facts)], device=device)
    if not bool((ranks.gather(count) == count).all()):
        return (
            "the optimizers of the processes have other groups or numbers of parameters: make "
            "them of the same model"
        )
    differs = _differs(ranks, [_word(fact) >> 1 for fact in facts], device)
    first = int(differs.nonzero()[0]) if bool(differs.any()) else 0
    what, place, _ = facts[first]
    place_in_words = ""
    if len(place) == 1:
        place_in_words = f" of group {place[0]}"
    elif len(place) == 2:
        i, k = place
        place_in_words = f" of {describe_parameter(optimizer.param_groups[i], i, k)}"
    return (
        f"{what}{place_in_words} is not the same in every process: give them all the same options, "
        "gradients and state"
    )
