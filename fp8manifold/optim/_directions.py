"""Directions of descent as pure functions of a gradient and its running averages.

Only ``+ - * /`` and :func:`sqrt_exact` are used, so that the same bits come out eager and compiled.
"""

import torch
from torch import Tensor

__all__ = ["adam", "sgd", "sqrt_exact"]


def sqrt_exact(x: Tensor) -> Tensor:
    """The correctly rounded square root: eager float32 ``torch.sqrt`` on the CPU is off by one ULP now and then."""
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt_().to(x.dtype)


def adam(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> Tensor:
    """Adam's direction, of size about 1; the averages are updated in place.

    .. math:: m = \\beta_1 m + (1 - \\beta_1) g, \\quad v = \\beta_2 v + (1 - \\beta_2) g^2, \\quad
              d = \\frac{m / (1 - \\beta_1^t)}{\\sqrt{v / (1 - \\beta_2^t)} + \\epsilon}

    With ``max_exp_avg_sq`` the largest ``v`` so far takes its place in ``d`` (AMSGrad).

    Source: Kingma and Ba 2015; Reddi, Kale, Kumar 2018.
    """
    beta1, beta2 = betas
    exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        second = max_exp_avg_sq
    denominator = sqrt_exact(second * (1 / (1 - beta2**step))).add_(eps)
    return (exp_avg * (1 / (1 - beta1**step))).div_(denominator)


def sgd(gradient: Tensor, buffer: Tensor | None, *, momentum: float, dampening: float, nesterov: bool) -> Tensor:
    """The gradient, or its momentum, which is updated in place.

    .. math:: b = \\mu b + (1 - \\tau) g, \\qquad d = b \\text{ or, with Nesterov, } g + \\mu b

    Source: Sutskever et al. 2013, in torch's convention.
    """
    if buffer is None:
        return gradient
    buffer.mul_(momentum).add_(gradient * (1 - dampening))
    return gradient + buffer * momentum if nesterov else buffer
