"""Read a tensor's values: only if it has any, only outside of compiled graphs.

Reading a number from a GPU waits for all the work before it. So a number is read once and
remembered with the tensor's version, which autograd raises at every write
(:func:`read_cached`); a number that the host can predict is noted without being read
(:func:`remember_value`, :func:`advance`); and a verdict that can wait is copied to the host
in the background (:class:`PendingValues`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

# torch.compiler.disable does the same, but imports the whole compiler at once. That would
# take longer than the rest of this library's import.
eager_only = _disable_dynamo


@dataclass(frozen=True)
class _CachedRead:
    #: the tensor's version when it was read
    version: int
    #: the value, or a function that returns it
    value: Any


_CACHE: Final = WeakIdKeyDictionary()
"""The :class:`_CachedRead` of each tensor on a GPU that was read."""


def has_values(x: Tensor) -> bool:
    """True if there is anything to check or to round in ``x``."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_exporting() -> bool:
    """True while torch.export traces."""
    # torch.compiler.is_exporting() is True under torch.compile too with torch 2.8
    return bool(torch.compiler._is_exporting_flag)


def refuse_trace() -> None:
    """Raise RuntimeError under ``torch.jit.trace``, whose graphs have no bits of floats."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            "torch.jit.trace can't record rounding to a format, which reads the bits of floats: "
            "use torch.export"
        )


def is_read_at_once(x: Tensor) -> bool:
    """True if a value can be read without a wait."""
    return not x.is_cuda


def read_cached(x: Tensor, reader: Callable[[Tensor], Any]) -> Any:
    """Return ``reader(x)``; from a GPU, read again only after a write to ``x``.

    A tensor is remembered with one value: it must always be read by the same function.

    Raises:
        RuntimeError: a CUDA graph is being recorded, in which nothing can be read.
    """
    if is_read_at_once(x) or not _is_cacheable(x):
        return reader(x)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph can't record a layer that draws random bits or freezes its first scale: "
            "every replay would repeat the bits and the scale of the recording; run the layer "
            "outside of the graph"
        )
    cached: _CachedRead | None = _CACHE.get(x)
    if cached is None or cached.version != x._version:
        cached = _CachedRead(x._version, reader(x))
        _CACHE[x] = cached
    return cached.value() if callable(cached.value) else cached.value


def _is_cacheable(x: Tensor) -> bool:
    """True for a plain tensor that counts the writes to it."""
    if torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and not x.is_inference()


def refuse_on_gpu(condition: Tensor, message: str) -> None:
    """Assert on the GPU that a condition is true.

    If it is not, the host raises an error where it waits next.
    """
    torch._assert_async(condition, message)


def advance(x: Tensor, number: int) -> None:
    """Add one to a counter on a device, whose present ``number`` the host knows."""
    x.add_(1)
    remember_value(x, number + 1)


def remember_value(x: Tensor, value: Any) -> None:
    """Spare :func:`read_cached` the wait for what was just written to ``x`` on a GPU.

    The value is given, or a function that returns it.
    """
    if not is_read_at_once(x) and _is_cacheable(x):
        _CACHE[x] = _CachedRead(x._version, value)


class PendingValues:
    """A tensor's values, copied to the host once the GPU has done the work before.

    Only reading them waits.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._values = x
        self._arrival: torch.cuda.Event | None = None
        if x.is_cuda:
            host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._values = host.copy_(x, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(x.device))

    @property
    def has_arrived(self) -> bool:
        """True if the values can be read without a wait."""
        return self._arrival is None or self._arrival.query()

    @cached_property
    def values(self) -> Any:
        """The values as numbers, in lists."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values.tolist()


class PendingMaximum:
    """A running maximum of numbers on a GPU, which the host looks at without a wait."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None
        self._pending: PendingValues | None = None

    def add(self, number: Tensor) -> float | None:
        """Add a number; return the maximum of those before it if it has arrived.

        The maximum then starts anew. None means that it is still on its way.
        """
        arrived = None
        if self._pending is not None and self._pending.has_arrived:
            arrived = float(self._pending.values)
            self._largest = None
        self._largest = number if self._largest is None else torch.maximum(self._largest, number)
        # A copy that has not arrived may go: the new maximum is over its numbers too.
        self._pending = PendingValues(self._largest)
        return arrived
