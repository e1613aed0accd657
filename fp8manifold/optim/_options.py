"""Options that optimizers share: spelt once, what is checked of them, and what of a group its steps depend on."""

import difflib
import math
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Final, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

from torch import Tensor

from fp8manifold._numerics.charts import Metric
from fp8manifold._numerics.checks import check_number
from fp8manifold.optim._schedules import Schedule
from fp8manifold.random_bits import Draws

__all__ = [
    "FUNCTIONS",
    "UNSUPPORTED_FLAGS",
    "Bounded",
    "Charted",
    "Family",
    "Shared",
    "Stiffness",
    "Written",
    "check_betas",
    "check_finite",
    "check_lr",
    "options_of",
    "reject_flags",
    "spelt_out",
]

UNSUPPORTED_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")
DEFAULTS: Final[dict[str, Any]] = {
    "stiffness": 0.0,
    "metric": "ulp",
    "writeback": "stochastic",
    "draws": "independent",
    "moments": "float32",
    "seed": 0,
    "damping": 2.0**-8,
    "clip": 2.0**4,
    "refresh_every": 100,
    "compile": None,
    "maximize": False,
    "on_nonfinite": "skip",
    "stabilize_every": None,
    "reset_every": None,
}
"""Of the options below, where an optimizer does not say otherwise, in the order of signatures and groups."""

FUNCTIONS: Final = ("stiffness", "metric")
"""Those that may be functions, in whose place a state has None."""

P = ParamSpec("P")
Self = TypeVar("Self")


class Shared(TypedDict, total=False):
    """Options of every optimizer, and the flags of torch's that must be False or None."""

    moments: str
    seed: int
    clip: float
    refresh_every: int
    compile: bool | None
    maximize: bool
    on_nonfinite: str
    stabilize_every: int | None
    reset_every: int | None
    foreach: bool | None
    fused: bool | None
    capturable: bool | None
    differentiable: bool | None


class Charted(Shared, total=False):
    """Those of an optimizer that steps in the chart, where a manifold may have a rounding of its own."""

    damping: float
    writeback: str | None
    draws: Draws | None


class Written(Shared, total=False):
    """Those of an optimizer with a write-back of its own."""

    writeback: str
    draws: Draws


class Bounded(Written, total=False):
    """Those of one whose bound from below is called so."""

    damping: float


class Stiffness(Written, total=False):
    """Those of one whose step has a power of the stiffness."""

    stiffness: Schedule
    metric: Metric


class Family(Bounded, Stiffness, total=False):
    """Those of the stiffness family."""


def spelt_out(
    **differing: Any,
) -> Callable[[Callable[Concatenate[Self, P], None]], Callable[Concatenate[Self, P], None]]:
    """Decorate a constructor that ends in ``**options: Unpack[...]``: it gets all of them, and its signature has them.

    Args:
        differing: defaults of this optimizer's own.

    Raises:
        TypeError: when constructed, an option that there is not.
        ValueError: when constructed, a flag of torch's that would be ignored.
    """

    def decorate(init: Callable[Concatenate[Self, P], None]) -> Callable[Concatenate[Self, P], None]:
        hints = get_type_hints(get_args(init.__annotations__["options"])[0])
        own = list(signature(init).parameters.values())[:-1]
        defaults = {name: differing.get(name, default) for name, default in DEFAULTS.items() if name in hints}
        known = defaults.keys() | {parameter.name for parameter in own}

        @wraps(init)
        def filled(self: Self, /, *args: P.args, **given: P.kwargs) -> None:
            reject_flags(type(self).__name__, {name: given[name] for name in given.keys() - known})
            every: Any = defaults | {name: value for name, value in given.items() if name in known}
            init(self, *args, **every)

        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in defaults.items()
        ]
        flags = Parameter("flags", Parameter.VAR_KEYWORD, annotation=Any)
        vars(filled)["__signature__"] = signature(init).replace(parameters=[*own, *shared, flags])
        return filled

    return decorate


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, inf)."""
    check_number(name, value, 0.0, math.inf, open_high=True)


def check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise ValueError for a flag of torch's that would be ignored, TypeError for any other keyword."""
    for name, value in flags.items():
        if name not in UNSUPPORTED_FLAGS:
            nearest = difflib.get_close_matches(name, UNSUPPORTED_FLAGS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


def options_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """What a group's steps depend on, but for the learning rate, which changes all the time."""
    return tuple([value for name, value in group.items() if name not in ("params", "lr", "initial_lr")])


def check_lr(group: dict[str, Any]) -> None:
    """A schedule may have set it since the group was made."""
    lr = group["lr"]
    check_finite("lr", lr.item() if isinstance(lr, Tensor) else lr)
