"""Steps on the host of weights that are trained on a device: codes and state stay here, gradients come and codes go."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from fp8manifold._ranks import share_of
from fp8manifold.optim._in_backward import InBackward, step_in_backward
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import manifold_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.tensor import FP8Tensor

__all__ = ["HostOptimizer"]

_HOST = torch.device("cpu")


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer whose state, and a copy of the weights, are in the host's memory, where its native step runs.

    .. math:: \\text{device} = \\text{weights} + \\text{gradients}, \\qquad
              \\text{host} = \\text{weights} + \\text{state} + \\text{gradients}

    The step is that of the optimizer it is made of, to the bit.  On the device remain the weights, one byte each where
    they are codes.  On a GPU copies are of pinned memory and overlap: with ``in_backward`` a parameter steps here while
    the device computes the gradients of others.

    Args:
        params: the parameters that a model computes with, on any device, or groups of them with their options, as
            ``StiffnessMuon.for_model(model).param_groups`` are; no names.
        made: the optimizer's class, or what makes one of groups.
        in_backward: None: gradients stay on the device until ``step()``, where they can be clipped.  A mapping of
            options of :func:`step_in_backward` (none, or ``clip`` and ``max_norm``, say): each gradient leaves the
            device as soon as it is there, is stepped with and freed.
        options: of ``made``, by name.

    Attributes:
        inner: the optimizer of the host's copies.  ``param_groups`` and ``state`` are its own, and so is the state
            dict: it goes into an optimizer on the device, and back.
        handle: what :func:`step_in_backward` gave; None without ``in_backward``.

    A weight that is written by others (``load_state_dict`` of the model) is taken in again before its next step.  NaN,
    Inf and -0 are what they are to ``inner``; a parameter without elements or gradient does not step.

    Raises:
        TypeError: ``made`` gives no optimizer of this library.
        ValueError: a parameter on a manifold (``storage="grid"``), or one that several processes hold parts of.
        RuntimeError: several processes, or as :func:`step_in_backward`.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.quantize_model(nn.Linear(4, 2), "E4M3", storage="fp8")
        >>> optimizer = HostOptimizer(model.parameters(), fm.optim.StiffnessAdamW, lr=1e-2, moments="8bit")
        >>> model(torch.ones(1, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> {str(x.device) for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)}
        {'cpu'}

    Source: ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) for what stays where.
    """

    def __init__(
        self,
        params: Iterable[Any],
        made: Callable[..., torch.optim.Optimizer],
        *,
        in_backward: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check_alone()
        groups = [entry if isinstance(entry, dict) else {"params": [entry]} for entry in params]
        if groups and not any(len(group) > 1 for group in groups):
            groups = [{"params": [p for group in groups for p in _listed(group["params"])]}]
        self._own = [p for group in groups for p in _listed(group["params"])]
        for p in self._own:
            _check_kind(p)
        self._twins = {id(p): _twin_of(p) for p in self._own}
        twins = [{**group, "params": [self._twins[id(p)] for p in _listed(group["params"])]} for group in groups]
        inner = made(twins, **options)
        if not isinstance(inner, ManifoldOptimizer):
            raise TypeError(f"made gives a {type(inner).__name__}, which is no optimizer of fp8manifold.optim")
        self.inner: Any = inner
        self.defaults = inner.defaults
        self._versions = {id(p): p._version for p in self._own}
        self._on_its_way: list[tuple[Tensor, Tensor, Any]] = []
        self._streams: dict[torch.device, Any] = {}
        self.handle: InBackward | None = None
        if in_backward is not None:
            self.handle = step_in_backward(inner, **in_backward)
            for p in self._own:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._take)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Those of ``inner``, with the host's copies for parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of ``inner``, in the host's memory."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of both homes.

        Raises:
            ValueError: ``set_to_none=False``.
        """
        if not set_to_none:
            raise ValueError("set_to_none=False would keep gradients in both homes: they are freed here")
        for p in self._own:
            p.grad = None
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the steps on the host, and send their weights to the device.

        Raises:
            ValueError: a closure, which would be called between two homes.
        """
        if closure is not None:
            raise ValueError("HostOptimizer takes no closure: call it before step()")
        stepped = [] if self.handle is not None else [p for p in self._own if p.grad is not None]
        for p in stepped:
            self._fetch(p)
        self._arrive(wait=True)
        if self.handle is not None and self.handle._accumulation is not None:
            stepped = [p for p in self._own if self._twins[id(p)].grad is not None]
        self.inner.step()
        for p in stepped:
            self._send(p)
            if self.handle is None:
                self._twins[id(p)].grad = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """As ``handle.measure()``, of gradients that come from the device.

        Raises:
            RuntimeError: as there, or without ``in_backward``.
        """
        if self.handle is None:
            raise RuntimeError("measure() takes a norm to clip by: give in_backward={'clip': ..., 'max_norm': ...}")
        with self.handle.measure():
            yield
            with torch.no_grad():
                self._arrive(wait=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: make one with all groups.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("HostOptimizer takes no groups later: make one with all of them")

    def state_dict(self) -> dict[str, Any]:
        """That of ``inner``."""
        saved: dict[str, Any] = self.inner.state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into ``inner``, whatever device the state is on."""
        self.inner.load_state_dict(state_dict)

    def _take(self, p: Tensor) -> None:
        """A hook: let the gradient go to the host, and step with those that are there by now."""
        with torch.no_grad():
            self._fetch(p)
            self._arrive(wait=False)

    def _fetch(self, p: Tensor) -> None:
        """Begin to copy a gradient to the host; on a GPU nobody waits, and in a backward pass it is freed after."""
        gradient = p.grad
        assert gradient is not None
        if self._versions[id(p)] != p._version:
            _adopt(self._twins[id(p)], p)
            self._versions[id(p)] = p._version
        if gradient.device.type != "cuda":
            self._on_its_way.append((p, gradient.to(_HOST, copy=True), None))
        else:
            self._on_its_way.append((p, *self._pinned(gradient)))
        if self.handle is not None:
            p.grad = None

    def _pinned(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """A copy on a stream of its own, behind what the device was told so far, and the event of its end."""
        if (stream := self._streams.get(gradient.device)) is None:
            stream = self._streams[gradient.device] = torch.cuda.Stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            copied = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            copied.copy_(gradient, non_blocking=True)
            event: Any = stream.record_event()
        gradient.record_stream(stream)
        return copied, event

    def _arrive(self, *, wait: bool) -> None:
        """Give the host's copies the gradients that are there, in the order in which they left."""
        while self._on_its_way:
            p, copied, event = self._on_its_way[0]
            if event is not None and not (wait or event.query()):
                return
            if event is not None:
                event.synchronize()
            del self._on_its_way[0]
            twin = self._twins[id(p)]
            if twin.grad is None:
                twin.grad = copied
            else:  # what stands for one that was used, or for a sum
                twin.grad.add_(copied)
            if self.handle is not None:
                self.handle._take(twin)
                if self.handle._accumulation is None:
                    self._send(p)

    def _send(self, p: Tensor) -> None:
        """Send a weight to its device, behind what that was told so far.

        Its memory here is written next with a gradient that was made after that: the copy is over by then.
        """
        twin = self._twins[id(p)]
        if isinstance(p, FP8Tensor) and isinstance(twin, FP8Tensor):
            p.codes.copy_(twin.codes, non_blocking=True)
            p.kept_scale.copy_(twin.kept_scale, non_blocking=True)
            p._changed()
        else:
            p.copy_(twin, non_blocking=True)
        self._versions[id(p)] = p._version


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _check_alone() -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if (size := torch.distributed.get_world_size()) > 1:
        raise RuntimeError(f"HostOptimizer works in one process, and here are {size}")


def _check_kind(p: Tensor) -> None:
    if not isinstance(p, Tensor):
        raise TypeError(f"params has a {type(p).__name__}: give parameters, or groups of them, without names")
    if share_of(p) is not None:
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is sharded: HostOptimizer takes whole ones")
    if not isinstance(p, FP8Tensor) and manifold_of(p) is not None:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is on a manifold, which HostOptimizer leaves on its device: take "
            "storage='fp8'"
        )


def _twin_of(p: Tensor) -> Tensor:
    """The host's copy of a parameter; in pinned memory where it is a GPU's."""
    pinned = p.device.type == "cuda"

    def here(part: Tensor) -> Tensor:
        copied = part.detach().to(_HOST, copy=True)
        return copied.pin_memory() if pinned else copied

    with torch.no_grad():
        if isinstance(p, FP8Tensor):
            copied: Any = p.detach()
            return FP8Parameter(copied.with_parts(here), requires_grad=p.requires_grad)
        return nn.Parameter(here(p), requires_grad=p.requires_grad)


def _adopt(twin: Tensor, p: Tensor) -> None:
    """Take in what others have written into a parameter."""
    if isinstance(p, FP8Tensor) and isinstance(twin, FP8Tensor):
        twin.adopt(p)
        twin.seed, twin.by_operator, twin.draws = p.seed, p.by_operator, p.draws
    else:
        twin.copy_(p)
