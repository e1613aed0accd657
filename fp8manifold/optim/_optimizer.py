"""What our optimizers share: checks, skipped steps, the state that resumes bit for bit, and running what is planned."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import void_remainder
from fp8manifold._numerics.checks import check_choice, check_int
from fp8manifold._numerics.eager import eager_only
from fp8manifold._ranks import local_of, share_of
from fp8manifold.optim._agreement import (
    all_finite,
    in_every_process,
    is_steady,
    ranks_elsewhere,
    take_steady,
    warn_of_one,
    warn_of_skips,
)
from fp8manifold.optim._backends import new_number, note_changes, run_all, step_as_a_node, tables_of
from fp8manifold.optim._checks import (
    UNSUPPORTED_FLAGS,
    check_arrays,
    check_entry,
    check_finite,
    check_lr,
    check_parameters,
    check_state,
    options_of,
    reject_flags,
    restore_dtypes,
)
from fp8manifold.optim._directions import AVERAGES
from fp8manifold.optim._pending import Count, Pending, refuse_recording, settle
from fp8manifold.optim._slot import Member, Slot
from fp8manifold.optim._spec import BOUND_NAMES
from fp8manifold.optim._state import first_residual, grid_of, new_stream, stabilize, twins, unpacked
from fp8manifold.optim._views import Hooks, StepView, observed_step
from fp8manifold.optim._writeback import rounds_at_random, rule_of
from fp8manifold.tensor import FP8Tensor

__all__ = ["ManifoldOptimizer"]


_RESET: Final = frozenset((*AVERAGES, *BOUND_NAMES))
"""What ``reset_every`` clears."""
_COUNTS: Final = ("skipped_steps", "skipped_in_row", "widened_scales", "streams_begun")


class ManifoldOptimizer(torch.optim.Optimizer):
    """Base of the library's optimizers: subclasses say what a step of one parameter is.

    Attributes:
        observer: called with a :class:`StepView` for every quantised parameter in every step; None costs nothing.
        observes: says of a parameter whether the observer is called for it; None: for all.  What it is not called for
            costs what it costs unobserved.
        skipped_steps: number of steps left out because a gradient was not finite: steps of all parameters, or of one
            under :func:`step_in_backward`.
        skipped_in_row: how many of them came last, with no step taken since.
        warn_after: a ``RuntimeWarning`` names the parameters at fault when so many have come in a row.
        widened_scales: how many scales of one-byte weights this process has doubled, as a weight had reached the end.
            On a GPU the card decides on both by itself; to read these three numbers, or ``state``, waits for its steps.
        streams_begun: how many parameters have been given random bits of their own (``stream`` in their state); those
            of parameters that are removed are not given again.
    """

    observer: Callable[[StepView], None] | None = None
    observes: Callable[[Tensor], bool] | None = None
    skipped_steps = Count()
    skipped_in_row = Count()
    warn_after: int = 10
    widened_scales = Count()
    streams_begun: int = 0
    _pending: tuple[Pending, ...] = ()
    _in_backward: Hooks | None = None
    _has_started: bool = False
    steps_alone = True  # a step of one parameter depends on nothing of the others
    steps_in_graphs = True  # a step goes through no backward pass, which an operator has no part in

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._number = new_number(self)
        self._elsewhere = ranks_elsewhere()
        super().__init__(params, defaults)

    @property
    def bounded_share(self) -> float:
        """Share of the quantised weights whose S / S_ref met ``damping`` or ``clip`` at the last refresh."""
        shares = [(p.numel(), float(s["bounded"])) for p, s in self.state.items() if "bounded" in s]
        return float(sum(n * share for n, share in shares) / max(sum(n for n, _ in shares), 1))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; in a graph of ``torch.compile`` it is one node, a closure apart.

        If any gradient is not finite, or so large that its square is not, nothing changes at all, step counts
        included: the step is counted in ``skipped_steps``, or a ``FloatingPointError`` is raised
        (``on_nonfinite="raise"``).  Gradients are never modified.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: a sparse or complex gradient.
            FloatingPointError: a gradient is not finite and ``on_nonfinite`` is ``raise``.
            RuntimeError: a CUDA graph is being recorded.
        """
        if closure is None and torch.compiler.is_compiling() and self._is_a_node():
            step_as_a_node(self._number, [p for group in self.param_groups for p in group["params"]])
            return None
        return self._step(closure)

    def _is_a_node(self) -> bool:
        """Whether a graph has all that a step reads: gradients that are still there, and no tensor but these."""
        rated = any(isinstance(group["lr"], Tensor) for group in self.param_groups)
        shared = any(share_of(p) is not None for _, p in self._everyone())  # processes agree on steps outside of graphs
        return self.steps_in_graphs and self._in_backward is None and not rated and not shared

    @eager_only  # it plans, counts and calls code that is compiled already
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish()
            return loss
        refuse_recording(self)
        self._settle()
        members = self._members()
        taken: bool | None
        if is_steady(self, members):
            taken = take_steady(self, members)
        elif taken := self._ready(members):
            for group in self.param_groups:
                for parameter in group["params"] if rule_of(group).residual_bits else ():
                    self._take_remainder(group, parameter)
            self._take(self._planned(members))
        if taken:
            self.skipped_in_row = 0
        elif taken is not None:
            self._count_skipped()
        return loss

    def step_alone(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Take the step of one parameter; where its gradient is not finite, warn and count it in ``skipped_steps``.

        The numbers are those of a :meth:`step` of all.  For :func:`step_in_backward`, whose doing it is.
        """
        refuse_recording(self)
        self._settle(parameter)
        others, self._pending = self._pending, ()  # of other parameters, which the host doesn't wait for
        try:
            members = [(group, parameter)]
            taken: bool | None
            if is_steady(self, members):
                taken = take_steady(self, members, alone=True)
            elif taken := self._ready(members):
                self._take_remainder(group, parameter)
                self._take(self._planned(members))
        finally:
            self._pending = (*others, *self._pending)
        if taken is False:
            self._count_skipped([parameter], alone=True)

    @property
    def state(self) -> Any:
        """Each parameter's, once the verdict on the steps that were launched is known."""
        self._settle()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def _settle(self, parameter: Tensor | None = None) -> None:
        """Hear of the steps that a card was given, those of one parameter or all, and count them."""
        if not self._pending:
            return
        due = [p for p in self._pending if parameter is None or p.has(parameter)]
        self._pending = tuple(p for p in self._pending if p not in due)
        for pending in due:
            settle(self, pending)

    def _count_skipped(self, culprits: Sequence[Tensor] | None = None, *, alone: bool = False) -> None:
        """Count a step that was left out because of some parameters' gradients, None: those that there are now."""
        self.skipped_steps += 1
        if alone and culprits:
            warn_of_one(self, culprits[0])
        if alone:
            return
        self.skipped_in_row += 1
        if self.skipped_in_row == self.warn_after:
            warn_of_skips(self, culprits)

    def takes_in(self, group: dict[str, Any]) -> bool:
        """Whether an average of a group's parameters is linear in the gradient, so that it takes in one after another.

        Raises:
            ValueError: it is, but a step needs more than the average.
        """
        return False

    def take_in(self, group: dict[str, Any], parameter: Tensor) -> bool:
        """Take a gradient into the average of a parameter, and no step; False where it is not finite."""
        raise NotImplementedError

    def _everyone(self) -> list[Member]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _members(self) -> list[Member]:
        """The parameters that have a gradient, each with its group."""
        return [(group, p) for group, p in self._everyone() if p.grad is not None]

    def _taken(self, members: list[Member]) -> list[tuple[dict[str, Any], int]]:
        """The steps that have been taken for each parameter, with its group."""
        return [(group, int(self.state[p].get("step", 0)) if p in self.state else 0) for group, p in members]

    def _planned(self, members: list[Member]) -> list[Slot]:
        """What a step of these parameters is, with every step count advanced."""
        stepped = [(group, p) for group, p in members if p.numel()]
        for group, p in stepped:
            check_arrays(self.state.get(p, {}), p, group, stores_moments=self._stores_moments(p))
        is_new = any("stream" not in self.state.get(p, {}) for _, p in stepped)
        numbers = twins(p for _, p in self._everyone()) if is_new else {}
        states = [self._begin(group, p, numbers.get(p, 0)) for group, p in stepped]
        if states:
            torch._foreach_add_([state["step"] for state in states], 1)
        slots = [self._plan(group, p, state) for (group, p), state in zip(stepped, states, strict=True)]
        return [slot for slot in slots if slot is not None]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its options and parameters like the constructor's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_parameters(group["params"])
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._checked[id(group)] = options_of(group)
        self._has_started = False
        if self._in_backward is not None:
            self._in_backward.watch(group)

    def __getstate__(self) -> dict[str, Any]:
        """torch's part, the counts and ``warn_after``; who observes does not go with a copy."""
        return super().__getstate__() | {name: getattr(self, name) for name in (*_COUNTS, "warn_after")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch's part; a copy is another optimizer in graphs."""
        super().__setstate__(state)
        if "_number" not in self.__dict__:
            self._number = new_number(self)

    def state_dict(self) -> dict[str, Any]:
        """The state, with everything a bit-exact resume needs; of schedules (functions) the name, and None.

        They are left to the constructor; their names are what flat states are read by.

        Raises:
            RuntimeError: in the middle of a step that :func:`step_in_backward` takes in parts.
        """
        if self._in_backward is not None:
            self._in_backward.check_whole()
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update({name: None for name, value in group.items() if callable(value)})
        saved |= {name: getattr(self, name) for name in _COUNTS}
        saved["optimizer"] = type(self).__name__
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; tensors keep the dtype they were saved in.

        What hooks before the loading make of the state is what is checked and loaded, and hooks after it see all of it.

        Raises:
            TypeError: no state, or an option in it of another type.
            ValueError: the state of another optimizer, of other parameters or of another format, or an option in it
                out of range; nothing has changed then.
        """
        self._settle()
        if not isinstance(state_dict, dict):
            check_state(self, state_dict)
        schedules = [{k: v for k, v in group.items() if callable(v)} for group in self.param_groups]
        loaded: list[dict[str, Any]] = []

        def check(_: object, given: dict[str, Any]) -> None:
            self._check_loaded(given, schedules)
            loaded.append(given)

        def take_over(_: object) -> None:
            for group, ours in zip(self.param_groups, schedules, strict=True):
                group.update({name: value for name, value in ours.items() if group.get(name) is None})
            restore_dtypes(self, loaded[0])
            self._has_started = False
            for name in _COUNTS:
                setattr(self, name, int(loaded[0].get(name, 0)))
            self.streams_begun = max(self.streams_begun, sum("stream" in entry for entry in self.state.values()))
            if self._in_backward is not None:
                self._in_backward.loaded(self.param_groups)

        # after the hooks that change what is loaded, and before those that change what was
        hooks = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take_over, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loaded(self, state_dict: dict[str, Any], schedules: list[dict[str, Any]]) -> None:
        """Raise before anything has changed unless a state is one for these parameters, with options in range."""
        check_state(self, state_dict)
        for saved, ours, group in zip(state_dict["param_groups"], schedules, self.param_groups, strict=True):
            merged = saved | {name: schedule for name, schedule in ours.items() if saved.get(name) is None}
            merged["params"] = group["params"]
            self._check_group(merged)
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                stores = self._stores_moments(parameter)
                check_entry(state_dict["state"].get(index, {}), parameter, merged, stores_moments=stores)

    def _check_options(self) -> None:
        """Raise before anything has changed if what somebody set since the last step is not valid."""
        checked = self._checked
        for group in self.param_groups:
            check_lr(group)
            if checked.get(id(group)) == (options := options_of(group)):
                continue
            self._check_group(group)
            for parameter in group["params"]:
                if parameter in self.state:
                    stores = self._stores_moments(parameter)
                    check_entry(self.state[parameter], parameter, group, stores_moments=stores)
            checked[id(group)] = options

    @property
    def _checked(self) -> dict[int, tuple[Any, ...]]:
        """Options by group, as they were when last found valid; no part of the state."""
        checked: dict[int, tuple[Any, ...]] = self.__dict__.setdefault("_checked_options", {})
        return checked

    def _stores_moments(self, parameter: Tensor) -> bool:
        """Whether ``moments`` is for this parameter."""
        return True

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise unless the options of a group are valid; subclasses add their own."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}: a number or a tensor of one element is needed")
        check_lr(group)
        check_finite("weight_decay", group["weight_decay"])
        check_int("seed", group["seed"], 0, 2**64 - 1)
        check_choice("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
        if not isinstance(maximize := group["maximize"], bool):
            raise TypeError(f"maximize={maximize!r} must be True or False, not {type(maximize).__name__}")
        if group["compile"] is not None and not isinstance(group["compile"], bool):
            raise TypeError(f"compile={group['compile']!r} must be None, True or False")
        if group.get("previous_norm") is not None:
            check_finite("previous_norm", group["previous_norm"])
        for name in ("stabilize_every", "reset_every"):
            if group[name] is not None:
                check_int(name, group[name], 1, 2**62)
        reject_flags(type(self).__name__, {name: group[name] for name in UNSUPPORTED_FLAGS if name in group})
        group.setdefault("start_lr", float(lr))

    def _plan(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Slot | None:
        """The step of one parameter; None where it has been taken already."""
        raise NotImplementedError

    def _begin(self, group: dict[str, Any], parameter: Tensor, twin: int) -> dict[str, Any]:
        """The parameter's state before the step; stabilised and reset when that is due."""
        state: dict[str, Any] = self.state.setdefault(parameter, {})  # somebody may have put a plain dict there
        if not isinstance(state.get("step"), Tensor):  # older states of torch's have a number
            state["step"] = torch.tensor(state.get("step", 0.0), dtype=torch.float32)
        if "stream" not in state:
            draws = group["moments"] != "float32" or rounds_at_random(parameter, group)
            alone = sum(len(each["params"]) for each in self.param_groups) == 1
            state["stream"] = new_stream(parameter, twin, self.state, self.streams_begun, draws=draws, alone=alone)
            self.streams_begun += 1
        done = int(state["step"])
        if "micro_batches" in state:
            return state  # what was due is done: this step has begun
        if done and group["stabilize_every"] and done % group["stabilize_every"] == 0:
            stabilize(parameter)
        if done and group["reset_every"] and done % group["reset_every"] == 0:
            for name in _RESET & state.keys():
                local_of(state[name]).zero_()
            state["since"] = done
        return state

    def _take_remainder(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Take what the first rounding left into the state, before anything can be saved without it."""
        bits, held = rule_of(group).residual_bits, local_of(parameter)
        if not bits or not isinstance(held, FP8Tensor) or held.remainder is None:
            return
        state = self.state.setdefault(parameter, {})
        if "residual" in state:  # a loaded state knows better
            void_remainder(held)
        else:
            state["grid"] = torch.tensor(grid_of(parameter).fields)
            state["residual"] = first_residual(parameter, bits)

    def _ready(self, members: list[Member]) -> bool:
        """Whether the step of these may be taken, in all processes that take it; before anything has changed."""

        def here() -> bool:
            self._check_options()
            self._check_schedules(self._taken(members))
            return all_finite(self, members)

        return in_every_process(self, here)

    def _gradient_factor(self, group: dict[str, Any], parameter: Tensor) -> float:
        """What a gradient is multiplied by before its square has to be finite."""
        return 1.0

    def _check_schedules(self, taken: list[tuple[dict[str, Any], int]]) -> None:
        """Raise before anything has changed if a schedule has left its range; ``taken`` says how many steps were."""

    def _take(self, slots: list[Slot]) -> None:
        """Take the planned steps."""
        for table in tables_of([slot for slot in slots if slot.tensors["weight"].numel()]):
            self._take_together(*table)
        self._widen(slots)
        note_changes([slot.parameter for slot in slots])

    def _widen(self, slots: list[Slot]) -> None:
        """Widen scales that the step has left a weight at the end of."""

    def _take_together(self, slots: list[Slot], numbers: Tensor, keys: Tensor) -> None:
        """Take the steps of one device and dtype: in one go, but for those taken alone."""
        with unpacked(slots, self.state):
            alone = [self._is_alone(slot) for slot in slots]
            together = [i for i, is_alone in enumerate(alone) if not is_alone]
            if together:
                rows = (numbers, keys) if len(together) == len(slots) else (numbers[together], keys[together])
                self._take_many([slots[i] for i in together], *rows)
            views = [self._take_alone(slot, numbers[i], keys[i]) if alone[i] else None for i, slot in enumerate(slots)]
        for slot in slots:
            if not slot.in_place:
                slot.parameter.copy_(slot.tensors["weight"])
            if slot.back:
                slot.put_back()
        for view in views:
            if view is not None and self.observer is not None:
                self.observer(view)

    def _is_alone(self, slot: Slot) -> bool:
        """Whether a step is taken by itself, eagerly."""
        return self._is_observed(slot)

    def _take_many(self, slots: list[Slot], numbers: Tensor, keys: Tensor) -> None:
        """Take the steps of those that nobody looks at."""
        run_all(slots, numbers, keys, [slot.group["compile"] for slot in slots])

    def _take_alone(self, slot: Slot, numbers: Tensor, keys: Tensor) -> StepView | None:
        """Take the step of one parameter, and show it."""
        return observed_step(slot.parameter, slot, numbers)

    def _is_observed(self, slot: Slot) -> bool:
        if self.observer is None or slot.spec.storage == "plain":
            return False
        return self.observes is None or self.observes(slot.parameter)
