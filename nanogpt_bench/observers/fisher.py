"""The Fisher information of the linear layers: at the weights of the run, and at those of its float32 shadow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import Metric
from nanogpt_bench.observers.attention import buffers_kept
from nanogpt_bench.training.points import Observer, Step


class Fisher(Observer):
    """Records the trace and the first `eigenvalues` eigenvalues of every layer's Fisher matrix every `interval` steps.

    They are `geometry/fisher_trace` and `geometry/fisher_top_I` with I from 1; with a shadow also its own,
    `fisher_shadow_trace` and `fisher_shadow_top_I`, and the ratios to these, `fisher_ratio` and `fisher_top_ratio_I`.
    `matrix` is `kfac` or `diagonal`; `shadow` gives the float32 model with the weights of this moment.
    """

    def __init__(
        self,
        batches: Callable[[], Sequence[tuple[Tensor, Tensor]]],
        shadow: Callable[[Step], nn.Module] | None,
        interval: int,
        *,
        matrix: str,
        eigenvalues: int,
        seed: int,
    ) -> None:
        self._batches, self._shadow, self._interval = batches, shadow, interval
        self._matrix: Any = matrix
        self._eigenvalues, self._seed = eigenvalues, seed

    def after_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        own = self._measure(step.model, step)
        _add(step, metrics.FISHER_TRACE, metrics.FISHER_TOP, own)
        if self._shadow is not None:
            shadow = self._measure(self._shadow(step), step)
            _add(step, metrics.SHADOW_TRACE, metrics.SHADOW_TOP, shadow)
            step.add(metrics.FISHER_RATIO.name, fm.monitor.fisher_ratio(own, shadow))
            _add_ranks(step, metrics.TOP_RATIO, fm.monitor.eigenvalue_ratios(own, shadow))

    def _measure(self, model: nn.Module, step: Step) -> dict[str, fm.monitor.FisherFigures]:
        gradients = {parameter: parameter.grad for parameter in model.parameters()}
        with buffers_kept(model):
            found = fm.monitor.fisher_figures(
                model,
                self._batches(),
                representation=self._matrix,
                eigenvalues=self._eigenvalues,
                seed=self._seed,
                step=step.number,
            )
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return found


def _add(step: Step, trace: Metric, top: Metric, found: Mapping[str, fm.monitor.FisherFigures]) -> None:
    step.add(trace.name, {layer: figures.trace for layer, figures in found.items()})
    _add_ranks(step, top, {layer: figures.eigenvalues for layer, figures in found.items()})


def _add_ranks(step: Step, metric: Metric, found: Mapping[str, Sequence[float | None]]) -> None:
    """Record figures by rank, from 1; a layer with few weights lacks the last of them."""
    for rank in range(max(map(len, found.values()), default=0)):
        ranked = {layer: values[rank] for layer, values in found.items() if rank < len(values)}
        step.add(metric.number(rank + 1).name, ranked)
