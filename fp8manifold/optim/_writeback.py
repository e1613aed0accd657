"""Write-backs: how the target of a step becomes a stored weight.

    target (float32, in units of the scale)
      one-byte codes, floats on a grid   WriteBack.store: one rounding; the remainder is
                                         lost, lost at random (right in the mean), stored
                                         in a residual, or added to the first moment
      ordinary 16-bit floats             to_half: one stochastic rounding
      ordinary 32-bit floats             nothing to do

``WRITEBACKS`` are the four rules that optimizers take by name. `store` is the PyTorch
version of a step, the definition that native code and kernels equal bit for bit.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fp8manifold._interface import WeightStorage
from fp8manifold._numerics import codec
from fp8manifold.formats import FloatFormat


@dataclass(frozen=True)
class WriteBack:
    r"""A rule by which the target of a step becomes the weight that is stored.

    An update that rounding undoes is lost, unless the remainder is stored, is added to
    a moment, or is made up for on average. With the target :math:`t`, :math:`u` uniform
    in one ULP, :math:`r` the remainder so far, and :math:`\rho_b` stochastic rounding
    to :math:`2^{-b}` ULP, stochastic rounding and a residual of :math:`b` bits are

    .. math:: w = \lfloor t + u \rfloor \qquad\text{and}\qquad
        w = \operatorname{round}\rho_b(t + r), \quad r' = \rho_b(t + r) - w

    A weight that is NaN stays NaN. No target is infinite. -0 is a value like others.
    Empty stays empty.

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
        """Refuse another number of residual bits."""
        if self.residual_bits not in (0, 8):
            raise ValueError(f"residual_bits={self.residual_bits!r} is not allowed: 0 or 8")

    @property
    def draws(self) -> bool:
        """True if it needs random bits."""
        return self.rounding == "stochastic"

    @property
    def loses_updates(self) -> bool:
        """True if the update of a weight that does not move is lost for good."""
        return not (self.draws or self.residual_bits or self.injects)

    @property
    def state(self) -> tuple[str, ...]:
        """The names of its entries in a parameter's state."""
        return ("residual",) if self.residual_bits else ()

    @property
    def bytes_per_weight(self) -> float:
        """The bytes of a code and of its residual."""
        return 1 + self.residual_bits / 8

    def store(
        self,
        storage: str,
        fmt: FloatFormat,
        arrays: dict[str, Tensor],
        target: Tensor,
        draws: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Round a target once.

        Args:
            storage: ``codes``, or ``grid`` for floats on it.
            fmt: the format.
            arrays: ``weight`` before the step, and its ``scale``.
            target: in units of the scale.
            draws: 24-bit draws, or None if the rule needs none.

        Returns:
            The tensors to store, by name, and the weights that they stand for, in units
            of the scale. With a residual these weights are the target. They are exact
            for a rule that injects the rounding error, which needs them.
        """
        weight, bits = arrays["weight"], self.residual_bits
        if bits:
            # A new zero has the sign of an old one. split_codes reads nothing else of
            # old codes, so those of zeros are enough for floats.
            old_codes = weight
            if storage == WeightStorage.GRID:
                old_codes = ((weight == 0) & weight.signbit()) * fmt.sign_bit
            fine_codes = codec.encode_signed(target.to(torch.float32), fmt, draws, bits)
            codes, residual = codec.split_codes(fine_codes, fmt, bits, old_codes)
            stored = {"residual": residual.to(torch.int8)}
            if storage == WeightStorage.CODES:
                stored["weight"] = codec.keep_nan_codes(codes, weight, fmt)
                return stored, target
            value = codec.decode_with_ulp(codes, fmt)[0].to(target.dtype) * arrays["scale"]
            stored["weight"] = torch.where(weight.isnan(), weight, value.to(weight.dtype))
            return stored, target
        if storage == WeightStorage.GRID:
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
    """Return the write-back of a group of parameters.

    None, a manifold's own rounding, is taken for ``nearest``: like it, it stores and
    injects nothing. Whether None draws, `rounds_at_random` or the manifold says.
    """
    return WRITEBACKS[group["writeback"] or "nearest"]


_HALF_DTYPES: Final = (torch.bfloat16, torch.float16)
# fields of a float32, as bits
_EXPONENT, _MAGNITUDE, _SIGN = 0x7F800000, 0x7FFFFFFF, -(2**31)
# the first as bits of a float32, the second as a value
_LARGEST_BFLOAT16, _LARGEST_FLOAT16 = 0x7F7F0000, 65504.0


def rounds_at_random(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Return True if ordinary floats are rounded stochastically.

    Those of 16 bits are, except under the write-back ``nearest``.
    """
    return parameter.dtype in _HALF_DTYPES and (group["writeback"] is None or rule_of(group).draws)


def to_half(x: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    r"""Round every float32 stochastically to bfloat16 or float16.

    Between the neighbours ``a`` and ``b`` it becomes ``b`` with the probability

    .. math:: P(b) = \frac{|x| - a}{b - a}, \qquad a \le |x| < b

    Values of the dtype stay, also -0, NaN and Inf. Finite numbers beyond its largest
    value become that one, and no draw makes them Inf. Draws have 24 bits, of which
    bfloat16 takes the upper 16.
    """
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    if dtype is torch.bfloat16:
        # the lower half carries into the upper one where it exceeds the draw
        rounded = ((magnitude + ((draws >> 8) ^ 0xFFFF)) & -65536).clamp(max=_LARGEST_BFLOAT16)
    else:
        rounded = _float16_bits(magnitude, draws)
    stored = torch.where(magnitude < _EXPONENT, rounded, magnitude) | (bits & _SIGN)
    return stored.view(torch.float32).to(dtype)


def _float16_bits(magnitude: Tensor, draws: Tensor) -> Tensor:
    """Return magnitudes rounded to float16, as bits of float32.

    A magnitude is counted in spacings of float16 there; one is added to the whole ones
    if the rest exceeds the draw.
    """
    # the exponent, not below that of float16's smallest normal number
    power = (magnitude & _EXPONENT).clamp(min=(127 - 14) << 23)
    # powers of two, made by their exponents: spacing = power 2^-10, and 1 / spacing
    inverse_spacing = (((2 * 127 + 10) << 23) - power).view(torch.float32)
    spacing = (power - (10 << 23)).view(torch.float32)
    steps = magnitude.view(torch.float32) * inverse_spacing
    whole = steps.to(torch.int32)
    away = draws.to(torch.float32) * 2.0**-24 < steps - whole.to(torch.float32)
    value = (whole + away.to(torch.int32)).to(torch.float32) * spacing
    return value.clamp(max=_LARGEST_FLOAT16).view(torch.int32)
