"""Optimizers over weights that live on a grid: direction x stiffness x write-back."""

from fp8manifold.optim._base import StepView
from fp8manifold.optim._schedules import anneal
from fp8manifold.optim.riemannian import RiemannianAdam, RiemannianSGD
from fp8manifold.optim.stiffness_adamw import StiffnessAdamW
from fp8manifold.optim.wrapper import StiffnessWrapper

__all__ = ["RiemannianAdam", "RiemannianSGD", "StepView", "StiffnessAdamW", "StiffnessWrapper", "anneal"]
