"""A step like the last one: the same parameters, options and state, so that little has to be looked up again.

Planning fifty parameters takes as long as stepping a million elements.  What a plan is made of seldom changes from
one step to the next, and what does (gradients, numbers, random keys) can be had for all parameters at once.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
    """What one parameter's last step was made of; the parameter itself is looked up in its group in every step."""

    state: dict[str, Any]
    kept: "Kept"
    #: compiled, or None for what is not worth compiling
    ready: Ready | None
    #: what the state held
    values: list[Any]
    #: the layout's sizes, in which compiled code takes a gradient
    dims: tuple[int, ...]

    def holds(self, parameter: Tensor, state: dict[str, Any] | None) -> bool:
        """Whether parameter and state are those of the last step."""
        gradient = parameter.grad
        return (
            gradient is not None
            and state is self.state
            and (self.ready is None or gradient.dtype == self.ready.dtype)
            and gradient.layout is torch.strided
            and gradient.is_contiguous()
            and _same(list(state.values()), self.values)
            and self.kept.averages_are_in_place(state)
            and self.kept.is_in_place(parameter)
            and (not isinstance(parameter, FP8Tensor) or parameter.remainder is None)
        )


class Taking(NamedTuple):
    """One parameter of a step that can be repeated: its group, and how many steps it has taken."""

    entry: _Entry
    group: dict[str, Any]
    parameter: Tensor
    done: int

    def take_eager(self, numbers: Tensor) -> None:
        """Take the step of a parameter that nothing was compiled for."""
        job, state = self.entry.kept.job, self.entry.state
        job.words = (self.group["seed"], int(state["step"]), state["stream"])
        job.arrays["gradient"] = self.gradient()
        run_eager(job, numbers)
        del job.arrays["gradient"]

    def gradient(self) -> Tensor:
        """The gradient in the layout's sizes."""
        assert self.parameter.grad is not None
        return self.parameter.grad.view(self.entry.dims)


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

    It holds no parameter and no group, and when a parameter goes, it lets go of everything.

    Args:
        optimizer: whose steps they are.
        planned: group, parameter and what was kept of every parameter that the last step changed, in order.
        numbers: their rows of hyperparameters.
    """

    def __init__(
        self, optimizer: "GridOptimizer", planned: Sequence[tuple[dict[str, Any], Tensor, "Kept"]], numbers: Tensor
    ) -> None:
        self._optimizer, self._numbers = weakref.proxy(optimizer), numbers.clone()
        self._entries = []
        for _, parameter, kept in planned:
            state, layout = optimizer.state[parameter], kept.job.layout
            self._entries.append(_Entry(state, kept, kept.job.ready, list(state.values()), layout.dims))
        self._changes = [array for entry in self._entries if entry.ready for array in entry.ready.changes]
        self._steps = [entry.state["step"] for entry in self._entries]
        self._streams = np.array([entry.state["stream"] for entry in self._entries], dtype=np.uint64)
        self._options = [optimizer._options_checked(group) for group in optimizer.param_groups]
        self._watch(optimizer.param_groups)
        stepped = {id(parameter) for _, parameter, _ in planned}
        self._steps_it = [[id(p) in stepped for p in group["params"]] for group in optimizer.param_groups]
        self._workspace = _Workspace(self._entries)
        ready = [entry.ready for entry in self._entries]
        self._bounds = [(i, 3 + k, bound) for i, each in enumerate(ready) if each for k, bound in each.bounds]
        self._draws_for_moments = any(entry.kept.job.variant.draws_for_moments for entry in self._entries)
        self._kinds: list[tuple[int, NDArray[np.intp]]] = []
        self._sorted_for: list[int] = []

    def _watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Know the members of the groups again, and hear when one of them goes."""
        me = weakref.ref(self)

        def forget(_: object) -> None:
            if (step := me()) is not None:
                step._forget()

        self._members = [[weakref.ref(p, forget) for p in group["params"]] for group in groups]

    def _forget(self) -> None:
        self._entries, self._changes, self._steps, self._bounds, self._options = [], [], [], [], []

    def done(self) -> list[Taking] | None:
        """What every parameter's step is, or None where the next step has to be planned."""
        optimizer = self._optimizer
        if not self._entries or optimizer.observer is not None or not self._groups_hold():
            return None
        members: list[tuple[dict[str, Any], Tensor]] = []
        for group, steps_it in zip(optimizer.param_groups, self._steps_it, strict=True):
            for parameter, is_stepped in zip(group["params"], steps_it, strict=True):
                if is_stepped:
                    members.append((group, parameter))
                elif parameter.grad is not None and parameter.numel():
                    return None
        states = optimizer.state
        for entry, (_, parameter) in zip(self._entries, members, strict=True):
            if not entry.holds(parameter, states.get(parameter)):
                return None
        counts = torch.stack(self._steps).tolist()
        taking = [Taking(e, *member, int(n)) for e, member, n in zip(self._entries, members, counts, strict=True)]
        return None if any(_is_due(each.group, each.done) for each in taking) else taking

    def taken(self, taking: Sequence[Taking]) -> list[tuple[dict[str, Any], int]]:
        """Each group with the steps that its parameters have taken."""
        return [(each.group, each.done) for each in taking]

    def _groups_hold(self) -> bool:
        """Whether groups, options and lists of parameters are those of the last step."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        return len(groups) == len(self._options) and all(
            optimizer._options_checked(group) is options and _same(group["params"], [member() for member in members])
            for group, options, members in zip(groups, self._options, self._members, strict=True)
        )

    @eager_only  # compiled code is called as it is
    def take(self, taking: Sequence[Taking]) -> bool:
        """Take the step, if every gradient and its square are finite; otherwise nothing has changed."""
        torch._foreach_add_(self._steps, 1)
        fresh, squares = self._new(taking)
        for each, given in zip(taking, fresh, strict=True):
            if each.entry.ready is not None:
                each.entry.ready.prepare(given)
        rest = [each.parameter for i, each in enumerate(taking) if i not in self._workspace.checked]
        if not (squares_sum_up(rest) and (squares is None or math.isfinite(squares.sum()))):
            torch._foreach_sub_(self._steps, 1)
            return False
        for each, given in zip(taking, fresh, strict=True):
            if each.entry.ready is not None:
                each.entry.ready.take(given)
            else:
                each.take_eager(given[1])
        if self._bounds:
            torch._foreach_copy_([bound for _, _, bound in self._bounds], [fresh[i][k] for i, k, _ in self._bounds])
        note_changes([*self._changes, *(each.parameter for each in taking)])
        self._sorted_for = [each.done + 1 for each in taking]
        return True

    def _new(self, taking: Sequence[Taking]) -> tuple[list[list[Tensor]], Tensor | None]:
        """What is new in this step for each parameter, as :class:`Ready` takes it."""
        kept = self._entries[0].kept
        device = kept.job.arrays["weight"].device
        numbers = self._next_numbers(taking).to(device, kept.dtype).unbind()
        prefixes = [(each.group["seed"], each.done + 1) for each in taking]
        keys = key_rows(prefixes, self._streams, moments=self._draws_for_moments).to(device).unbind()
        rooms, squares = self._workspace.empty(device)
        return [
            [each.gradient(), number_row, key_row, *room]
            for each, number_row, key_row, room in zip(taking, numbers, keys, rooms, strict=True)
        ], squares

    def _next_numbers(self, taking: Sequence[Taking]) -> Tensor:
        """Ask for one parameter of each kind: the others' numbers differ in what follows from S_ref alone."""
        done = [each.done for each in taking]
        if done != self._sorted_for:
            self._kinds, self._sorted_for = self._sorted(taking), done
        table = self._numbers.numpy().reshape(-1)
        for first, places in self._kinds:
            entry, group, parameter, _ = taking[first]
            values = self._optimizer._numbers(group, parameter, entry.state, entry.kept.job)
            table[places] = np.array(row(values, entry.kept.dtype))[_SHARED]
        return self._numbers

    def _sorted(self, taking: Sequence[Taking]) -> list[tuple[int, NDArray[np.intp]]]:
        """Parameters that have all but S_ref in common: one of them, and the places of the numbers they share."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (entry, group, _, count) in enumerate(taking):
            variant = entry.kept.job.variant
            key = (id(group), count, entry.state.get("since", 0), variant.storage == "plain", variant.fmt)
            kinds.setdefault(key, []).append(i)
        return [(members[0], np.array(members)[:, None] * len(HYPER) + _SHARED) for members in kinds.values()]


def _same(now: Sequence[object], then: Sequence[object]) -> bool:
    return len(now) == len(then) and not any(map(is_not, now, then))


def _is_due(group: dict[str, Any], done: int) -> bool:
    """Whether something is to be done in this step that a plan is needed for."""
    return done % group["refresh_every"] == 0 or any(
        group[name] and done % group[name] == 0 for name in ("stabilize_every", "reset_every")
    )
