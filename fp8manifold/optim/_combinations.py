"""Which write-backs and moments an optimizer has: one row each, and the reasons for what is left out."""

from dataclasses import dataclass
from typing import Any, Final

from fp8manifold._checks import check_choice
from fp8manifold.optim._variant import MOMENTS, WRITEBACKS

__all__ = ["REGISTRY", "Combinations", "check_combination", "is_valid"]

_ROUNDING: Final = ("nearest", "stochastic", "residual8", "residual4")


@dataclass(frozen=True)
class Combinations:
    """An optimizer's write-backs and moments; error injection does not go with averages of 8 bits anywhere."""

    writebacks: tuple[str, ...] = WRITEBACKS
    moments: tuple[str, ...] = MOMENTS


REGISTRY: Final[dict[str, Combinations]] = {
    "RiemannianAdam": Combinations(),
    "RiemannianSGD": Combinations(),
    "StiffnessAdamW": Combinations(),
    "StiffnessSGD": Combinations(),
    "StiffnessMuon": Combinations(),
    "StiffnessLion": Combinations(_ROUNDING),
    "Madam": Combinations(_ROUNDING),
    "FisherNaturalGradient": Combinations(),
}
"""By class name."""

_NO_MOMENTUM: Final = {
    "StiffnessLion": "its step is a sign, which no share of a rounding error fits",
    "Madam": "it has no first average to put a rounding error into",
}


def is_valid(optimizer: str, writeback: str, moments: str) -> bool:
    """Whether an optimizer, by class name, has a combination."""
    row = REGISTRY[optimizer]
    injects_coarsely = writeback == "momentum" and moments == "8bit"
    return writeback in row.writebacks and moments in row.moments and not injects_coarsely


def check_combination(optimizer: type, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, unless the optimizer has the group's write-back and moments."""
    writeback, moments = group["writeback"], group["moments"]
    if writeback is not None:
        check_choice("writeback", writeback, WRITEBACKS)
    check_choice("moments", moments, MOMENTS)
    name = next((c.__name__ for c in optimizer.__mro__ if c.__name__ in REGISTRY), optimizer.__name__)
    row = REGISTRY.get(name, Combinations())
    if writeback is not None and writeback not in row.writebacks:
        raise ValueError(
            f"writeback={writeback!r} does not go with {name}: {_NO_MOMENTUM[name]}; one of {', '.join(row.writebacks)}"
        )
    if writeback == "momentum" and moments == "8bit":
        raise ValueError(
            "writeback='momentum' does not go with moments='8bit': injected errors exceed the averages' blocks; "
            "use moments='float32' or 'bfloat16', or a residual"
        )
