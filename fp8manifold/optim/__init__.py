"""Optimizers over weights that live on a grid: direction x stiffness x write-back.

optimizers   stiffness.py, stiffness_muon.py, stiffness_adafactor.py, riemannian.py,
             _fisher/, wrapper.py: options, and the fixed parts of a parameter's step
a step       _optimizer.py runs it; a parameter in it is a `Slot` (_slot.py), its fixed
             parts a `Spec` (_spec.py), what changes from step to step _step_numbers.py.
             _matrices.py, _muon.py: steps of whole matrices. _factors.py,
             _factored.py: the second moment of Adafactor
arithmetic   _eager_step.py, with _directions.py and _writeback.py, in PyTorch. It defines
             the bits that _native_step.py (C) and _triton_step.py (GPU) equal, with
             which it shares the tables of fp8manifold/_interface.py; both read
             _records.py. _backends.py chooses
C            fp8manifold/_native/: step.c is what is called, and starts threads; stages.c
             takes steps of every kind, a tile at a time, in_one_loop.c the usual ones over
             codes; squares.c asks whether gradients are finite, factors.c is Adafactor's,
             rescale.c doubles scales
steady       _steady.py says which steps are planned, _plan.py takes them again as they
             were planned, _graphed.py records them
before it    _checks.py, _finite.py, _agreement.py (several processes): may refuse it
state        _state.py, _streams.py (random bits), _scales.py, with _rescaling.py (codes
             under other scales), _adopted.py
in backward  _in_backward/: each parameter steps once its gradient is computed.
             _passes.py: the backward pass that it is in
"""

from fp8manifold.optim._adopted import (
    adafactor_state,
    adamw_state,
    adopted_state,
    rows_of_state,
)
from fp8manifold.optim._checks import anneal
from fp8manifold.optim._eager_step import StepView
from fp8manifold.optim._fisher import FisherNaturalGradient
from fp8manifold.optim._graphed import graphed
from fp8manifold.optim._in_backward import InBackward, step_in_backward
from fp8manifold.optim._triton_step import CompileUnavailableWarning
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack
from fp8manifold.optim.riemannian import RiemannianAdam, RiemannianSGD
from fp8manifold.optim.stiffness import StiffnessAdamW, StiffnessLion, StiffnessSGD
from fp8manifold.optim.stiffness_adafactor import StiffnessAdafactor
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
    "StiffnessAdafactor",
    "StiffnessAdamW",
    "StiffnessLion",
    "StiffnessMuon",
    "StiffnessSGD",
    "StiffnessWrapper",
    "WriteBack",
    "adafactor_state",
    "adamw_state",
    "adopted_state",
    "anneal",
    "graphed",
    "muon_report",
    "rows_of_state",
    "step_in_backward",
]
