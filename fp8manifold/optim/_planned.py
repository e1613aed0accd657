"""What a step is planned over: parameters as they are given, one with its group, and one's step before it is taken."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8manifold.optim._job import Job

__all__ = ["Member", "Parameters", "Planned"]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Member = tuple[dict[str, Any], Tensor]
"""A group and one of its parameters."""


@dataclass
class Planned:
    """One parameter's step, ready to be taken."""

    group: dict[str, Any]
    parameter: Tensor
    state: dict[str, Any]
    job: Job
    numbers: dict[str, float]
    dtype: torch.dtype
    compile: bool | None
    #: a contiguous copy of the weight, where the parameter itself is not contiguous
    copied: Tensor | None = None
