"""Reading a tensor's values: only if it has any, only outside of compiled graphs, and
from a GPU only once.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

# torch.compiler.disable does the same and imports the whole compiler at once: more than
# half of this library's import.
eager_only = _disable_dynamo
_READ: Final = WeakIdKeyDictionary()  #: By tensor: its version when it was read, and what was read.


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


def read_cached(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """``read(x)``, with one ``read`` for each tensor; from a GPU read again only once
    autograd counts a write to it.
    """
    if (
        is_read_at_once(x)
        or torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_inference()
    ):
        return read(x)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph can't record a layer that draws random bits or freezes its first scale: "
            "every replay would repeat the bits and the scale of the recording; run the layer "
            "outside of the graph"
        )
    kept = _READ.get(x)
    if kept is None or kept[0] != x._version:
        kept = _READ[x] = (x._version, read(x))
    return kept[1]() if callable(kept[1]) else kept[1]


def refuse_on_card(right: Tensor, message: str) -> None:
    """Assert on the GPU that ``right`` is true; if not, the host raises an error where
    it waits next.
    """
    torch._assert_async(right, message)


def advance(x: Tensor, number: int) -> None:
    """Add one to a counter on the device whose ``number`` the host knows."""
    x.add_(1)
    remember_value(x, number + 1)


def remember_value(x: Tensor, number: Any) -> None:
    """Spare :func:`read_cached` the wait for a number just written on a GPU: it is given, or
    a function that returns it.
    """
    if not (
        is_read_at_once(x)
        or torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_inference()
    ):
        _READ[x] = (x._version, number)


class PendingValues:
    """A tensor's values, copied to the host once the work before is done: only reading
    them waits.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = self._values = x
        self._there: torch.cuda.Event | None = None
        if x.is_cuda:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._values, self._there = host.copy_(x, non_blocking=True), torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(x.device))

    @property
    def is_there(self) -> bool:
        """True if the values can be read without a wait."""
        return self._there is None or self._there.query()

    @cached_property
    def values(self) -> Any:
        """The values as numbers, in lists."""
        if self._there is not None:
            self._there.synchronize()
        return self._values.tolist()


class PendingMaximum:
    """The largest of numbers that a GPU computes, read without a wait once it has
    reached the host.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None
        self._later: PendingValues | None = None

    def add(self, number: Tensor) -> float | None:
        """Add a number; the largest of those before it if it has reached the host,
        which then drops them.
        """
        found = None
        if self._later is not None and self._later.is_there:
            found, self._largest = float(self._later.values), None
        self._largest = number if self._largest is None else torch.maximum(self._largest, number)
        self._later = PendingValues(self._largest)
        return found
