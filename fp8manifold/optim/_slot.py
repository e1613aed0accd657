"""A slot: one parameter in one step.

A step is planned once for all parameters and taken by whichever backend can. What a
backend needs of a parameter is in its slot, whatever the parameter is (bytes with
scales, floats on a manifold, ordinary floats, a shard of any of these)::

    slot_of(group, parameter, state)   where the weight is: codes, floats, scale, format
    optimizer._begin(slots)            fills in the state, the spec, the view, the
                                       gradient and the numbers of this step
    run_all(slots)                     a backend changes ``slot.tensors`` in place, and
                                       reports scales that are full or have only zeros
    optimizer._take(slots)             acts on these reports

All arrays of a step are seen in one `View` of rows. A row is a block of moments in 8 bits,
or the weights that share a scale, so that bounds and scales are one column beside it.

The attributes that backends append to (``saturated``, ``doubled``, ``has_zero_rows``,
``next_scale``) are lists because copies of a slot (`Slot.replaced`) share them: what is
reported about a copy is found in the original.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8manifold import _geoopt_import
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.reading import PendingValues, read_cached, remember_value
from fp8manifold._encoded.storage import number_of, run_length, runs_of
from fp8manifold._encoded.stored_scale import decoded_scale
from fp8manifold._interface import WeightStorage
from fp8manifold._numerics.charts import Metric
from fp8manifold._numerics.stiffness import bounded_ends
from fp8manifold._ranks import ALONE, Ranks, Share, local_of, share_of
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._directions import row_from_numbers
from fp8manifold.optim._factors import STATISTIC_NAMES, Factors
from fp8manifold.optim._spec import BOUND_NAMES, Spec
from fp8manifold.random_bits import FOR_MOMENTS, DrawKey, draw_key
from fp8manifold.tensor import FP8Tensor

if TYPE_CHECKING:
    import geoopt

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""The parameters that an optimizer may be given."""
_LONGEST_BLOCK: Final = 256
_SHORTEST_BLOCK: Final = 32


@dataclass(frozen=True)
class View:
    """A view of one or two dimensions that every array of a step broadcasts to."""

    #: (rows, length), or the length alone
    dims: tuple[int, ...]
    #: of scales, one per row or per element; () of a single one
    row_dims: tuple[int, ...]
    #: rows of the view that share one of the scale's entries
    repeats: int = 1

    @property
    def block_dims(self) -> tuple[int, ...]:
        return (*self.dims[:-1], 1)

    @property
    def numel(self) -> int:
        return math.prod(self.dims)


def row_view(scale: Tensor, shape: tuple[int, ...], view: View) -> Tensor:
    """Broadcast one value per scale group to one value per row of a view."""
    if view.row_dims == view.dims and scale.numel() != view.numel:
        scale = scale.expand(shape)
    if view.repeats > 1:
        scale = scale.reshape(-1).repeat_interleave(view.repeats)
    return scale.reshape(view.row_dims)


@lru_cache(maxsize=4096)
def view_of(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...] | None,
    block_size: int | None,
    blocks: bool,
) -> View:
    """Return the view that a parameter is stepped in.

    Args:
        shape: of the parameter.
        scale_shape: of its scale, or None if it has none.
        block_size: the number of weights that share a scale, where scales are of blocks;
            with 1 each weight has its own.
        blocks: whether moments are in blocks.
    """
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    has_scale_per_row = False
    has_scale_per_element = False
    if scale_shape is None or math.prod(scale_shape) == 1:
        # no scale, or one for all
        if not blocks and scale_shape is None:
            rows = 1
    elif block_size == 1:
        # one for each weight
        rows = numel // shape[-1]
        has_scale_per_element = True
    elif block_size is not None:
        # one for each block or run of a row
        rows = numel // block_size
        has_scale_per_row = True
    elif len(shape) > 1 and scale_shape == (rows, *(1,) * (len(shape) - 1)):
        # one for each index of the first dimension
        has_scale_per_row = True
    elif len(shape) > 2 and scale_shape == (*shape[:-1], 1):
        # one for each row along the last dimension
        rows = numel // shape[-1]
        has_scale_per_row = True
    else:
        # a scale of any other shape is expanded to one per element
        return View((numel,), (numel,))
    length = numel // rows
    block = _block_length(length) if blocks else length
    repeats = length // block
    dims = (rows * repeats, block) if rows * repeats > 1 else (block,)
    if has_scale_per_element:
        return View(dims, dims)
    if has_scale_per_row and len(dims) == 2:
        return View(dims, (rows * repeats, 1), repeats)
    return View(dims, ())


def _block_length(row_length: int) -> int:
    """Return the longest block that divides a row, or the row where only short ones do."""
    for length in range(min(row_length, _LONGEST_BLOCK), _SHORTEST_BLOCK - 1, -1):
        if row_length % length == 0:
            return length
    return row_length


_DERIVED: Final = frozenset(("scale", "arrays", "number_row"))
"""Cached attributes of a slot that follow from its fields."""


@dataclass(eq=False)
class Slot:
    """One parameter in one step, made from its group, its state and the parameter.

    A plan keeps its slots from step to step, without tensors.
    """

    group: dict[str, Any]
    parameter: Tensor
    state: dict[str, Any]
    #: steps taken before this one
    steps_done: int
    storage: WeightStorage
    #: ``weight``, and once the step is prepared ``gradient`` and what the state has
    #: (moments, bounds, ``residual``); contiguous, the rows that this process has
    tensors: dict[str, Tensor]
    #: None for an ordinary parameter
    fmt: FloatFormat | None = None
    #: the scale as it is stored: for blocks exponents, uint8
    kept_scale: Tensor | None = None
    block_size: int | None = None
    metric: Metric = "ulp"
    rounding: str = "nearest"
    #: how draws for the weight follow each other from step to step: independent or dither
    draws: str = "independent"
    retraction: str = "exponential"
    #: True if ``weight`` is the parameter's own memory, and no contiguous copy of it
    in_place: bool = True
    #: the rows that this process has of a sharded parameter
    share: Share | None = None

    spec: Spec = field(init=False)
    view: View = field(init=False)
    #: the numbers of this step by name
    numbers: dict[str, float] = field(init=False)
    #: the stiffness exponent of this step
    power: float = 0.0
    #: exponents of the values between which a chart of the ulp follows the format
    chart_ends: tuple[int, int] = (0, 0)
    #: True if every process steps all rows of a sharded parameter
    steps_all_rows: bool = False
    #: reports of a backend: whether a code has the largest magnitude
    saturated: list[bool] = field(default_factory=list)
    #: how many scales it has doubled
    doubled: list[int] = field(default_factory=list)
    #: False if every scale is known to have a weight that is not 0
    has_zero_rows: list[bool] = field(default_factory=list)
    #: a mask of the scales that this step fits, as their weights all are 0
    fit_mask: Tensor | None = None
    #: the scales in floats after a step that fits some
    next_scale: list[Tensor] = field(default_factory=list)
    #: what Adafactor multiplies the gradient by, once its statistics are advanced
    factors: Factors | None = None

    @property
    def weight(self) -> Tensor:
        return self.tensors["weight"]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @cached_property
    def scale(self) -> Tensor | None:
        """The scale in floats."""
        return None if self.kept_scale is None else decoded_scale(self.kept_scale)

    @property
    def ranks(self) -> Ranks:
        return ALONE if self.share is None else self.share.ranks

    @property
    def grid_fields(self) -> tuple[int, ...] | None:
        """Format and granularity as numbers, which a state is made for.

        They are None for an ordinary parameter.
        """
        if self.fmt is None:
            return None
        scales = 0 if self.kept_scale is None else self.kept_scale.numel()
        if self.share is not None and self.kept_scale is not None and self.kept_scale.dim():
            scales = self.share.shape[0]
        granularity = int(scales > 1)
        if self.storage == WeightStorage.CODES:
            granularity = number_of(local_of(self.parameter).block_size) or granularity
        layout = LAYOUTS.index(self.fmt.layout)
        fmt = self.fmt
        return fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, layout, granularity

    @property
    def scale_is_power_of_two(self) -> bool:
        """True where dividing by the scale leaves points of the grid.

        Codes are not divided by their scale.
        """
        if self.storage in (WeightStorage.CODES, WeightStorage.PLAIN):
            return True
        assert self.scale is not None
        return bool(read_cached(self.scale, _are_powers_of_two))

    def view_in(self, *, blocks: bool) -> View:
        """Return the view in which the slot is stepped, in rows of blocks or not.

        A shard without rows has the view of one row.
        """
        shape = tuple(self.weight.shape)
        scale_shape = None if self.kept_scale is None else tuple(self.kept_scale.shape)
        if self.steps_all_rows:
            assert self.share is not None
            shape = tuple(self.share.shape)
        elif self.share is not None and not shape[0]:
            shape = (1, *shape[1:])
            if scale_shape:
                scale_shape = (1, *scale_shape[1:])
        return view_of(shape, scale_shape, self.block_size, blocks)

    @property
    def draw_words(self) -> tuple[int, int, int]:
        """Seed, step and stream of its draws."""
        return self.group["seed"], self.steps_done + 1, self.state["stream"]

    @property
    def rounding_key(self) -> DrawKey:
        return draw_key(self.draws, *self.draw_words)

    @property
    def moments_key(self) -> DrawKey:
        """Key of the moments' draws, which are always independent.

        A moment forgets, so with dither earlier draws would enter its odds.
        """
        return DrawKey((*self.draw_words, FOR_MOMENTS))

    @cached_property
    def offset(self) -> int:
        """Position of the first element in the whole parameter."""
        return 0 if self.share is None or self.steps_all_rows else self.share.offset

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that is computed in: float64 for float64, else float32."""
        return torch.float64 if self.parameter.dtype is torch.float64 else torch.float32

    @cached_property
    def number_row(self) -> Tensor:
        """The numbers in the order of :data:`NUMBERS`.

        They are where the step is taken, in the dtype it is computed in.
        """
        values = row_from_numbers(self.numbers, self.dtype)
        row = torch.tensor(values, dtype=self.dtype, device="cpu")
        return row.to(self.device, non_blocking=True)

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """Everything by name, as views that broadcast against each other.

        Adafactor's statistics, which have other shapes, are left out.
        Where scales are fitted, `_scales.py` and `_muon.py` add ``next_scale`` later.
        """
        dims, block_dims = self.view.dims, self.view.block_dims
        arrays = {}
        for name, tensor in self.tensors.items():
            if name in STATISTIC_NAMES:
                continue
            arrays[name] = tensor.view(block_dims if name in BOUND_NAMES else dims)
        if self.scale is not None:
            arrays["scale"] = row_view(self.scale, self.weight.shape, self.view)
            if self.spec.has_bounded_chart:
                assert self.fmt is not None
                arrays |= bounded_ends(self.fmt, arrays["scale"], *self.chart_ends)
        return arrays

    @property
    def changed_tensors(self) -> list[Tensor]:
        """The tensors that a step changes."""
        tensors = dict(self.tensors)
        tensors.pop("gradient", None)
        return list(tensors.values())

    def drop_tensors(self) -> None:
        """Let go of all tensors but the parameter and its state.

        A plan keeps slots from step to step, and no tensors.
        """
        for name in _DERIVED:
            self.__dict__.pop(name, None)
        self.tensors, self.kept_scale = {}, None

    def replaced(self, **fields: Any) -> "Slot":
        """Return a copy with other fields, without the views of the old ones."""
        unchanged = {name: value for name, value in self.__dict__.items() if name not in _DERIVED}
        copy = object.__new__(Slot)
        copy.__dict__ = unchanged | fields
        return copy


def _are_powers_of_two(scale: Tensor) -> bool:
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def slot_of(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Slot:
    """Return a slot that knows where the parameter's weight is, and not yet its step.

    Nothing is changed, and no manifold is made.
    """
    share = share_of(parameter)
    local = parameter if share is None else share.local
    draws = group.get("draws")
    retraction = group.get("retraction")
    steps_done = steps_taken(state)
    if isinstance(local, FP8Tensor):
        kept_scale, block_size = scales_in_runs(local)
        return Slot(
            group,
            parameter,
            state,
            steps_done,
            storage=WeightStorage.CODES,
            tensors={"weight": local.codes},
            fmt=local.format,
            kept_scale=kept_scale,
            block_size=block_size,
            rounding=local.rounding,
            draws=draws or local.draws,
            retraction=retraction or local.retraction,
            share=share,
        )
    weight, in_place = _contiguous_values(local)
    manifold = manifold_of(local)
    if not isinstance(manifold, StiffnessManifold):
        return Slot(
            group,
            parameter,
            state,
            steps_done,
            storage=WeightStorage.PLAIN,
            tensors={"weight": weight},
            draws=draws or "independent",
            in_place=in_place,
            share=share,
        )
    return Slot(
        group,
        parameter,
        state,
        steps_done,
        storage=WeightStorage.GRID if isinstance(manifold, FP8Manifold) else WeightStorage.FREE,
        tensors={"weight": weight},
        fmt=manifold.format,
        kept_scale=manifold.scale.to(working_dtype(weight)),
        metric=manifold.metric,
        rounding=getattr(manifold, "rounding", "nearest"),
        draws=draws or str(getattr(manifold, "draws", "independent")),
        retraction=retraction or str(getattr(manifold, "retraction", "exponential")),
        in_place=in_place,
    )


def describe_parameter(group: dict[str, Any], i: int, k: int) -> str:
    """Return words for parameter ``k`` of ``group``, which is the optimizer's group ``i``.

    They are its name, where the group has names, its position and its shape.
    """
    names = group.get("param_names")
    name = f"{names[k]!r}, " if names else ""
    return f"parameter {k} of group {i} ({name}shape {tuple(group['params'][k].shape)})"


def steps_taken(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a parameter's state has taken.

    A count on a GPU is waited for unless the host knows it.
    """
    step = state.get("step", 0)
    return int(read_cached(step, Tensor.item) if isinstance(step, Tensor) else step)


def count_step(
    slots: list[Slot], report: PendingValues | None = None, *, added: bool = False
) -> list[Slot]:
    """Count a step of slots, and return the slots.

    Args:
        slots: with ``steps_done`` as it was before the step.
        report: of kernels that may have refused the step; None if it is taken.
        added: whether a CUDA graph has counted the step on the GPU already.
    """
    steps = [slot.state["step"] for slot in slots]
    if report is not None and not added:
        count_on_gpu(steps, report.x)
    elif report is None and slots:
        torch._foreach_add_(steps, 1)
    for slot, step in zip(slots, steps, strict=True):
        remember_value(step, partial(_count_after, slot.steps_done, report))
    return slots


def _count_after(steps_done: int, report: PendingValues | None) -> int:
    refused = 0 if report is None else report.values[0][0]
    return steps_done + 1 - int(refused)


def count_on_gpu(steps: list[Tensor], words: Tensor) -> None:
    """Count steps up by one, unless the kernels' first word says that they are refused."""
    # without alpha torch waits, for the tensor's number
    torch._foreach_add_(steps, 1.0 - words[0, 0], alpha=1)


def scales_in_runs(tensor: FP8Tensor, scale: Tensor | None = None) -> tuple[Tensor, int | None]:
    """Return scales as a step takes them, and the length of the runs that share one.

    Args:
        tensor: the tensor of codes. The rows of its squares are cut into runs, each of
            which has the scale of its square.
        scale: None for the scales that it has, or others in their shape.
    """
    scale = tensor.kept_scale if scale is None else scale
    if not isinstance(tensor.block_size, tuple):
        return scale, tensor.block_size
    return runs_of(scale, tensor.shape), run_length(tensor.shape[-1])


def _contiguous_values(floats: Tensor) -> tuple[Tensor, bool]:
    """Return contiguous values, and whether they are the parameter's own memory."""
    weight = floats.detach().as_subclass(Tensor)
    return weight.contiguous().resolve_neg(), weight.is_contiguous() and not weight.is_neg()


def manifold_of(parameter: Tensor) -> "geoopt.Manifold | None":
    """Return the manifold a parameter lives on, or None for an ordinary one.

    That of codes is made, which imports geoopt.
    """
    is_on_manifold = isinstance(parameter, _geoopt_import.tensor_kind)
    return parameter.manifold if is_on_manifold else None  # type: ignore[attr-defined]


def stiffness_manifold_of(parameter: Tensor) -> StiffnessManifold | None:
    """Return the parameter's manifold if it is one of this library's, else None."""
    manifold = manifold_of(parameter)
    return manifold if isinstance(manifold, StiffnessManifold) else None


def foreign_manifold_of(parameter: Tensor) -> "geoopt.Manifold | None":
    """Return the parameter's manifold if it is none of this library's, else None."""
    # no manifold is made of codes
    manifold = None if isinstance(parameter, FP8Tensor) else manifold_of(parameter)
    return None if isinstance(manifold, StiffnessManifold) else manifold


def is_quantized(parameter: Tensor) -> bool:
    """Return True for a parameter in codes or on one of this library's manifolds."""
    return (
        isinstance(local_of(parameter), FP8Tensor) or stiffness_manifold_of(parameter) is not None
    )


def stabilize(slot: Slot) -> None:
    """Project onto the manifold. Codes are always on their grid."""
    parameter = slot.parameter
    if isinstance(parameter, FP8Tensor):
        return
    manifold = manifold_of(parameter)
    if manifold is not None:
        parameter.copy_(manifold.projx(parameter))
        slot.tensors["weight"], _ = _contiguous_values(parameter)
