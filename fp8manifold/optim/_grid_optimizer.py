"""Building the job of a parameter's step from what its group, its storage and its state hold, anew in every step."""

from typing import Any

import torch
from torch import Tensor

from fp8manifold._numerics.charts import Metric
from fp8manifold._numerics.checks import check_int, check_number
from fp8manifold.optim._combinations import check_combination
from fp8manifold.optim._field import bounded_share, reference_stiffness
from fp8manifold.optim._geometry import end_exponents
from fp8manifold.optim._job import Job
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._plan import Grid, grid_of, make_state, stiffness_field
from fp8manifold.optim._rescale import widened
from fp8manifold.optim._variant import variant_of
from fp8manifold.tensor import FP8Tensor

__all__ = ["GridOptimizer"]


class GridOptimizer(ManifoldOptimizer):
    """Plans steps for the engine: subclasses name a direction and the traits of the variant, and give its numbers."""

    direction: str

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number("damping", group["damping"], 0.0, 1.0)
        check_number("clip", group["clip"], 1.0)
        check_int("refresh_every", group["refresh_every"], 1, 2**62)
        check_combination(type(self).__name__, self.direction, group)

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        """The variant's fields that follow neither from storage nor from shared options: direction, geometry, ...

        ``grid`` is None for an ordinary parameter.
        """
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], job: Job) -> dict[str, float]:
        """The row of hyperparameters of this step."""
        raise NotImplementedError

    def _metric(self, group: dict[str, Any], grid: Grid) -> Metric:
        """The metric whose field S_ref is the mean of."""
        metric: Metric = group["metric"]
        return metric

    def _bounded(self, group: dict[str, Any], grid: Grid, stiffness: Tensor, reference: float) -> float:
        """The share of a field that lies outside the bounds."""
        return bounded_share(stiffness, reference, group["damping"], group["clip"])

    def _gradient(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """What the direction is taken from; it is not changed."""
        assert parameter.grad is not None
        return parameter.grad

    def _plan(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Job | None:
        words = (group["seed"], int(state["step"]), state["stream"])
        grid = grid_of(parameter)
        due = (words[1] - 1) % group["refresh_every"] == 0 or "reference" not in state
        if due and grid.storage != "plain":
            self._refresh(group, grid, state)
        job = self._job(group, parameter, state, grid, words)
        if due and isinstance(parameter, FP8Tensor) and widened(parameter, state, job, words):
            self.widened_scales += 1
            self._refresh(group, grid, state)
            job = self._job(group, parameter, state, grid, words)
        job.held["gradient"] = self._gradient(group, parameter).contiguous()
        job.parameter, job.group, job.in_place = parameter, group, grid.in_place
        job.numbers = self._numbers(group, parameter, state, job)
        return job

    def _job(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], grid: Grid, words: tuple[int, int, int]
    ) -> Job:
        """The step of a parameter, short of its gradient."""
        traits = {
            "writeback": (group["writeback"] or grid.rounding) if grid.rounds else "nearest",
            "moments": group["moments"],
            "decays": bool(group["weight_decay"]),
            "maximize": group["maximize"],
            **self._traits(group, parameter, grid if grid.fmt is not None else None),
        }
        layout = grid.layout(blocks=traits["moments"] == "8bit")
        variant = variant_of(
            storage=grid.storage, fmt=grid.fmt, scale_is_power_of_two=grid.scale_is_power_of_two, **traits
        )
        make_state(variant, layout, parameter, state)
        held = {"weight": grid.weight} | {name: state[name] for name in variant.keeps}
        job = Job(variant, layout, held, words, grid.scale, parameter.shape)
        if grid.fmt is not None:
            if "grid" not in state:
                state["grid"] = torch.tensor(grid.fields)
            if variant.geometry in ("exponential", "tangent") and variant.metric == "ulp":
                bounds = (state["reference"], group["damping"], group["clip"])
                job.ends = end_exponents(*bounds, grid.fmt.mantissa_bits)
        return job

    def _refresh(self, group: dict[str, Any], grid: Grid, state: dict[str, Any]) -> None:
        """Compute S_ref and the bounded share."""
        stiffness = stiffness_field(grid, self._metric(group, grid))
        state["reference"] = reference_stiffness(stiffness)
        state["bounded"] = self._bounded(group, grid, stiffness, state["reference"])
