"""Views of floats as integers that stay in a register of the CPU.

The compiler's own go through memory, a value at a time where a row ends: there they cost thirty times the arithmetic.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch

__all__ = ["bitcasts_in_registers"]

_NAMES: Final = {torch.float32: "float", torch.int32: "int32_t"}


@contextmanager
def bitcasts_in_registers() -> Iterator[None]:
    """Compile views between float32 and int32 as casts of whole vectors, where this release's compiler can be told."""
    try:
        from torch._inductor.codegen.cpp import CppVecOverrides
        from torch._inductor.virtualized import V

        slow = CppVecOverrides.to_dtype_bitcast
    except (ImportError, AttributeError):
        yield
        return
    with patch.object(CppVecOverrides, "to_dtype_bitcast", staticmethod(_fast(slow, V))):
        yield


def _fast(slow: Callable[..., Any], virtualized: Any) -> Callable[..., Any]:
    def to_dtype_bitcast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
        whole = {dtype, src_dtype} == _NAMES.keys() and virtualized.kernel._get_num_vectors(dtype) == 1
        return f"at::vec::cast<{_NAMES[dtype]}>({x})" if whole else slow(x, dtype, src_dtype)

    return to_dtype_bitcast
