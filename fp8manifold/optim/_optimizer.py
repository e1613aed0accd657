"""ManifoldOptimizer, the base of the library's optimizers: a step from checks to
write-back, and the state.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.reading import PendingValues, eager_only
from fp8manifold._numerics.stiffness import bounded_share, end_exponents, reference_stiffness
from fp8manifold._ranks import local_of
from fp8manifold.optim import _checks, _state
from fp8manifold.optim._agreement import in_every_process
from fp8manifold.optim._backends import gathered, note_changes, run_all
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._finite import all_finite, warn_of_pass, warn_of_skips
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._scales import fit_scales, mark_zero, narrow, take_fitted, widen_full
from fp8manifold.optim._slot import (
    Slot,
    count_step,
    is_quantized,
    slot_of,
    stabilize,
    stiffness_field,
)
from fp8manifold.optim._spec import BOUND_NAMES, Spec, spec_of
from fp8manifold.optim._steady import SteadyPlan, is_steady, plan_steady
from fp8manifold.optim._step import StepView, observed_step
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._triton_step import count_decided
from fp8manifold.optim._writeback import rounds_at_random

_RESET: Final = frozenset(
    (*MOMENT_NAMES, *BOUND_NAMES)
)  #: Entries of the state that ``reset_every`` clears.
_COUNTS: Final = (
    "skipped_steps",
    "skipped_in_row",
    "widened_scales",
    "fitted_scales",
    "streams_begun",
)
_PLANNING: Final = ("_begin", "_may_step", "_prepare", "_run", "_take", "_widen")


def _count(name: str) -> Any:
    """A count that depends on verdicts of a GPU: to read it is to wait for the steps
    that were launched.
    """

    def read(optimizer: "ManifoldOptimizer") -> int:
        optimizer._count_decided()
        return int(vars(optimizer).get(name, 0))

    def write(optimizer: "ManifoldOptimizer", number: int) -> None:
        optimizer._count_decided()
        vars(optimizer)[name] = number

    return property(read, write)


class ManifoldOptimizer(torch.optim.Optimizer):
    """Base of the library's optimizers: subclasses name a direction, fields of the spec
    and the numbers of a step.

    Attributes:
        observer: called with a :class:`StepView` for every quantised parameter in every
            step; None costs nothing.
        observes: a function of a parameter, true if the observer is called for it; None
            calls it for all.
        skipped_steps, skipped_in_row: steps left out as a gradient was not finite, and
            how many of them came last; with steps in the backward pass, the passes in
            which one was.
        warn_after: after this many skipped steps in a row a ``RuntimeWarning`` names
            the parameters at fault.
        widened_scales, fitted_scales: scales of one-byte weights that this process
            doubled; fitted or narrowed.
        streams_begun: parameters that were given a stream of random bits (``stream`` in
            their state).
    """

    observer: Callable[[StepView], None] | None = None
    observes: Callable[[Tensor], bool] | None = None
    skipped_steps: int = _count("skipped_steps")
    skipped_in_row: int = _count("skipped_in_row")
    warn_after: int = 10
    widened_scales: int = _count("widened_scales")
    fitted_scales: int = 0
    streams_begun: int = 0
    _unheard: tuple[
        tuple[PendingValues, dict[Tensor, int | None], BackwardPass | None], ...
    ] = ()  # arguments of ``count_decided``, by step
    _heard: BackwardPass | None = None  # the last backward pass with a verdict
    _steady_plan: SteadyPlan | None = (
        None  # of the last steady step; compared with the present before each use
    )
    _recorder: Callable[[], None] | None = (
        None  # called in place of a step while a graph of the passes is recorded
    )
    _graph: Callable[[Any, list[Slot]], PendingValues] | None = (
        None  # takes and counts a step that a GPU's table launches
    )
    _in_backward: Any = None  # the handle of ``step_in_backward``
    _has_started: bool = False
    elsewhere: Any = None
    """The processes that step the other parts, and their device, where
    ``ZeroRedundancyOptimizer`` steps this one.
    """
    direction: str
    damping_option = "damping"  # the lower bound of S / S_ref
    stores_all_moments = True  # ``moments`` holds for ordinary parameters too
    steps_alone = True  # the step of one parameter depends on no other
    # Steps are planned and taken by this class's methods, so that a GPU may decide on
    # them
    defers_verdict = True
    # A steady step may be taken again as it was planned: no method of it is overridden
    # outside
    keeps_plan = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Find out whether a subclass may leave verdicts to a GPU, and whether it may
        reuse a plan.
        """
        super().__init_subclass__(**options)
        ours = ("fp8manifold.", "torch.", "builtins")
        others = [base for base in cls.__mro__ if not base.__module__.startswith(ours)]
        names = {name for base in others for name in vars(base) if not name.startswith("__")}
        names -= {"defers_verdict", "keeps_plan"}
        cls.keeps_plan = not any(
            hasattr(base, name) for base in set(cls.__mro__) - {*others} for name in names
        )
        own = any(getattr(cls, name) is not getattr(ManifoldOptimizer, name) for name in _PLANNING)
        cls.defers_verdict = cls.defers_verdict and not own

    @property
    def bounded_share(self) -> float:
        """Share of the quantised weights whose S / S_ref met ``damping`` or ``clip`` at
        the last refresh.
        """
        shares = [(p.numel(), float(s["bounded"])) for p, s in self.state.items() if "bounded" in s]
        return float(sum(n * share for n, share in shares) / max(sum(n for n, _ in shares), 1))

    @eager_only  # it counts, and calls code that no compiler sees into
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; in a function that ``torch.compile`` compiles it causes a
        graph break.

        If a gradient or its square is not finite, nothing changes, and the step is
        counted in ``skipped_steps``. Gradients are never modified. Returns what
        ``closure`` returns, or None.

        Raises:
            ValueError: a sparse or complex gradient.
            FloatingPointError: a gradient is not finite and ``on_nonfinite`` is
                ``raise``.
            RuntimeError: a CUDA graph is being recorded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish()
            return loss
        if self._recorder is not None:
            self._recorder()
            return loss
        _checks.refuse_recording(self)
        if self._unheard:
            self._count_decided()
        plan, self._steady_plan = self._steady_plan, None
        if plan is None or not plan.serves(self):
            slots = self._slots()
            plan = plan_steady(self, slots) if is_steady(self, slots) else None
        if plan is not None:
            taken = plan.take(self)
            self._steady_plan = plan if plan.alive else None
        elif taken := self._may_step(slots):
            self._take(count_step(self._begin(slots)))
        if taken:
            self.skipped_in_row = 0
        elif taken is not None:
            self._count_skipped()
        return loss

    def step_alone(
        self, group: dict[str, Any], parameter: Tensor, backward_pass: BackwardPass
    ) -> None:
        """Take the step of one parameter in a backward pass, as :meth:`step` would;
        where it is skipped, warn of the pass and count it, once.
        """
        _checks.refuse_recording(self)
        self._count_decided(parameter)
        slots = [self._slot(group, parameter)]
        if is_steady(self, slots) and (plan := plan_steady(self, slots)) is not None:
            taken = plan.take(self, backward_pass)
        elif taken := self._may_step(slots):
            self._take(count_step(self._begin(slots)))
        if taken is None:
            return
        self._count_decided()  # verdicts are heard in the order of the steps
        self._hear(backward_pass)
        if not taken:
            self._count_skipped_pass(backward_pass, [parameter])

    def _count_decided(self, parameter: Tensor | None = None) -> None:
        """Count the steps whose verdict was left to a GPU: all, or those up to a
        parameter's last one.
        """
        while self._unheard and (
            parameter is None or any(parameter in each for _, each, _ in self._unheard)
        ):
            (said, versions, backward_pass), *others = self._unheard
            self._unheard = tuple(others)
            count_decided(self, said, versions, backward_pass)
        if parameter is None and self._heard is not None and not self._heard.is_under_way:
            self._hear(None)

    def _hear(self, backward_pass: BackwardPass | None) -> None:
        """Note the pass of a verdict, or that there is none under way; a pass before it
        that left out no step has ended a row of those that did.
        """
        before, self._heard = self._heard, backward_pass
        if before is not None and before is not backward_pass and not before.is_skipped:
            vars(self)["skipped_in_row"] = 0

    def _count_skipped_pass(
        self, backward_pass: BackwardPass, culprits: Sequence[Tensor], why: str = ""
    ) -> None:
        """Count a backward pass that left out a step, and warn of it, once: because of
        the gradient of a parameter, or for the reason that is given.
        """
        if backward_pass.is_skipped:
            return
        backward_pass.is_skipped = True
        counts = vars(self)  # the properties wait for later verdicts
        counts["skipped_steps"] = counts.get("skipped_steps", 0) + 1
        counts["skipped_in_row"] = counts.get("skipped_in_row", 0) + 1
        warn_of_pass(self, culprits, why, counts["skipped_in_row"])

    def _count_skipped(self, culprits: Sequence[Tensor] | None = None) -> None:
        """Count a step that was left out because of the gradients of ``culprits``;
        None: of any that are there now.
        """
        self.skipped_steps += 1
        self.skipped_in_row += 1
        if self.skipped_in_row == self.warn_after:
            warn_of_skips(self, culprits)

    def _slots(self) -> list[Slot]:
        members = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        return [slot_of(group, p, self.state.get(p, {})) for group, p in members]

    def _slot(self, group: dict[str, Any], parameter: Tensor) -> Slot:
        return slot_of(group, parameter, self.state.get(parameter, {}))

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check everything that can refuse the step, in all processes that take it,
        before anything changes.
        """

        def here() -> bool:
            self._check_options()
            self._check_schedules(slots)
            return all_finite(self, slots)

        return in_every_process(self, here)

    def _check_schedules(self, slots: list[Slot]) -> None:
        """Raise before anything has changed if a schedule has left its range."""

    def _gradient_factor(self, slot: Slot) -> float:
        """The number that a gradient is multiplied by before its square has to be
        finite.
        """
        return 1.0

    def _begin(self, slots: list[Slot]) -> list[Slot]:
        """Begin the step of each slot with elements: state, spec, view, tensors and
        numbers.
        """
        slots = [slot for slot in slots if slot.parameter.numel()]
        for slot in slots:
            stores_moments = self.stores_all_moments or slot.fmt is not None
            _state.check_arrays(
                slot.state, slot.parameter, slot.group, stores_moments=stores_moments
            )
        everyone = [p for group in self.param_groups for p in group["params"]]
        earlier = twins(everyone) if [slot for slot in slots if "stream" not in slot.state] else {}
        for slot in slots:
            self._begin_state(slot, earlier.get(slot.parameter, 0), alone=len(everyone) == 1)
        for slot in slots:
            self._prepare(slot)
        return slots

    def _begin_state(self, slot: Slot, twin: int, *, alone: bool) -> None:
        """Give a parameter its state; stabilise and reset it when that is due."""
        group, parameter = slot.group, slot.parameter
        state = slot.state = self.state.setdefault(
            parameter, slot.state
        )  # user code may have set a plain dict
        _state.claim(self, parameter)
        home, step = (
            slot.device if slot.device.type == "cuda" else torch.device("cpu"),
            state.get("step"),
        )
        if (
            not isinstance(step, Tensor) or step.device != home
        ):  # older states of torch's have a number
            state["step"] = torch.full((), slot.steps_done, dtype=torch.float32, device=home)
        if "stream" not in state:
            draws = group["moments"] != "float32" or rounds_at_random(parameter, group)
            state["stream"] = new_stream(
                parameter, twin, self.state, self.streams_begun, draws=draws, alone=alone
            )
            self.streams_begun += 1
        done = slot.steps_done
        if done and group["stabilize_every"] and done % group["stabilize_every"] == 0:
            stabilize(slot)
        if done and group["reset_every"] and done % group["reset_every"] == 0:
            for name in _RESET & state.keys():
                local_of(state[name]).zero_()
            state["since"] = done

    def _prepare(self, slot: Slot) -> None:
        """Fill a slot: its spec, S_ref when it is due, its view, the tensors that the
        step changes, and its numbers.
        """
        slot.spec = self._spec(slot)
        if slot.storage != "plain" and (
            slot.steps_done % slot.group["refresh_every"] == 0 or "reference" not in slot.state
        ):
            self.fitted_scales += narrow(slot)
            self._refresh(slot)
        # the blocks of a vector's moments are cut by other processes' rows: each of
        # them steps all of it
        slot.steps_all_rows = (
            slot.share is not None and slot.spec.blockwise and slot.parameter.dim() == 1
        )
        slot.view = slot.view_in(blocks=slot.spec.moments == "8bit")
        _state.make_state(slot)
        slot.tensors |= {name: local_of(slot.state[name]) for name in slot.spec.state_entries}
        if "gradient" not in slot.tensors:
            slot.tensors["gradient"] = (
                local_of(slot.parameter.grad).contiguous().resolve_neg()
            )  # C reads its memory
        if slot.fmt is not None and slot.spec.bounds_chart:
            bounds = (slot.state["reference"], slot.group["damping"], slot.group["clip"])
            slot.chart_ends = end_exponents(*bounds, slot.fmt.mantissa_bits)
        slot.numbers = self._numbers(slot)

    def _spec(self, slot: Slot) -> Spec:
        group, writeback = slot.group, slot.group["writeback"] or slot.rounding
        if slot.storage in ("free", "plain"):
            writeback = "stochastic" if rounds_at_random(slot.weight, group) else "nearest"
        fields = {
            "storage": slot.storage,
            "fmt": slot.fmt,
            "scale_is_power_of_two": slot.scale_is_power_of_two,
            "writeback": writeback,
            "moments": group["moments"],
            "decays": bool(group["weight_decay"]),
            "maximize": group["maximize"],
        }
        fields |= self._fields(slot)
        if fields["direction"] in ("sgd", "muon"):
            fields |= {
                "has_moments": bool(group.get("momentum", True)),
                "nesterov": group.get("nesterov", False),
            }
        return spec_of(**fields)

    def _fields(self, slot: Slot) -> dict[str, Any]:
        """Fields of the spec that follow neither from storage nor from shared options:
        direction, geometry, ...
        """
        raise NotImplementedError

    def _numbers(self, slot: Slot) -> dict[str, float]:
        """The numbers of this step by name."""
        raise NotImplementedError

    def _refresh(self, slot: Slot) -> None:
        stiffness = stiffness_field(slot, slot.spec.metric)
        slot.state["reference"] = reference_stiffness(stiffness, slot.ranks)
        slot.state["bounded"] = self._bounded(slot, stiffness, slot.state["reference"])

    def _bounded(self, slot: Slot, stiffness: Tensor, reference: float) -> float:
        return bounded_share(
            stiffness, reference, slot.group[self.damping_option], slot.group["clip"], slot.ranks
        )

    def _take(self, slots: list[Slot]) -> None:
        """Take the steps that have begun: gather, run, put back; show them; fit scales,
        double full ones.
        """
        mark_zero(slots)
        with gathered(slots):
            views = self._run(slots)
        take_fitted(self, slots)
        self._widen(slots)
        note_changes([slot.parameter for slot in slots])
        for view in views:
            if self.observer is not None:
                self.observer(view)

    def _run(self, slots: list[Slot]) -> list[StepView]:
        """Run the steps, observed ones eagerly and one by one."""
        fit_scales(slots)
        if self.observer is None:
            run_all(slots)
            return []
        observed = dict.fromkeys(slot for slot in slots if self._is_observed(slot))
        run_all([slot for slot in slots if slot not in observed])
        return [observed_step(slot) for slot in observed]

    def _is_observed(self, slot: Slot) -> bool:
        if self.observer is None or slot.storage == "plain" or not slot.weight.numel():
            return False
        return self.observes is None or self.observes(slot.parameter)

    def _widen(self, slots: list[Slot]) -> None:
        widen_full(self, slots)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options and parameters are checked."""
        super().add_param_group(param_group)
        self._steady_plan, group = None, self.param_groups[-1]
        _checks.unshare(self.param_groups)
        try:
            _checks.check_parameters(group["params"])
            self._check_group(group)
            if self._in_backward is not None:
                self._in_backward.watch(group)
        except (TypeError, ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        self.__dict__.setdefault("_checked_options", {})[id(group)] = group | _checks.CHANGING
        self._has_started = False

    def __getstate__(self) -> dict[str, Any]:
        """torch's part and the counts: a copy has no observer."""
        return super().__getstate__() | {
            name: getattr(self, name) for name in (*_COUNTS, "warn_after")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the weights of a copy find their state in it."""
        super().__setstate__(state)
        for parameter in self.state:
            _state.claim(self, parameter)

    def state_dict(self) -> dict[str, Any]:
        """The state, with all that a bit-exact resume needs but schedules (functions):
        None is in their places.

        Raises:
            RuntimeError: in the middle of a step that :func:`step_in_backward` takes in
                parts.
        """
        if self._in_backward is not None:
            self._in_backward.check_whole()
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update({name: None for name, value in group.items() if callable(value)})
        saved |= {name: getattr(self, name) for name in _COUNTS} | {
            "optimizer": type(self).__name__
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as hooks before the loading have left it; tensors keep the
        dtype they were saved in.

        Raises:
            TypeError: no state, or an option in it of another type.
            ValueError: the state of another optimizer, of other parameters or format,
                or an option out of range; nothing has changed then.
        """
        self._steady_plan = None  # it holds parts of the old state
        if not isinstance(state_dict, dict):
            _state.check_state(self, state_dict)
        schedules = [{k: v for k, v in group.items() if callable(v)} for group in self.param_groups]
        before, loaded = self.param_groups, list[dict[str, Any]]()

        def check(_: object, given: dict[str, Any]) -> None:
            self._check_loaded(given, schedules)
            loaded.append(given)

        def take_over(_: object) -> None:
            for group, ours in zip(self.param_groups, schedules, strict=True):
                group.update(
                    {name: value for name, value in ours.items() if group.get(name) is None}
                )
            _state.restore_dtypes(self, loaded[0])
            _checks.unshare(self.param_groups)
            self._has_started = False
            for name in _COUNTS:
                setattr(self, name, int(loaded[0].get(name, 0)))
            self.streams_begun = max(
                self.streams_begun, sum("stream" in entry for entry in self.state.values())
            )
            if self._in_backward is not None:
                self._in_backward.loaded(self.param_groups)

        # after the hooks that change what is loaded, and before those that change what
        # was
        hooks = [self.register_load_state_dict_pre_hook(check)]
        hooks.append(self.register_load_state_dict_post_hook(take_over, prepend=True))
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        _checks.warn_of_overridden(self, before)

    def _check_loaded(self, state_dict: dict[str, Any], schedules: list[dict[str, Any]]) -> None:
        """Raise before anything has changed unless a state is one for these parameters,
        with options in range.
        """
        _state.check_state(self, state_dict)
        for saved, ours, group in zip(
            state_dict["param_groups"], schedules, self.param_groups, strict=True
        ):
            merged = saved | {
                name: schedule for name, schedule in ours.items() if saved.get(name) is None
            }
            merged["params"] = group["params"]
            self._check_group(merged)
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                stores = self.stores_all_moments or is_quantized(parameter)
                _state.check_entry(
                    state_dict["state"].get(index, {}), parameter, merged, stores_moments=stores
                )

    def _check_options(self) -> None:
        """Raise before anything has changed if an option or state set since the last
        step is not valid.
        """
        checked = self.__dict__.setdefault(
            "_checked_options", {}
        )  # as they were when last valid; no part of the state
        for group in self.param_groups:
            _checks.check_lr(group)
            options = group | _checks.CHANGING
            if _checks.are_same(checked.get(id(group)), options):
                continue
            self._check_group(group)
            for parameter in group["params"]:
                if parameter in self.state:
                    stores = self.stores_all_moments or is_quantized(parameter)
                    _state.check_entry(
                        self.state[parameter], parameter, group, stores_moments=stores
                    )
            checked[id(group)] = options

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise unless the options of a group are valid; subclasses add their own."""
        _checks.check_shared(type(self).__name__, group, self.damping_option)
        _checks.check_combination(type(self).__name__, self.direction, group)
