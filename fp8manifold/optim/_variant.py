"""What is fixed while a parameter is stepped: everything that a compiled step is specialised for."""

from dataclasses import dataclass
from typing import Final, Literal

from fp8manifold._charts import Metric
from fp8manifold.formats import FloatFormat

__all__ = ["MOMENTS", "RESIDUAL_BITS", "WRITEBACKS", "Storage", "Variant"]

WRITEBACKS: Final = ("nearest", "stochastic", "residual8", "residual4", "momentum")
MOMENTS: Final = ("float32", "bfloat16", "8bit")

RESIDUAL_BITS: Final = {"residual8": 8, "residual4": 4}

Storage = Literal["codes", "grid", "free", "plain"]
Geometry = Literal["linear", "exponential", "tangent", "multiplicative"]


@dataclass(frozen=True)
class Variant:
    """One combination of direction x stiffness x write-back x storage."""

    direction: str
    #: codes (one byte), grid (floats on the grid), free (floats between its ends) or plain (floats)
    storage: Storage
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

    @property
    def compiles(self) -> bool:
        """Whether the step has the same bits compiled: no function of the user's, no ``pow``, ``exp`` or ``log``."""
        if callable(self.metric) or self.metric == "log":
            return False
        return self.stiffness != "power" or self.scale_is_power_of_two

    @property
    def residual_bits(self) -> int:
        """Bits of the ULP residual kept beside the code."""
        return RESIDUAL_BITS.get(self.writeback, 0)

    @property
    def draws_for_weight(self) -> bool:
        """Whether the write-back needs random bits."""
        return self.storage in ("codes", "grid") and self.writeback != "nearest"

    @property
    def draws_for_moments(self) -> bool:
        """Whether storing the averages needs random bits."""
        return self.moments != "float32" and (self.averages or self.direction in ("adam", "madam"))

    @property
    def stores(self) -> tuple[str, ...]:
        """The running averages of the direction, by the names they have in the state."""
        if self.direction == "adam":
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")
        if self.direction == "madam":
            return ("exp_avg_sq",)
        if self.direction == "lion":
            return ("exp_avg",)
        return ("momentum_buffer",) if self.averages else ()
