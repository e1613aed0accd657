"""Write a file of safetensors one tensor at a time.

safetensors' own writer takes the bytes of all tensors at once. Its format needs their
dtypes and shapes first, and their values in the order of the header::

    8 bytes     length of the header
    header      JSON: metadata, then dtype, shape and place of each tensor
    values      of the widest dtype first, and by name

So values are made when their turn comes, some rows at a time, and freed before the next.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 8
_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""safetensors' names of torch's dtypes, in its order: the last is written first."""
_DTYPES: Final = {
    getattr(torch, torch_name): name
    for torch_name, name in _NAMES.items()
    if hasattr(torch, torch_name)
}
_RANKS: Final = {dtype: rank for rank, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that is made when it is written.

    Attributes:
        dtype: of the tensor.
        shape: of it.
        make: makes it, in pieces that follow each other in its memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def whole(self) -> Tensor:
        """Make all of it at once."""
        values = torch.cat([piece.reshape(-1) for piece in self.make()])
        return values.view(self.shape)


def ready(tensor: Tensor) -> TensorToWrite:
    """Return a tensor that is there already as one to be written."""
    return TensorToWrite(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def write_tensors(
    path: Path, tensors: Mapping[str, TensorToWrite], metadata: Mapping[str, str]
) -> None:
    """Write a file with the bytes that ``safetensors.torch.save_file`` writes.

    Args:
        path: of the file. Whoever needs it wholly or not at all gives a temporary one.
        tensors: by name.
        metadata: of the header.

    Raises:
        TypeError: a dtype that safetensors has no name for.
        ValueError: a tensor that is made otherwise than it was described.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name!r} has dtype {tensor.dtype}, which safetensors can't write")
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            _write_values(file, name, tensors[name])


def _write_values(file: BinaryIO, name: str, tensor: TensorToWrite) -> None:
    """Write the values of a tensor, piece by piece."""
    written = 0
    for piece in tensor.make():
        if piece.dtype != tensor.dtype:
            raise ValueError(f"{name!r} is {piece.dtype}, but was described as {tensor.dtype}")
        written += file.write(_bytes_of(piece))
    if written != tensor.nbytes:
        raise ValueError(
            f"{name!r} has {written} bytes, but was described as {tensor.dtype} of shape "
            f"{tensor.shape}, which has {tensor.nbytes}"
        )


def _bytes_of(value: Tensor) -> Any:
    """Return the bytes of a tensor, which share its memory where it is contiguous."""
    array: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
