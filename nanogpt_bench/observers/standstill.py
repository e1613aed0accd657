"""Standing still: steps that the optimizer did not take, and weights that did not change, between two validations."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nanogpt_bench.config import metrics
from nanogpt_bench.step.memory import plain_tensors
from nanogpt_bench.step.points import Step
from nanogpt_bench.system.words import counted

_FLAGS = tuple(flag.name for flag in metrics.FLAGS)


@dataclass
class _Look:
    """What was there at a validation: the step's number, the optimizer's count of steps, and a hash of the weights."""

    number: int
    #: summed over parameters; None where the optimizer counts none
    steps: float | None
    weights: int


class Standstill:
    """Compares every validation with the one before; a state of it lets a run that goes on compare with that before.

    >>> from nanogpt_bench.step.points import Step
    >>> layer = nn.Linear(2, 1)
    >>> adamw = torch.optim.AdamW(layer.parameters())
    >>> seen = Standstill()
    >>> found = [list(seen.see(Step(n, layer, adamw, record={"val/loss": 1.0}))) for n in (0, 4)]
    >>> found[1]
    [('no_change', 'no weight changed from step 0 to step 4, in 1 step')]
    """

    def __init__(self) -> None:
        self._last: _Look | None = None
        #: steps since then whose loss and gradient were finite
        self._due = 0

    def see(self, step: Step) -> Iterator[tuple[str, str]]:
        """Take in a step whose record is complete; yield kind and message of what stood still."""
        if step.number > 0 and not any(step.record.get(flag) for flag in _FLAGS):
            self._due += 1
        if metrics.VAL_LOSS.name not in step.record:
            return
        last, now = self._last, _Look(step.number, _steps(step.optimizer), _hash(step.model))
        if last is not None and self._due:
            between = f"from step {last.number} to step {now.number}, in {counted(self._due, 'step')}"
            if now.steps is not None and now.steps == last.steps:
                yield "no_step", f"the optimizer took no step {between}"
            if now.weights == last.weights:
                yield "no_change", f"no weight changed {between}"
        self._last, self._due = now, 0

    def state(self) -> dict[str, Any]:
        return {"last": None if self._last is None else asdict(self._last), "due": self._due}

    def load_state(self, state: Mapping[str, Any]) -> None:
        last = state.get("last")
        self._last, self._due = None if last is None else _Look(**last), state.get("due", 0)


def _steps(optimizer: torch.optim.Optimizer) -> float | None:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state]
    return sum(float(state["step"]) for state in states) if states else None


@torch.no_grad()
def _hash(model: nn.Module) -> int:
    """A hash of the bits of all trained weights that this process holds."""
    found = 0
    for parameter in model.parameters():
        for part in plain_tensors(parameter) if parameter.requires_grad else ():
            found = zlib.crc32(part.detach().reshape(-1).cpu().view(torch.uint8).numpy().data, found)
    return found
