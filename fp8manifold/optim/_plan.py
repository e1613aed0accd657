"""From a parameter, its state and its group to the job of one step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8manifold._charts import Metric, chart_of
from fp8manifold._codec import decode_bits, decode_with_ulp
from fp8manifold._float_bits import working_dtype
from fp8manifold._native._arrays import spacings
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.optim._kinds import own_manifold
from fp8manifold.optim._layout import Layout, layout_of
from fp8manifold.optim._variant import BOUNDS, Storage, Variant
from fp8manifold.tensor import FP8Tensor

__all__ = [
    "STORED",
    "Grid",
    "described",
    "first_residual",
    "grid_of",
    "make_state",
    "pack_nibbles",
    "stiffness_field",
    "unpack_nibbles",
]

STORED = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(slots=True)
class Grid:
    """What a step has to know of where a parameter lives; ``fmt`` is None for an ordinary one."""

    storage: Storage
    weight: Tensor
    fmt: FloatFormat | None = None
    scale: Tensor | None = None
    block_size: int | None = None
    metric: Metric = "ulp"
    rounding: str = "nearest"
    retraction: str = "exponential"
    #: whether ``weight`` is the parameter's own memory, and not a contiguous copy of it
    in_place: bool = True

    @property
    def fields(self) -> tuple[int, ...]:
        """Format and granularity as numbers: what a state has to have been made for."""
        assert self.fmt is not None
        per_channel = int(self.scale is not None and self.scale.numel() > 1)
        layout = LAYOUTS.index(self.fmt.layout)
        fields = (self.fmt.exponent_bits, self.fmt.mantissa_bits, self.fmt.bias, layout)
        return (*fields, self.block_size or per_channel)

    @property
    def rounds(self) -> bool:
        """Whether what is stored are numbers of the format."""
        return self.storage in ("codes", "grid")

    @property
    def scale_is_power_of_two(self) -> bool:
        """Whether dividing by the scale is exact, as it is by those of codes."""
        if self.storage in ("codes", "plain"):
            return True
        assert self.scale is not None
        return bool((torch.frexp(self.scale).mantissa == 0.5).all())

    def layout(self, *, blocks: bool) -> Layout:
        """The view it is stepped in."""
        scale_shape = None if self.scale is None else tuple(self.scale.shape)
        return layout_of(tuple(self.weight.shape), scale_shape, self.block_size, blocks)


def described(fields: tuple[int, ...] | None) -> str:
    """What :attr:`Grid.fields` stand for."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, shares = fields
    shared = {0: "tensor", 1: "channel"}.get(shares, f"block of {shares}")
    return f"{FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout]).name}, one scale a {shared}"


def grid_of(parameter: Tensor) -> Grid:
    """Where a parameter lives, without making a manifold for it."""
    if isinstance(parameter, FP8Tensor):
        return Grid(
            "codes",
            parameter.codes,
            parameter.format,
            parameter.scale,
            parameter.block_size,
            rounding=parameter.rounding,
        )
    weight = parameter.detach().as_subclass(Tensor)
    in_place = weight.is_contiguous()
    weight = weight.contiguous()
    manifold = own_manifold(parameter)
    if manifold is None:
        return Grid("plain", weight, in_place=in_place)
    storage: Storage = "grid" if isinstance(manifold, FP8Manifold) else "free"
    return Grid(
        storage,
        weight,
        manifold.format,
        manifold.scale.to(working_dtype(weight)),
        metric=manifold.metric,
        rounding=getattr(manifold, "rounding", "nearest"),
        retraction=getattr(manifold, "retraction", "exponential"),
        in_place=in_place,
    )


def make_state(variant: Variant, layout: Layout, parameter: Tensor, state: dict[str, Any]) -> None:
    """Add what the variant keeps and the state lacks."""
    if all(map(state.__contains__, variant.keeps)) and variant.residual_bits != 4:
        return
    shape, device = parameter.shape, parameter.device
    dtype = STORED[variant.moments] or working_dtype(parameter)
    for name in variant.stores:
        if name not in state:
            state[name] = torch.zeros(shape, dtype=dtype, device=device)
        if variant.moments == "8bit" and BOUNDS[name] not in state:
            state[BOUNDS[name]] = torch.zeros(layout.block_dims, dtype=torch.float32, device=device)
    if variant.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter, variant.residual_bits)


def _values_of(grid: Grid) -> Tensor:
    """The weights in units of their scale."""
    if grid.storage == "codes":
        assert grid.fmt is not None
        return decode_bits(grid.weight, grid.fmt)
    x = grid.weight.to(working_dtype(grid.weight))
    return x if grid.scale is None else x / grid.scale


def stiffness_field(grid: Grid, metric: Metric) -> Tensor:
    """The field S of a metric over all weights, in value."""
    assert grid.fmt is not None
    assert grid.scale is not None
    if grid.storage == "codes" and metric == "ulp":
        if (native := spacings(grid.weight, grid.fmt, grid.scale)) is not None:
            return native
        stiffness = decode_with_ulp(grid.weight, grid.fmt)[1]
    else:
        stiffness = chart_of(grid.fmt, metric).stiffness(_values_of(grid))
    return stiffness * expanded(grid.scale, grid.weight.shape, grid.block_size)


def expanded(scale: Tensor, shape: torch.Size, block_size: int | None) -> Tensor:
    """A scale that broadcasts against the weights."""
    return scale if block_size is None else scale.repeat_interleave(block_size, dim=-1).view(shape)


def pack_nibbles(values: Tensor) -> Tensor:
    """Signed 4-bit values, two a byte: the even position in the low half."""
    flat = values.reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    pairs = flat.view(-1, 2).to(torch.int16) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor, shape: torch.Size) -> Tensor:
    """The way back, as int8."""
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    return torch.stack([low, high], dim=1).view(-1)[: shape.numel()].view(shape)


def first_residual(parameter: Tensor, bits: int) -> Tensor:
    """What the rounding of the float weights left, where the parameter has kept it; zeros elsewhere."""
    start = torch.zeros(parameter.shape, dtype=torch.int8, device=parameter.device)
    if isinstance(parameter, FP8Tensor) and parameter.remainder is not None:
        start, parameter.remainder = parameter.remainder, None
    return start if bits == 8 else pack_nibbles(_coarser(start))


def _coarser(remainder: Tensor) -> Tensor:
    """Parts of 1/256 of a step as parts of 1/16."""
    return ((remainder.to(torch.int16) + 8) >> 4).clamp_(-8, 7).to(torch.int8)
