"""Optimizers over weights that live on a grid: direction x stiffness x write-back."""

from fp8manifold.optim._adopted import adamw_state, adopted_state, rows_of_state
from fp8manifold.optim._checks import anneal
from fp8manifold.optim._fisher import FisherNaturalGradient
from fp8manifold.optim._graphed import graphed
from fp8manifold.optim._in_backward import InBackward, step_in_backward
from fp8manifold.optim._step import StepView
from fp8manifold.optim._triton_step import CompileUnavailableWarning
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack
from fp8manifold.optim.riemannian import RiemannianAdam, RiemannianSGD
from fp8manifold.optim.stiffness import StiffnessAdamW, StiffnessLion, StiffnessSGD
from fp8manifold.optim.stiffness_muon import (
    MuonReport,
    ReportedParameter,
    StiffnessMuon,
    muon_report,
)
from fp8manifold.optim.wrapper import StiffnessWrapper

__all__ = [
    "WRITEBACKS",
    "CompileUnavailableWarning",
    "FisherNaturalGradient",
    "InBackward",
    "MuonReport",
    "ReportedParameter",
    "RiemannianAdam",
    "RiemannianSGD",
    "StepView",
    "StiffnessAdamW",
    "StiffnessLion",
    "StiffnessMuon",
    "StiffnessSGD",
    "StiffnessWrapper",
    "WriteBack",
    "adamw_state",
    "adopted_state",
    "anneal",
    "graphed",
    "muon_report",
    "rows_of_state",
    "step_in_backward",
]
