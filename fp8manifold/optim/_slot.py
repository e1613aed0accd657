"""A slot is one parameter in one step: where its weight lives, the view it is stepped
in, the key of its draws.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import geoopt
import torch
from torch import Tensor

from fp8manifold._base.float_bits import working_dtype
from fp8manifold._base.reading import PendingValues, read_cached, remember_value
from fp8manifold._encoded.storage import expand_scale, number_of, run_length, runs_of
from fp8manifold._encoded.stored_scale import decoded_scale
from fp8manifold._native._arrays import spacings
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.codec import decode_bits, decode_with_ulp
from fp8manifold._numerics.stiffness import bounded_ends
from fp8manifold._ranks import ALONE, Ranks, Share, local_of, share_of
from fp8manifold.formats import LAYOUTS, FloatFormat
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.optim._directions import row_of
from fp8manifold.optim._spec import BOUND_NAMES, Spec, Storage
from fp8manifold.random_bits import DrawKey, draw_key
from fp8manifold.tensor import FP8Tensor

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""The parameters that an optimizer may be given."""
FOR_MOMENTS, FOR_RESCALING = 1, 2
"""A fourth key word, for draws apart from those of weights: of moments, and of weights
whose scale doubles.
"""
_LONGEST_BLOCK: Final = 256
_SHORTEST_BLOCK: Final = 32


@dataclass(frozen=True)
class View:
    """A view of one or two dimensions that every array of a step broadcasts to."""

    #: (rows, length), or the length alone; a row is a block of moments in blocks, or
    #: the weights that share a scale
    dims: tuple[int, ...]
    row_dims: tuple[int, ...]  # of scales, one per row or per element; () of a single one
    repeats: int = 1  # rows of the view that share one of the scale's entries

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
    """The view that a parameter is stepped in, by its shape, that of its scale, and
    whether moments are in blocks.

    Blocks of ``block_size`` weights share a scale, unless it is None; with 1 each
    weight has its own.
    """
    numel = math.prod(shape)
    rows, each = shape[0] if len(shape) > 1 else 1, False
    row_dims: tuple[int, ...] | None = ()
    if scale_shape is None or math.prod(scale_shape) == 1:
        if not blocks and scale_shape is None:
            rows = 1
    elif block_size == 1:
        each, rows = True, numel // shape[-1]
    elif block_size is not None:
        rows, row_dims = numel // block_size, None
    elif len(shape) > 1 and scale_shape == (rows, *(1,) * (len(shape) - 1)):
        row_dims = None
    elif len(shape) > 2 and scale_shape == (*shape[:-1], 1):
        rows, row_dims = numel // shape[-1], None
    else:
        return View((numel,), (numel,))
    block = length = numel // rows
    if blocks:  # the longest that divides a row, or the row itself where only a short one does
        longest = range(min(length, _LONGEST_BLOCK), _SHORTEST_BLOCK - 1, -1)
        block = next((each for each in longest if length % each == 0), length)
    repeats = length // block
    dims = (rows * repeats, block) if rows * repeats > 1 else (block,)
    if each:
        return View(dims, dims)
    row_dims = (rows * repeats, 1) if row_dims is None and len(dims) == 2 else ()
    return View(dims, row_dims, repeats if row_dims else 1)


_FOLLOWING: Final = frozenset(
    ("scale", "arrays", "row")
)  #: Attributes of a slot that follow from the others.


@dataclass(eq=False)
class Slot:
    """One parameter in one step, made in every step from its group, its state and the
    parameter itself.
    """

    group: dict[str, Any]
    parameter: Tensor
    state: dict[str, Any]
    done: int  # steps taken before this one
    storage: Storage
    #: ``weight``, and once the step is prepared ``gradient`` and what the state has:
    #: moments, bounds, ``residual``; contiguous, the rows that this process holds
    tensors: dict[str, Tensor]
    fmt: FloatFormat | None = None  # None for an ordinary parameter
    kept_scale: Tensor | None = None  # for blocks exponents, uint8
    block_size: int | None = None
    metric: Metric = "ulp"
    rounding: str = "nearest"
    draws: str = (
        "independent"  # or dither: how draws for the weight follow each other from step to step
    )
    retraction: str = "exponential"
    in_place: bool = True  # ``weight`` is the parameter's own memory, and no contiguous copy of it
    share: Share | None = None  # the rows that this process holds of a sharded parameter

    spec: Spec = field(init=False)
    view: View = field(init=False)
    numbers: dict[str, float] = field(init=False)
    power: float = 0.0  # the stiffness exponent of this step
    ends: tuple[int, int] = (
        0,
        0,
    )  # exponents of values between which a chart of the ulp follows the format
    whole: bool = False  # every process steps all rows of a sharded parameter
    # reported by a backend: a code of the largest magnitude, how many scales it has
    # doubled, some in a row at 0
    reached: list[bool] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    emptied: list[bool] = field(default_factory=list)
    zero: Tensor | None = None  # mask of the scales that the step fits, whose weights all are 0
    next_scale: list[Tensor] = field(default_factory=list)  # in floats, after a step that fits some

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
    def fields(self) -> tuple[int, ...] | None:
        """Format and granularity as numbers, which a state is made for; None for an
        ordinary parameter.
        """
        if self.fmt is None:
            return None
        scales = 0 if self.kept_scale is None else self.kept_scale.numel()
        if self.share is not None and self.kept_scale is not None and self.kept_scale.dim():
            scales = self.share.shape[0]
        per_channel = int(scales > 1)
        layout = LAYOUTS.index(self.fmt.layout)
        fields = (self.fmt.exponent_bits, self.fmt.mantissa_bits, self.fmt.bias, layout)
        shared = number_of(local_of(self.parameter).block_size) if self.storage == "codes" else 0
        return (*fields, shared or per_channel)

    @property
    def scale_is_power_of_two(self) -> bool:
        """True where dividing by the scale leaves points of the grid; codes are not
        divided by theirs.
        """
        if self.storage in ("codes", "plain"):
            return True
        assert self.scale is not None
        return bool(
            read_cached(self.scale, lambda scale: bool((torch.frexp(scale).mantissa == 0.5).all()))
        )

    def view_in(self, *, blocks: bool) -> View:
        """The view in which the slot is stepped, in rows of blocks or not; without rows
        that of one row.
        """
        shape, kept = tuple(self.weight.shape), self.kept_scale
        scale_shape = None if kept is None else tuple(kept.shape)
        if self.whole:
            assert self.share is not None
            shape = tuple(self.share.shape)
        elif self.share is not None and not shape[0]:
            shape, scale_shape = (
                (1, *shape[1:]),
                (1, *scale_shape[1:]) if scale_shape else scale_shape,
            )
        return view_of(shape, scale_shape, self.block_size, blocks)

    @property
    def age(self) -> int:
        """The number of this step since its moments were cleared, from 1."""
        return self.done + 1 - int(self.state.get("since", 0))

    @property
    def key(self) -> tuple[int, int, int]:
        """Seed, step and stream of its draws."""
        return self.group["seed"], self.done + 1, self.state["stream"]

    @property
    def rounding_key(self) -> DrawKey:
        return draw_key(self.draws, *self.key)

    @property
    def moments_key(self) -> DrawKey:
        """Key of the moments' draws: independent, for a moment forgets, and earlier
        draws would enter its odds.
        """
        return DrawKey((*self.key, FOR_MOMENTS))

    @cached_property
    def offset(self) -> int:
        """Position of the first element in the whole parameter."""
        return 0 if self.share is None or self.whole else self.share.offset

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that is computed in: float64 for float64, else float32."""
        return torch.float64 if self.parameter.dtype is torch.float64 else torch.float32

    @cached_property
    def row(self) -> Tensor:
        """The numbers in the order of :data:`NUMBERS`, where the step is taken and in
        the dtype it is computed in.
        """
        return torch.tensor(row_of(self.numbers, self.dtype), dtype=self.dtype).to(
            self.device, non_blocking=True
        )

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """Everything by name, as views that broadcast against each other."""
        dims, blocks = self.view.dims, self.view.block_dims
        arrays = {
            name: t.view(blocks if name in BOUND_NAMES else dims)
            for name, t in self.tensors.items()
        }
        if self.scale is not None:
            arrays["scale"] = row_view(self.scale, self.weight.shape, self.view)
            if self.spec.bounds_chart:
                assert self.fmt is not None
                arrays |= bounded_ends(self.fmt, arrays["scale"], *self.ends)
        return arrays

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that a step changes."""
        changed = dict(self.tensors)
        changed.pop("gradient", None)
        return list(changed.values())

    def replaced(self, **fields: Any) -> "Slot":
        """A copy with other fields, without the views of the old ones."""
        kept = {name: value for name, value in self.__dict__.items() if name not in _FOLLOWING}
        other = object.__new__(Slot)
        other.__dict__ = kept | fields
        return other


def slot_of(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Slot:
    """A slot without its step: where the parameter's weight lives; makes no manifold
    and changes nothing.
    """
    held, share = parameter, share_of(parameter)
    if share is not None:
        held = share.local
    draws, retraction = group.get("draws"), group.get("retraction")
    of_step = (group, parameter, state, steps_taken(state))
    if isinstance(held, FP8Tensor):
        how: dict[str, Any] = {
            "rounding": held.rounding,
            "draws": draws or held.draws,
            "retraction": retraction or held.retraction,
            "share": share,
        }
        return Slot(
            *of_step, "codes", {"weight": held.codes}, held.format, *scales_in_runs(held), **how
        )
    weight, in_place = _memory_of(held)
    manifold, tensors = own_manifold(held), {"weight": weight}
    if manifold is None:
        return Slot(
            *of_step, "plain", tensors, draws=draws or "independent", in_place=in_place, share=share
        )
    return Slot(
        *of_step,
        "grid" if isinstance(manifold, FP8Manifold) else "free",
        tensors,
        manifold.format,
        manifold.scale.to(working_dtype(weight)),
        metric=manifold.metric,
        rounding=getattr(manifold, "rounding", "nearest"),
        draws=draws or str(getattr(manifold, "draws", "independent")),
        retraction=retraction or str(getattr(manifold, "retraction", "exponential")),
        in_place=in_place,
    )


def in_words(group: dict[str, Any], i: int, k: int) -> str:
    """A parameter of a group by its name where the groups have names, its position and
    its shape.
    """
    names = group.get("param_names")
    name = f"{names[k]!r}, " if names else ""
    return f"parameter {k} of group {i} ({name}shape {tuple(group['params'][k].shape)})"


def steps_taken(state: Mapping[str, Any]) -> int:
    """The steps that a parameter's state has taken; a count on a GPU is waited for
    unless the host knows it.
    """
    step = state.get("step", 0)
    return int(read_cached(step, Tensor.item) if isinstance(step, Tensor) else step)


def counted(
    slots: list[Slot], said: PendingValues | None = None, *, added: bool = False
) -> list[Slot]:
    """Count a step of slots: as taken, or as the kernels' verdict ``said``; with
    ``added`` a graph has counted it.
    """
    steps = [slot.state["step"] for slot in slots]
    if said is not None and not added:
        count_on_card(steps, said.x)
    elif said is None and slots:
        torch._foreach_add_(steps, 1)
    for slot, step in zip(slots, steps, strict=True):
        remember_value(
            step, lambda done=slot.done: done + 1 - (0 if said is None else said.values[0][0])
        )
    return slots


def count_on_card(steps: list[Tensor], said: Tensor) -> None:
    """Count steps up by one, unless the kernels' first word says that they are refused."""
    torch._foreach_add_(
        steps, 1.0 - said[0, 0], alpha=1
    )  # without alpha torch waits, for the tensor's number


def scales_in_runs(held: FP8Tensor, scale: Tensor | None = None) -> tuple[Tensor, int | None]:
    """The scales that a step takes, its own or others in their shape, and the length of
    the runs that share one.
    """
    scale = held.kept_scale if scale is None else scale
    if not isinstance(held.block_size, tuple):
        return scale, held.block_size
    return runs_of(scale, held.shape), run_length(held.shape[-1])


def _memory_of(floats: Tensor) -> tuple[Tensor, bool]:
    """Contiguous values, and whether they are the parameter's own memory."""
    weight = floats.detach().as_subclass(Tensor)
    return weight.contiguous().resolve_neg(), weight.is_contiguous() and not weight.is_neg()


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold a parameter lives on, or None for an ordinary one."""
    return parameter.manifold if isinstance(parameter, geoopt.ManifoldTensor) else None


def own_manifold(parameter: Tensor) -> StiffnessManifold | None:
    """The parameter's manifold where it is one of this library's."""
    manifold = manifold_of(parameter)
    return manifold if isinstance(manifold, StiffnessManifold) else None


def is_quantized(parameter: Tensor) -> bool:
    """True for a parameter stored in codes or on one of this library's manifolds."""
    return isinstance(local_of(parameter), FP8Tensor) or own_manifold(parameter) is not None


def stabilize(slot: Slot) -> None:
    """Project onto the manifold; codes are on their grid always."""
    parameter = slot.parameter
    if not isinstance(parameter, FP8Tensor) and (manifold := manifold_of(parameter)) is not None:
        parameter.copy_(manifold.projx(parameter))
        slot.tensors["weight"], _ = _memory_of(parameter)


def stiffness_field(slot: Slot, metric: Metric) -> Tensor:
    """The field S of a metric over all weights, in value."""
    assert slot.fmt is not None
    assert slot.scale is not None
    if slot.storage == "codes" and metric == "ulp":
        if (native := spacings(slot.weight, slot.fmt, slot.scale)) is not None:
            return native
        stiffness = decode_with_ulp(slot.weight, slot.fmt)[1]
    else:
        if slot.storage == "codes":
            x = decode_bits(slot.weight, slot.fmt)
        else:
            x = slot.weight.to(working_dtype(slot.weight)) / slot.scale
        stiffness = chart_of(slot.fmt, metric).stiffness(x)
    return stiffness * expand_scale(slot.scale, slot.block_size, slot.weight.shape)
