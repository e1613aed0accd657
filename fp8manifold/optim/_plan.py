"""Where a parameter lives, and what its state keeps: what a step has to know of both."""

from dataclasses import dataclass, replace
from typing import Any

import geoopt
import torch
from torch import Tensor

from fp8manifold._native._arrays import spacings
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.codec import decode_bits, decode_with_ulp
from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold._ranks import ALONE, Ranks, Share, local_of, share_of, spread
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._job import Layout, layout_of
from fp8manifold.optim._residuals import first_residual
from fp8manifold.optim._variant import BOUNDS, Storage, Variant
from fp8manifold.tensor import FP8Tensor

__all__ = [
    "STORED",
    "Grid",
    "described",
    "grid_of",
    "is_quantized",
    "make_state",
    "manifold_of",
    "own_manifold",
    "stabilize",
    "stiffness_field",
]


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold a parameter lives on, or None for an ordinary one."""
    return parameter.manifold if isinstance(parameter, geoopt.ManifoldTensor) else None


def own_manifold(parameter: Tensor) -> StiffnessManifold | None:
    """The parameter's manifold where it is one of this library's."""
    manifold = manifold_of(parameter)
    return manifold if isinstance(manifold, StiffnessManifold) else None


def is_quantized(parameter: Tensor) -> bool:
    """Whether it is stored in codes or lives on one of this library's manifolds."""
    return isinstance(local_of(parameter), FP8Tensor) or own_manifold(parameter) is not None


def stabilize(parameter: Tensor) -> None:
    """Project onto the manifold; codes are on their grid always."""
    if isinstance(parameter, FP8Tensor):
        return
    if (manifold := manifold_of(parameter)) is not None:
        parameter.copy_(manifold.projx(parameter))


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
    draws: str = "independent"
    retraction: str = "exponential"
    #: whether ``weight`` is the parameter's own memory, and not a contiguous copy of it
    in_place: bool = True
    #: where ``weight`` is a part of what several processes hold
    share: Share | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes that hold a part each."""
        return ALONE if self.share is None else self.share.ranks

    @property
    def fields(self) -> tuple[int, ...]:
        """Format and granularity as numbers: what a state has to have been made for."""
        assert self.fmt is not None
        scales = 0 if self.scale is None else self.scale.numel()
        if self.share is not None and self.scale is not None and self.scale.dim():
            scales = self.share.shape[0]
        per_channel = int(scales > 1)
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
        """The view it is stepped in; of no rows that of one."""
        shape, scale_shape = tuple(self.weight.shape), None if self.scale is None else tuple(self.scale.shape)
        if self.share is not None and not shape[0]:
            shape, scale_shape = (1, *shape[1:]), (1, *scale_shape[1:]) if scale_shape else scale_shape
        return layout_of(shape, scale_shape, self.block_size, blocks)

    @property
    def whole(self) -> "Grid":
        """All rows, gathered in memory of their own; one scale serves them all."""
        assert self.share is not None
        return replace(self, weight=self.share.gathered(self.weight))


def described(fields: tuple[int, ...] | None) -> str:
    """What :attr:`Grid.fields` stand for."""
    if fields is None:
        return "an ordinary parameter"
    exponent_bits, mantissa_bits, bias, layout, shares = fields
    shared = {0: "tensor", 1: "channel"}.get(shares, f"block of {shares}")
    return f"{FloatFormat(exponent_bits, mantissa_bits, bias, LAYOUTS[layout]).name}, one scale a {shared}"


def grid_of(parameter: Tensor) -> Grid:
    """Where a parameter lives, or what this process holds of it, without making a manifold for it."""
    if (share := share_of(parameter)) is not None:
        parameter = share.local
    if isinstance(parameter, FP8Tensor):
        return Grid(
            "codes",
            parameter.codes,
            parameter.format,
            parameter.scale,
            parameter.block_size,
            rounding=parameter.rounding,
            draws=parameter.draws,
            share=share,
        )
    weight = parameter.detach().as_subclass(Tensor)
    in_place = weight.is_contiguous() and not weight.is_neg()
    weight = weight.contiguous().resolve_neg()
    manifold = own_manifold(parameter)
    if manifold is None:
        return Grid("plain", weight, in_place=in_place, share=share)
    storage: Storage = "grid" if isinstance(manifold, FP8Manifold) else "free"
    return Grid(
        storage,
        weight,
        manifold.format,
        manifold.scale.to(working_dtype(weight)),
        metric=manifold.metric,
        rounding=getattr(manifold, "rounding", "nearest"),
        draws=getattr(manifold, "draws", "independent"),
        retraction=getattr(manifold, "retraction", "exponential"),
        in_place=in_place,
    )


def make_state(variant: Variant, layout: Layout, parameter: Tensor, state: dict[str, Any]) -> None:
    """Add what the variant keeps and the state lacks."""
    if all(map(state.__contains__, variant.keeps)) and not variant.rule.packs:
        return
    held = local_of(parameter)
    dtype = STORED[variant.moments] or working_dtype(parameter)
    for name in variant.stores:
        if name not in state:
            state[name] = spread(parameter, torch.zeros(held.shape, dtype=dtype, device=held.device))
        if variant.moments == "8bit" and BOUNDS[name] not in state:
            state[BOUNDS[name]] = _first_bounds(parameter, layout)
    if variant.residual_bits and "residual" not in state:
        state["residual"] = first_residual(parameter, variant.residual_bits)


def _first_bounds(parameter: Tensor, layout: Layout) -> Tensor:
    """One a block; of a shared matrix with a row for each of its rows, of a shared vector all in every process."""
    held, in_rows = local_of(parameter), parameter.dim() > 1 and share_of(parameter) is not None
    shape = (held.shape[0], held.shape[1:].numel() // layout.dims[-1]) if in_rows else layout.block_dims
    bounds = torch.zeros(shape, dtype=torch.float32, device=held.device)
    return spread(parameter, bounds) if in_rows else bounds


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
