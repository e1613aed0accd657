"""Steps in the backward pass: each gradient is used and freed before the next.

    step_in_backward(optimizer)   an InBackward: a hook on every parameter, which
                                  autograd calls once the parameter has its gradient
    backward()   _on_gradient     by a sum: put a GradientSum in the place of ``grad``
                   _step          else clip, `ManifoldOptimizer.step_alone`, and put a
                                  SpentGradient in the place of ``grad``
    optimizer.step()  finish      end the step: step by sums, keep the norm for the next

Autograd may run several threads, so a lock lets one parameter step at a time. Users may
delete the optimizer, change its groups or load a state at any time: the handle has only
a weak reference, and looks a parameter's place up when it needs it. What stands in for
gradients, and clipping, is in `gradients.py`.
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
from fp8manifold._base.param_groups import parameters_of
from fp8manifold._base.replaced import refuse_replaced
from fp8manifold.optim._agreement import is_distributed
from fp8manifold.optim._in_backward.gradients import Accumulation, Clipping, SpentGradient, StandIn
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._slot import describe_parameter

__all__ = ["InBackward", "step_in_backward"]

_SUMS: Final = ("bfloat16",)


class _Hook:
    """The function that autograd calls once a parameter has its gradient.

    It keeps neither handle nor optimizer alive.
    """

    def __init__(self, handle: "InBackward") -> None:
        self.handle = weakref.ref(handle)

    def __call__(self, parameter: Tensor) -> None:
        handle = self.handle()
        if handle is not None:
            handle._on_gradient(parameter)


class InBackward:
    """The hooks by which an optimizer steps in the backward pass.

    :func:`step_in_backward` returns it. It is a context manager that removes the hooks
    at its end. It does not keep the optimizer alive; if the optimizer is deleted,
    nothing steps.

    Args:
        optimizer: the optimizer whose parameters step.

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
        self._optimizer = weakref.ref(optimizer)
        self._hook = _Hook(self)
        self._has_stepped = False
        self._clipping: Clipping | None = None
        self._accumulation: Accumulation | None = None
        self._pass: BackwardPass | None = None
        self._hooks: list[RemovableHandle] = []
        # autograd has one thread per device
        self._step_lock = threading.Lock()
        # by the identity of a parameter: a first guess, checked on every use
        self._last_places: dict[int, tuple[int, int]] = {}
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    @property
    def optimizer(self) -> Any:
        """The optimizer whose parameters step.

        Raises:
            RuntimeError: it was deleted.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(_DELETED)
        return optimizer

    def __enter__(self) -> "InBackward":
        """Return the handle, whose hooks are registered already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Remove the hooks, so that ``step()`` steps again.

        A second call changes nothing.
        """
        _remove_all(self._hooks)
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._in_backward is self:
            optimizer._in_backward = None

    def watch(self, group: dict[str, Any]) -> None:
        """Hook the parameters of a group.

        Each steps with the options of the group that it is in at that moment.

        Args:
            group: one of the optimizer's groups.

        Raises:
            RuntimeError: another optimizer steps one of them in backward. Nothing is
                hooked then.
        """
        self.check_free([group])
        for parameter in group["params"]:
            if self._hook not in _hooks_of(parameter):
                requires_grad = parameter.requires_grad
                # autograd refuses hooks on a frozen parameter, which may train later
                parameter.requires_grad_(True)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))
                parameter.requires_grad_(requires_grad)
        self.listen([group])
        if self._clipping is not None:
            self._clipping.share_previous_norm(self.optimizer.param_groups)

    def check_free(self, groups: list[dict[str, Any]]) -> None:
        """Refuse parameters whose gradients the hooks of another optimizer would use.

        Args:
            groups: groups of parameters.

        Raises:
            RuntimeError: there is such a parameter.
        """
        if self._stepped_by_another(groups) is None:
            return
        # an optimizer that only a reference cycle keeps alive uses no gradients
        gc.collect()
        stepped = self._stepped_by_another(groups)
        if stepped is not None:
            name, other = stepped
            raise RuntimeError(
                f"{name} steps in backward already, with another {type(other).__name__}, which "
                "would use its gradient and free it: call remove() of that optimizer's handle, or "
                "delete the optimizer and the scheduler (torch.optim.lr_scheduler), which keeps it"
            )

    def _stepped_by_another(self, groups: list[dict[str, Any]]) -> tuple[str, Any] | None:
        """Return the first parameter that another optimizer steps, and that optimizer.

        Hooks of optimizers that were deleted are removed.
        """
        for i, group in enumerate(groups):
            for k, parameter in enumerate(group["params"]):
                for handle in self._other_handles(parameter):
                    optimizer = handle._optimizer()
                    if optimizer is None:
                        handle.remove()
                    elif handle._place_of(parameter) is not None:
                        return describe_parameter(group, i, k), optimizer
        return None

    def _other_handles(self, parameter: Tensor) -> list["InBackward"]:
        """Return the handles of other optimizers that have hooked a parameter."""
        hooks = [hook for hook in _hooks_of(parameter) if isinstance(hook, _Hook)]
        handles = [hook.handle() for hook in hooks if hook is not self._hook]
        return [handle for handle in handles if handle is not None]

    def listen(self, groups: list[dict[str, Any]]) -> None:
        """Register the hooks of parameters again.

        ``Module.to`` swaps encoded tensors, and drops their hooks.

        Args:
            groups: groups of parameters.
        """
        for group in groups:
            for parameter in group["params"]:
                hooks = parameter._post_accumulate_grad_hooks
                if hooks is not None:
                    # setting them is what registers them
                    parameter._post_accumulate_grad_hooks = hooks

    def loaded(self, groups: list[dict[str, Any]]) -> None:
        """Continue from a loaded state; the norms of the step under way are forgotten.

        Args:
            groups: the groups of the optimizer after loading.
        """
        self.listen(groups)
        if self._clipping is not None:
            self._clipping.forget()
            self._clipping.share_previous_norm(groups)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the norm of the whole gradient in a backward pass, without a step.

        It is a context for this backward pass, which frees the gradients. With
        ``clip="exact"`` it comes before each pass that steps, with ``"previous"``
        before the first.

        Raises:
            RuntimeError: nothing is clipped, or a step is under way. Also if there was
                no backward pass in the context, or a second one.
            FloatingPointError: with ``clip="previous"`` and ``on_nonfinite="raise"``, a
                norm that is not finite.

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
        clipping.forget_failed_pass()
        if clipping.norms:
            raise RuntimeError(
                "measure() comes between steps: call optimizer.step(), which ends the one under way"
            )
        clipping.takes_no_step = True
        try:
            yield
        except BaseException:
            clipping.forget()
            raise
        finally:
            clipping.takes_no_step = False
        if clipping.end_measurement(self.optimizer.param_groups):
            return
        self._refuse_nonfinite()
        warnings.warn(
            f"measure(): {_NOT_FINITE}: it is no norm to clip by; measure another batch",
            RuntimeWarning,
            stacklevel=3,
        )

    def _refuse_nonfinite(self) -> None:
        """Raise FloatingPointError for a norm that is not finite, if a group says so."""
        if any(group["on_nonfinite"] == "raise" for group in self.optimizer.param_groups):
            raise FloatingPointError(f"{_NOT_FINITE}: on_nonfinite='skip' skips the step")

    def check_whole(self) -> None:
        """Refuse to save in the middle of a step.

        Raises:
            RuntimeError: gradients were used since the last ``optimizer.step()``.
        """
        if self._clipping is None:
            return
        self._clipping.forget_failed_pass()
        if self._clipping.norms:
            raise RuntimeError(
                "a step is under way, and has used gradients already: call optimizer.step(), which "
                "ends it, and save the state afterwards"
            )

    def finish(self) -> None:
        """Do what is left for ``optimizer.step()``.

        It steps with accumulated gradients, and ends the step under way.

        Raises:
            RuntimeError: a gradient that no hook has seen.
            FloatingPointError: a norm that is not finite, with ``clip="exact"`` and
                ``on_nonfinite="raise"``.
        """
        for i, group in enumerate(self.optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not isinstance(parameter.grad, StandIn):
                    raise RuntimeError(
                        f"{describe_parameter(group, i, k)} has a gradient that "
                        "step_in_backward has not seen: it was set by hand, or the "
                        "parameter was moved (model.to); remove() "
                        "the handle, call step_in_backward again"
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
        self.optimizer._note_pass(backward_pass)
        if self._clipping.kind == "exact":
            why = f"{_NOT_FINITE}: the step was skipped"
        else:
            why = f"{_NOT_FINITE}: no step was taken, and the next pass measures again"
        self.optimizer._count_skipped_pass(backward_pass, [], why)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Use the gradient of a parameter, which autograd has just computed."""
        if self._optimizer() is None:
            # deleted before its first step: a loop without step() would never notice
            if not self._has_stepped:
                raise RuntimeError(_DELETED)
            return
        self._has_stepped = True
        _check_alone()
        gradient = parameter.grad
        if isinstance(gradient, StandIn):
            # the sum grows; or the parameter left and came back, has two hooks, and the
            # first has stepped
            return
        place = self._place_of(parameter)
        if place is None:
            # hooks of a replaced parameter went on to the one in its place
            refuse_replaced(self.optimizer)
            # no group contains it any more: its gradient belongs to others
            return
        group = self.optimizer.param_groups[place[0]]
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {describe_parameter(group, *place)} was freed by another hook "
                "(register_post_accumulate_grad_hook) before step_in_backward could use it: remove "
                "that hook"
            )
        with self._step_lock, torch.no_grad():
            if self._accumulation is not None:
                self._accumulation.take(self.optimizer, group, parameter)
            else:
                self._step(group, parameter, gradient, place)

    def _step(
        self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, place: tuple[int, int]
    ) -> None:
        """Clip a gradient, take the step of its parameter, and free it."""
        clipping, groups = self._clipping, self.optimizer.param_groups
        backward_pass = self._pass
        if backward_pass is None or not backward_pass.is_under_way:
            backward_pass = BackwardPass()
            self._pass = backward_pass
        backward_pass.join()
        if clipping is None or clipping.measure_and_clip(gradient, place, groups, backward_pass):
            self.optimizer.step_alone(group, parameter, backward_pass)
        if clipping is None:
            parameter.grad = SpentGradient(parameter)
        elif clipping.takes_no_step:
            parameter.grad = None
        else:
            norm = clipping.norms[place]
            parameter.grad = SpentGradient(parameter, norm, clipping.has_clipped_by)

    def _place_of(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the index of a parameter's group, and of the parameter in it, or None.

        It may change: ``load_state_dict`` replaces groups, and users change them.
        """
        groups = self.optimizer.param_groups
        i, k = self._last_places.get(id(parameter), (0, 0))
        if i < len(groups) and k < len(groups[i]["params"]) and groups[i]["params"][k] is parameter:
            return i, k
        for i, group in enumerate(groups):
            for k, member in enumerate(group["params"]):
                if member is parameter:
                    self._last_places[id(parameter)] = (i, k)
                    return i, k
        return None


_NOT_FINITE: Final = "the norm of the whole gradient is not finite"
_DELETED: Final = (
    "the optimizer that step_in_backward was given has been deleted: keep it in a variable, its "
    "handle does not keep it"
)


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
    r"""Step each parameter as soon as its gradient is computed, and free the gradient.

    At most one gradient is alive at a time:

    .. math:: \text{peak} = \text{weights} + \text{state} + \max_i \text{gradient}_i, \qquad
              g \leftarrow \min(1, \mathrm{max\_norm} / (\lVert g \rVert + 10^{-6}))\, g

    in place of ``weights + state + sum_i gradient_i``. The second formula is clipping,
    with ``clip``. Without it the numbers are those of ``optimizer.step()`` after the
    same pass, and ``step()`` only ends the step. ``docs/in-backward.md`` has each
    option with an example.

    A used gradient becomes a placeholder without memory, so a second pass before
    ``zero_grad()`` is refused. ``GradScaler`` and several processes are refused, too.

    If a gradient is not finite, its parameter skips the step, and the pass warns and
    counts once. With ``clip="exact"``, and with sums, all parameters skip it, in
    ``step()``. Sums warn only after ``warn_after`` skipped steps in a row.

    Args:
        optimizer: any of this library except :class:`FisherNaturalGradient` and
            :class:`StiffnessWrapper`.
        clip: None does not clip. ``exact`` gives the numbers of ``clip_grad_norm_``,
            and takes two passes per step, the first under ``handle.measure()`` for the
            norm. ``previous`` takes one pass. It clips by the larger of two norms: the
            last finite one of an earlier step, which groups and states store as
            ``previous_norm``, and that of the pass so far.
        max_norm: the bound on the norm of the whole gradient; inf only measures norms.
        first: what ``clip="previous"`` does in the first pass, without a norm:
            ``refuse`` raises, ``measure`` takes the norm and steps nothing.
        accumulate: None, or ``bfloat16``, which sums the gradients of several passes in
            ``grad``, rounded stochastically, with 2 bytes per weight.

    Returns:
        A handle with ``remove()``, which is a context manager too. Groups and
        parameters that are added or unfrozen later step as well.

    Raises:
        TypeError: an optimizer that this is not for, or an option of another type.
        ValueError: an option out of range, ``max_norm`` without ``clip`` or ``clip``
            without ``max_norm``, or ``clip`` with ``accumulate``.
        RuntimeError: a gradient exists, another optimizer steps in backward already,
            there are several processes, or ``quantize_model`` has replaced parameters
            since the optimizer was made.
        FloatingPointError: with ``on_nonfinite="raise"``, in the pass, or in ``step()``
            if that skips the whole step.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(torch.nn.Linear(4, 2), "E4M3", storage="codes")
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
    if any(p.grad is not None for p in parameters_of(optimizer)):
        raise RuntimeError(
            "there are gradients already, which no backward pass would use: call zero_grad() first"
        )
    refuse_replaced(optimizer)
    _check_alone()
    _check_options(clip, max_norm, first, accumulate)
    handle = InBackward(optimizer)
    if clip is not None:
        handle._clipping = Clipping(clip, max_norm, first)
    if accumulate is not None:
        handle._accumulation = Accumulation()
    handle.check_free(optimizer.param_groups)
    optimizer._in_backward = handle
    for group in optimizer.param_groups:
        handle.watch(group)
    return handle


def _check_options(
    clip: str | None, max_norm: float | None, first: str, accumulate: str | None
) -> None:
    """Raise unless the options go together."""
    if clip is None and max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm!r} needs clip='previous' (one backward pass per step, by the norm "
            "of the step before) or clip='exact' (two backward passes per step)"
        )
    if clip is None and first != "refuse":
        raise ValueError(f"first={first!r} is for clip='previous', and nothing is clipped here")
    if accumulate is not None:
        check_choice("accumulate", accumulate, _SUMS)
    if clip is not None and accumulate is not None:
        raise ValueError(
            f"clip={clip!r} does not go with accumulate={accumulate!r}: sums can be clipped by "
            "clip_grad_norm_; leave out clip"
        )


def _check_alone() -> None:
    """Raise RuntimeError if there are several processes."""
    size = torch.distributed.get_world_size() if is_distributed() else 1
    if size > 1:
        raise RuntimeError(
            f"step_in_backward works in one process, and there are {size}: a step would be "
            "taken before gradients are summed over the processes"
        )
