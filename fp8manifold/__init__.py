"""8-bit float formats as Riemannian manifolds, and optimizers whose weights live on their grids."""

from fp8manifold import optim
from fp8manifold.formats import NAMED_FORMATS, FloatFormat
from fp8manifold.grid import decode, encode, from_chart, round_to_grid, to_chart, ulp
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.random_bits import random_bits

__all__ = [
    "NAMED_FORMATS",
    "FP8Manifold",
    "FloatFormat",
    "StiffnessManifold",
    "decode",
    "encode",
    "from_chart",
    "optim",
    "random_bits",
    "round_to_grid",
    "to_chart",
    "ulp",
]
