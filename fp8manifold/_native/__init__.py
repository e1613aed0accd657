"""The step and the codec in plain C, built when the package is installed: the bits of the eager stages, in one pass.

Nothing is kept here but what a specification is.  Where the library was not built, :func:`library` is None, everything
runs eager, and one :class:`NativeUnavailableWarning` says so.
"""

import ctypes
import warnings
from functools import cache
from pathlib import Path

__all__ = ["NativeUnavailableWarning", "is_available", "library"]


class NativeUnavailableWarning(UserWarning):
    """Steps, decoding and rounding run eager: the same results, several times slower."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, with the types of its functions; None where there is none."""
    folder = Path(__file__).parent
    found = [path for pattern in ("_kernels*.so", "_kernels*.pyd", "_kernels*.dylib") for path in folder.glob(pattern)]
    reason = "it was not built"
    for path in sorted(found):
        try:
            return _with_types(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            reason = str(error).splitlines()[0]
    warnings.warn(
        f"fp8manifold's native code is not available ({reason}): steps and rounding run eager, with the same results, "
        "several times slower; install the package where there is a C compiler to have it",
        NativeUnavailableWarning,
        stacklevel=2,
    )
    return None


def is_available() -> bool:
    """Whether there is native code to run."""
    return library() is not None


def _with_types(kernels: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernels.fp8manifold_step.argtypes = (pointer, size, number)
    kernels.fp8manifold_step.restype = None
    kernels.fp8manifold_squares.argtypes = (pointer, pointer, size)
    kernels.fp8manifold_squares.restype = ctypes.c_float
    for function in (kernels.fp8manifold_decode, kernels.fp8manifold_round, kernels.fp8manifold_encode):
        function.argtypes = (pointer, number)
        function.restype = None
    kernels.fp8manifold_content.argtypes = (pointer, size, pointer)
    kernels.fp8manifold_content.restype = ctypes.c_uint64
    kernels.fp8manifold_array_size.restype = size
    kernels.fp8manifold_sizes.argtypes = (number,)
    kernels.fp8manifold_sizes.restype = size
    return kernels
