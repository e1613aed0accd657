"""The small file beside a model's floats, from which the very codes come back.

::

    model.safetensors      w: scale * decode(code), in bfloat16 or float32
    fp8manifold.grids      w_scale, w_counter, w_traits: scale, stochastic writes, format
                           w_remainder, where there is one
                           w_exceptions, w_exception_codes: where w alone is not enough
                           what quantised layers have beside their weights
                           header: options of layers and parameters

    code = encode(w / scale)

It is a file of its own, and not tensors in the same one. Transformers reports names
that it does not know, and servers and converters refuse them: the floats are then
those of an ordinary model. It does not end in ``.safetensors``, since some read all
such files of a folder. Trainer, which reads the floats alone, gets both by `trainers`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import in_pieces, pieces
from fp8manifold._base.checks import import_optional
from fp8manifold._encoded.storage import BlockSize, divided, expand_scale
from fp8manifold._encoded.stored_scale import decoded_scale
from fp8manifold._numerics.codec import encode_with_nan
from fp8manifold._published.replace_files import SIDE_FILE
from fp8manifold.formats import FloatFormat
from fp8manifold.nn._parts import PARTS, read_traits
from fp8manifold.tensor import FP8Tensor

CODES: Final = "_codes"
"""What is added to a weight's name for its codes, in the layout ``codes``."""
_AT: Final = "_exceptions"
_EXCEPTION_CODES: Final = "_exception_codes"
_TRAITS: Final = "_traits"
_HEADER: Final = "fp8manifold"
_VERSION: Final = 1


class Content(StrEnum):
    """What stands beside a side file."""

    #: Floats that any library reads.
    FLOATS = "floats"
    #: One byte per weight, under names that no float layer has.
    CODES = "codes"
    #: Codes and scales in a published layout.
    PUBLISHED = "published"


@dataclass
class SideFile:
    """What a folder has beside its weights.

    Attributes:
        content: of the folder's other files.
        layers: options of quantised layers, as `recipe_of` describes them.
        parameters: options of parameters in codes, as `parameters_recipe_of` does.
        turned: names of parameters that the model holds transposed.
        tensors: by the names that a state dict has for them.
    """

    content: Content
    layers: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    turned: list[str]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The weights in codes."""
        return [name.removesuffix(_TRAITS) for name in self.tensors if name.endswith(_TRAITS)]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What is added to a weight's name for what the file has of it."""
        return (*PARTS[1:], _AT, _EXCEPTION_CODES)

    def add(
        self, name: str, weight: FP8Tensor, parts: Mapping[str, Tensor], values: Tensor | None
    ) -> None:
        """Add a weight: its parts without codes, and codes that floats don't give back.

        Args:
            name: in the model.
            weight: in codes.
            parts: by their suffixes.
            values: its floats, as they are written; None if its codes are.
        """
        self.tensors |= {name + suffix: part for suffix, part in parts.items()}
        if values is None:
            return
        codes = codes_of_values(values, weight.scale, weight.format, weight.block_size)
        differing = (codes != weight.codes).flatten().nonzero().flatten()
        if differing.numel():
            self.tensors[name + _AT] = differing
            self.tensors[name + _EXCEPTION_CODES] = weight.codes.flatten()[differing]

    def parts_of(self, name: str, codes: Tensor) -> dict[str, Tensor]:
        """Return the parts of a weight as a state dict has them."""
        parts = {name: codes.unsqueeze(-1)}
        for suffix in PARTS[1:]:
            if name + suffix in self.tensors:
                parts[name + suffix] = self.tensors[name + suffix]
        return parts

    def codes(self, name: str, values: Tensor) -> Tensor:
        """Return the codes of floats that were read.

        Raises:
            ValueError: floats that the codes do not have, or no part of the weight.
        """
        scale = self.tensors.get(f"{name}_scale")
        if scale is None:
            raise ValueError(f"{SIDE_FILE!r} has no scale of {name!r}: the file is not whole")
        options = read_traits(name, self.tensors[name + _TRAITS], scale)
        fmt, block_size = options["fmt"], options["block_size"]
        scale = decoded_scale(scale.to(values.device))
        codes = codes_of_values(values, scale, fmt, block_size)
        if name + _AT in self.tensors:
            positions = self.tensors[name + _AT].to(values.device)
            codes.view(-1)[positions] = self.tensors[name + _EXCEPTION_CODES].to(values.device)
        weight = FP8Tensor.from_codes(codes, scale, fmt, block_size=block_size, dtype=values.dtype)
        if not _are_equal(weight.dequantize(), values):
            raise ValueError(
                f"{name!r} was changed since it was saved with {SIDE_FILE!r}: to read its floats "
                "as they are now, remove that file"
            )
        return codes

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        description = {
            "version": _VERSION,
            "content": str(self.content),
            "layers": self.layers,
            "parameters": self.parameters,
            "turned": self.turned,
        }
        save_file = import_optional("safetensors.torch", "hf", "save").save_file
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        save_file(tensors, folder / SIDE_FILE, {_HEADER: json.dumps(description)})


def read_side_file(folder: Path) -> SideFile:
    """Read the side file of a folder.

    Raises:
        ValueError: a file that is not whole, or of a later version.
    """
    path = folder / SIDE_FILE
    safe_open = import_optional("safetensors", "hf", "load").safe_open
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        version = description["version"]
        side = SideFile(
            Content(description["content"]),
            description["layers"],
            description["parameters"],
            description["turned"],
            tensors,
        )
    # safetensors raises a class of its own
    except Exception as error:
        raise ValueError(f"{str(path)!r} can't be read: {error!r:.200}") from None
    if version != _VERSION:
        raise ValueError(f"{str(path)!r} has version {version!r}: {_VERSION} is read")
    return side


@torch.no_grad()
def codes_of_values(
    values: Tensor, scale: Tensor, fmt: FloatFormat, block_size: BlockSize
) -> Tensor:
    """Return the codes nearest to values, at scales in float32; NaN gives its first code.

    NaN in a format that has none is refused.
    """
    spread = expand_scale(scale, block_size, values.shape)
    if not in_pieces(values):
        return _encoded(values, spread, fmt)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    has_scale_per_row = spread.dim() == values.dim() and spread.shape[0] > 1
    for rows in pieces(values):
        codes[rows] = _encoded(values[rows], spread[rows] if has_scale_per_row else spread, fmt)
    return codes


def _encoded(values: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    units = divided(values.float(), scale)
    if fmt.nan_code is None and bool(units.isnan().any()):
        raise ValueError(f"a weight holds NaN, which {fmt.name} has not")
    return encode_with_nan(units, fmt)


def _are_equal(values: Tensor, others: Tensor) -> bool:
    """Return whether values are equal to the bit, any NaN to any."""
    if in_pieces(values):
        return all(_are_equal_at_once(values[rows], others[rows]) for rows in pieces(values))
    return _are_equal_at_once(values, others)


def _are_equal_at_once(values: Tensor, others: Tensor) -> bool:
    # -0 equals 0, and NaN nothing.
    are_alike = (values == others) & (values.signbit() == others.signbit())
    return bool((are_alike | (values.isnan() & others.isnan())).all())


def exact_dtype(values: Tensor) -> torch.dtype:
    """Return bfloat16 if it holds float32 values exactly, else their own dtype."""
    if values.dtype is not torch.float32:
        return values.dtype
    if in_pieces(values):
        are_exact = all(_is_bfloat16(values[rows]) for rows in pieces(values))
    else:
        are_exact = _is_bfloat16(values)
    return torch.bfloat16 if are_exact else torch.float32


def _is_bfloat16(values: Tensor) -> bool:
    return _are_equal_at_once(values.bfloat16().float(), values)
