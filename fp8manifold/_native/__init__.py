"""The step and the codec in plain C: the bits of PyTorch's operations, in one pass.

The C code is built when the package is installed (``hatch_build.py``) and loaded by
ctypes::

    _interface.py, *.c, *.h  --hatch_build.py-->  _kernels.so, with their digest
    library()    the loaded file, if the digest is that of the tables and of the sources
                 beside it; else None, and everything runs in PyTorch

If there is none, one :class:`NativeUnavailableWarning` says so.
"""

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch

from fp8manifold import _interface, formats
from fp8manifold._native._sources import digest, header_text

WORTH_A_THREAD: Final = 65_536
"""Elements for which starting a thread pays."""


class NativeUnavailableWarning(UserWarning):
    """A warning that steps, decoding and rounding run without native code.

    The results are the same, but take several times longer.
    """


class _Loaded(NamedTuple):
    """The library, or None, and the warning that is still to be given, if any."""

    kernels: ctypes.CDLL | None
    pending_warnings: list[str]


def library() -> ctypes.CDLL | None:
    """Return the library; or None, with one warning."""
    loaded = _load()
    if loaded.pending_warnings:
        # Popped before it is given: where warnings are errors, the next call does not
        # raise again.
        message = loaded.pending_warnings.pop()
        warnings.warn(message, NativeUnavailableWarning, stacklevel=2)
    return loaded.kernels


@cache
def _load() -> _Loaded:
    """Load the library, once: it stays as it is, whatever becomes of the file."""
    path = Path(__file__).with_name("_kernels.so")
    reason = "it was built from other sources"
    try:
        if not path.exists():
            reason = "there was no C compiler to build it, or it was removed since"
        else:
            kernels = ctypes.CDLL(str(path))
            kernels.fp8manifold_sources.restype = ctypes.c_char_p
            header = header_text(_interface, formats)
            if kernels.fp8manifold_sources().decode() == digest(path.parent, header):
                return _Loaded(_with_types(kernels), [])
    except (OSError, AttributeError) as error:
        reason = str(error).splitlines()[0]
    message = (
        f"fp8manifold's native code is not available ({reason}): steps and rounding run without "
        "it, with the same results, several times slower; install the package again where there "
        "is a C compiler"
    )
    return _Loaded(None, [message])


def most_threads(elements: int) -> int:
    """Return how many threads are worth starting for so many elements, if torch has them."""
    return elements // WORTH_A_THREAD + 1


def threads_for(elements: int) -> int:
    """Return how many of torch's threads are worth starting for so many elements."""
    return min(torch.get_num_threads(), most_threads(elements))


def is_available() -> bool:
    """Return whether the library could be loaded."""
    return library() is not None


def _with_types(kernels: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernels.fp8manifold_step.argtypes = (pointer, size, number)
    kernels.fp8manifold_step.restype = None
    kernels.fp8manifold_squares.argtypes = (pointer, pointer, size)
    kernels.fp8manifold_squares.restype = ctypes.c_float
    for function in (
        kernels.fp8manifold_decode,
        kernels.fp8manifold_round,
        kernels.fp8manifold_encode,
    ):
        function.argtypes = (pointer, pointer, pointer, pointer, number)
        function.restype = None
    kernels.fp8manifold_rescale.argtypes = (pointer, pointer, pointer, pointer, number)
    kernels.fp8manifold_rescale.restype = None
    kernels.fp8manifold_exponents.argtypes = (pointer, pointer, pointer, number)
    kernels.fp8manifold_exponents.restype = None
    kernels.fp8manifold_content.argtypes = (pointer, size, pointer)
    kernels.fp8manifold_content.restype = ctypes.c_uint64
    return kernels
