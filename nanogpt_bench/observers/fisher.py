"""The Fisher information of the linear layers: at the weights of the run, and at those of its float32 shadow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.observers.attention import buffers_kept
from nanogpt_bench.observers.base import Observer, Step


class Fisher(Observer):
    """Records `geometry/fisher_trace`, `fisher_top` and, with a shadow, `fisher_ratio` every `interval` steps.

    `matrix` is `kfac` or `diagonal`; `shadow` gives the float32 model with the weights of this moment.
    """

    def __init__(
        self,
        batches: Callable[[], Sequence[tuple[Tensor, Tensor]]],
        shadow: Callable[[Step], nn.Module] | None,
        interval: int,
        matrix: str,
        seed: int,
    ) -> None:
        self._batches, self._shadow, self._interval = batches, shadow, interval
        self._matrix: Any = matrix
        self._seed = seed

    def after_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        own = self._measure(step.model, step)
        step.add("geometry/fisher_trace", {name: found.trace for name, found in own.items()})
        step.add("geometry/fisher_top", {name: found.top for name, found in own.items()})
        if self._shadow is not None:
            ratios = fm.monitor.fisher_ratio(own, self._measure(self._shadow(step), step))
            step.add("geometry/fisher_ratio", ratios)

    def _measure(self, model: nn.Module, step: Step) -> dict[str, fm.monitor.FisherFigures]:
        gradients = {parameter: parameter.grad for parameter in model.parameters()}
        with buffers_kept(model):
            found = fm.monitor.fisher_figures(
                model, self._batches(), representation=self._matrix, seed=self._seed, step=step.number
            )
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return found
