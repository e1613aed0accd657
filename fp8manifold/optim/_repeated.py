"""A step like the last one: the same parameters, options and state, so that little has to be looked up again.

Planning fifty parameters takes as long as stepping a million elements.  What a plan is made of seldom changes from
one step to the next, and what does (gradients, numbers, random keys) can be had for all parameters at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold.optim._engine import Ready, key_rows, note_changes, run_eager
from fp8manifold.optim._hyper import FIELD, HYPER, row
from fp8manifold.tensor import FP8Tensor

if TYPE_CHECKING:
    from fp8manifold.optim._jobs import GridOptimizer, Kept

__all__ = ["RepeatedStep"]

_SHARED: Final = np.array([i for i, name in enumerate(HYPER) if name not in FIELD])


@dataclass
class _Entry:
    """One parameter of the last step."""

    group: dict[str, Any]
    parameter: Tensor
    state: dict[str, Any]
    kept: "Kept"
    #: compiled, or None for what is not worth compiling
    ready: Ready | None
    #: what the state held
    values: list[Any]
    #: the layout's sizes, in which compiled code takes a gradient
    dims: tuple[int, ...]

    def holds(self) -> bool:
        """Whether parameter and state are those of the last step."""
        parameter, values = self.parameter, self.state.values()
        gradient = parameter.grad
        return (
            gradient is not None
            and (self.ready is None or gradient.dtype == self.ready.dtype)
            and gradient.layout is torch.strided
            and gradient.is_contiguous()
            and len(values) == len(self.values)
            and not any(map(is_not, values, self.values))
            and self.kept.is_in_place(parameter)
            and (not isinstance(parameter, FP8Tensor) or parameter.remainder is None)
        )

    def take_eager(self, gradient: Tensor, numbers: Tensor) -> None:
        """Take the step of a parameter that nothing was compiled for."""
        job = self.kept.job
        job.words = (self.group["seed"], int(self.state["step"]), self.state["stream"])
        job.arrays["gradient"] = gradient.view(self.dims)
        run_eager(job, numbers)
        del job.arrays["gradient"]


class RepeatedStep:
    """Takes the steps that follow a planned one, for as long as :meth:`done` says so.

    Args:
        optimizer: whose steps they are.
        planned: group, parameter and what was kept of every parameter that the last step changed, in order.
        numbers: their rows of hyperparameters.
    """

    def __init__(
        self, optimizer: "GridOptimizer", planned: Sequence[tuple[dict[str, Any], Tensor, "Kept"]], numbers: Tensor
    ) -> None:
        self._optimizer, self._numbers = optimizer, numbers.clone()
        self._entries = []
        for group, parameter, kept in planned:
            state, layout = optimizer.state[parameter], kept.job.layout
            self._entries.append(
                _Entry(group, parameter, state, kept, kept.job.ready, list(state.values()), layout.dims)
            )
        self._changes = [array for entry in self._entries if entry.ready for array in entry.ready.changes]
        self._steps = [entry.state["step"] for entry in self._entries]
        self._streams = np.array([entry.state["stream"] for entry in self._entries], dtype=np.uint64)
        self._groups = list(optimizer.param_groups)
        self._options = [optimizer.checked_options(group) for group in self._groups]
        self._members = [list(group["params"]) for group in self._groups]
        stepped = {id(parameter) for _, parameter, _ in planned}
        self._others = [p for members in self._members for p in members if id(p) not in stepped and p.numel()]
        self._kinds: list[NDArray[np.intp]] = []
        self._sorted_for: list[int] = []

    def done(self) -> list[int] | None:
        """The steps every parameter has taken, or None where the next step has to be planned."""
        if self._optimizer.observer is not None or not self._groups_hold():
            return None
        if any(parameter.grad is not None for parameter in self._others):
            return None
        if not all(entry.holds() for entry in self._entries):
            return None
        done = [int(count) for count in torch.stack(self._steps).tolist()]
        due = [_is_due(entry.group, count) for entry, count in zip(self._entries, done, strict=True)]
        return None if any(due) else done

    def taken(self, done: list[int]) -> list[tuple[dict[str, Any], int]]:
        """Each group with the steps that its parameters have taken."""
        return [(entry.group, count) for entry, count in zip(self._entries, done, strict=True)]

    def _groups_hold(self) -> bool:
        """Whether groups, options and lists of parameters are those of the last step."""
        groups = self._optimizer.param_groups
        return _same(groups, self._groups) and all(
            self._optimizer.checked_options(group) is options and _same(group["params"], members)
            for group, options, members in zip(groups, self._options, self._members, strict=True)
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code is called as it is
    def take(self, done: list[int]) -> None:
        """Take the step."""
        torch._foreach_add_(self._steps, 1)
        numbers = self._next_numbers(done)
        prefixes = [(entry.group["seed"], count + 1) for entry, count in zip(self._entries, done, strict=True)]
        kept = self._entries[0].kept
        device = kept.job.arrays["weight"].device
        rows = numbers.to(device, kept.dtype).unbind()
        keys = key_rows(prefixes, self._streams).to(device).unbind()
        for entry, number_row, key_row in zip(self._entries, rows, keys, strict=True):
            gradient = entry.parameter.grad
            assert gradient is not None
            if entry.ready is not None:
                entry.ready.take(gradient.view(entry.dims), number_row, key_row)
            else:
                entry.take_eager(gradient, number_row)
        note_changes(self._changes)

    def _next_numbers(self, done: list[int]) -> Tensor:
        """Ask for one parameter of each kind: the others' numbers differ in what follows from S_ref alone."""
        if done != self._sorted_for:
            self._kinds = self._sorted(done)
        self._sorted_for = [count + 1 for count in done]
        table = self._numbers.numpy()
        for members in self._kinds:
            entry = self._entries[members[0]]
            values = self._optimizer.numbers_of(entry.group, entry.parameter, entry.state, entry.kept.job)
            table[np.ix_(members, _SHARED)] = np.array(row(values, entry.kept.dtype))[_SHARED]
        return self._numbers

    def _sorted(self, done: list[int]) -> list[NDArray[np.intp]]:
        """Positions of the parameters that have all but S_ref in common."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (entry, count) in enumerate(zip(self._entries, done, strict=True)):
            variant = entry.kept.job.variant
            key = (id(entry.group), count, entry.state.get("since", 0), variant.storage == "plain", variant.fmt)
            kinds.setdefault(key, []).append(i)
        return [np.array(members) for members in kinds.values()]


def _same(now: Sequence[object], then: Sequence[object]) -> bool:
    return len(now) == len(then) and not any(map(is_not, now, then))


def _is_due(group: dict[str, Any], done: int) -> bool:
    """Whether something is to be done in this step that a plan is needed for."""
    return done % group["refresh_every"] == 0 or any(
        group[name] and done % group[name] == 0 for name in ("stabilize_every", "reset_every")
    )
