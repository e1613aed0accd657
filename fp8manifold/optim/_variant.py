"""What is fixed while a parameter is stepped: everything that a compiled step is specialised for."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from fp8manifold._numerics.charts import Metric
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._writeback import WRITEBACKS, WriteBack

__all__ = ["BOUNDS", "MOMENTS", "WRITEBACKS", "Geometry", "Storage", "Variant", "variant_of"]

MOMENTS: Final = ("float32", "bfloat16", "8bit")

BOUNDS: Final = {"exp_avg": "avg_bound", "momentum_buffer": "avg_bound", "exp_avg_sq": "sq_bound"}
"""The float32 bound of each block of an average: the same average, of the block's largest gradient.

No value of the block exceeds it but by rounding noise, so a scale taken from it leaves room and needs no second pass;
only while gradients stay 0 for hundreds of steps does that noise, of averages on their way to 0, ever reach the end.
"""

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
    #: whether storing the averages needs random bits
    draws_for_moments: bool = field(init=False, compare=False, repr=False)
    #: the running averages of the direction, by the names they have in the state
    stores: tuple[str, ...] = field(init=False, compare=False, repr=False)
    #: what a step needs of the state as it is there: averages, their bounds, and a residual of a byte
    keeps: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Draw the conclusions once: they are asked for in every step."""
        rule, stores, rounds = WRITEBACKS[self.writeback], self._stores(), self.storage in ("codes", "grid")
        bounds = tuple(BOUNDS[name] for name in stores) if self.moments == "8bit" else ()
        is_plain_power = self.stiffness == "power" and not self.scale_is_power_of_two
        conclusions = {
            "rule": rule,
            "residual_bits": rule.residual_bits,
            "compiles": not (callable(self.metric) or self.metric == "log" or is_plain_power),
            "draws_for_weight": rule.draws,
            "injects": rounds and rule.injects,
            "draws_for_moments": self.moments != "float32" and bool(stores),
            "stores": stores,
            "keeps": (*stores, *bounds, *(() if rule.packs else rule.state)),
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
