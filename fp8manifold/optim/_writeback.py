"""Write-backs: how a step's target becomes codes, numbers of a grid or floats of half
as many bits.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fp8manifold._numerics import codec
from fp8manifold.formats import FloatFormat


@dataclass(frozen=True)
class WriteBack:
    r"""A way from the target of a step to the weight that is stored.

    An update is lost if rounding undoes it and it is not stored, added to a moment or
    made up for on average. With the target :math:`t`, :math:`u` uniform in one ULP,
    :math:`r` the remainder, and :math:`\rho_b` rounding, at random too, to
    :math:`2^{-b}` ULP:

    .. math:: w = \lfloor t + u \rfloor \qquad\text{or, with } b \text{ bits,}\quad
        w = \operatorname{round}\rho_b(t + r), \quad r' = \rho_b(t + r) - w

    A weight that is NaN stays so; no target is infinite; -0 is a value like others;
    empty stays empty.

    Args:
        name: what optimizers call it.
        rounding: how values are rounded, ``"nearest"`` or ``"stochastic"``.
        residual_bits: bits per weight in which the state stores the remainder of the
            rounding: 0 or 8.
        injects: whether the rounding error is added to the first moment.

    Raises:
        ValueError: another number of residual bits.

    Example:
        >>> WriteBack("residual8", residual_bits=8).bytes_per_weight
        2.0
    """

    name: str
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    residual_bits: Literal[0, 8] = 0
    injects: bool = False

    def __post_init__(self) -> None:
        """Refuse another width."""
        if self.residual_bits not in (0, 8):
            raise ValueError(f"residual_bits={self.residual_bits!r} is not allowed: 0 or 8")

    @property
    def draws(self) -> bool:
        """True if it needs random bits."""
        return self.rounding == "stochastic"

    @property
    def loses_updates(self) -> bool:
        """True where the update of a weight that does not move is lost, not returned on
        average.
        """
        return not (self.draws or self.residual_bits or self.injects)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of its entries in a parameter's state."""
        return ("residual",) if self.residual_bits else ()

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a code and of its residual."""
        return 1 + self.residual_bits / 8

    def store(
        self,
        storage: str,
        fmt: FloatFormat,
        arrays: dict[str, Tensor],
        target: Tensor,
        draws: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Round once, to tensors to store by name, and the weights that they mean in
        units of the scale.

        Args:
            storage: ``codes``, or ``grid`` for floats on it.
            fmt: the format.
            arrays: ``weight`` as it is, and its ``scale``.
            target: in units of the scale.
            draws: 24-bit draws, or None where it needs none.
        """
        weight, bits = arrays["weight"], self.residual_bits
        if bits:
            old = (
                weight if storage == "codes" else ((weight == 0) & weight.signbit()) * fmt.sign_bit
            )
            codes, residual = codec.split_codes(
                codec.encode_signed(target.to(torch.float32), fmt, draws, bits), fmt, bits, old
            )
            stored = {"residual": residual.to(torch.int8)}
            if storage == "codes":
                return stored | {"weight": codec.keep_nan_codes(codes, weight, fmt)}, target
            value = codec.decode_with_ulp(codes, fmt)[0].to(target.dtype) * arrays["scale"]
            return stored | {
                "weight": torch.where(weight.isnan(), weight, value.to(weight.dtype))
            }, target
        if storage == "grid":
            after = codec.round_block(target, fmt, self.rounding, "saturate", draws)
            return {"weight": (after * arrays["scale"]).to(weight.dtype)}, after
        codes = codec.encode_finite(target, fmt, draws)
        after = codec.decode_with_ulp(codes, fmt)[0] if self.injects else target
        return {"weight": codec.keep_nan_codes(codes, weight, fmt)}, after


WRITEBACKS: Final[dict[str, WriteBack]] = {
    rule.name: rule
    for rule in (
        WriteBack("nearest", "nearest"),
        WriteBack("stochastic"),
        WriteBack("residual8", residual_bits=8),
        WriteBack("momentum", injects=True),
    )
}
"""The write-backs by name."""


def rule_of(group: dict[str, Any]) -> WriteBack:
    """A group's write-back; None is a manifold's own rounding, which like nearest
    stores and injects nothing.
    """
    return WRITEBACKS[group["writeback"] or "nearest"]


_HALVES: Final = (torch.bfloat16, torch.float16)
_EXPONENT, _MAGNITUDE, _SIGN = 0x7F800000, 0x7FFFFFFF, -(2**31)
_LARGEST_BFLOAT16, _LARGEST_FLOAT16 = 0x7F7F0000, 65504.0


def rounds_at_random(parameter: Tensor, group: dict[str, Any]) -> bool:
    """True for floats that are rounded stochastically: 16-bit ones, except under the
    write-back ``nearest``.
    """
    return parameter.dtype in _HALVES and (group["writeback"] is None or rule_of(group).draws)


def to_half(x: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    r"""One of the two neighbours of every float32, away from zero with the odds of what
    would be cut off.

    .. math:: P(b) = \frac{|x| - a}{b - a}, \qquad a \le |x| < b

    Values of the dtype stay, -0, NaN and Inf too; finite numbers beyond its largest
    value become that, and no draw makes them Inf. Draws have 24 bits, of which bfloat16
    takes the upper 16.
    """
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    if dtype is torch.bfloat16:  # the upper bits grow by one where the lower ones exceed the draw
        rounded = ((magnitude + ((draws >> 8) ^ 0xFFFF)) & -65536).clamp(max=_LARGEST_BFLOAT16)
    else:
        rounded = _float16_bits(magnitude, draws)
    stored = torch.where(magnitude < _EXPONENT, rounded, magnitude) | (bits & _SIGN)
    return stored.view(torch.float32).to(dtype)


def _float16_bits(magnitude: Tensor, draws: Tensor) -> Tensor:
    """Whole spacings, which float16's subnormals bound from below, and one more where
    the rest exceeds the draw.
    """
    power = (magnitude & _EXPONENT).clamp(min=(127 - 14) << 23)
    steps = magnitude.view(torch.float32) * (((2 * 127 + 10) << 23) - power).view(torch.float32)
    whole = steps.to(torch.int32)
    away = draws.to(torch.float32) * 2.0**-24 < steps - whole.to(torch.float32)
    value = (whole + away.to(torch.int32)).to(torch.float32) * (power - (10 << 23)).view(
        torch.float32
    )
    return value.clamp(max=_LARGEST_FLOAT16).view(torch.int32)
