"""The step and the codec in plain C, built when the package is installed: the bits of
the eager stages, in one pass.

If the library was not built, :func:`library` is None, everything runs eagerly, and one
:class:`NativeUnavailableWarning` says so.
"""

import ctypes
import hashlib
import warnings
from functools import cache
from pathlib import Path
from typing import Final

import torch

_WORTH_A_THREAD: Final = 65_536


class NativeUnavailableWarning(UserWarning):
    """Steps, decoding and rounding run without native code: the same results, several
    times slower.
    """


def library() -> ctypes.CDLL | None:
    """The library, with the types of its functions; None, with one warning, if there is
    none.
    """
    kernels, unsaid = _found()
    if (
        unsaid
    ):  # popped before warning: where warnings are errors, the next call does not raise again
        warnings.warn(unsaid.pop(), NativeUnavailableWarning, stacklevel=2)
    return kernels


@cache
def _found() -> tuple[ctypes.CDLL | None, list[str]]:
    """The library as first loaded, whatever becomes of the file, and the warning that
    is still to be given.
    """
    path = Path(__file__).with_name("_kernels.so")
    reason = "it was built from other sources"
    try:
        if not path.exists():
            reason = "there was no C compiler to build it, or it was removed since"
        else:
            kernels = ctypes.CDLL(str(path))
            kernels.fp8manifold_sources.restype = ctypes.c_char_p
            if kernels.fp8manifold_sources().decode() == _digest(path.parent):
                return _with_types(kernels), []
    except (OSError, AttributeError) as error:
        reason = str(error).splitlines()[0]
    return None, [
        f"fp8manifold's native code is not available ({reason}): steps and rounding run without "
        f"it, with the same "
        "results, several times slower; install the package again where there is a C compiler"
    ]


def threads_for(elements: int) -> int:
    """The number of torch's threads that are worth starting for so many elements."""
    return min(torch.get_num_threads(), elements // _WORTH_A_THREAD + 1)


def is_available() -> bool:
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
        function.argtypes = (pointer, number)
        function.restype = None
    kernels.fp8manifold_content.argtypes = (pointer, size, pointer)
    kernels.fp8manifold_content.restype = ctypes.c_uint64
    return kernels


def _digest(folder: Path) -> str:
    """The digest that a library of the sources in a folder has; see ``hatch_build.py``."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.[ch]")):
        found.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return found.hexdigest()[:16]
