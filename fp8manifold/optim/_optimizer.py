"""ManifoldOptimizer, the base of the library's optimizers.

    step
      a steady step: the plan of the last step is not stale, and is run (the stops of
        this way are in _plan.py)
      any other step makes a slot for every parameter with a gradient; if
        preparing it changes nothing                        plan it, run the plan
        else _may_step   options, schedules and gradients are checked, in all processes
             _begin      each slot gets state, stream, S_ref when due, spec and numbers
             count_step  the step counts of the states grow
             _take       scales that are zero are marked, sharded blocks gathered
               _run        a backend steps the slots, or an observer sees them
                         scales are fitted and widened, autograd is told

A slot is one parameter in one step (`_slot.py`). A subclass names a direction, and says
for a slot which parts of its step are fixed (`_fields`) and which numbers it needs
(`_numbers`). Until `_may_step` has returned True, nothing has changed.

A plan is made with slots that ``_begin`` has prepared. It asks for itself whether all
gradients are finite, as ``_may_step`` does, with `_largest_factor` and
`_gradient_factor` for what a subclass checks beyond that. So a subclass that adds a check
to ``_may_step`` gives these too, or refuses plans.

A steady step on a GPU does not wait for the question whether all gradients are finite:
the kernels answer it, refuse the step or take it, and report. Riemannian steps are left to
them too, but for those of geoopt's arithmetic, and where the square of a gradient of codes
may overflow before that of the gradient. ``_pending_verdicts`` has the reports that the
host has not read. They are read before the next step, and when somebody asks for a count.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.reading import PendingValues, eager_only
from fp8manifold._base.replaced import MARK, refuse_replaced
from fp8manifold._interface import MomentStorage, WeightStorage
from fp8manifold._numerics.stiffness import (
    Field,
    bounded_share,
    end_exponents,
    reference_stiffness,
)
from fp8manifold._ranks import local_of
from fp8manifold.optim import _checks, _state
from fp8manifold.optim._agreement import in_every_process, is_distributed, watch_for_zero
from fp8manifold.optim._backends import gathered, note_changes, run_all
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._eager_step import StepView, observed_step
from fp8manifold.optim._factors import STATISTIC_NAMES, Preconditioner
from fp8manifold.optim._finite import all_finite, plain_gradient, warn_of_pass, warn_of_skips
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._plan import CHANGING, Plan, Verdict, are_same
from fp8manifold.optim._scales import fit_scales, mark_zero, narrow, take_fitted, widen_full
from fp8manifold.optim._slot import (
    Slot,
    count_step,
    is_quantized,
    slot_of,
    stabilize,
)
from fp8manifold.optim._spec import BOUND_NAMES, Spec, spec_of
from fp8manifold.optim._steady import is_steady, make_plan
from fp8manifold.optim._step_numbers import check_lr
from fp8manifold.optim._stiffness_fields import stiffness_field
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._triton_step import PendingVerdict, count_verdict
from fp8manifold.optim._writeback import rounds_at_random

_RESET: Final = frozenset((*MOMENT_NAMES, *BOUND_NAMES, *STATISTIC_NAMES))
"""Entries of the state that ``reset_every`` clears."""
_COUNTS: Final = (
    "skipped_steps",
    "skipped_in_row",
    "widened_scales",
    "fitted_scales",
    "streams_begun",
)
"""Attributes that are saved with the state."""
_PLANNING: Final = ("_begin", "_may_step", "_prepare", "_run", "_take", "_widen")
"""Methods by which a step is planned and taken."""


def _count(name: str) -> Any:
    """Return a property for a count that depends on the verdicts of a GPU.

    Reading it waits for the steps that were launched.
    """

    def read(optimizer: "ManifoldOptimizer") -> int:
        optimizer._count_verdicts()
        return int(vars(optimizer).get(name, 0))

    def write(optimizer: "ManifoldOptimizer", number: int) -> None:
        optimizer._count_verdicts()
        vars(optimizer)[name] = number

    return property(read, write)


def _checked_facts(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group was checked with: its options, and which parameters it has.

    A user may edit either between two steps. A shape decides too: Muon refuses vectors.
    """
    parameters = [(id(parameter), parameter.shape) for parameter in group["params"]]
    return group | CHANGING | {"params": parameters}


class ManifoldOptimizer(torch.optim.Optimizer):
    """Base of the library's optimizers.

    Subclasses give a direction, fields of the spec and the numbers of a step.

    Attributes:
        observer: function that is called with a :class:`StepView` for every quantised
            parameter in every step, or None.
        observes: function of a parameter that returns True if the observer is called
            for it; None calls it for all.
        skipped_steps: the number of steps that were skipped because a gradient was not
            finite. If parameters step in the backward pass, the number of passes in
            which one skipped its step.
        skipped_in_row: the number of those that came last.
        warn_after: after this many skipped steps in a row a ``RuntimeWarning`` names
            the parameters at fault.
        widened_scales: the number of scales of one-byte weights that this process has
            doubled.
        fitted_scales: the number of those that it has fitted or narrowed.
        streams_begun: the number of parameters that were given a stream of random bits
            (``stream`` in their state).
    """

    observer: Callable[[StepView], None] | None = None
    observes: Callable[[Tensor], bool] | None = None
    skipped_steps: int = _count("skipped_steps")
    skipped_in_row: int = _count("skipped_in_row")
    warn_after: int = 10
    widened_scales: int = _count("widened_scales")
    fitted_scales: int = 0
    streams_begun: int = 0
    # steps that a GPU has decided on, and the host has not counted
    _pending_verdicts: tuple[PendingVerdict, ...] = ()
    # the backward pass of the last verdict that was counted
    _last_pass: BackwardPass | None = None
    # of the last steady step; compared with the present before each use
    _plan: Plan | None = None
    # called in place of a step while a graph of the passes is recorded
    _recorder: Callable[[], None] | None = None
    # launches and counts a planned step on a GPU from a recorded graph
    _graph: Callable[[Any, list[Slot]], PendingValues] | None = None
    # the handle of ``step_in_backward``
    _in_backward: Any = None
    # the backward pass in which a trainer calls ``step_parameter``
    _fused_pass: BackwardPass | None = None
    # several processes have compared parameters and states
    _has_started: bool = False
    zero_processes: Any = None
    """The processes that step the other parts under ``ZeroRedundancyOptimizer``, and
    their device.
    """
    direction: str
    # the name of the option that is the lower bound of S / S_ref
    damping_option = "damping"
    # the option ``moments`` holds for ordinary parameters too
    stores_all_moments = True
    # the step of one parameter depends on no other
    steps_alone = True
    # steps may be steady; False for a subclass of a user's that overrides one of
    # `_PLANNING`, and for Fisher's
    is_planned = True
    # a GPU may decide on a steady step
    defers_verdict = True
    # no subclass outside of the library overrides a method, so a plan may serve again
    keeps_plan = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Find out whether a subclass may leave verdicts to a GPU and reuse a plan."""
        super().__init_subclass__(**options)
        packages = ("fp8manifold.", "torch.", "builtins")
        foreign = [base for base in cls.__mro__ if not base.__module__.startswith(packages)]
        library = [base for base in cls.__mro__ if base not in foreign]
        foreign_names: set[str] = set()
        for base in foreign:
            foreign_names.update(name for name in vars(base) if not name.startswith("__"))
        # flags about plans, with which a subclass overrides no method
        foreign_names -= {"defers_verdict", "is_planned", "keeps_plan"}
        overrides = [name for name in foreign_names if any(hasattr(base, name) for base in library)]
        cls.keeps_plan = not overrides
        cls.is_planned = cls.is_planned and foreign_names.isdisjoint(_PLANNING)

    @property
    def bounded_share(self) -> float:
        """The share of weights whose S / S_ref met a bound at the last refresh.

        The bounds are ``damping`` and ``clip``; only quantised weights count.
        """
        weights = 0
        bounded = 0.0
        for parameter, state in self.state.items():
            if "bounded" in state:
                weights += parameter.numel()
                bounded += parameter.numel() * float(state["bounded"])
        return bounded / max(weights, 1)

    # eager, as it counts, and calls code that no compiler sees into
    @eager_only
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        If a gradient or its square is not finite, nothing changes, and the step is
        counted in ``skipped_steps``. Gradients are never modified. In a function that
        ``torch.compile`` compiles it causes a graph break.

        Args:
            closure: function that computes gradients and returns the loss.

        Returns:
            What ``closure`` returns, or None.

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
        self._refuse_recording()
        if self._pending_verdicts:
            self._count_verdicts()
        plan = self._plan
        # a step that fails leaves no plan
        self._plan = None
        if plan is None or plan.is_stale(self):
            slots = self._slots()
            plan = make_plan(self, slots) if is_steady(self, slots) else None
        if plan is None:
            # no plan has served, so the slots were made above
            verdict = self._step_unplanned(slots)
        else:
            verdict = plan.run(self)
            self._plan = plan if plan.alive else None
        if verdict is Verdict.TAKEN:
            self.skipped_in_row = 0
        elif verdict is Verdict.SKIPPED:
            self._count_skipped()
        return loss

    def _refuse_recording(self) -> None:
        """Raise RuntimeError where a CUDA graph would record a step.

        The counts and random bits of the step would never change.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph can't record a step of {type(self).__name__}, whose numbers and "
                "random bits would be "
                "the same in every replay: fp8manifold.optim.graphed records the whole training "
                "step and renews them"
            )

    def _step_unplanned(self, slots: list[Slot]) -> Verdict:
        """Take a step that is not planned: state begins, something is due, ... (`_steady.py`)."""
        if not self._may_step(slots):
            return Verdict.SKIPPED
        self._take(count_step(self._begin(slots)))
        return Verdict.TAKEN

    @property
    def supports_fused_back_pass(self) -> bool:
        """True if a trainer may call :meth:`step_parameter` in hooks of its own."""
        return self.steps_alone

    # eager, as it counts
    @eager_only
    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, group: dict[str, Any], index: int = 0) -> None:
        """Take the step of one parameter, as image trainers ask for it.

        OneTrainer, SimpleTuner and sd-scripts call it in the backward pass, in hooks of
        their own, and drop the gradient. In loops of your own take
        :func:`step_in_backward`, which clips too. A parameter without a gradient stays.

        Args:
            parameter: to step, whose gradient is complete.
            group: its group, one of ``param_groups``.
            index: its place in the group, which is not needed.

        Raises:
            RuntimeError: several processes, whose gradients are not reduced yet;
                :func:`step_in_backward` steps already, or parameters do not step alone.
        """
        if not self.supports_fused_back_pass:
            raise RuntimeError(f"{type(self).__name__} steps parameters together: call step()")
        if self._in_backward is not None:
            raise RuntimeError("step_in_backward steps already: remove() its handle first")
        processes = torch.distributed.get_world_size() if is_distributed() else 1
        if processes > 1:
            raise RuntimeError(
                f"step_parameter is for one process, and here are {processes}: call step()"
            )
        if MARK in vars(parameter):
            refuse_replaced(self)
        if parameter.grad is None:
            return
        backward_pass = self._fused_pass
        if backward_pass is None or not backward_pass.is_under_way:
            backward_pass = BackwardPass()
            self._fused_pass = backward_pass
        backward_pass.join()
        self.step_alone(group, parameter, backward_pass)

    def step_alone(
        self, group: dict[str, Any], parameter: Tensor, backward_pass: BackwardPass
    ) -> None:
        """Take the step of one parameter in a backward pass, as :meth:`step` would.

        If it is skipped, warn of the pass and count it, once.
        """
        self._refuse_recording()
        self._count_verdicts(parameter)
        member = (group, parameter)
        plans = self._plans_alone
        plan = plans.pop(id(parameter), None)
        if plan is None or plan.is_stale(self, member):
            slots = [self._slot(group, parameter)]
            plan = make_plan(self, slots) if is_steady(self, slots) else None
        if plan is None:
            verdict = self._step_unplanned(slots)
        else:
            verdict = plan.run(self, backward_pass=backward_pass, member=member)
            if plan.alive:
                plans[id(parameter)] = plan
        if verdict is Verdict.PENDING:
            return
        # verdicts are counted in the order of the steps
        self._count_verdicts()
        self._note_pass(backward_pass)
        if verdict is Verdict.SKIPPED:
            self._count_skipped_pass(backward_pass, [parameter])

    @property
    def _plans_alone(self) -> dict[int, Plan]:
        """The plans of parameters that step in the backward pass, by their identities."""
        plans: dict[int, Plan] = vars(self).setdefault("_plans_of_parameters", {})
        return plans

    def _drop_plans(self) -> None:
        self._plan = None
        self._plans_alone.clear()

    def _count_verdicts(self, parameter: Tensor | None = None) -> None:
        """Count the steps that a GPU has decided on.

        With a parameter only those up to its last one are counted, and waited for.
        """
        while self._pending_verdicts and (
            parameter is None
            or any(parameter in verdict.versions for verdict in self._pending_verdicts)
        ):
            verdict, *later = self._pending_verdicts
            self._pending_verdicts = tuple(later)
            count_verdict(self, verdict)
        if parameter is None and self._last_pass is not None and not self._last_pass.is_under_way:
            self._note_pass(None)

    def _note_pass(self, backward_pass: BackwardPass | None) -> None:
        """Note the backward pass that a verdict belongs to, or that none is under way.

        ``skipped_in_row`` becomes 0 if another pass was noted before, and none of its
        steps was skipped.
        """
        before = self._last_pass
        self._last_pass = backward_pass
        if before is not None and before is not backward_pass and not before.is_skipped:
            vars(self)["skipped_in_row"] = 0

    def _count_skipped_pass(
        self, backward_pass: BackwardPass, culprits: Sequence[Tensor], why: str = ""
    ) -> None:
        """Count a backward pass in which a step was skipped, and warn of it, once.

        Args:
            backward_pass: the pass.
            culprits: the parameters whose gradients are the cause.
            why: the reason, if it is another one.
        """
        if backward_pass.is_skipped:
            return
        backward_pass.is_skipped = True
        # not by the properties, which wait for later verdicts
        counts = vars(self)
        counts["skipped_steps"] = counts.get("skipped_steps", 0) + 1
        counts["skipped_in_row"] = counts.get("skipped_in_row", 0) + 1
        warn_of_pass(self, culprits, why, counts["skipped_in_row"])

    def _count_skipped(self, culprits: Sequence[Tensor] | None = None) -> None:
        """Count a step that was skipped because of the gradients of ``culprits``.

        None looks for them among the present gradients.
        """
        self.skipped_steps += 1
        self.skipped_in_row += 1
        if self.skipped_in_row == self.warn_after:
            warn_of_skips(self, culprits)

    def _slots(self) -> list[Slot]:
        """Return a slot for every parameter that has a gradient."""
        slots = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slots.append(slot_of(group, p, self.state.get(p, {})))
        return slots

    def _slot(self, group: dict[str, Any], parameter: Tensor) -> Slot:
        return slot_of(group, parameter, self.state.get(parameter, {}))

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check everything that can refuse the step, before anything changes.

        All processes that take it have the same answer.
        """

        def may_step_here() -> bool:
            self._check_options()
            self._apply_schedules(slots)
            return all_finite(self, slots)

        return in_every_process(self, may_step_here)

    def _apply_schedules(self, slots: list[Slot]) -> None:
        """Raise before anything has changed if a schedule has left its range.

        A subclass may note in the slots what schedules give for this step.
        """

    def _gradient_factor(self, slot: Slot) -> float:
        """Return what a gradient is multiplied by before its square must be finite."""
        return 1.0

    def _largest_factor(self, slots: list[Slot]) -> float:
        """Return the largest `_gradient_factor` of steps that are planned."""
        return 1.0

    def _are_plannable(self, slots: list[Slot]) -> bool:
        """Return True if steady steps of native code or of kernels may be planned.

        Subclasses refuse steps that need more than the records of these.
        """
        return True

    def _number_facts(self, slot: Slot) -> tuple[Any, ...]:
        """Return what `_numbers` depends on beside group, step and age of a slot.

        A plan computes the numbers of slots with the same facts once.
        """
        return (slot.state.get("reference"),)

    def _by_geoopt(self, slots: list[Slot]) -> list[int]:
        """Return the positions of steps that no backend takes, but `_take_by_geoopt`.

        They are those of Riemannian optimizers whose arithmetic is geoopt's.
        """
        return []

    def _take_by_geoopt(self, slot: Slot) -> None:
        """Take the step of a parameter that no backend steps."""
        raise NotImplementedError

    def _begin(self, slots: list[Slot]) -> list[Slot]:
        """Give each slot state, spec, view, tensors and numbers.

        Slots without elements are left out of the result.
        """
        slots = [slot for slot in slots if slot.parameter.numel()]
        for slot in slots:
            stores_moments = self.stores_all_moments or slot.fmt is not None
            _state.check_arrays(
                slot.state, slot.parameter, slot.group, stores_moments=stores_moments
            )
        parameters: list[Tensor] = []
        for group in self.param_groups:
            parameters += group["params"]
        without_stream = [slot for slot in slots if "stream" not in slot.state]
        twin_numbers = twins(parameters) if without_stream else {}
        for slot in slots:
            twin = twin_numbers.get(slot.parameter, 0)
            self._begin_state(slot, twin, alone=len(parameters) == 1)
        for slot in slots:
            self._prepare(slot)
        return slots

    def _begin_state(self, slot: Slot, twin: int, *, alone: bool) -> None:
        """Give a parameter its state; stabilise and reset it when that is due.

        Args:
            slot: of the parameter.
            twin: the number of parameters before it whose stream would be the same.
            alone: the optimizer has no other parameter.
        """
        group, parameter = slot.group, slot.parameter
        # setdefault, as user code may have set a plain dict
        state = self.state.setdefault(parameter, slot.state)
        slot.state = state
        _state.claim(self, parameter)
        device = slot.device if slot.device.type == "cuda" else torch.device("cpu")
        step = state.get("step")
        # older states of torch's have a number
        if not isinstance(step, Tensor) or step.device != device:
            state["step"] = torch.full((), slot.steps_done, dtype=torch.float32, device=device)
        if "stream" not in state:
            draws = group["moments"] != MomentStorage.FLOAT32 or rounds_at_random(parameter, group)
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
        """Fill a slot: spec, view, the tensors that the step changes, and numbers.

        S_ref is computed when it is due.
        """
        slot.spec = self._spec(slot)
        if slot.storage != WeightStorage.PLAIN and (
            slot.steps_done % slot.group["refresh_every"] == 0 or "reference" not in slot.state
        ):
            self.fitted_scales += narrow(slot)
            self._refresh(slot)
        # the boundaries between processes cut the blocks of a vector's moments, and the
        # tiles of its sums: every process steps all of it
        needs_all = slot.spec.blockwise or slot.spec.preconditioner != Preconditioner.NONE
        slot.steps_all_rows = slot.share is not None and needs_all and slot.parameter.dim() == 1
        slot.view = slot.view_in(blocks=slot.spec.moments == MomentStorage.EIGHT_BIT)
        _state.make_state(slot)
        slot.tensors |= {name: local_of(slot.state[name]) for name in slot.spec.state_entries}
        if "gradient" not in slot.tensors:
            # native code reads its memory
            gradient = plain_gradient(slot.parameter).contiguous().resolve_neg()
            slot.tensors["gradient"] = gradient
        if slot.fmt is not None and slot.spec.has_bounded_chart:
            bounds = (slot.state["reference"], slot.group["damping"], slot.group["clip"])
            slot.chart_ends = end_exponents(*bounds, slot.fmt.mantissa_bits)
        slot.numbers = self._numbers(slot)

    def _spec(self, slot: Slot) -> Spec:
        """Return the fixed parts of a slot's step."""
        group = slot.group
        if slot.storage in (WeightStorage.FREE, WeightStorage.PLAIN):
            writeback = "stochastic" if rounds_at_random(slot.weight, group) else "nearest"
        else:
            # without the option the manifold's own rounding
            writeback = group["writeback"] or slot.rounding
        fields = {
            "storage": slot.storage,
            "fmt": slot.fmt,
            "scale_is_power_of_two": slot.scale_is_power_of_two,
            "writeback": writeback,
            "moments": MomentStorage(group["moments"]),
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
        """Return fields of the spec: direction, metric, geometry, power of S / S_ref.

        Those that follow from storage and from shared options are set already.
        """
        raise NotImplementedError

    def _numbers(self, slot: Slot) -> dict[str, float]:
        """Return the numbers of this step by name, as in ``NUMBERS``."""
        raise NotImplementedError

    def _refresh(self, slot: Slot) -> None:
        """Compute S_ref of a parameter, and the share of its weights at a bound."""
        field = stiffness_field(slot, slot.spec.metric)
        slot.state["reference"] = reference_stiffness(field, slot.ranks)
        slot.state["bounded"] = self._share_at_bounds(slot, field, slot.state["reference"])

    def _share_at_bounds(self, slot: Slot, field: Field, reference: float) -> float:
        return bounded_share(
            field, reference, slot.group[self.damping_option], slot.group["clip"], slot.ranks
        )

    def _take(self, slots: list[Slot]) -> None:
        """Take the steps that have begun, and do what is due after them.

        Scales are fitted and widened, autograd is told of changes, and observers see
        the steps.
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
        """Run the steps; observed ones eagerly, and one by one."""
        fit_scales(slots)
        if self.observer is None:
            run_all(slots)
            return []
        observed = dict.fromkeys(slot for slot in slots if self._is_observed(slot))
        run_all([slot for slot in slots if slot not in observed])
        return [observed_step(slot) for slot in observed]

    def _is_observed(self, slot: Slot) -> bool:
        if self.observer is None or slot.storage == WeightStorage.PLAIN or not slot.weight.numel():
            return False
        return self.observes is None or self.observes(slot.parameter)

    def _widen(self, slots: list[Slot]) -> None:
        widen_full(self, slots)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and check its options and parameters."""
        super().add_param_group(param_group)
        watch_for_zero()
        self._drop_plans()
        group = self.param_groups[-1]
        _checks.copy_shared_tensors(self.param_groups)
        try:
            _checks.check_parameters(group["params"])
            _checks.check_memory(self.param_groups)
            self._check_group(group)
            if self._in_backward is not None:
                self._in_backward.watch(group)
        except (TypeError, ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        # made here: torch's constructor calls this, and a copy begins without it
        self.__dict__.setdefault("_checked_options", {})[id(group)] = _checked_facts(group)
        self._has_started = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the base's part, and the counts; a copy has no observer."""
        counts = {name: getattr(self, name) for name in (*_COUNTS, "warn_after")}
        return super().__getstate__() | counts

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the weights of a copy find their state in it."""
        super().__setstate__(state)
        watch_for_zero()
        for parameter in self.state:
            _state.claim(self, parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with all that a bit-exact resume needs except schedules.

        Schedules are functions; None is in their places.

        Raises:
            RuntimeError: in the middle of a step that :func:`step_in_backward` takes in
                parts.
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

        Hooks that are registered for it change the state before it is checked.

        Args:
            state_dict: as :meth:`state_dict` returns it. Schedules of this optimizer
                stay where it has None.

        Raises:
            TypeError: no state, or an option in it of another type.
            ValueError: the state of another optimizer, of other parameters or format,
                or an option out of range. Nothing has changed then.
        """
        # they are of the old state
        self._drop_plans()
        if not isinstance(state_dict, dict):
            # raises, and says what it is
            _state.check_state(self, state_dict)
        schedules = [
            {name: value for name, value in group.items() if callable(value)}
            for group in self.param_groups
        ]
        groups_before = self.param_groups
        loaded_states: list[dict[str, Any]] = []

        def check(_: object, state: dict[str, Any]) -> None:
            self._check_loaded(state, schedules)
            loaded_states.append(state)

        def take_over(_: object) -> None:
            self._take_over(loaded_states[0], schedules)

        # after the hooks that change what will be loaded, and before those that change
        # what has been loaded
        hooks = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take_over, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        _state.warn_of_overridden(self, groups_before)

    def _take_over(self, state_dict: dict[str, Any], schedules: list[dict[str, Any]]) -> None:
        """Do what torch's part of loading has left: schedules, dtypes and counts."""
        for group, functions in zip(self.param_groups, schedules, strict=True):
            for name, function in functions.items():
                if group.get(name) is None:
                    group[name] = function
        _state.restore_dtypes(self, state_dict)
        _checks.copy_shared_tensors(self.param_groups)
        self._has_started = False
        for name in _COUNTS:
            setattr(self, name, int(state_dict.get(name, 0)))
        streams = sum("stream" in state for state in self.state.values())
        self.streams_begun = max(self.streams_begun, streams)
        if self._in_backward is not None:
            self._in_backward.loaded(self.param_groups)

    def _check_loaded(self, state_dict: dict[str, Any], schedules: list[dict[str, Any]]) -> None:
        """Raise unless a state fits these parameters and its options are in range.

        Nothing has changed then.
        """
        _state.check_state(self, state_dict)
        for saved, functions, group in zip(
            state_dict["param_groups"], schedules, self.param_groups, strict=True
        ):
            merged = dict(saved)
            for name, function in functions.items():
                if saved.get(name) is None:
                    merged[name] = function
            merged["params"] = group["params"]
            self._check_group(merged)
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                stores = self.stores_all_moments or is_quantized(parameter)
                _state.check_entry(
                    state_dict["state"].get(index, {}), parameter, merged, stores_moments=stores
                )

    def _check_options(self) -> None:
        """Raise if an option or a state that was set since the last step is not valid.

        Options and parameters are compared with those that were checked last. Nothing has
        changed when this raises.
        """
        checked = self.__dict__.setdefault("_checked_options", {})
        has_changed = False
        for group in self.param_groups:
            check_lr(group)
            if are_same(checked.get(id(group)), _checked_facts(group)):
                continue
            # all groups together, so once
            if not has_changed:
                _checks.check_distinct(self.param_groups)
                _checks.check_memory(self.param_groups)
            has_changed = True
            self._check_group(group)
            for parameter in group["params"]:
                if parameter in self.state:
                    stores = self.stores_all_moments or is_quantized(parameter)
                    _state.check_entry(
                        self.state[parameter], parameter, group, stores_moments=stores
                    )
            checked[id(group)] = _checked_facts(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise unless the options of a group are valid; subclasses add their own.

        Lists become tuples: a list that is edited where it lies would be equal to itself.
        """
        for name, value in group.items():
            if name not in ("params", "param_names") and isinstance(value, list):
                group[name] = tuple(value)
        _checks.check_shared(type(self).__name__, group, self.damping_option)
        _checks.check_combination(type(self).__name__, self.direction, group)
