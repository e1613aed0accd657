"""What a checkpoint holds, and the two ways in which one can fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nanogpt_bench.system.errors import BenchError


@dataclass
class Contents:
    """Everything a checkpoint holds, free of any class that a reader would need to know.

    Example:
        >>> import torch
        >>> contents = Contents(10, {"model": {"w": torch.ones(2, 3)}}, facts={"best": True})
        >>> contents.step, list(contents.tensors["model"])
        (10, ['w'])
    """

    #: optimizer steps completed
    step: int
    #: file stem -> name -> plain, contiguous CPU tensor that shares its memory with no other
    tensors: dict[str, dict[str, Tensor]]
    #: file stem -> the texts in that file's header
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    #: state.json, without NaN and Inf; `best` is true if no validation loss had been lower at that step
    facts: dict[str, Any] = field(default_factory=dict)


class BrokenCheckpoint(BenchError):
    """A checkpoint is not what was committed; `str(error)` is one line that says what is wrong with which file."""


class CheckpointNotWritten(BenchError):
    """A checkpoint could not be written; those before it are as they were."""
