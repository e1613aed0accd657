"""A weight on the grid that stays there when somebody assigns to its ``data``, as PEFT does when it merges."""

from typing import Any, Final, Literal

import geoopt
import torch
from torch import Tensor

from fp8manifold._base.reading import has_values
from fp8manifold._encoded.merging import warn_if_merged
from fp8manifold.manifolds import FP8Manifold
from fp8manifold.scaling import amax_of, refitted_scale, storage_scale

_DATA: Final[Any] = vars(torch._C.TensorBase)["data"]


class GridParameter(geoopt.ManifoldParameter):  # type: ignore[misc]  # geoopt is untyped
    """A ``geoopt.ManifoldParameter`` whose values stay points of its grid: what is assigned is rounded to the nearest.

    Its scale becomes another where the values would saturate at it, or be lost, as that of codes does.
    """

    @property
    def data(self) -> Tensor:
        """The values, sharing memory."""
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        if isinstance(self.manifold, FP8Manifold):
            warn_if_merged(self.manifold)
            values = _on_grid(self, self.manifold, values)
        _DATA.__set__(self, values)


@torch.no_grad()
def _on_grid(weight: Tensor, manifold: FP8Manifold, values: Tensor) -> Tensor:
    """The nearest points; values that are points, or another dtype's or device's, as of a weight that moves, stay."""
    moved = (values.dtype, values.device, values.shape) != (weight.dtype, weight.device, weight.shape)
    scale = manifold.scale
    if moved or not (has_values(values) and has_values(scale)) or scale.device != values.device:
        return values
    points = manifold.projx(values)
    if torch.equal(points, values):
        return values
    shared: Literal["channel", "tensor"] = "channel" if scale.dim() else "tensor"
    amax = amax_of(values, shared)
    if not bool(amax.isfinite().all()):
        return points
    old = scale.float()
    fits = refitted_scale(amax.view_as(old), old, manifold.format) == old
    if bool(fits.all()):
        return points
    scale.copy_(torch.where(fits, old, storage_scale(values, manifold.format, shared).view_as(old)))
    return manifold.projx(values)
