"""The step and the codec as Triton kernels for NVIDIA GPUs.

They have the bits of native code. One launch serves many tensors::

    kinds    facts that a kernel is compiled for
    launch   launches of steps, from a table      whole    launches over one array
    step     kernels of the step                  arrays   kernels over one array
    stages   the stages of a step                  factors  kernels before Adafactor's steps
    format   codes, values, rounding, random words

Only ``format``, ``stages``, ``step``, ``factors`` and ``arrays`` import Triton. They are imported
when there is something to launch: an installed Triton without a driver fails late.
"""

import importlib
import importlib.util
import os
import re
import warnings
from functools import cache
from typing import Final

import torch

_KEEPS_SUBNORMALS: Final = (3, 6)
"""The first version of Triton with an option not to flush subnormals."""


@cache
def is_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_available() -> bool:
    """Return whether kernels run on this machine's GPU.

    Only CUDA counts: no other compiler's code has been checked.
    """
    return (
        torch.version.cuda is not None
        and is_installed()
        and not is_interpreted()
        and _keeps_subnormals()
    )


@cache
def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def _keeps_subnormals() -> bool:
    """Return whether this Triton can compile without flushing subnormals to zero.

    If not, warn; the answer is cached, so that a process is warned once.
    """
    # Triton may be installed under another distribution's name.
    version = importlib.import_module("triton").__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _KEEPS_SUBNORMALS:
        return True
    warnings.warn(
        f"Triton {version} flushes subnormals to zero: GPU kernels need Triton 3.6, which PyTorch "
        "2.10 brings; PyTorch's own operations run instead, slower",
        UserWarning,
        stacklevel=2,
    )
    return False


@cache
def options() -> dict[str, bool | int]:
    """Return the options of a compilation, as far as this Triton knows them.

    Products and sums are not contracted, and subnormals are not flushed.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    wanted: dict[str, bool | int] = {
        "num_warps": 4,
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
    }
    known = CUDAOptions.__dataclass_fields__
    return {name: value for name, value in wanted.items() if name in known}
