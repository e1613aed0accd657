"""Steps in the backward pass: each gradient is used and freed before the next is
computed.
"""

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8manifold._base.checks import check_choice
from fp8manifold._base.replaced import refuse_replaced
from fp8manifold.optim._agreement import is_distributed
from fp8manifold.optim._in_backward.gradients import Accumulation, Clipping, SpentGradient, StandIn
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._slot import describe_parameter

__all__ = ["InBackward", "step_in_backward"]

_SUMS: Final = ("bfloat16",)


class _Hook:
    """The function that autograd calls once a parameter has its gradient; it keeps no
    handle or optimizer alive.
    """

    def __init__(self, handle: "InBackward") -> None:
        self.handle = weakref.ref(handle)

    def __call__(self, parameter: Tensor) -> None:
        if (handle := self.handle()) is not None:
            handle._take(parameter)


class InBackward:
    """The hooks by which an optimizer steps in the backward pass, as
    :func:`step_in_backward` returns them.

    A context manager that removes them at its end. It does not keep the optimizer
    alive, whose deletion ends steps.

    Args:
        optimizer: whose parameters step.

    Raises:
        RuntimeError: in a backward pass, if there are several processes by then, if
            another hook has freed a gradient, or if the optimizer was deleted before
            its first step.
        FloatingPointError: in a backward pass, for a gradient that is not finite, with
            ``on_nonfinite="raise"``.

    Example:
        >>> import fp8manifold as fm
        >>> weight = fm.FP8Parameter(torch.eye(2), "E4M3")
        >>> optimizer = fm.optim.StiffnessMuon([weight], 0.1)
        >>> with fm.optim.step_in_backward(optimizer):
        ...     weight.square().sum().backward()
        >>> int(optimizer.state[weight]["step"])
        1
    """

    def __init__(self, optimizer: Any) -> None:
        self._of = weakref.ref(optimizer)
        self._hook = _Hook(self)
        self._has_stepped = False
        self._clipping: Clipping | None = None
        self._accumulation: Accumulation | None = None
        self._pass: BackwardPass | None = None
        self._hooks: list[RemovableHandle] = []
        self._one_at_a_time = threading.Lock()  # autograd has one thread per device
        self._last_places: dict[int, tuple[int, int]] = {}  # a first guess, checked on every use
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    @property
    def optimizer(self) -> Any:
        """The optimizer whose parameters step.

        Raises:
            RuntimeError: it was deleted.
        """
        if (optimizer := self._of()) is None:
            raise RuntimeError(_GONE)
        return optimizer

    def __enter__(self) -> "InBackward":
        """Return the handle, whose hooks are registered already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Remove the hooks, so that ``step()`` steps again. A second call changes
        nothing.
        """
        _remove_all(self._hooks)
        optimizer = self._of()
        if optimizer is not None and optimizer._in_backward is self:
            optimizer._in_backward = None

    def watch(self, group: dict[str, Any]) -> None:
        """Hook a group's parameters; each steps with the options of the group that it
        is in at that moment.

        Raises:
            RuntimeError: another optimizer steps one of them in backward; nothing is
                hooked then.
        """
        self.check_free([group])
        for parameter in group["params"]:
            if self._hook not in _hooks_of(parameter):
                trains = (
                    parameter.requires_grad
                )  # autograd refuses a frozen one, which may train later
                self._hooks.append(
                    parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._hook)
                )
                parameter.requires_grad_(trains)
        self.listen([group])
        if self._clipping is not None:
            self._clipping.watch(self.optimizer.param_groups)

    def check_free(self, groups: list[dict[str, Any]]) -> None:
        """Refuse parameters whose gradients the hooks of another optimizer would take.

        Raises:
            RuntimeError: there is such a parameter.
        """
        if self._taken(groups) is None:
            return
        gc.collect()  # an optimizer that only a reference cycle keeps alive takes no gradients
        if (found := self._taken(groups)) is not None:
            name, other = found
            raise RuntimeError(
                f"{name} steps in backward already, with another {type(other).__name__}, which "
                "would use its gradient "
                "and free it: call remove() of that optimizer's handle, or delete the optimizer "
                "and the scheduler (torch.optim.lr_scheduler), which keeps it"
            )

    def _taken(self, groups: list[dict[str, Any]]) -> tuple[str, Any] | None:
        """The first parameter that another optimizer steps, and that optimizer."""
        for i, group in enumerate(groups):
            for k, parameter in enumerate(group["params"]):
                for hook in _hooks_of(parameter):
                    other = (
                        hook.handle()
                        if isinstance(hook, _Hook) and hook is not self._hook
                        else None
                    )
                    if other is not None and (optimizer := other._of()) is None:
                        other.remove()
                    elif other is not None and other._place_of(parameter) is not None:
                        return describe_parameter(group, i, k), optimizer
        return None

    def listen(self, groups: list[dict[str, Any]]) -> None:
        """Register the parameters' hooks again: ``Module.to`` swaps encoded tensors and
        drops their hooks.
        """
        for group in groups:
            for parameter in group["params"]:
                if (hooks := parameter._post_accumulate_grad_hooks) is not None:
                    parameter._post_accumulate_grad_hooks = hooks

    def loaded(self, groups: list[dict[str, Any]]) -> None:
        """Continue from a loaded state; the norms of the step under way are forgotten."""
        self.listen(groups)
        if self._clipping is not None:
            self._clipping.forget()
            self._clipping.watch(groups)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """A context whose backward pass takes the norm of the whole gradient, frees it,
        and steps nothing.

        With ``clip="exact"`` it comes before each pass that steps, with ``"previous"``
        before the first.

        Raises:
            RuntimeError: nothing is clipped; a step is under way; in it, no backward
                pass or a second one.

        Example:
            >>> import fp8manifold as fm
            >>> weight = fm.FP8Parameter(torch.eye(2), "E4M3")
            >>> optimizer = fm.optim.StiffnessMuon([weight], 0.1)
            >>> handle = fm.optim.step_in_backward(optimizer, clip="exact", max_norm=1.0)
            >>> with handle.measure():
            ...     weight.square().sum().backward()
            >>> weight.square().sum().backward()
            >>> optimizer.step()
            >>> int(optimizer.state[weight]["step"])
            1
        """
        clipping = self._clipping
        if clipping is None:
            raise RuntimeError(
                "measure() measures a norm to clip by: give step_in_backward clip='exact' or "
                "'previous'"
            )
        clipping.forget_broken()
        if clipping.norms:
            raise RuntimeError(
                "measure() comes between steps: call optimizer.step(), which ends the one under way"
            )
        clipping.measuring = True
        try:
            yield
        except BaseException:
            clipping.forget()
            raise
        finally:
            clipping.measuring = False
        if clipping.measured(self.optimizer.param_groups):
            return
        self._refuse_nonfinite()
        warnings.warn(
            f"measure(): {_NOT_FINITE}: it is no norm to clip by; measure another batch",
            RuntimeWarning,
            stacklevel=3,
        )

    def _refuse_nonfinite(self) -> None:
        """Raise FloatingPointError if a group asks for it where the norm of the whole
        gradient is not finite.
        """
        if any(group["on_nonfinite"] == "raise" for group in self.optimizer.param_groups):
            raise FloatingPointError(f"{_NOT_FINITE}: on_nonfinite='skip' skips the step")

    def check_whole(self) -> None:
        """Refuse to save in the middle of a step.

        Raises:
            RuntimeError: gradients were used since the last ``optimizer.step()``.
        """
        if self._clipping is None:
            return
        self._clipping.forget_broken()
        if self._clipping.norms:
            raise RuntimeError(
                "a step is under way, and has used gradients already: call optimizer.step(), which "
                "ends it, and save the state afterwards"
            )

    def finish(self) -> None:
        """Do the rest of ``optimizer.step()``: end the step, and step by accumulated
        gradients.

        Raises:
            RuntimeError: a gradient that no hook has seen.
            FloatingPointError: a norm that is not finite, with ``clip="exact"`` and
                ``on_nonfinite="raise"``.
        """
        for i, group in enumerate(self.optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not isinstance(parameter.grad, StandIn):
                    raise RuntimeError(
                        f"{describe_parameter(group, i, k)} has a gradient that step_in_backward has not "
                        "seen: it was set by "
                        "hand, or the parameter was moved (model.to); remove() the handle, call "
                        "step_in_backward again"
                    )
        if self._accumulation is not None:
            with torch.no_grad():
                self._accumulation.finish(self.optimizer)
        if self._clipping is None:
            return
        if not self._clipping.end(self.optimizer.param_groups):
            return
        self._refuse_nonfinite()
        backward_pass = self._pass or BackwardPass()
        self.optimizer._hear(backward_pass)
        if self._clipping.kind == "exact":
            why = f"{_NOT_FINITE}: the step was skipped"
        else:
            why = f"{_NOT_FINITE}: no step was taken, and the next pass measures again"
        self.optimizer._count_skipped_pass(backward_pass, [], why)

    def _take(self, parameter: Tensor) -> None:
        if self._of() is None:
            if not self._has_stepped:  # a loop without step() would never notice
                raise RuntimeError(_GONE)
            return
        self._has_stepped = True
        _check_alone()
        gradient = parameter.grad
        if isinstance(gradient, StandIn):
            # The sum grows; or the parameter left and came back, has two hooks, and the
            # first has stepped
            return
        if (place := self._place_of(parameter)) is None:
            refuse_replaced(self.optimizer)  # whose hooks went on to those in their places
            return  # no group contains it any more: its gradient belongs to others
        group = self.optimizer.param_groups[place[0]]
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {describe_parameter(group, *place)} was freed by another hook "
                "(register_post_accumulate_grad_hook) before step_in_backward could use it: remove "
                "that hook"
            )
        with self._one_at_a_time, torch.no_grad():
            if self._accumulation is not None:
                self._accumulation.take(self.optimizer, group, parameter)
            else:
                self._step(group, parameter, gradient, place)

    def _step(
        self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, place: tuple[int, int]
    ) -> None:
        clipping, groups = self._clipping, self.optimizer.param_groups
        backward_pass = self._pass
        if backward_pass is None or not backward_pass.is_under_way:
            backward_pass = self._pass = BackwardPass()
        backward_pass.join()
        if clipping is None or clipping.lets(gradient, place, groups, backward_pass):
            self.optimizer.step_alone(group, parameter, backward_pass)
        if clipping is None:
            parameter.grad = SpentGradient(parameter)
        elif clipping.measuring:
            parameter.grad = None
        else:
            parameter.grad = SpentGradient(parameter, clipping.norms[place], clipping.is_done_by)

    def _place_of(self, parameter: Tensor) -> tuple[int, int] | None:
        """The parameter's place in the groups now: ``load_state_dict`` replaces groups,
        and users change them.
        """
        groups = self.optimizer.param_groups
        i, k = self._last_places.get(id(parameter), (0, 0))
        if i < len(groups) and k < len(groups[i]["params"]) and groups[i]["params"][k] is parameter:
            return i, k
        for i, group in enumerate(groups):
            for k, each in enumerate(group["params"]):
                if each is parameter:
                    self._last_places[id(parameter)] = i, k
                    return i, k
        return None


_NOT_FINITE: Final = "the norm of the whole gradient is not finite"
_GONE = "the optimizer that step_in_backward was given has been deleted: keep it in a variable, its handle does not keep it"


def _hooks_of(parameter: Tensor) -> list[Any]:
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def step_in_backward(
    optimizer: torch.optim.Optimizer,
    *,
    clip: str | None = None,
    max_norm: float | None = None,
    first: str = "refuse",
    accumulate: str | None = None,
) -> InBackward:
    r"""Step each parameter as soon as its gradient is computed, and free it: at most one
    gradient is alive at a time.

    .. math:: \text{peak} = \text{weights} + \text{state} + \max_i \text{gradient}_i, \qquad
              g \leftarrow \min(1, \mathrm{max\_norm} / (\lVert g \rVert + 10^{-6}))\, g

    in place of ``weights + state + sum_i gradient_i``. Without ``clip`` the numbers are
    those of ``optimizer.step()`` after the same pass, and ``step()`` only ends the
    step. A used gradient becomes a placeholder without memory; a second pass before
    ``zero_grad()``, ``GradScaler`` and several processes are refused. If a gradient is
    not finite, its parameter skips the step; a pass warns and counts once. With
    ``clip="exact"`` and with sums all parameters do, in ``step()``; sums warn only
    after ``warn_after`` in a row. ``docs/in-backward.md`` has each option with an example.

    Args:
        optimizer: any of this library except :class:`FisherNaturalGradient` and
            :class:`StiffnessWrapper`.
        clip: None; ``exact``, with the numbers of ``clip_grad_norm_`` and two passes
            per step, the first under ``handle.measure()`` for the norm; or
            ``previous``, one pass, clipped by the larger of the last finite norm of an
            earlier step (``previous_norm`` of groups and states) and the norm of the
            pass so far.
        max_norm: the bound of the norm of the whole gradient; inf only measures norms.
        first: what ``clip="previous"`` does without a norm: ``refuse``, or ``measure``,
            which steps nothing.
        accumulate: None or ``bfloat16``: sums of passes, rounded stochastically, in
            ``grad``, 2 bytes per weight.

    Returns:
        A handle with ``remove()``, a context manager; groups and parameters added or
        unfrozen later step as well.

    Raises:
        TypeError, ValueError: another optimizer; ``max_norm`` without ``clip`` or the
            reverse, ``clip`` with ``accumulate``.
        RuntimeError: a gradient exists, another optimizer steps in backward already,
            there are several processes, or ``quantize_model`` has replaced parameters
            since the optimizer was made.
        FloatingPointError: ``on_nonfinite="raise"``, in the pass, or in ``step()``
            where that skips the whole step.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(torch.nn.Linear(4, 2), "E4M3", storage="fp8")
        >>> optimizer = fm.optim.StiffnessMuon.for_model(model, 1e-2, moments="8bit")
        >>> with fm.optim.step_in_backward(optimizer):
        ...     model(torch.ones(1, 4)).square().sum().backward()
        ...     optimizer.step()
        >>> model.weight.grad
        SpentGradient(shape=(2, 4), dtype=torch.float32)

    Source: Lv et al. 2023 (LOMO, arXiv 2306.09782) for stepping in the backward pass,
    and for two passes to clip.
    """
    if not isinstance(optimizer, ManifoldOptimizer) or not optimizer.steps_alone:
        raise TypeError(
            "step_in_backward needs an optimizer of fp8manifold.optim whose parameters step "
            f"independently, not {type(optimizer).__name__}"
        )
    if optimizer._in_backward is not None:
        raise RuntimeError(
            f"this {type(optimizer).__name__} steps in backward already: remove() the first handle"
        )
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            "there are gradients already, which no backward pass would use: call zero_grad() first"
        )
    refuse_replaced(optimizer)
    _check_alone()
    handle = InBackward(optimizer)
    handle._clipping, handle._accumulation = _options(clip, max_norm, first, accumulate)
    handle.check_free(optimizer.param_groups)
    optimizer._in_backward = handle
    for group in optimizer.param_groups:
        handle.watch(group)
    return handle


def _options(
    clip: str | None, max_norm: float | None, first: str, accumulate: str | None
) -> tuple[Clipping | None, Accumulation | None]:
    if clip is None and max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm!r} needs clip='previous' (one backward pass per step, by the norm "
            "of the step "
            "before) or clip='exact' (two backward passes per step)"
        )
    if clip is None and first != "refuse":
        raise ValueError(f"first={first!r} is for clip='previous', and nothing is clipped here")
    if accumulate is not None:
        check_choice("accumulate", accumulate, _SUMS)
    if clip is not None and accumulate is not None:
        raise ValueError(
            f"clip={clip!r} does not go with accumulate={accumulate!r}: sums can be clipped by "
            "clip_grad_norm_; leave "
            "out clip"
        )
    clipping = None if clip is None else Clipping(clip, max_norm, first)
    return clipping, None if accumulate is None else Accumulation()


def _check_alone() -> None:
    if is_distributed() and (size := torch.distributed.get_world_size()) > 1:
        raise RuntimeError(
            f"step_in_backward works in one process, and here are {size}: a step would be taken "
            "before the "
            "gradients have been summed over them"
        )
