"""What is quantised in one operand of a linear layer, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from fp8manifold._numerics.checks import check_choice, check_int, check_keys, check_number
from fp8manifold.fake_quant import STE, STES
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.nn._scalers import POLICIES, Policy
from fp8manifold.scaling import GRANULARITIES, Granularity

__all__ = [
    "GLOBAL",
    "NONE",
    "OPERANDS",
    "OperandLike",
    "OperandName",
    "OperandSpec",
    "is_none",
    "read_operand",
]

NONE: Final = "none"
"""The format that leaves an operand, or a pattern's layers, as they are."""

OperandName = Literal["weight", "activation", "activation_gradient", "weight_gradient"]
OPERANDS: Final[tuple[OperandName, ...]] = ("weight", "activation", "activation_gradient", "weight_gradient")
OperandRounding = Literal["nearest", "stochastic"]
OPERAND_ROUNDINGS: Final = ("nearest", "stochastic")
GLOBAL: Final = "global"


@dataclass(frozen=True)
class OperandSpec:
    """How a weight, an activation or a gradient is quantised; what is None is as the layer has it.

    Args:
        format: a format or its name.
        granularity: one scale for the ``tensor``, for each ``channel`` (row: an output of a weight, a token of an
            activation or gradient), or for each ``block`` of 32 along a row, a power of two (E8M0).
        policy: of the scale, as in :class:`Scale`.
        history: of the policy ``delayed``, usually 16 to 100 tensors.
        rounding: ``nearest`` or ``stochastic``.
        scale: None measures it.  A number is the scale itself; ``global``, for gradients, takes one magnitude for all
            gradients of the model (the control that fails).
        ste: the straight-through gradient, as in :func:`fake_quantize`; gradients have none.

    Raises:
        TypeError, ValueError: a format or option that can't be read, or options that exclude each other.

    Example:
        >>> OperandSpec("e5m2", rounding="stochastic").format.name
        'E5M2'
    """

    format: FloatFormat
    granularity: Granularity | None = None
    policy: Policy | None = None
    history: int | None = None
    rounding: OperandRounding | None = None
    scale: float | Literal["global"] | None = None
    ste: STE | None = None

    def __init__(
        self,
        format: FormatLike,  # noqa: A002  # what it is called everywhere
        granularity: Granularity | None = None,
        policy: Policy | None = None,
        history: int | None = None,
        rounding: OperandRounding | None = None,
        scale: float | Literal["global"] | None = None,
        ste: STE | None = None,
    ) -> None:
        values = (as_format(format), granularity, policy, history, rounding, _read_scale(scale), ste)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        self._check_choices()
        self._check_scale()

    def filled(self, **defaults: Any) -> "OperandSpec":
        """A copy in which what was None has the layer's value.

        Args:
            defaults: the layer's values by name, ``policy`` among them.

        Raises:
            ValueError: a history where the policy is not ``delayed``.
        """
        if self.scale is not None:
            defaults |= {"policy": None, "granularity": "tensor"}
        policy = self.policy or defaults["policy"]
        if self.history is not None and policy != "delayed":
            raise ValueError(f"history={self.history} belongs to policy='delayed', not to {policy!r}")
        if policy != "delayed":
            defaults["history"] = None
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    def _check_choices(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value is not None:
                check_choice(name, value, allowed)
        if self.history is not None:
            check_int("history", self.history, 1, 2**20)

    def _check_scale(self) -> None:
        if self.scale is None:
            return
        if self.policy is not None:
            raise ValueError(f"scale={self.scale!r} leaves nothing to policy={self.policy!r}: give one of them")
        if self.granularity not in (None, "tensor"):
            raise ValueError(f"scale={self.scale!r} is one for the tensor, not granularity={self.granularity!r}")


_CHOICES: Final = {"granularity": GRANULARITIES, "policy": POLICIES, "rounding": OPERAND_ROUNDINGS, "ste": STES}
OperandLike = FormatLike | OperandSpec | Mapping[str, Any] | None


def _read_scale(scale: float | str | None) -> Any:
    if scale is None:
        return None
    if isinstance(scale, str):
        check_choice("scale", scale, (GLOBAL,))
        return scale
    check_number("scale", scale, 2.0**-126, 2.0**127)
    return float(scale)


def read_operand(name: str, value: OperandLike) -> OperandSpec | None:
    """The specification in a format, a mapping or itself; None where the operand stays as it is.

    Raises:
        TypeError, ValueError: it can't be read.
    """
    if isinstance(value, Mapping):
        check_keys(name, value, [field.name for field in fields(OperandSpec)])
        if is_none(value.get("format")):
            if set(value) - {"format"}:
                raise ValueError(f"{name} has options but no format: {dict(value)!r}")
            return None
        value = OperandSpec(**value)
    if is_none(value):
        return None
    return value if isinstance(value, OperandSpec) else OperandSpec(value)  # type: ignore[arg-type]


def is_none(value: object) -> bool:
    """Whether this is how nothing is spelt."""
    return value is None or (isinstance(value, str) and value.lower() == NONE)
