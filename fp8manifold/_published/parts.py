"""Codes and scales of one stored weight as FP8Tensor takes them, and back as the files have them."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.stored_scale import decoded_scale, exponents_of
from fp8manifold._published.stored import EXPONENTS, StoredWeight
from fp8manifold.tensor import FP8Tensor

_DTYPES: Final = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def read_parts(stored: StoredWeight, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales as :meth:`fp8manifold.FP8Tensor.from_codes` takes them with ``stored.block_size``.

    Args:
        stored: of :func:`stored_weights`.
        read: gives a tensor of the files by its name; the codes share its memory.
    """
    codes = read(stored.codes).view(torch.uint8)
    scale = read(stored.scale).reshape(stored.own_scale_shape)
    if stored.scale_dtype in EXPONENTS:
        scale = scale.view(torch.uint8)
        return codes, scale if stored.block_size else decoded_scale(scale)
    return codes, scale.float()


def written_parts(stored: StoredWeight, weight: FP8Tensor) -> dict[str, Tensor]:
    """The tensors of the files by their names: of a weight that no step changed, the same bytes."""
    scale = weight.scale
    if stored.scale_dtype in EXPONENTS:
        scale = exponents_of(scale).view(_DTYPES[stored.scale_dtype])
    else:
        narrow = scale.to(_DTYPES[stored.scale_dtype])
        if not torch.equal(narrow.float(), scale):
            raise ValueError(f"scales of {stored.name} are no {stored.scale_dtype}, which {stored.scale} is")
        scale = narrow
    codes = weight.codes.view(_DTYPES[stored.code_dtype])
    return {stored.codes: codes, stored.scale: scale.reshape(stored.scale_shape)}
