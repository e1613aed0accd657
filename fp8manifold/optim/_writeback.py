"""From the requested value to what is stored: the one rounding of a step, as pure functions."""

from typing import Final

import torch
from torch import Tensor

from fp8manifold.grid import round_to_grid
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold

__all__ = ["WRITEBACKS", "write_back"]

WRITEBACKS: Final = ("nearest", "stochastic")


def write_back(
    target: Tensor, manifold: StiffnessManifold, writeback: str, *, seed: int, step: int, stream: int
) -> Tensor:
    """``scale * round(target / scale)`` on a grid, the nearest point of the interval on the continuous manifold.

    Stochastic draws are keyed by seed, step and parameter.
    """
    if not isinstance(manifold, FP8Manifold):
        return manifold.projx(target)
    scale = manifold.scale.to(target.dtype)
    if writeback == "nearest":
        return round_to_grid(target / scale, manifold.format) * scale
    after = round_to_grid(target / scale, manifold.format, "stochastic", seed=seed, step=step, stream=stream) * scale
    if bool((torch.frexp(scale).mantissa == 0.5).all()):
        return after
    # dividing by any other scale puts points of the grid a hair off it, where a draw could move them
    nearest = round_to_grid(target / scale, manifold.format) * scale
    return torch.where(nearest == target, target, after)
