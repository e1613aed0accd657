"""The family as its registry has it.

Every combination of options, every optimizer by its name, and one parameter of every kind.
"""

import itertools

import geoopt
import torch
from optimizer_cases import (
    ROWS,
    free_weight,
    grid_weight,
    manifold_parameter,
    muon_groups,
    normal,
    stored_weight,
)
from torch import nn

import fp8manifold as fm
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._spec import MOMENTS
from fp8manifold.optim._writeback import WRITEBACKS

NAMES = tuple(
    name
    for name, kind in vars(fm.optim).items()
    if isinstance(kind, type) and issubclass(kind, ManifoldOptimizer)
)


def is_valid(optimizer, writeback, moments):
    """Return whether a combination exists.

    A write-back that injects errors needs an average that takes them, not in 8 bits.
    """
    takes_errors = DIRECTIONS[getattr(fm.optim, optimizer).direction].takes_no_error is None
    return not WRITEBACKS[writeback].injects or (takes_errors and moments != "8bit")


COMBINATIONS = list(itertools.product(NAMES, WRITEBACKS, MOMENTS))
VALID = [c for c in COMBINATIONS if is_valid(*c)]
INVALID = [c for c in COMBINATIONS if not is_valid(*c)]
RIEMANNIAN_NAMES = ("RiemannianAdam", "RiemannianSGD")

#: Options with which weights of size 0.1 move by a fraction of an ULP a step.
OPTIONS = {
    **{name: {"lr": 0.01} for name in ("StiffnessAdamW", "StiffnessLion")},
    "RiemannianAdam": {"lr": 0.6, "float_lr": 0.01},
    "RiemannianSGD": {"lr": 150.0, "float_lr": 0.05, "momentum": 0.9},
    "StiffnessSGD": {"lr": 0.1, "momentum": 0.5, "stiffness": 1.0},
    "StiffnessAdafactor": {"lr": 0.05, "momentum": 0.5},
    "StiffnessMuon": {"lr": 0.02, "weight_decay": 0.0},
    "FisherNaturalGradient": {"lr": 0.01, "refresh": 4},
}


class Parallel(nn.Module):
    """Linear layers, each on the leading columns of one input; it draws no random numbers."""

    def __init__(self, weights):
        super().__init__()
        self.layers = nn.ModuleList()
        for weight in weights:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = weight
            self.layers.append(layer)

    def forward(self, x):
        return torch.cat([layer(x[:, : layer.in_features]) for layer in self.layers], -1)


def is_layer(p):
    return p.dim() == 2 and p.dtype == torch.float32 and p.numel() > 0 and p.requires_grad


def make(name, parameters, **options):
    """Make the optimizer called `name`.

    The natural gradient is of a network that has the matrices among the parameters.
    """
    kind, options = getattr(fm.optim, name), {**OPTIONS[name], **options}
    parameters = list(parameters)
    if name == "StiffnessMuon" and options.get("direction") != "adam":
        return kind(muon_groups(parameters, lr=0.01), **options)
    if name != "FisherNaturalGradient":
        return kind(parameters, **options)
    tensors = parameters
    if parameters and isinstance(parameters[0], dict):
        tensors = itertools.chain.from_iterable(group["params"] for group in parameters)
    model = Parallel([p for p in tensors if is_layer(p)])
    return kind(parameters, model, [normal(16, 320, seed=77)], **options)


def zoo():
    """Return a parameter of every kind, by a name for the kind."""
    scattered = fm.FP8Manifold("E4M3", 2.0**-5)
    return {
        "codes tensor": stored_weight(
            "E4M3", (3, 7), seed=1, granularity="tensor", keep_remainder=True
        ),
        "codes channel": stored_weight("E3M4", (5, 33), seed=2, headroom=4.0, keep_remainder=True),
        "codes block": stored_weight("E4M3", (3, 64), seed=3, granularity="block"),
        "codes block, any scale": stored_weight(
            "E4M3", (2, 64), seed=20, granularity="block", factors=True
        ),
        "codes bfloat16, any scale": stored_weight(
            "E5M2", (2, 2, 5), seed=4, dtype=torch.bfloat16, factors=True
        ),
        "codes vector, any scale": stored_weight(
            "E4M3FNUZ", (13,), seed=5, rounding="nearest", factors=True
        ),
        "codes scalar": stored_weight("E4M3", (), seed=6),
        "codes empty": stored_weight("E4M3", (0, 4), seed=7),
        "grid": grid_weight("E4M3", (3, 7), ROWS, "stochastic", seed=8),
        "grid, any scale": grid_weight("E5M2", (5,), 0.3, seed=9),
        "grid float64": grid_weight("E4M3", (4, 3), seed=10, dtype=torch.float64),
        "grid non-contiguous": geoopt.ManifoldParameter(
            scattered.projx(normal(5, 3, seed=11, std=0.1)).t(), scattered
        ),
        "grid empty": manifold_parameter(fm.FP8Manifold("E4M3"), torch.empty(0, 4)),
        "free": free_weight(normal(6, seed=12, std=0.1), "E5M2", 2.0**-3),
        "float32": nn.Parameter(normal(4, 3, seed=13, std=0.1)),
        "bfloat16": nn.Parameter(normal(9, seed=14, std=0.1).bfloat16()),
        "float64": nn.Parameter(normal(3, seed=15, dtype=torch.float64, std=0.1)),
        "float16": nn.Parameter(normal(2, 3, seed=16, std=0.1).half()),
        "non-contiguous": nn.Parameter(normal(6, 4, seed=17, std=0.1).t()),
        "scalar": nn.Parameter(normal(seed=18, std=0.1)),
        "empty": nn.Parameter(torch.empty(0, 3)),
        "frozen": nn.Parameter(normal(2, seed=19), requires_grad=False),
    }


def moves(p):
    """Return whether a step changes the parameter."""
    return p.requires_grad and p.numel() > 0
