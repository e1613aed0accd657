"""A spec: everything about a parameter's step that stays the same from step to step.

One `Spec` is one combination of

    direction   adam, sgd, lion, muon, ...        what the step descends along
    stiffness   none, linear, power, ...          how the local spacing scales the step
    write-back  nearest, stochastic, ...          how the result becomes stored bits
    storage     codes, grid, free, plain          what is stored
    moments     float32, bfloat16, 8bit           how averages are stored between steps
    precondit.  none, factored, whole             what divides the gradient first

It is hashable, and the same object for the same fields (`spec_of`), so that C records and
compiled kernels are made once for it. What changes from step to step (learning rate, keys
of random bits) is in the `Slot`.

Moments in 8 bits are codes in blocks of a row. Each block has a float32 entry in the state
that its scale follows from: a bound on its values that is known before the step (`BOUNDS`),
or, for Muon's momentum, its largest magnitude (`LARGEST`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from fp8manifold import _interface
from fp8manifold._interface import Geometry, MomentStorage, StiffnessPower, WeightStorage
from fp8manifold._numerics.charts import Metric, MetricName
from fp8manifold.formats import FloatFormat, as_format
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._factors import STATISTICS, Preconditioner
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack

MOMENTS: Final = tuple(str(member) for member in MomentStorage)
"""How moments may be stored."""
BOUNDS: Final = {"exp_avg": "avg_bound", "momentum_buffer": "avg_bound", "exp_avg_sq": "sq_bound"}
"""For each moment the state's entry of its bounds, one in float32 for each block.

A bound is the running average of the block's largest gradient. No value of the block
exceeds it but by rounding noise, so a scale taken from it leaves room, and no second
pass is needed.
"""
LARGEST: Final = "avg_largest"
"""The entry that takes the place of bounds for a moment on a fitted grid.

It is each block's largest magnitude, in float32.
"""
BOUND_NAMES: Final = frozenset((*BOUNDS.values(), LARGEST))
"""All entries of a state that have one number for each block."""
MOMENT_FORMAT: Final = as_format(_interface.MOMENT_FORMAT)
"""The format of both moments in 8 bits."""
MOMENTUM_FORMAT: Final = as_format(_interface.MOMENTUM_FORMAT)
"""The format of a fitted moment."""


def bounds_of(direction: str | None) -> dict[str, str]:
    """Return the name of each moment's bounds in the state, for moments in 8 bits."""
    fitted = direction is not None and DIRECTIONS[direction].fitted
    return BOUNDS | {"momentum_buffer": LARGEST} if fitted else BOUNDS


@dataclass(frozen=True)
class Spec:
    """One combination of direction, stiffness, write-back, storage and moments."""

    direction: str
    storage: WeightStorage
    #: for floats ``stochastic`` if 16-bit ones are rounded at random, else ``nearest``
    writeback: str = "nearest"
    moments: MomentStorage = MomentStorage.FLOAT32
    fmt: FloatFormat | None = None
    metric: Metric = "ulp"
    scale_is_power_of_two: bool = True
    geometry: Geometry = Geometry.LINEAR
    #: how S / S_ref enters a linear step: none, linear, sqrt, square or power
    stiffness: StiffnessPower = StiffnessPower.NONE
    decays: bool = False
    has_moments: bool = True
    nesterov: bool = False
    amsgrad: bool = False
    maximize: bool = False
    preconditioner: Preconditioner = Preconditioner.NONE

    @cached_property
    def rule(self) -> WriteBack:
        return WRITEBACKS[self.writeback]

    @cached_property
    def residual_bits(self) -> int:
        return self.rule.residual_bits

    @cached_property
    def compiles(self) -> bool:
        """True for a step that compiled code takes to the same bits.

        Such a step calls no function of the user's, and neither ``exp`` nor ``log``.
        """
        return not (callable(self.metric) or self.metric == MetricName.LOG)

    @cached_property
    def draws_for_weight(self) -> bool:
        return self.rule.draws

    @cached_property
    def draws_for_moments(self) -> bool:
        return self.moments != MomentStorage.FLOAT32 and bool(self.moment_names)

    @cached_property
    def injects(self) -> bool:
        """True where the rounding error of the weight is added to the first moment."""
        return self.storage in (WeightStorage.CODES, WeightStorage.GRID) and self.rule.injects

    @cached_property
    def moment_names(self) -> tuple[str, ...]:
        """The moments by their names in the state."""
        moments = DIRECTIONS[self.direction].moments if self.has_moments else ()
        return (*moments, "max_exp_avg_sq") if self.amsgrad else moments

    @cached_property
    def blockwise(self) -> bool:
        return self.moments == MomentStorage.EIGHT_BIT and bool(self.moment_names)

    @cached_property
    def first_moment(self) -> str | None:
        """The first moment by its name in the state, or None if there is none."""
        for name in ("exp_avg", "momentum_buffer"):
            if name in self.moment_names:
                return name
        return None

    @cached_property
    def bound_names(self) -> dict[str, str]:
        """For each moment in 8 bits the name of its bounds in the state."""
        if self.moments != MomentStorage.EIGHT_BIT:
            return {}
        names = bounds_of(self.direction)
        return {name: names[name] for name in self.moment_names}

    @cached_property
    def fitted(self) -> bool:
        """True for a step whose moment in 8 bits is on a fitted grid.

        The grid then follows from each block's largest value.
        """
        return LARGEST in self.bound_names.values()

    @cached_property
    def first_format(self) -> FloatFormat:
        """The format of the first moment in 8 bits."""
        return MOMENTUM_FORMAT if self.fitted else MOMENT_FORMAT

    @cached_property
    def state_entries(self) -> tuple[str, ...]:
        """Entries of the state that a step changes in place.

        They are moments, their bounds, a residual, and Adafactor's statistics.
        """
        return (
            *self.moment_names,
            *self.bound_names.values(),
            *self.rule.state,
            *STATISTICS[self.preconditioner],
        )

    @cached_property
    def has_bounded_chart(self) -> bool:
        """True where the step goes along the chart of the ULP, whose stiffness has bounds."""
        return (
            self.geometry in (Geometry.EXPONENTIAL, Geometry.TANGENT)
            and self.metric == MetricName.ULP
        )

    @cached_property
    def first_half(self) -> "Spec":
        """The step as far as its direction, which is stored: ``u`` of Muon.

        A moment that takes an error later is stored in floats.
        """
        moments = MomentStorage.FLOAT32 if self.injects else self.moments
        return replace(
            self,
            storage=WeightStorage.DIRECTION,
            writeback="nearest",
            fmt=None,
            moments=moments,
            stiffness=StiffnessPower.NONE,
            decays=False,
        )

    @cached_property
    def second_half(self) -> "Spec":
        """The step along a direction that stands in place of the gradient.

        Its direction is called ``sgd``, which without a moment is the gradient.
        """
        writeback = self.rule.rounding if self.rule.injects else self.writeback
        return replace(
            self,
            direction="sgd",
            writeback=writeback,
            moments=MomentStorage.FLOAT32,
            has_moments=False,
            nesterov=False,
            maximize=False,
        )


def spec_of(**fields: Any) -> Spec:
    """Return a spec: the same object for the same fields, if they can be hashed."""
    try:
        return _cached_spec(**fields)
    except TypeError:
        # a metric that has no hash
        return Spec(**fields)


_cached_spec = lru_cache(maxsize=1024)(Spec)
