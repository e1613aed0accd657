"""What would take an encoded tensor for memory full of floats: refused, each with what to do instead."""

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem")


def check_not_sent(func: Any) -> None:
    """Raise RuntimeError for a collective but a broadcast, which sends every part."""
    if func.namespace in _COLLECTIVES and func._schema.name != "c10d::broadcast_":
        refuse_collective(func)


def refuse_collective(func: Any) -> NoReturn:
    """Raise RuntimeError: it would send floats, or nothing."""
    raise RuntimeError(
        f"{func} can't take an FP8Tensor, whose values are codes at scales of their own: broadcast the whole of it, or "
        "send its codes, scale and counter each, or state_dict(), or dequantize()"
    )


def refuse_part_of_buffer(values: Tensor) -> None:
    """Raise RuntimeError where several processes are to share a buffer that a parameter becomes part of.

    ``ZeroRedundancyOptimizer`` would send the buffer, in which no step of codes is.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or hasattr(values, "is_share"):
        return
    if values._base is not None or values.untyped_storage().nbytes() > values.nbytes:
        raise RuntimeError(
            "an FP8Tensor can't become part of a buffer of floats, as its values are codes: take "
            "parameters_as_bucket_view=False, or copy_() where values alone are meant"
        )


def guard_memory(x: Tensor) -> None:
    """Make what asks for the values' address in C++ fail, where it would write to no memory at all."""
    torch._C._set_throw_on_mutable_data_ptr(x)


class NoStorage:
    """The storage of a tensor that has no memory: it has a size and an identity, and everything else is refused.

    Other libraries compare the size before they save, and compilers keep the identity.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def size(self) -> int:
        """Bytes that the values would take as floats."""
        return int(self._storage.size())

    nbytes = size

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith("_share"):
            refuse_memory("storage")
        return getattr(self._storage, name)


def refuse_memory(name: str) -> NoReturn:
    """Raise RuntimeError: there is no memory full of floats."""
    raise RuntimeError(
        f"an FP8Tensor has no {name} of its own, as its values are codes: to save it, take state_dict() of the module "
        "that it is in, whose entries are plain tensors; for plain floats take dequantize()"
    )
