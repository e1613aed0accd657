"""Float formats of at most eight bits: four stored facts, everything else derived.

Codes in order, here of E4M3 with bias 7 (s EEEE mmm). A code is the number of steps from
zero, and the top ones are what the layout says::

    0 0000 000     0                        zero
    0 0000 001     1 * 2^-9                 subnormal: 2^(1 - bias) * m / 2^M
    0 0000 111     7 * 2^-9
    0 0001 000     2^-6                     normal: 2^(E - bias) * (1 + m / 2^M)
    0 0001 001     2^-6 * (1 + 1/8)
    0 1111 110     448                      max_code = 126
    0 1111 111     NaN in layout fn         480 in layout finite
    1 ....         the same with a minus    1 0000 000 is -0, or the NaN of fnuz, p3109

No tensor code lives here.
"""

import difflib
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

__all__ = ["LAYOUTS", "NAMED_FORMATS", "FloatFormat", "FormatLike", "as_format"]


class Layout(StrEnum):
    """What the top codes of a format mean, see `LAYOUTS`; formats have the plain word."""

    # Saved states have a layout by its index here: append, and never reorder.
    IEEE = "ieee"
    FN = "fn"
    FNUZ = "fnuz"
    FINITE = "finite"
    P3109E = "p3109e"
    P3109F = "p3109f"


LAYOUTS: Final = tuple(layout.value for layout in Layout)
"""The meanings of the top codes.

- ``ieee``: the top exponent is Inf (mantissa 0) and NaN;
- ``fn``: no Inf, the all-ones code is NaN;
- ``fnuz``: no Inf and no -0, whose code is the one NaN;
- ``finite``: every code is a number;
- ``p3109e``, ``p3109f``: IEEE P3109 extended (with Inf) and finite, NaN in place of -0.
"""
_LAYOUTS_WITH_NEGATIVE_ZERO: Final = (Layout.IEEE, Layout.FN, Layout.FINITE)
_LAYOUTS_WITH_INF: Final = (Layout.IEEE, Layout.P3109E)
# by (exponent bits, mantissa bits); of all others it is finite
_DEFAULT_LAYOUTS: Final = {(4, 3): Layout.FN, (5, 2): Layout.IEEE, (3, 4): Layout.IEEE}
# Exact rounding needs 1.5 * 2^23 times the power of two of any value to be a float32.
_LARGEST_EXPONENT_OF_VALUES: Final = 100
# A random draw resolves 2^-24 of the smallest ulp, which must be a float32.
_SMALLEST_EXPONENT: Final = -102
# The smallest float32 must still be a nonzero fraction of the smallest ulp.
_LARGEST_ULP_EXPONENT: Final = 24
# Characters of a name that is read. An error quotes no more of a longer one.
_LONGEST_NAME: Final = 40
_EXMY = re.compile(r"E([0-9]+)M([0-9]+)(FNUZ|FN|IEEE|FINITE|P3109E|P3109F)?(?:_B(-?[0-9]+))?")
_P3109 = re.compile(r"P3109_([0-9]+)P([0-9]+)(F)?")


@dataclass(frozen=True)
class FloatFormat:
    r"""A binary float format with a sign bit, ``exponent_bits`` and ``mantissa_bits``.

    A code with exponent field ``E`` and mantissa field ``m`` stands for

    .. math:: (-1)^s \, 2^{E - bias} (1 + m / 2^M) \text{ for } E > 0, \qquad
              (-1)^s \, 2^{1 - bias} \, m / 2^M \text{ for } E = 0.

    Args:
        exponent_bits: width of the exponent field, at least 1.
        mantissa_bits: width of the mantissa field, at least 0. Sign, exponent and
            mantissa fill at most 8 bits.
        bias: exponent bias, by default ``2^(E-1) - 1``, and ``2^(E-1)`` for the layouts
            without -0.
        layout: one of :data:`~fp8manifold.formats.LAYOUTS`, by default that of the
            named format, or ``finite``.

    Raises:
        TypeError, ValueError: widths, bias or layout out of range, or a format without
            a nonzero finite value.

    Example:
        >>> fmt = FloatFormat(4, 3)
        >>> fmt.name, fmt.max, fmt.min_subnormal, fmt.finite_codes
        ('E4M3', 448.0, 0.001953125, 254)

    Source: OCP 8-bit Floating Point Specification 1.0; IEEE P3109 interim report.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    layout: str

    def __init__(
        self,
        exponent_bits: int,
        mantissa_bits: int,
        bias: int | None = None,
        layout: str | None = None,
    ) -> None:
        e, m = exponent_bits, mantissa_bits
        for field, value in (("exponent_bits", e), ("mantissa_bits", m)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field}={value!r} must be an int")
        if e < 1 or m < 0 or e + m + 1 > 8:
            raise ValueError(
                f"exponent_bits={e}, mantissa_bits={m}: need exponent_bits >= 1, mantissa_bits >= "
                f"0 and at most 8 bits in all (sign + exponent + mantissa = {e + m + 1})"
            )
        if layout is None:
            layout = _default_layout(e, m)
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} is unknown: one of {', '.join(LAYOUTS)}")
        if bias is None:
            bias = _default_bias(e, layout)
        object.__setattr__(self, "exponent_bits", e)
        object.__setattr__(self, "mantissa_bits", m)
        object.__setattr__(self, "bias", bias)
        object.__setattr__(self, "layout", layout)
        self._check_range()
        # Made here, as each pass of a layer reads the name.
        object.__setattr__(self, "_name", _shortest_name(self))

    def _check_range(self) -> None:
        if not isinstance(self.bias, int) or isinstance(self.bias, bool):
            raise TypeError(f"bias={self.bias!r} must be an int")
        e, m = self.exponent_bits, self.mantissa_bits
        lowest = max(2**e - 1 - _LARGEST_EXPONENT_OF_VALUES, 1 - m - _LARGEST_ULP_EXPONENT)
        highest = 1 - m - _SMALLEST_EXPONENT
        if not lowest <= self.bias <= highest:
            raise ValueError(
                f"bias={self.bias} is out of range for E{e}M{m}: {lowest} to {highest}, "
                "so that float32 rounds to it exactly"
            )
        if self.max_code < 1:
            raise ValueError(f"E{e}M{m} with layout {self.layout!r} has no nonzero finite value")

    @classmethod
    def from_string(cls, name: str) -> "FloatFormat":
        """Return the format of a name.

        Args:
            name: ``ExMy`` with an optional layout, or ``P3109_KpP``, in any case of
                letters. ``E4M3``, ``E4M3FNUZ``, ``E3M4IEEE``, ``E5M2FN``,
                ``E1M6FINITE``, ``P3109_8P4`` (extended), ``P3109_8P4F`` (finite).
                ``_B<n>`` at the end sets another bias.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: ``name`` can't be read. The message says what is allowed and
                names the nearest known name.

        Example:
            >>> FloatFormat.from_string("e5m2").max
            57344.0
        """
        if not isinstance(name, str):
            raise TypeError(f"format name must be a str, not {type(name).__name__}: {name!r}")
        text = name.strip().upper()
        if len(text) > _LONGEST_NAME:
            raise ValueError(_unreadable(f"{name[:_LONGEST_NAME]}...", text[:_LONGEST_NAME], ""))
        try:
            match = _EXMY.fullmatch(text)
            if match:
                e, m, layout_suffix, bias_suffix = match.groups()
                bias = int(bias_suffix) if bias_suffix else None
                layout = layout_suffix.lower() if layout_suffix else None
                return cls(int(e), int(m), bias, layout)
            match = _P3109.fullmatch(text)
            if match:
                width = int(match[1])
                precision = int(match[2])
                layout = Layout.P3109F if match[3] else Layout.P3109E
                return cls(width - precision, precision - 1, layout=layout.value)
        except ValueError as error:
            raise ValueError(_unreadable(name, text, f"; {error}")) from None
        raise ValueError(_unreadable(name, text, ""))

    @property
    def name(self) -> str:
        """The shortest spelling that :meth:`from_string` reads back as this format."""
        name: str = vars(self)["_name"]
        return name

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Width of a code: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        """The code's sign bit as a mask."""
        return 1 << (self.bits - 1)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number and the subnormals, ``1 - bias``."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return max(self.max_code >> self.mantissa_bits, 1) - self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite value, and so the number of steps from zero to it."""
        last_code = self.sign_bit - 1
        if self.layout == Layout.IEEE:
            # the codes of the top exponent
            return last_code - (1 << self.mantissa_bits)
        if self.layout in (Layout.FN, Layout.P3109E):
            # the one NaN, or Inf
            return last_code - 1
        return last_code

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Codes that stand for NaN, ascending; empty where the layout has none."""
        if self.layout == Layout.FINITE:
            return ()
        if self.layout not in (Layout.IEEE, Layout.FN):
            return (self.sign_bit,)
        first = self.max_code + (2 if self.layout == Layout.IEEE else 1)
        positive = range(first, self.sign_bit)
        negative = range(first + self.sign_bit, 2 * self.sign_bit)
        return (*positive, *negative)

    @property
    def nan_code(self) -> int | None:
        """The code a NaN is encoded to (the positive quiet NaN), or None."""
        if not self.nan_codes:
            return None
        if self.layout == Layout.IEEE:
            # past Inf, with the top bit of the mantissa
            return self.max_code + 1 + (1 << (self.mantissa_bits - 1))
        return self.nan_codes[0]

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, or None where the layout has no Inf."""
        return self.max_code + 1 if self.layout in _LAYOUTS_WITH_INF else None

    @property
    def has_negative_zero(self) -> bool:
        """True if the code with only the sign bit set is -0."""
        return self.layout in _LAYOUTS_WITH_NEGATIVE_ZERO

    def decode_code(self, code: int) -> float:
        """Return the value of one code, exactly: a finite float, ``inf`` or ``nan``.

        Args:
            code: ``0 <= code < 2**bits``.

        Raises:
            ValueError: ``code`` out of range.

        Example:
            >>> FloatFormat(5, 2).decode_code(0x7B)
            57344.0
        """
        if not 0 <= code < 2 * self.sign_bit:
            raise ValueError(
                f"code={code} is out of range for {self.name}: 0 to {2 * self.sign_bit - 1}"
            )
        if code in self.nan_codes:
            return math.nan
        sign = -1.0 if code & self.sign_bit else 1.0
        magnitude = code & (self.sign_bit - 1)
        if magnitude == self.inf_code:
            return sign * math.inf
        field, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if field:
            # the leading 1 of a normal number
            mantissa += 1 << self.mantissa_bits
        return sign * mantissa * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> list[float]:
        """All finite values in code order, -0 included where the format has it."""
        decoded = [self.decode_code(code) for code in range(2 * self.sign_bit)]
        return [value for value in decoded if math.isfinite(value)]

    @property
    def finite_codes(self) -> int:
        """Number of codes that stand for a finite number (+0 and -0 are two codes)."""
        return len(self.values)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self.decode_code(self.max_code)

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value, ``2^emin``."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float | None:
        """The smallest positive subnormal value, or None without mantissa bits."""
        return self.ulp_min if self.mantissa_bits else None

    @property
    def ulp_min(self) -> float:
        """The smallest spacing, that at zero: ``2^(emin - M)``."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def ulp_max(self) -> float:
        """The largest spacing, that of the top binade: ``2^(emax - M)``."""
        return 2.0 ** (self.emax - self.mantissa_bits)


#: A format or its name.
FormatLike = FloatFormat | str


def _shortest_name(fmt: FloatFormat) -> str:
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    has_default_bias = fmt.bias == _default_bias(e, fmt.layout)
    if fmt.layout in (Layout.P3109E, Layout.P3109F) and has_default_bias:
        finite_suffix = "F" if fmt.layout == Layout.P3109F else ""
        return f"P3109_{fmt.bits}P{m + 1}{finite_suffix}"
    has_default_layout = fmt.layout == _default_layout(e, m)
    layout_suffix = "" if has_default_layout else fmt.layout.upper()
    bias_suffix = "" if has_default_bias else f"_B{fmt.bias}"
    return f"E{e}M{m}{layout_suffix}{bias_suffix}"


def as_format(fmt: FormatLike) -> FloatFormat:
    """Return a format from itself or from its name."""
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(
            f"format must be a FloatFormat or its name, not {type(fmt).__name__}: {fmt!r}"
        )
    return FloatFormat.from_string(fmt)


def _default_layout(exponent_bits: int, mantissa_bits: int) -> str:
    layout = _DEFAULT_LAYOUTS.get((exponent_bits, mantissa_bits), Layout.FINITE)
    return layout.value


def _default_bias(exponent_bits: int, layout: str) -> int:
    half_of_fields = 1 << (exponent_bits - 1)
    return half_of_fields - 1 if layout in _LAYOUTS_WITH_NEGATIVE_ZERO else half_of_fields


_ALSO_CALLED: Final = {
    **dict.fromkeys(("INT8", "UINT8", "I8", "E0M7"), "E1M6"),
    **dict.fromkeys(("INT6", "E0M5"), "E1M4"),
    **dict.fromkeys(("INT4", "UINT4", "E0M3"), "E1M2"),
    **dict.fromkeys(("FP8", "FLOAT8", "F8", "HF8", "MXFP8"), "E4M3"),
    **dict.fromkeys(("FP6", "MXFP6"), "E2M3"),
    **dict.fromkeys(("FP4", "NVFP4", "MXFP4"), "E2M1"),
    "BF8": "E5M2",
    "E8M0": "E7M0",
    "E8M0FNU": "E7M0",
}
"""What other libraries call formats that have another name here."""
_WIDTHS: Final = re.compile(r"(?:FLOAT|MXFP|FP|F)[468](?=E\d)")
"""What other libraries write before ExMy."""


def _nearest_name(text: str) -> str:
    """Return the format that a text probably names, and for a uniform grid why."""
    letters = re.sub(r"[^A-Z0-9]", "", text).removeprefix("TORCH")
    spelled = _WIDTHS.sub("", letters)
    if spelled in _ALSO_CALLED:
        name = _ALSO_CALLED[spelled]
        uniform = ", whose numbers are evenly spaced" if name.startswith("E1M") else ""
        return f"{name!r}{uniform}"
    if spelled != text and _EXMY.fullmatch(spelled):
        try:
            return repr(FloatFormat.from_string(spelled).name)
        except ValueError:
            # a format of more than eight bits
            pass
    # Names of P3109 have an underscore.
    likely = text if text.startswith("P3109") else spelled
    return repr(difflib.get_close_matches(likely, NAMED_FORMATS, n=1, cutoff=0.0)[0])


def _unreadable(name: str, text: str, reason: str) -> str:
    """Return the message for a name that can't be read."""
    if "at most 8 bits" in reason:
        # The error of __init__ about the width: "x + y <= 7" below says it as well.
        reason = ""
    return (
        f"unknown float format {name!r}; did you mean {_nearest_name(text)}? allowed: ExMy with "
        "x >= 1 and x + y <= 7, with or without FN, FNUZ, IEEE or FINITE, such as E5M2FNUZ; "
        f"P3109_8P1 to P3109_8P7, with or without F{reason}"
    )


_NAMES: Final = (
    "E4M3 E5M2 E3M4 E2M5 E6M1 E1M6 E7M0 E4M3FNUZ E5M2FNUZ E2M3 E3M2 E2M1 "
    "P3109_8P1 P3109_8P2 P3109_8P3 P3109_8P4 P3109_8P5 P3109_8P6 P3109_8P7 "
    "P3109_8P1F P3109_8P2F P3109_8P3F P3109_8P4F P3109_8P5F P3109_8P6F P3109_8P7F"
)
NAMED_FORMATS: Final[dict[str, FloatFormat]] = {}
"""The formats with a name; :meth:`FloatFormat.from_string` reads any other ExMy too."""
NAMED_FORMATS.update((name, FloatFormat.from_string(name)) for name in _NAMES.split())
