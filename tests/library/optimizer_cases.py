"""Cases of the optimizers.

Parameters of every kind, gradients, steps, and everything that a step may change as bytes.
"""

import copy
import io
from itertools import chain

import geoopt
import pytest
import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import (
    RiemannianAdam,
    RiemannianSGD,
    StiffnessAdamW,
    StiffnessLion,
    StiffnessSGD,
)

ROWS = torch.tensor([[2.0**-5], [2.0**-4], [2.0**-6]])


def normal(*shape, seed=0, dtype=torch.float32, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(std).to(dtype)


def manifold_parameter(manifold, x):
    return geoopt.ManifoldParameter(manifold.projx(x), manifold=manifold)


def grid_weight(
    fmt="E4M3",
    shape=(3, 7),
    scale=2.0**-5,
    rounding="nearest",
    *,
    seed=0,
    dtype=torch.float32,
    std=0.1,
):
    return manifold_parameter(
        fm.FP8Manifold(fmt, scale, rounding, seed), normal(*shape, seed=seed, dtype=dtype, std=std)
    )


def free_weight(x, fmt="E4M3", scale=1.0):
    """Return a weight on the continuous manifold, whose steps are not rounded."""
    return manifold_parameter(fm.StiffnessManifold(fmt, scale), x)


def stored_weight(fmt="E4M3", shape=(3, 7), *, seed=0, factors=False, **options):
    """Return a weight of one byte with room above its largest value.

    Its scales are powers of two, or others with `factors`.
    """
    w = normal(*shape, seed=seed, std=0.1)
    return with_factors(
        fm.FP8Parameter(w, fmt, **{"headroom": 64.0, "seed": seed, **options}), factors
    )


def with_factors(x, factors=True):
    """Multiply the scales of a tensor or model, and return it; its codes stay.

    All but the first factor are no powers of two.
    """
    if not factors:
        return x
    for p in x.parameters() if isinstance(x, nn.Module) else [x]:
        if isinstance(p, fm.FP8Tensor) and p.scale.numel():
            factor = 1 + torch.rand(p.scale.numel(), generator=torch.Generator().manual_seed(5))
            # The second has the largest mantissa; the first of several stays a power of
            # two.
            factor[1:2] = 2.0 - 2.0**-23
            factor[: int(p.scale.numel() > 1)] = 1.0
            p.set_scale_(p.scale * factor.view(p.scale.shape))
    return x


def same_parameters(parameters):
    copies = []
    for p in parameters:
        if isinstance(p, fm.FP8Parameter):
            copies.append(copy.deepcopy(p))
            continue
        x = p.detach().as_subclass(Tensor).clone()
        if isinstance(p, geoopt.ManifoldParameter):
            copies.append(geoopt.ManifoldParameter(x, manifold=p.manifold))
        else:
            copies.append(nn.Parameter(x, requires_grad=p.requires_grad))
    return copies


def put_gradients(parameters, step, size=1.0):
    """Give parameters gradients that depend on the step and their place alone."""
    for i, p in enumerate(parameters):
        if p.requires_grad:
            p.grad = normal(*p.shape, seed=1000 * step + i, std=size).to(p.device, p.dtype)


def step_from(optimizer, parameter, gradient):
    """Take a step in which one parameter has this gradient, and the others what they had."""
    parameter.grad = gradient
    optimizer.step()


def take_steps(optimizers, parameters, steps, size=1.0):
    """Take steps of several optimizers over their parameters, with the same gradients."""
    for optimizer, stepped in zip(optimizers, parameters, strict=True):
        stepped = list(stepped)
        for t in steps:
            put_gradients(stepped, t, size)
            optimizer.step()


def value_of(p):
    return p.dequantize() if isinstance(p, fm.FP8Tensor) else p.detach().as_subclass(Tensor)


def values(parameters):
    return [value_of(p).clone() for p in parameters]


def bits_of(x):
    if isinstance(x, fm.FP8Tensor):
        return b"".join(bits_of(part) for part in (x.codes, x.scale, x.counter))
    flat = x.detach().as_subclass(Tensor).cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same_bits(a, b):
    return [bits_of(x) for x in a] == [bits_of(y) for y in b]


def snapshot(optimizer):
    """Return all that a step may change, parameters and state, as bytes."""
    saved = optimizer.state_dict()
    return {
        "parameters": [bits_of(p) for p in parameters_of(optimizer)],
        "state": frozen(saved),
    }


def frozen(x):
    """Return a nested structure with tensors as bytes: then == means bit for bit."""
    if isinstance(x, Tensor):
        return (str(x.dtype), tuple(x.shape), bits_of(x))
    if isinstance(x, dict):
        return {key: frozen(value) for key, value in x.items()}
    return [frozen(value) for value in x] if isinstance(x, list | tuple) else x


def through_disk(state):
    """Save and load a state as a checkpoint is, without unpickling objects."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def record(optimizer):
    """Return a list to which every step appends its views."""
    views = []
    optimizer.observer = views.append
    return views


def on_grid(p):
    manifold = p.manifold
    x = value_of(p)
    return bool((manifold.projx(x.float()).to(x.dtype) == x).all())


def muon_groups(parameters, **adam):
    """Return groups of a list or of groups: of matrices, and of the rest for Adam."""
    parameters = list(parameters)
    groups = (
        parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    )
    sorted_groups = []
    for group in groups:
        matrices = [p for p in group["params"] if p.dim() > 1]
        vectors = [p for p in group["params"] if p.dim() <= 1]
        if matrices:
            sorted_groups.append({"matrix_shape": "flatten", **group, "params": matrices})
        if vectors:
            sorted_groups.append({**adam, **group, "params": vectors, "direction": "adam"})
    return sorted_groups


RIEMANNIAN = (RiemannianAdam, RiemannianSGD)
CLASSES = (StiffnessAdamW, StiffnessSGD, StiffnessLion, *RIEMANNIAN)


every_class = pytest.mark.parametrize("kind", CLASSES)


def parameters_of(optimizer):
    """Return all parameters of an optimizer."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def close(x, y, tolerance=1e-6):
    return bool((x - y).norm() <= tolerance * y.norm())
