"""A spec is the part of a step that is fixed: everything that compiled code is
specialised for.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from fp8manifold._numerics.charts import Metric
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack

MOMENTS: Final = ("float32", "bfloat16", "8bit")
BOUNDS: Final = {"exp_avg": "avg_bound", "momentum_buffer": "avg_bound", "exp_avg_sq": "sq_bound"}
"""The float32 bound of each block of a moment: the running average of its largest
gradient.

No value of the block exceeds it but by rounding noise, so a scale taken from it leaves
room and needs no second pass.
"""
LARGEST: Final = "avg_largest"
"""The entry in place of a bound for a moment whose grid is fitted: each block's largest
magnitude, float32.
"""
BOUND_NAMES: Final = frozenset((*BOUNDS.values(), LARGEST))
MOMENT_FORMAT: Final = FloatFormat(4, 3)
"""The format of both moments in 8 bits; the second is stored as its square root, for 36
binades of ``v``.
"""
MOMENTUM_FORMAT: Final = FloatFormat(2, 5)
"""The format of a fitted moment, evenly spaced: an error in an orthogonal factor counts
beside the whole matrix.
"""


def bounds_of(direction: str | None) -> dict[str, str]:
    """The name of each moment's bounds in the state, for moments in 8 bits."""
    fitted = direction is not None and DIRECTIONS[direction].fitted
    return BOUNDS | {"momentum_buffer": LARGEST} if fitted else BOUNDS


Storage = Literal["codes", "grid", "free", "plain", "direction"]
Geometry = Literal["linear", "exponential", "tangent"]


@dataclass(frozen=True)
class Spec:
    """One combination of direction x stiffness x write-back x storage."""

    direction: str
    #: codes (one byte), grid (floats on the grid), free (floats between its ends),
    #: plain (floats), or direction: no weight, but the direction itself in its place
    storage: Storage
    writeback: str = "nearest"  # for floats: stochastic if 16-bit ones are rounded so
    moments: str = "float32"
    fmt: FloatFormat | None = None
    metric: Metric = "ulp"
    scale_is_power_of_two: bool = True
    geometry: Geometry = "linear"  # in value, along the chart's geodesic, or along its tangent
    stiffness: str = (
        "none"  # how S / S_ref enters a linear step: none, linear, sqrt, square or power
    )
    decays: bool = False
    has_moments: bool = True
    nesterov: bool = False
    amsgrad: bool = False
    maximize: bool = False

    @cached_property
    def rule(self) -> WriteBack:
        return WRITEBACKS[self.writeback]

    @cached_property
    def residual_bits(self) -> int:
        return self.rule.residual_bits

    @cached_property
    def compiles(self) -> bool:
        """True for a step with the same bits compiled: no function of the user's, no
        ``exp`` or ``log``.
        """
        return not (callable(self.metric) or self.metric == "log")

    @cached_property
    def draws_for_weight(self) -> bool:
        return self.rule.draws

    @cached_property
    def draws_for_moments(self) -> bool:
        return self.moments != "float32" and bool(self.stores)

    @cached_property
    def injects(self) -> bool:
        return self.storage in ("codes", "grid") and self.rule.injects

    @cached_property
    def stores(self) -> tuple[str, ...]:
        moments = DIRECTIONS[self.direction].moments if self.has_moments else ()
        return (*moments, "max_exp_avg_sq") if self.amsgrad else moments

    @cached_property
    def blockwise(self) -> bool:
        return self.moments == "8bit" and bool(self.stores)

    @cached_property
    def first(self) -> str | None:
        """The first moment, by its name in the state."""
        return next((name for name in ("exp_avg", "momentum_buffer") if name in self.stores), None)

    @cached_property
    def bounds(self) -> dict[str, str]:
        """The bounds of moments in 8 bits: their names in the state, by the moments'."""
        names = bounds_of(self.direction)
        return {name: names[name] for name in self.stores} if self.moments == "8bit" else {}

    @cached_property
    def fitted(self) -> bool:
        """True where the grid of its moment in 8 bits is fitted to each block's largest
        value.
        """
        return LARGEST in self.bounds.values()

    @cached_property
    def first_format(self) -> FloatFormat:
        return MOMENTUM_FORMAT if self.fitted else MOMENT_FORMAT

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        """Entries of the state that a step changes in place: moments, their bounds, and
        a residual.
        """
        return (*self.stores, *self.bounds.values(), *self.rule.state)

    @cached_property
    def bounds_chart(self) -> bool:
        """True where the step goes along the chart of the ULP, whose stiffness has
        bounds.
        """
        return self.geometry in ("exponential", "tangent") and self.metric == "ulp"

    @cached_property
    def first_half(self) -> "Spec":
        """The step as far as its direction, which is stored; a moment that takes an
        error later is stored in floats.
        """
        moments = "float32" if self.injects else self.moments
        floats = replace(self, storage="direction", writeback="nearest", fmt=None, moments=moments)
        return replace(floats, stiffness="none", decays=False)

    @cached_property
    def second_half(self) -> "Spec":
        """The step along a direction that is given in place of the gradient: SGD's,
        without a moment.
        """
        writeback = self.rule.rounding if self.rule.injects else self.writeback
        plain = replace(self, has_moments=False, nesterov=False, maximize=False, moments="float32")
        return replace(plain, direction="sgd", writeback=writeback)


def spec_of(**fields: Any) -> Spec:
    """A spec; the same object for the same fields, if they can be hashed."""
    try:
        return _known_spec(**fields)
    except TypeError:  # a metric that has no hash
        return Spec(**fields)


_known_spec = lru_cache(maxsize=1024)(Spec)
