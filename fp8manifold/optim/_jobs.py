"""Building the job of a parameter's step, and keeping it while nothing it is made of has changed."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8manifold._charts import Metric
from fp8manifold._float_bits import working_dtype
from fp8manifold.optim._base import ManifoldOptimizer
from fp8manifold.optim._engine import Job, compiles
from fp8manifold.optim._field import bounded_share, reference_stiffness
from fp8manifold.optim._geometry import bounded_ends
from fp8manifold.optim._hyper import row
from fp8manifold.optim._kinds import is_quantized, own_manifold
from fp8manifold.optim._layout import row_view
from fp8manifold.optim._moments import BOUNDS
from fp8manifold.optim._options import options_of
from fp8manifold.optim._plan import Grid, grid_of, make_state, stiffness_field
from fp8manifold.optim._planned import Member, Planned
from fp8manifold.optim._repeated import RepeatedStep
from fp8manifold.optim._rescale import widened
from fp8manifold.optim._variant import Variant
from fp8manifold.tensor import FP8Tensor

__all__ = ["GridOptimizer", "Kept"]

_STATE = ("residual", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "avg_bound", "sq_bound")


class GridOptimizer(ManifoldOptimizer):
    """Plans steps for the engine: subclasses name the traits of the variant and give its numbers."""

    _repeats = True  # numbers differ within a group, at the same step, in what follows from S_ref alone

    @property
    def _jobs(self) -> "MutableMapping[Tensor, Kept]":
        """Jobs by parameter, for as long as that lives; no part of the state."""
        jobs: MutableMapping[Tensor, Kept] = self.__dict__.setdefault("_kept_jobs", WeakTensorKeyDictionary())
        return jobs

    def _planned(self, members: list[Member]) -> list[Planned]:
        """Without what was kept of parameters that are in no group any more."""
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for parameter in [p for p in self._jobs if id(p) not in known]:
            del self._jobs[parameter]
        return super()._planned(members)

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        """The variant's fields that do not follow from storage: direction, geometry, stiffness, ...

        ``grid`` is None for an ordinary parameter.
        """
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], job: Job) -> dict[str, float]:
        """The row of hyperparameters of this step."""
        raise NotImplementedError

    def _kind(self, parameter: Tensor) -> object:
        """What else the traits of a parameter depend on, besides its group and storage."""
        return None

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
        words = (group["seed"], int(state["step"]), state["stream"])
        due = (words[1] - 1) % group["refresh_every"] == 0 or (is_quantized(parameter) and "reference" not in state)
        kept = self._jobs.get(parameter)
        is_new = (
            due or kept is None or kept.kind != self._kind(parameter) or not kept.is_current(group, parameter, state)
        )
        if is_new:
            kept = self._look_at(group, parameter, state, words, due=due)
        assert kept is not None
        job = kept.job
        job.arrays["gradient"] = self._gradient(group, parameter).reshape(job.layout.dims).contiguous()
        job.words = words
        numbers = self._numbers(group, parameter, state, job)
        copied = None if kept.grid.in_place else kept.grid.weight
        return Planned(group, parameter, state, job, numbers, kept.dtype, group["compile"], copied, is_new)

    def _repeatable(self, planned: list[Planned]) -> RepeatedStep | None:
        """What takes the next steps if they are like this one."""
        if not self._repeats or not planned or self.observer is not None:
            return None
        kept = [self._jobs[plan.parameter] for plan in planned]
        if len({(each.dtype, each.job.arrays["weight"].device) for each in kept}) > 1:
            return None
        if any(_has_to_be_planned(plan) for plan in planned):
            return None
        numbers = torch.tensor([row(plan.numbers, plan.dtype) for plan in planned], dtype=torch.float64)
        members = [(plan.group, plan.parameter, each) for plan, each in zip(planned, kept, strict=True)]
        return RepeatedStep(self, members, numbers)

    def _look_at(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], words: tuple[int, int, int], *, due: bool
    ) -> "Kept":
        """Look at the parameter anew: its field, where that is due, its scale, and what a step of it is made of."""
        kept = self._keep(group, parameter, state, due=due)
        if due and isinstance(parameter, FP8Tensor) and widened(parameter, state, kept.job, words):
            self.widened_scales += 1
            kept = self._keep(group, parameter, state, due=True)
        self._jobs[parameter] = kept
        return kept

    def _keep(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], *, due: bool) -> "Kept":
        grid = grid_of(parameter)
        quantized = grid.storage != "plain"
        if quantized and due:
            self._refresh(group, grid, state)
        traits = self._traits(group, parameter, grid if quantized else None)
        job = self._new_job(group, parameter, state, grid, traits)
        return Kept(self._kind(parameter), group, parameter, state, job, grid)

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
        if grid.fmt is not None:
            state["grid"] = torch.tensor(grid.fields)
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


def _has_to_be_planned(plan: Planned) -> bool:
    """Whether an array has to be unpacked first, or the compiler's own guards are what a call goes through."""
    job = plan.job
    return job.variant.residual_bits == 4 or (job.ready is None and compiles(job, plan.dtype, plan.compile))


class Kept:
    """A job, and what it was made of: it holds while all of that is still there."""

    def __init__(
        self, kind: object, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], job: Job, grid: Grid
    ) -> None:
        self.kind = kind
        self.job, self.grid, self.dtype = job, grid, working_dtype(parameter)
        self._options = options_of(group)
        self._address = _address(parameter, grid.storage)
        self._state = [(name, state[name], place_of(state[name])) for name in _STATE if name in state]
        self._reference = state.get("reference")

    def is_current(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> bool:
        """Whether nothing has been replaced or set anew."""
        return (
            self.is_in_place(parameter)
            and self.averages_are_in_place(state)
            and self._reference == state.get("reference")
            and self._options == options_of(group)
        )

    def averages_are_in_place(self, state: dict[str, Any]) -> bool:
        """Whether the state holds the very tensors that are stepped, and these the same memory in the same layout."""
        return all((now := state.get(name)) is tensor and place_of(now) == place for name, tensor, place in self._state)

    def is_in_place(self, parameter: Tensor) -> bool:
        """Whether weight and scale lie where they did and are stepped there."""
        return self.grid.in_place and self._address == _address(parameter, self.grid.storage)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where and how a tensor lies: assigning to ``.data`` changes that of the same object."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _address(parameter: Tensor, storage: str) -> tuple[Any, ...]:
    """Where weight and scale lie; the job keeps both alive, so that no address is used twice."""
    if storage == "codes":
        assert isinstance(parameter, FP8Tensor)
        codes, scale = parameter.codes, parameter.scale
        return (*place_of(codes), scale.data_ptr(), id(scale), scale.shape, scale._version, parameter.rounding)
    if storage == "plain":
        return place_of(parameter)
    manifold = own_manifold(parameter)
    assert manifold is not None
    return (
        *place_of(parameter),
        manifold.scale.data_ptr(),
        id(manifold.scale),
        manifold.scale._version,
        manifold.metric,
        getattr(manifold, "rounding", ""),
        getattr(manifold, "retraction", ""),
    )
