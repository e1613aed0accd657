"""Building the job of a parameter's step, and keeping it while nothing it is made of has changed."""

from typing import Any

from torch import Tensor

from fp8manifold._charts import Metric
from fp8manifold._float_bits import working_dtype
from fp8manifold.optim._base import ManifoldOptimizer, Planned
from fp8manifold.optim._engine import Job
from fp8manifold.optim._field import bounded_share, log2_bounded, reference_stiffness
from fp8manifold.optim._geometry import bounded_ends
from fp8manifold.optim._layout import row_view
from fp8manifold.optim._moments import BOUNDS
from fp8manifold.optim._plan import Grid, grid_of, make_state, stiffness_field
from fp8manifold.optim._rescale import widened
from fp8manifold.optim._variant import Variant
from fp8manifold.tensor import FP8Tensor

__all__ = ["GridOptimizer"]

_STATE = ("residual", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "avg_bound", "sq_bound")


class GridOptimizer(ManifoldOptimizer):
    """Plans steps for the engine: subclasses name the traits of the variant and give its numbers.

    Attributes:
        widened_scales: how often a one-byte parameter that had reached the end of its range was given a wider scale.
    """

    widened_scales: int = 0

    @property
    def _jobs(self) -> dict[Tensor, tuple[tuple[Any, ...], Job, Grid]]:
        """Jobs by parameter; no part of the state."""
        jobs: dict[Tensor, tuple[tuple[Any, ...], Job, Grid]] = self.__dict__.setdefault("_kept_jobs", {})
        return jobs

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        """The variant's fields that do not follow from storage: direction, geometry, stiffness, ...

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

    def _plan(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Planned | None:
        job, grid = self._job(group, parameter, state)
        words = (group["seed"], int(state["step"]), state["stream"])
        if isinstance(parameter, FP8Tensor) and _is_due(group, state) and widened(parameter, state, job, words):
            self.widened_scales += 1
            del self._jobs[parameter]
            job, grid = self._job(group, parameter, state)
        job.arrays["gradient"] = self._gradient(group, parameter).reshape(job.layout.dims)
        job.words = words
        numbers = self._numbers(group, parameter, state, job)
        copied = None if grid.in_place else grid.weight
        return Planned(parameter, state, job, numbers, working_dtype(parameter), group["compile"], copied)

    def _job(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> tuple[Job, Grid]:
        grid = grid_of(parameter)
        quantized = grid.storage != "plain"
        if quantized and _is_due(group, state):
            self._refresh(group, grid, state)
        traits = self._traits(group, parameter, grid if quantized else None)
        kept = self._jobs
        signature = _signature(traits, grid, state)
        if parameter not in kept or kept[parameter][0] != signature:
            job = self._new_job(group, parameter, state, grid, traits)
            kept[parameter] = (_signature(traits, grid, state), job, grid)
        return kept[parameter][1], grid

    def _new_job(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], grid: Grid, traits: dict[str, Any]
    ) -> Job:
        layout = grid.layout(blocks=traits["moments"] == "8bit")
        variant = Variant(
            storage=grid.storage,
            fmt=grid.fmt,
            scale_is_power_of_two=grid.scale_is_power_of_two,
            **traits,
        )
        make_state(variant, layout, parameter, state)
        arrays = {"weight": grid.weight.view(layout.dims)}
        names = (*variant.stores, *(("residual",) if variant.residual_bits == 8 else ()))
        arrays |= {name: state[name].view(layout.dims) for name in names}
        if variant.moments == "8bit":
            arrays |= {BOUNDS[name]: state[BOUNDS[name]].view(layout.block_dims) for name in variant.stores}
        if grid.scale is not None:
            arrays["scale"] = row_view(grid.scale, grid.weight.shape, layout)
            if variant.geometry in ("exponential", "tangent") and variant.metric == "ulp":
                assert grid.fmt is not None
                arrays |= bounded_ends(grid.fmt, arrays["scale"], state["reference"], group["damping"], group["clip"])
        return Job(variant, layout, arrays, (0, 0, 0))

    def _refresh(self, group: dict[str, Any], grid: Grid, state: dict[str, Any]) -> None:
        """Compute S_ref and the bounded share."""
        stiffness = stiffness_field(grid, self._metric(group, grid))
        state["reference"] = reference_stiffness(stiffness)
        state["bounded"] = self._bounded(group, grid, stiffness, state["reference"])

    def _stiffness_numbers(self, group: dict[str, Any], state: dict[str, Any], power: float) -> dict[str, float]:
        reference = state["reference"]
        return {
            "inverse_reference": 1 / reference,
            "log_reference": log2_bounded(reference),
            "low": group["damping"],
            "high": group["clip"],
            "log_low": log2_bounded(group["damping"]),
            "log_high": log2_bounded(group["clip"]),
            "power": power,
        }


def _is_due(group: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether S_ref, and what else changes rarely, is looked at in this step."""
    return bool((int(state["step"]) - 1) % group["refresh_every"] == 0)


def _signature(traits: dict[str, Any], grid: Grid, state: dict[str, Any]) -> tuple[Any, ...]:
    """What a job was built from; the job keeps the memory alive, so that no address is used twice."""
    addresses = [state[name].data_ptr() for name in _STATE if name in state]
    scale = None if grid.scale is None else grid.scale.data_ptr()
    return (*traits.values(), grid.weight.data_ptr(), scale, state.get("reference"), *addresses)
