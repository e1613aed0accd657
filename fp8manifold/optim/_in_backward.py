"""Steps taken while gradients come: each is used, and freed, before the next is there."""

import threading
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8manifold.optim._agreement import described
from fp8manifold.optim._optimizer import ManifoldOptimizer

__all__ = ["InBackward", "step_in_backward"]

_SPENT = (
    "this gradient has been used and freed: under step_in_backward a parameter's step is taken as soon as its gradient "
    "is there, so gradients cannot be accumulated, clipped, scaled or read; call optimizer.zero_grad() between "
    "backward passes"
)
_ZEROED = (
    "zero_grad(set_to_none=False) keeps gradients, as zeros, for the next backward pass to add to: under "
    "step_in_backward they are freed as soon as they are used; call zero_grad(set_to_none=True), the default"
)
_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class SpentGradient(Tensor):
    """What stands for a gradient that has been used: its shape and dtype, no memory, and a refusal of all else."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "SpentGradient":
        """A stand-in of the parameter's shape."""
        return Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Say what became of it."""
        return f"SpentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Refuse everything but being detached, as torch does with the gradients that it sets to None."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(_ZEROED if func in _ZEROING else _SPENT)


class InBackward:
    """The hooks by which an optimizer steps in the backward pass, as :func:`step_in_backward` gives them.

    A context manager that removes them at its end.

    Args:
        optimizer: whose parameters step.

    Attributes:
        optimizer: the same.

    Raises:
        RuntimeError: in a backward pass, where there are several processes by then.
        FloatingPointError: in a backward pass, for a gradient that is not finite, with ``on_nonfinite="raise"``.

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
        self.optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._one_at_a_time = threading.Lock()  # devices have a thread each
        self._last_places: dict[int, tuple[int, int]] = {}  # where to look first, and nothing that is relied upon

    def __enter__(self) -> "InBackward":
        """Nothing that the constructor has not done."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Let the optimizer step as it did before; twice is once."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.optimizer._in_backward is self:
            self.optimizer._in_backward = None

    def watch(self, group: dict[str, Any]) -> None:
        """Take the steps of a group's parameters from now on, each with the options of the group that it is in then."""
        for parameter in group["params"]:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))
        self.listen([group])

    def listen(self, groups: list[dict[str, Any]]) -> None:
        """Have torch call the hooks of groups: ``Module.to`` swaps encoded tensors, and forgets those that they had."""
        for group in groups:
            for parameter in group["params"]:
                if (hooks := parameter._post_accumulate_grad_hooks) is not None:
                    parameter._post_accumulate_grad_hooks = hooks

    def finish(self) -> None:
        """What is left for ``optimizer.step()``: nothing, unless a gradient came that no hook has seen.

        Raises:
            RuntimeError: there is one.
        """
        for group in self.optimizer.param_groups:
            for k, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not isinstance(parameter.grad, SpentGradient):
                    i = next(i for i, each in enumerate(self.optimizer.param_groups) if each is group)
                    raise RuntimeError(
                        f"{described(group, i, k)} has a gradient that step_in_backward was not told of: it was frozen "
                        "when that was called, or moved since (model.to), or its gradient was set by hand; remove() "
                        "and call it again"
                    )

    def _take(self, parameter: Tensor) -> None:
        _check_alone()
        if isinstance(parameter.grad, SpentGradient):
            return  # it was taken out and put back, and has been stepped for the hook of either time
        if (place := self._place_of(parameter)) is None:
            return  # it has been taken out: its gradient is somebody else's
        group = self.optimizer.param_groups[place[0]]
        with self._one_at_a_time, torch.no_grad():
            self.optimizer.step_alone(group, parameter)
            parameter.grad = SpentGradient(parameter)

    def _place_of(self, parameter: Tensor) -> tuple[int, int] | None:
        """Which parameter of which group it is now: groups are others after ``load_state_dict``, and may change."""
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


def step_in_backward(optimizer: torch.optim.Optimizer) -> InBackward:
    """Step each parameter as soon as its gradient is there, and free the gradient: no two need memory at once.

    .. math:: \\text{peak} = \\text{weights} + \\text{state} + \\max_i \\text{gradient}_i

    in place of ``weights + state + sum_i gradient_i``.  The numbers are those of ``optimizer.step()`` after the same
    backward pass.  The loop stays as it is: ``zero_grad()``, ``backward()``, ``step()``, which has nothing left to do
    but to end the step for schedulers.

    A gradient that has been used is replaced by a stand-in without memory.  What cannot work with gradients that are
    gone is refused: a second backward pass before ``zero_grad()`` (accumulation), clipping, ``GradScaler``, reading
    them, and more than one process.  A gradient that is not finite leaves out the step of its own parameter only,
    with a warning (``on_nonfinite="raise"``: ends the backward pass).  On a GPU the card decides on that, and the
    warning comes with the parameter's next step.

    Args:
        optimizer: one of this library's whose parameters step independently: all but
            :class:`FisherNaturalGradient` and :class:`StiffnessWrapper`.

    Returns:
        A handle with ``remove()``, which is a context manager too.  Groups added later are stepped alike.

    Raises:
        TypeError: another optimizer.
        RuntimeError: a gradient is there already, the optimizer steps in backward already, or there are several
            processes.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(torch.nn.Linear(4, 2), "E4M3", storage="fp8")
        >>> optimizer = fm.optim.StiffnessMuon.for_model(model, 1e-2, moments="8bit")
        >>> handle = fm.optim.step_in_backward(optimizer)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 4)).square().sum().backward()
        ...     optimizer.step()
        >>> model.weight.grad
        SpentGradient(shape=(2, 4), dtype=torch.float32)

    Source: Lv et al. 2023 (LOMO, arXiv 2306.09782) for stepping in the backward pass.
    """
    if not isinstance(optimizer, ManifoldOptimizer) or not optimizer.steps_alone:
        raise TypeError(
            f"step_in_backward needs an optimizer of fp8manifold.optim whose parameters step independently, not "
            f"{type(optimizer).__name__}"
        )
    if optimizer._in_backward is not None:
        raise RuntimeError(f"this {type(optimizer).__name__} steps in backward already: remove() the first handle")
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError("there are gradients already, which no backward pass would use: call zero_grad() first")
    _check_alone()
    handle = InBackward(optimizer)
    optimizer._in_backward = handle
    for group in optimizer.param_groups:
        handle.watch(group)
    return handle


def _check_alone() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"step_in_backward works in one process, and here are {size}: a step would be taken before the "
                "gradients have been summed over them"
            )
