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

from fp8manifold._base.blocks import indices_of_pieces
from fp8manifold._base.checks import import_optional
from fp8manifold._doors.grids import Grid
from fp8manifold._encoded.storage import checked_codes
from fp8manifold._encoded.stored_scale import decoded_scale
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

    def add_parts(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Add the parts of a weight without its codes, by their suffixes."""
        self.tensors |= {name + suffix: part for suffix, part in parts.items()}

    def add_exceptions(self, name: str, weight: FP8Tensor) -> torch.dtype:
        """Add the codes of a weight that its floats don't give back.

        Returns:
            The dtype in which its floats are exact: bfloat16 if that is, else its own.
        """
        grid = Grid.of(weight)
        has_bfloat16 = True
        positions = []
        codes = []
        start = 0
        for index in indices_of_pieces(weight.shape):
            piece = weight.codes[index]
            values = grid.values(piece, index, weight.dtype)
            has_bfloat16 = has_bfloat16 and _is_bfloat16(values)
            differing = (grid.codes(values, index) != piece).flatten().nonzero().flatten()
            if differing.numel():
                positions.append(differing + start)
                codes.append(piece.flatten()[differing])
            start += piece.numel()
        if positions:
            self.tensors[name + _AT] = torch.cat(positions)
            self.tensors[name + _EXCEPTION_CODES] = torch.cat(codes)
        return torch.bfloat16 if has_bfloat16 else weight.dtype

    def parts_of(self, name: str, codes: Tensor) -> dict[str, Tensor]:
        """Return the parts of a weight as a state dict has them."""
        parts = {name: codes.unsqueeze(-1)}
        for suffix in PARTS[1:]:
            if name + suffix in self.tensors:
                parts[name + suffix] = self.tensors[name + suffix]
        return parts

    def grid(self, name: str, shape: tuple[int, ...], device: Any) -> Grid:
        """Return the grid of a weight, whose scales are checked to be of its shape.

        Raises:
            ValueError: no scale, or one of another shape.
        """
        scale = self.tensors.get(f"{name}_scale")
        if scale is None:
            raise ValueError(f"{SIDE_FILE!r} has no scale of {name!r}: the file is incomplete")
        options = read_traits(name, self.tensors[name + _TRAITS], scale)
        fmt, block_size = options["fmt"], options["block_size"]
        scale = decoded_scale(scale)
        # Codes without values, of which only the shape is asked.
        codes = torch.empty(shape, dtype=torch.uint8, device="meta")
        FP8Tensor.from_codes(codes, scale, fmt, block_size=block_size, seed=options["seed"])
        return Grid(fmt, scale.to(device), block_size)

    def put_exceptions(self, name: str, codes: Tensor, fmt: FloatFormat) -> None:
        """Put in the codes of a weight that its floats don't give back.

        Raises:
            ValueError: positions without codes or the reverse, a position beyond the
                weight, or a code beyond the format.
        """
        positions = self.tensors.get(name + _AT)
        exceptions = self.tensors.get(name + _EXCEPTION_CODES)
        if positions is None and exceptions is None:
            return
        if positions is None or exceptions is None or positions.shape != exceptions.shape:
            raise ValueError(
                f"{SIDE_FILE!r} has codes of {name!r} without their positions, or the reverse: the "
                "file is incomplete"
            )
        exceptions = checked_codes(exceptions, fmt)
        if bool(((positions < 0) | (positions >= codes.numel())).any()):
            raise ValueError(
                f"{SIDE_FILE!r} has codes of {name!r} beyond its {codes.numel():,} weights: the "
                "file is damaged"
            )
        codes.view(-1)[positions.to(codes.device)] = exceptions.to(codes.device)

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
        raise ValueError(
            f"{str(path)!r} has version {version!r}, but this fp8manifold reads version {_VERSION}"
        )
    return side


def are_equal(values: Tensor, others: Tensor) -> bool:
    """Return whether values are equal to the bit, any NaN to any."""
    # -0 equals 0, and NaN nothing.
    are_alike = (values == others) & (values.signbit() == others.signbit())
    return bool((are_alike | (values.isnan() & others.isnan())).all())


def _is_bfloat16(values: Tensor) -> bool:
    return are_equal(values.bfloat16().to(values.dtype), values)
