"""The step and the codec as Triton kernels for NVIDIA GPUs: the bits of native code,
one launch for many tensors.

Only ``format``, ``stages``, ``step`` and ``arrays`` import Triton, and are imported
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


@cache
def is_installed() -> bool:
    """True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_available() -> bool:
    """True if kernels run on this machine's GPU: only CUDA, as no other compiler's code
    has been checked.
    """
    return (
        torch.version.cuda is not None
        and is_installed()
        and not is_interpreted()
        and _keeps_subnormals()
    )


@cache
def is_interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def _keeps_subnormals() -> bool:
    """True if this Triton can compile without flushing subnormals to zero; the process
    is warned once if not.
    """
    version = importlib.import_module("triton").__version__  # under whatever name it was installed
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _KEEPS_SUBNORMALS:
        return True
    warnings.warn(
        f"Triton {version} flushes subnormals to zero: GPU kernels need Triton 3.6, which PyTorch "
        f"2.10 brings; "
        "PyTorch's own operations run instead, slower",
        UserWarning,
        stacklevel=2,
    )
    return False


@cache
def options() -> dict[str, bool | int]:
    """Options of a compilation, as far as this Triton knows them: no contraction, and
    subnormals.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    wanted: dict[str, bool | int] = {
        "num_warps": 4,
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
    }
    return {
        name: value for name, value in wanted.items() if name in CUDAOptions.__dataclass_fields__
    }
