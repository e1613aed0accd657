"""Which write-backs and averages an optimizer has: all, but for those without an average that an error fits into."""

from typing import Any

from fp8manifold._numerics.checks import check_choice
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._variant import MOMENTS
from fp8manifold.optim._writeback import WRITEBACKS, rule_of

__all__ = ["check_combination", "check_first_average"]


def check_combination(optimizer: str, direction: str, group: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, unless an optimizer of this direction has the group's options."""
    writeback, moments = group["writeback"], group["moments"]
    if writeback is not None:
        check_choice("writeback", writeback, WRITEBACKS)
    check_choice("moments", moments, MOMENTS)
    if not rule_of(group).injects:
        return
    if (reason := DIRECTIONS[direction].takes_no_error) is not None:
        others = ", ".join(rule.name for rule in WRITEBACKS.values() if not rule.injects)
        raise ValueError(f"writeback={writeback!r} does not go with {optimizer}: {reason}; one of {others}")
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
