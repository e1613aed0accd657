"""Kinds of parameters: ordinary ones, codes, and those on manifolds."""

import geoopt
from torch import Tensor

from fp8manifold._ranks import local_of
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.tensor import FP8Tensor

__all__ = ["is_quantized", "manifold_of", "own_manifold", "stabilize"]


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
