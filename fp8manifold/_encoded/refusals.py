"""What would take an encoded tensor for memory full of floats: refused, each with what to do instead."""

import sys
from types import FrameType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem")
_SHARDING: Final = (
    *("torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._composable.", "torch.distributed._shard."),
    *("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.utils."),
    *("torch.distributed.algorithms.", "torch.distributed.distributed_c10d."),
    "torch.distributed.optim.zero_redundancy_optimizer._build_param_buckets",
)
_RIGHT: Final = ("c10d::broadcast_", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
DDP_START: Final = "torch.distributed.utils._sync_module_states"
_BY_ROWS: Final = ("torch.distributed.fsdp._fully_shard.", "torch.distributed._shard._utils.")
_UNPADS: Final = ("torch.distributed.tensor.placement_types.", "torch.distributed.tensor._collective_utils.")
"""What cuts tensors into rows and pads them, which codes can be."""
_BETWEEN: Final = ("torch._tensor.", "torch.functional.", "torch._compile.", "torch._dynamo.", "fp8manifold.")
_CUTS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("split", "slice", "new_zeros", "new_empty", "as_strided", "view", "copy_", "detach", "alias"),
        *("_to_copy", "constant_pad_nd", "empty_like"),
    )
)
_WHY: Final = "can't take an FP8Tensor, whose values are codes at scales of their own"
_WAYS: Final = {
    "send": "broadcast the whole of it, or send its codes, scale and counter each, or dequantize()",
    "copy": "call fp8manifold.distributed.sync(model), then take init_sync=False, or storage='grid' or 'master'",
    "shard": "take fully_shard, load a full state before it, or take storage='master', or dequantize_model()",
    "bucket": "take parameters_as_bucket_view=False",
}

_OTHER_WAYS: Final = {
    "torch.nn.parallel.": "copy",
    "torch.distributed.utils.": "copy",
    "torch.distributed.distributed_c10d.": "send",
    "torch.distributed.optim.": "bucket",
}


def _caller() -> str:
    """The name of what called an operator."""
    return _name_of(_calling_frame())


def _name_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


def _calling_frame() -> FrameType:
    """What called an operator, past functions of torch's and this package's and past modes that stand between."""
    frame = sys._getframe(1)
    for _ in range(16):
        frame = _past_mode(frame)
        if frame.f_back is None or not _name_of(frame).startswith(_BETWEEN):
            break
        frame = frame.f_back
    return frame


def _past_mode(frame: FrameType) -> FrameType:
    """What called the mode (a counter of FLOPs, say) that the frame is a part of; the frame itself where it is none."""
    outer: FrameType | None = frame
    for _ in range(3):
        if outer is None:
            break
        if outer.f_code.co_name == "__torch_dispatch__" and isinstance(outer.f_locals.get("self"), TorchDispatchMode):
            return outer.f_back or frame
        outer = outer.f_back
    return frame


def is_sharded_by_torch() -> bool:
    """Whether FSDP2 calls, or what cuts tensors for distributed checkpoints."""
    return _caller().startswith((*_BY_ROWS, *_UNPADS))


def is_taken_whole() -> bool:
    """Whether ``full_tensor``, or ``to_local`` of what every process has all of, calls, for the tensor itself."""
    tensors = sys.modules.get("torch.distributed.tensor._api")  # without which there are no DTensors
    frame = _calling_frame()
    if tensors is None or frame.f_code is not tensors._ToTorchTensor.forward.__code__:
        return False
    return all(placement.is_replicate() for placement in frame.f_locals["input"].placements)


def is_staged() -> bool:
    """Whether what copies a state for ``async_save`` calls: attribute by attribute, where there is no memory."""
    return _caller().startswith("torch.distributed.checkpoint._state_dict_stager.")


def check_not_distributed(func: Any, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for a collective, and for what torch does to tensors that it shards or makes equal.

    These would send floats into tensors of other scales, or nothing at all, or keep shards of floats.
    """
    operator = func._schema.name
    if operator in _RIGHT or (args and getattr(args[0], "is_share", False)):
        return
    if func.namespace in _COLLECTIVES:
        refuse_collective(func)
    if operator == "aten::view" and is_taken_whole():
        return
    name = _caller()
    if name == DDP_START and operator == "aten::detach":  # which sends codes in its own way
        return
    if (name.startswith(_BY_ROWS) and operator in _CUTS) or (name.startswith(_UNPADS) and operator == "aten::slice"):
        return
    if name.startswith(_SHARDING):
        way = next((way for start, way in _OTHER_WAYS.items() if name.startswith(start)), "shard")
        raise RuntimeError(f"{name} {_WHY}: {_WAYS[way]}")


def check_not_unwrapped(x: Tensor) -> None:
    """Raise RuntimeError where an exported program makes a parameter that is trained of each part: codes can't be."""
    if x.requires_grad and _caller().startswith("torch._functorch._aot_autograd.subclass_parametrization."):
        raise RuntimeError(
            "an exported program whose FP8Parameters require gradients can't be decomposed, as codes take no gradient: "
            "call requires_grad_(False) on the model before torch.export.export"
        )


def refuse_collective(func: Any) -> NoReturn:
    """Raise RuntimeError: it would send floats, or nothing."""
    raise RuntimeError(f"{func} {_WHY}: {_WAYS['send']}")


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
        f"an FP8Tensor has no {name} of its own, as its values are codes: to save it with safetensors, and what builds "
        "on that, call fp8manifold.use_plain_state(model), for one of transformers huggingface.attach(model), or pass "
        "state_dict() through fp8manifold.flatten_state_dict; for plain floats take dequantize()"
    )
