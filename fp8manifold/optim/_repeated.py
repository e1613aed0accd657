"""A step like the last one: the same parameters, options and state, so that little has to be looked up again.

Planning fifty parameters takes as long as stepping a million elements.  What a plan is made of seldom changes from
one step to the next, and what does (gradients, numbers, random keys) can be had for all parameters at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._eager import eager_only
from fp8manifold.optim._compile import next_name
from fp8manifold.optim._engine import Ready, key_rows, note_changes, run_eager
from fp8manifold.optim._finite import squares_sum_up
from fp8manifold.optim._hyper import FIELD, HYPER, row
from fp8manifold.optim._moments import BOUNDS
from fp8manifold.tensor import FP8Tensor

if TYPE_CHECKING:
    from fp8manifold.optim._jobs import GridOptimizer, Kept

__all__ = ["RepeatedStep"]

_SQUARES: Final = next_name(BOUNDS["exp_avg_sq"])
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

    def take_eager(self, numbers: Tensor) -> None:
        """Take the step of a parameter that nothing was compiled for."""
        job = self.kept.job
        job.words = (self.group["seed"], int(self.state["step"]), self.state["stream"])
        job.arrays["gradient"] = self.gradient()
        run_eager(job, numbers)
        del job.arrays["gradient"]

    def gradient(self) -> Tensor:
        """The gradient in the layout's sizes."""
        assert self.parameter.grad is not None
        return self.parameter.grad.view(self.dims)


class _Workspace:
    """Room for what is prepared of all parameters whose averages are stored in blocks, in one array a name."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._owners: dict[str, list[int]] = {}
        for i, entry in enumerate(entries):
            for name in entry.ready.workspace if entry.ready is not None else ():
                self._owners.setdefault(name, []).append(i)
        blocks = [entry.ready.block_dims if entry.ready is not None else (0,) for entry in entries]
        self._blocks = {name: [blocks[i][0] for i in owners] for name, owners in self._owners.items()}
        #: whose squares are found finite when their bounds are
        self.checked = {i for i in self._owners.get(_SQUARES, ()) if len(blocks[i]) == 2}
        self._count, self._dims = len(entries), blocks

    def empty(self, device: torch.device) -> tuple[list[list[Tensor]], Tensor | None]:
        """Each parameter's room in the order of its names, and the array of all bounds of squares."""
        rooms: list[list[Tensor]] = [[] for _ in range(self._count)]
        squares = None
        for name, owners in self._owners.items():
            whole = torch.empty((sum(self._blocks[name]), 1), dtype=torch.float32, device=device)
            squares = whole if name == _SQUARES else squares
            for i, part in zip(owners, whole.split(self._blocks[name]), strict=True):
                rooms[i].append(part if len(self._dims[i]) == 2 else part.view(self._dims[i]))
        return rooms, squares


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
        self._changes += [entry.parameter for entry in self._entries]
        self._steps = [entry.state["step"] for entry in self._entries]
        self._streams = np.array([entry.state["stream"] for entry in self._entries], dtype=np.uint64)
        self._groups = list(optimizer.param_groups)
        self._options = [optimizer._options_checked(group) for group in self._groups]
        self._members = [list(group["params"]) for group in self._groups]
        stepped = {id(parameter) for _, parameter, _ in planned}
        self._others = [p for members in self._members for p in members if id(p) not in stepped and p.numel()]
        self._workspace = _Workspace(self._entries)
        ready = [entry.ready for entry in self._entries]
        self._bounds = [(i, 3 + k, bound) for i, each in enumerate(ready) if each for k, bound in each.bounds]
        self._draws_for_moments = any(entry.kept.job.variant.draws_for_moments for entry in self._entries)
        self._kinds: list[tuple[int, NDArray[np.intp]]] = []
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
            self._optimizer._options_checked(group) is options and _same(group["params"], members)
            for group, options, members in zip(groups, self._options, self._members, strict=True)
        )

    @eager_only  # compiled code is called as it is
    def take(self, done: list[int]) -> bool:
        """Take the step, if every gradient and its square are finite; otherwise nothing has changed."""
        torch._foreach_add_(self._steps, 1)
        fresh, squares = self._new(done)
        for entry, given in zip(self._entries, fresh, strict=True):
            if entry.ready is not None:
                entry.ready.prepare(given)
        rest = [entry.parameter for i, entry in enumerate(self._entries) if i not in self._workspace.checked]
        if not (squares_sum_up(rest) and (squares is None or math.isfinite(squares.sum()))):
            torch._foreach_sub_(self._steps, 1)
            return False
        for entry, given in zip(self._entries, fresh, strict=True):
            if entry.ready is not None:
                entry.ready.take(given)
            else:
                entry.take_eager(given[1])
        if self._bounds:
            torch._foreach_copy_([bound for _, _, bound in self._bounds], [fresh[i][k] for i, k, _ in self._bounds])
        note_changes(self._changes)
        self._sorted_for = [count + 1 for count in done]
        return True

    def _new(self, done: list[int]) -> tuple[list[list[Tensor]], Tensor | None]:
        """What is new in this step for each parameter, as :class:`Ready` takes it."""
        kept = self._entries[0].kept
        device = kept.job.arrays["weight"].device
        numbers = self._next_numbers(done).to(device, kept.dtype).unbind()
        prefixes = [(entry.group["seed"], count + 1) for entry, count in zip(self._entries, done, strict=True)]
        keys = key_rows(prefixes, self._streams, moments=self._draws_for_moments).to(device).unbind()
        rooms, squares = self._workspace.empty(device)
        return [
            [entry.gradient(), number_row, key_row, *room]
            for entry, number_row, key_row, room in zip(self._entries, numbers, keys, rooms, strict=True)
        ], squares

    def _next_numbers(self, done: list[int]) -> Tensor:
        """Ask for one parameter of each kind: the others' numbers differ in what follows from S_ref alone."""
        if done != self._sorted_for:
            self._kinds, self._sorted_for = self._sorted(done), done
        table = self._numbers.numpy().reshape(-1)
        for first, places in self._kinds:
            entry = self._entries[first]
            values = self._optimizer._numbers(entry.group, entry.parameter, entry.state, entry.kept.job)
            table[places] = np.array(row(values, entry.kept.dtype))[_SHARED]
        return self._numbers

    def _sorted(self, done: list[int]) -> list[tuple[int, NDArray[np.intp]]]:
        """Parameters that have all but S_ref in common: one of them, and the places of the numbers they share."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (entry, count) in enumerate(zip(self._entries, done, strict=True)):
            variant = entry.kept.job.variant
            key = (id(entry.group), count, entry.state.get("since", 0), variant.storage == "plain", variant.fmt)
            kinds.setdefault(key, []).append(i)
        return [(members[0], np.array(members)[:, None] * len(HYPER) + _SHARED) for members in kinds.values()]


def _same(now: Sequence[object], then: Sequence[object]) -> bool:
    return len(now) == len(then) and not any(map(is_not, now, then))


def _is_due(group: dict[str, Any], done: int) -> bool:
    """Whether something is to be done in this step that a plan is needed for."""
    return done % group["refresh_every"] == 0 or any(
        group[name] and done % group[name] == 0 for name in ("stabilize_every", "reset_every")
    )
