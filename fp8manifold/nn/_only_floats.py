"""Weights are read from floats: codes and integers in their place are refused, by every reader in the same words."""

from collections.abc import Iterable
from typing import Final

import torch

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""What weights are read from, as files and as torch name it."""
_SCALES: Final = ("scale", "scb", "absmax")
"""How names of scales go: weight_scale_inv, weight_scale, scales, SCB."""


def refuse_codes(name: str, dtype: torch.dtype | str, others: Iterable[str] = (), file: str = "") -> None:
    """Raise ValueError unless a tensor that a float weight is read from holds floats.

    Args:
        name, dtype: of the tensor; the dtype may be as safetensors files name it.
        others: names of what lies beside it, its scales perhaps.
        file: where it lies.
    """
    if dtype in FLOATS:
        return
    scale = scale_of(name, others)
    beside = f"at the scales of {scale!r}, which are not read" if scale else f"and {name}_scale is missing"
    where = f" of {file!r}" if file else ""
    raise ValueError(
        f"{name}{where} holds codes ({dtype}), {beside}: weights are read from float64, float32, float16 or bfloat16; "
        "decode it first, values times scales"
    )


def is_scale(entry: str) -> bool:
    """Whether a tensor is called a scale."""
    return any(word in entry.lower() for word in _SCALES)


def scale_of(name: str, others: Iterable[str]) -> str | None:
    """The name of a tensor's scale among those that lie beside it, or None."""
    owner, _, entry = name.rpartition(".")
    stem = entry.removesuffix("_blocks").removesuffix("_packed")
    near = sorted(each for each in others if each.rpartition(".")[0] == owner and is_scale(each.rpartition(".")[2]))
    named = [each for each in near if each.rpartition(".")[2].startswith(stem)]
    plain = [each for each in near if each.rpartition(".")[2].lower().startswith(_SCALES)]
    return next(iter(named + plain), None)
