"""What is fixed while a parameter is stepped: everything that a compiled step is specialised for."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from fp8manifold._numerics.charts import Metric
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack

__all__ = [
    "BOUNDS",
    "BOUND_NAMES",
    "LARGEST",
    "MOMENTS",
    "MOMENTUM_FORMAT",
    "MOMENT_FORMAT",
    "WRITEBACKS",
    "Geometry",
    "Storage",
    "Variant",
    "bounds_of",
    "variant_of",
]

MOMENTS: Final = ("float32", "bfloat16", "8bit")

BOUNDS: Final = {"exp_avg": "avg_bound", "momentum_buffer": "avg_bound", "exp_avg_sq": "sq_bound"}
"""The float32 bound of each block of an average: the same average, of the block's largest gradient.

No value of the block exceeds it but by rounding noise, so a scale taken from it leaves room and needs no second pass;
only while gradients stay 0 for hundreds of steps does that noise, of averages on their way to 0, ever reach the end.
"""

LARGEST: Final = "avg_largest"
"""In their place, of an average whose grid is fitted to it: the largest magnitude in each block, float32."""

BOUND_NAMES: Final = frozenset((*BOUNDS.values(), LARGEST))

MOMENT_FORMAT: Final = FloatFormat(4, 3)
"""Of both averages in 8 bits; the second is stored as its square root, which doubles the range: 36 binades of ``v``."""

MOMENTUM_FORMAT: Final = FloatFormat(2, 5)
"""Of one that is fitted: even spacing for what is small in its block, where no range is asked for.

An orthogonal factor is that of a whole matrix: an error counts beside the matrix, not beside the value that has it.
"""


def bounds_of(direction: str | None) -> dict[str, str]:
    """The name of each average's bounds in the state, where averages are kept in 8 bits."""
    fitted = direction is not None and DIRECTIONS[direction].fitted
    return BOUNDS | {"momentum_buffer": LARGEST} if fitted else BOUNDS


Storage = Literal["codes", "grid", "free", "plain"]
Geometry = Literal["linear", "exponential", "tangent", "multiplicative"]


@dataclass(frozen=True)
class Variant:
    """One combination of direction x stiffness x write-back x storage."""

    direction: str
    #: codes (one byte), grid (floats on the grid), free (floats between its ends) or plain (floats)
    storage: Storage
    #: of floats stochastic where they are rounded so, to bfloat16 or float16, and nearest else
    writeback: str = "nearest"
    moments: str = "float32"
    fmt: FloatFormat | None = None
    metric: Metric = "ulp"
    scale_is_power_of_two: bool = True
    #: linear in value, along the chart's geodesic, along its tangent, or multiplicative
    geometry: Geometry = "linear"
    #: how S / S_ref enters a linear step: none, linear, sqrt, square or power
    stiffness: str = "none"
    decays: bool = False
    averages: bool = True
    nesterov: bool = False
    amsgrad: bool = False
    maximize: bool = False

    #: the write-back itself
    rule: WriteBack = field(init=False, compare=False, repr=False)
    #: bits of the ULP residual kept beside the code
    residual_bits: int = field(init=False, compare=False, repr=False)
    #: whether the step has the same bits compiled: no function of the user's, no ``pow``, ``exp`` or ``log``
    compiles: bool = field(init=False, compare=False, repr=False)
    #: whether the write-back needs random bits
    draws_for_weight: bool = field(init=False, compare=False, repr=False)
    #: whether the first average is given what the write-back takes
    injects: bool = field(init=False, compare=False, repr=False)
    #: whether the grid of its average in 8 bits is fitted to each block's largest value
    fitted: bool = field(init=False, compare=False, repr=False)
    #: the format of its first average in 8 bits
    average: FloatFormat = field(init=False, compare=False, repr=False)
    #: the bounds of averages in 8 bits: their names in the state, by the averages'
    bounds: dict[str, str] = field(init=False, compare=False, repr=False)
    #: whether storing the averages needs random bits
    draws_for_moments: bool = field(init=False, compare=False, repr=False)
    #: the running averages of the direction, by the names they have in the state
    stores: tuple[str, ...] = field(init=False, compare=False, repr=False)
    #: what a step needs of the state as it is there: averages, their bounds, and a residual of a byte
    keeps: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Draw the conclusions once: they are asked for in every step."""
        rule, stores, rounds = WRITEBACKS[self.writeback], self._stores(), self.storage in ("codes", "grid")
        names, in_8_bits = bounds_of(self.direction), self.moments == "8bit"
        bounds = {name: names[name] for name in stores} if in_8_bits else {}
        fitted = LARGEST in bounds.values()
        is_plain_power = self.stiffness == "power" and not self.scale_is_power_of_two
        conclusions = {
            "rule": rule,
            "residual_bits": rule.residual_bits,
            "compiles": not (callable(self.metric) or self.metric == "log" or is_plain_power),
            "draws_for_weight": rule.draws,
            "injects": rounds and rule.injects,
            "fitted": fitted,
            "average": MOMENTUM_FORMAT if fitted else MOMENT_FORMAT,
            "bounds": bounds,
            "draws_for_moments": self.moments != "float32" and bool(stores),
            "stores": stores,
            "keeps": (*stores, *bounds.values(), *(() if rule.packs else rule.state)),
        }
        for name, value in conclusions.items():
            object.__setattr__(self, name, value)

    def _stores(self) -> tuple[str, ...]:
        averages = DIRECTIONS[self.direction].averages if self.averages else ()
        return (*averages, "max_exp_avg_sq") if self.amsgrad else averages


def variant_of(**fields: Any) -> Variant:
    """A variant; the same object for the same fields, where they can be told apart."""
    try:
        return _variant_of(**fields)
    except TypeError:  # a metric that has no hash
        return Variant(**fields)


@lru_cache(maxsize=1024)
def _variant_of(**fields: Any) -> Variant:
    return Variant(**fields)
