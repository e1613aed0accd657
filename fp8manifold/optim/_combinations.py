"""Which write-backs and averages an optimizer has: all, but for those without an average that an error fits into."""

from typing import Any, Final

from fp8manifold._checks import check_choice
from fp8manifold.optim._variant import MOMENTS
from fp8manifold.optim._writeback import WRITEBACKS, rule_of

__all__ = ["REGISTRY", "check_combination", "check_first_average", "is_valid"]

REGISTRY: Final[dict[str, str | None]] = {
    "RiemannianAdam": None,
    "RiemannianSGD": None,
    "StiffnessAdamW": None,
    "StiffnessSGD": None,
    "StiffnessMuon": None,
    "StiffnessLion": "its step is a sign, which no share of a rounding error fits",
    "Madam": "it has no first average to put a rounding error into",
    "FisherNaturalGradient": None,
}
"""By class name, why no error can be injected; None where one can."""


def is_valid(optimizer: str, writeback: str, moments: str) -> bool:
    """Whether an optimizer, by class name, has a combination: no error is injected into averages of 8 bits."""
    return not WRITEBACKS[writeback].injects or (REGISTRY[optimizer] is None and moments != "8bit")


def check_combination(optimizer: type, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, unless the optimizer has the group's write-back and moments."""
    writeback, moments = group["writeback"], group["moments"]
    if writeback is not None:
        check_choice("writeback", writeback, WRITEBACKS)
    check_choice("moments", moments, MOMENTS)
    name = next((c.__name__ for c in optimizer.__mro__ if c.__name__ in REGISTRY), optimizer.__name__)
    if not rule_of(group).injects:
        return
    if (reason := REGISTRY.get(name)) is not None:
        others = ", ".join(rule.name for rule in WRITEBACKS.values() if not rule.injects)
        raise ValueError(f"writeback={writeback!r} does not go with {name}: {reason}; one of {others}")
    if moments == "8bit":
        raise ValueError(
            f"writeback={writeback!r} does not go with moments='8bit': injected errors exceed the averages' blocks; "
            "use moments='float32' or 'bfloat16', or a residual"
        )


def check_first_average(group: dict[str, Any]) -> None:
    """Raise ValueError where Adam's first average is to take errors and keeps nothing."""
    if rule_of(group).injects and not group["betas"][0]:
        raise ValueError(
            f"writeback={group['writeback']!r} needs betas[0] > 0: there is no average to put the error into"
        )
