"""The step and the codec as Triton kernels, for GPUs of NVIDIA: the bits of native code, one launch for many tensors.

Only ``format``, ``chart``, ``step`` and ``arrays`` import Triton, and only ``launch`` imports these, when there is
something to launch: an installed Triton without a driver fails late.
"""

import importlib.util
import os
from functools import cache
from typing import Final

import torch

__all__ = ["is_available", "is_installed", "options"]

_INTERPRETED: Final = "TRITON_INTERPRET"


@cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_available() -> bool:
    """Whether kernels run on this machine's GPU: CUDA's, for no other compiler's code was looked at."""
    interpreted = os.environ.get(_INTERPRETED, "0").lower() in ("1", "true", "on", "yes", "y")
    return torch.version.cuda is not None and is_installed() and not interpreted


@cache
def options(registers: int | None = None) -> dict[str, bool | int]:
    """What a kernel is compiled with, short of what this Triton doesn't know: no contraction, and subnormals.

    Args:
        registers: the most that a thread may have; None: as many as the compiler takes.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    wanted: dict[str, bool | int] = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    if registers is not None:
        wanted["maxnreg"] = registers
    return {name: value for name, value in wanted.items() if name in CUDAOptions.__dataclass_fields__}
