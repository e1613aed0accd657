"""The unit of Adam's averages in code coordinates: a power of two near the gradient's, so that squares stay floats."""

import math
from typing import Any, Final

from fp8manifold._ranks import local_of
from fp8manifold.optim._geometry import bounds
from fp8manifold.optim._plan import Grid
from fp8manifold.optim._variant import BOUNDS

__all__ = ["change_unit", "unit_of"]

_POWERS: Final = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_LARGEST_EXPONENT: Final = 126  # of a power of two whose reciprocal is a float32, too


def unit_of(group: dict[str, Any], grid: Grid, reference: float) -> float:
    """A power of two no less than any stiffness of the bounded chart; next to S_ref where there is no bound."""
    bounded = grid.metric == "ulp" and math.isfinite(group["clip"])
    largest = bounds(reference, 0.0, group["clip"])[1] if bounded else reference
    exponent = math.frexp(largest)[1] - (0 if bounded else 1)  # twice: a scale may be no power of two
    return math.ldexp(1.0, min(max(exponent, -_LARGEST_EXPONENT), _LARGEST_EXPONENT))


def change_unit(state: dict[str, Any], unit: float) -> None:
    """Keep the averages in another unit, which moves no bit but of what underflows; a state without one has 1."""
    old, state["unit"] = state.get("unit", 1.0), unit
    for name, power in _POWERS.items() if unit != old else ():
        for each in (name, BOUNDS.get(name, "")):
            kept = state.get(each)
            if kept is None or kept.dtype.itemsize == 1:  # codes are in units of their bounds
                continue
            change = power * (math.frexp(old)[1] - math.frexp(unit)[1])
            for part in range(4):  # the whole factor may be no float32
                local_of(kept).mul_(math.ldexp(1.0, (change + part) // 4))
