"""Float formats of at most eight bits: four stored facts, everything else derived. No
tensor code lives here.
"""

import difflib
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

__all__ = ["LAYOUTS", "NAMED_FORMATS", "FloatFormat", "FormatLike", "as_format"]

LAYOUTS: Final = ("ieee", "fn", "fnuz", "finite", "p3109e", "p3109f")
"""The meanings of the top codes.

- ``ieee``: the top exponent is Inf (mantissa 0) and NaN;
- ``fn``: no Inf, the all-ones code is NaN;
- ``fnuz``: no Inf and no -0, whose code is the one NaN;
- ``finite``: every code is a number;
- ``p3109e``, ``p3109f``: IEEE P3109 extended (with Inf) and finite, NaN in place of -0.
"""
_DEFAULT_LAYOUTS: Final = {(4, 3): "fn", (5, 2): "ieee", (3, 4): "ieee"}
_LARGEST_EXPONENT: Final = (
    100  # float32 holds 1.5 * 2^23 times the power of two of any value, as exact rounding needs
)
_SMALLEST_EXPONENT: Final = (
    -102
)  # float32 holds 2^-24 of the smallest ulp, the resolution of a random draw
_LARGEST_ULP_EXPONENT: Final = (
    24  # the smallest float32 is still a nonzero fraction of the smallest ulp
)
_LONGEST_NAME: Final = (
    40  # characters of a name that is read; an error quotes no more of a longer one
)
_EXMY = re.compile(r"E([0-9]+)M([0-9]+)(FNUZ|FN|IEEE|FINITE|P3109E|P3109F)?(?:_B(-?[0-9]+))?")
_P3109 = re.compile(r"P3109_([0-9]+)P([0-9]+)(F)?")


@dataclass(frozen=True)
class FloatFormat:
    """A binary float format with a sign bit, ``exponent_bits`` and ``mantissa_bits``.

    A code with exponent field ``E`` and mantissa field ``m`` stands for

    .. math:: (-1)^s \\, 2^{E - bias} (1 + m / 2^M) \\text{ for } E > 0, \\qquad
              (-1)^s \\, 2^{1 - bias} \\, m / 2^M \\text{ for } E = 0.

    Args:
        exponent_bits: width of the exponent field, at least 1.
        mantissa_bits: width of the mantissa field, at least 0; sign, exponent and
            mantissa fill at most 8 bits.
        bias: exponent bias; by default ``2^(E-1) - 1``, and ``2^(E-1)`` for the layouts
            without -0.
        layout: one of :data:`~fp8manifold.formats.LAYOUTS`; by default that of the
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
        layout = _DEFAULT_LAYOUTS.get((e, m), "finite") if layout is None else layout
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} is unknown: one of {', '.join(LAYOUTS)}")
        facts = {"exponent_bits": e, "mantissa_bits": m, "layout": layout}
        facts["bias"] = _default_bias(e, layout) if bias is None else bias
        for field, fact in facts.items():
            object.__setattr__(self, field, fact)
        self._check_range()
        object.__setattr__(self, "_name", _name_of(self))  # each pass of a layer reads it

    def _check_range(self) -> None:
        if not isinstance(self.bias, int) or isinstance(self.bias, bool):
            raise TypeError(f"bias={self.bias!r} must be an int")
        e, m = self.exponent_bits, self.mantissa_bits
        lowest = max(2**e - 1 - _LARGEST_EXPONENT, 1 - m - _LARGEST_ULP_EXPONENT)
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
        """Read a format's name: ``ExMy`` with an optional layout suffix, or
        ``P3109_KpP``.

        Args:
            name: case-insensitive. ``E4M3``, ``E4M3FNUZ``, ``E3M4IEEE``, ``E5M2FN``,
                ``E1M6FINITE``, ``P3109_8P4`` (extended), ``P3109_8P4F`` (finite);
                ``_B<n>`` at the end sets another bias.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: it can't be read; the message names what was expected and the
                nearest known name.

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
            if match := _EXMY.fullmatch(text):
                e, m, layout, bias = match.groups()
                return cls(
                    int(e), int(m), int(bias) if bias else None, layout.lower() if layout else None
                )
            if match := _P3109.fullmatch(text):
                width, precision, finite = int(match[1]), int(match[2]), match[3]
                return cls(
                    width - precision, precision - 1, layout="p3109f" if finite else "p3109e"
                )
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
        """Exponent of the smallest normal number, which the subnormals share:
        ``1 - bias``.
        """
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return max(self.max_code >> self.mantissa_bits, 1) - self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite value, and so the number of steps from zero to it."""
        magnitudes = self.sign_bit
        if self.layout == "ieee":
            return magnitudes - (1 << self.mantissa_bits) - 1
        return magnitudes - (2 if self.layout in ("fn", "p3109e") else 1)

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Codes that stand for NaN, ascending; empty where the layout has none."""
        if self.layout == "ieee":
            positive = range(self.sign_bit - (1 << self.mantissa_bits) + 1, self.sign_bit)
        elif self.layout == "fn":
            positive = range(self.sign_bit - 1, self.sign_bit)
        else:
            return () if self.layout == "finite" else (self.sign_bit,)
        return (*positive, *(code + self.sign_bit for code in positive))

    @property
    def nan_code(self) -> int | None:
        """The code a NaN is encoded to (the positive quiet NaN), or None."""
        if not self.nan_codes:
            return None
        return (
            self.max_code + 1 + (1 << (self.mantissa_bits - 1))
            if self.layout == "ieee"
            else self.nan_codes[0]
        )

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, or None where the layout has no Inf; -Inf has the sign bit set
        as well.
        """
        return self.max_code + 1 if self.layout in ("ieee", "p3109e") else None

    @property
    def has_negative_zero(self) -> bool:
        """True if the code with only the sign bit set is -0."""
        return self.layout in ("ieee", "fn", "finite")

    def decode_code(self, code: int) -> float:
        """The value of one code, exactly: a finite float, ``inf`` or ``nan``.

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
        magnitude, sign = code & (self.sign_bit - 1), -1.0 if code & self.sign_bit else 1.0
        if magnitude == self.inf_code:
            return sign * math.inf
        exponent, mantissa = (
            magnitude >> self.mantissa_bits,
            magnitude & ((1 << self.mantissa_bits) - 1),
        )
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return sign * mantissa * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> list[float]:
        """All finite values in code order, -0 included where the format has it."""
        return [
            value
            for code in range(2 * self.sign_bit)
            if math.isfinite(value := self.decode_code(code))
        ]

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
        return 2.0 ** (self.emin)

    @property
    def min_subnormal(self) -> float | None:
        """The smallest positive subnormal value, or None in a format without mantissa
        bits.
        """
        return self.ulp_min if self.mantissa_bits else None

    @property
    def ulp_min(self) -> float:
        """The smallest spacing, that at zero: ``2^(emin - M)``."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def ulp_max(self) -> float:
        """The largest spacing, that of the top binade: ``2^(emax - M)``."""
        return 2.0 ** (self.emax - self.mantissa_bits)


FormatLike = FloatFormat | str  #: A format or its name.


def _name_of(fmt: FloatFormat) -> str:
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    if fmt.layout in ("p3109e", "p3109f"):
        name = f"P3109_{fmt.bits}P{m + 1}" + ("F" if fmt.layout == "p3109f" else "")
        if fmt.bias == _default_bias(e, fmt.layout):
            return name
    default = fmt.layout == _DEFAULT_LAYOUTS.get((e, m), "finite")
    suffix = "" if default else fmt.layout.upper()
    bias = "" if fmt.bias == _default_bias(e, fmt.layout) else f"_B{fmt.bias}"
    return f"E{e}M{m}{suffix}{bias}"


def as_format(fmt: FormatLike) -> FloatFormat:
    """A format from itself or from its name."""
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(
            f"format must be a FloatFormat or its name, not {type(fmt).__name__}: {fmt!r}"
        )
    return FloatFormat.from_string(fmt)


def _default_bias(exponent_bits: int, layout: str) -> int:
    return (1 << (exponent_bits - 1)) - (1 if layout in ("ieee", "fn", "finite") else 0)


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


def _meant(text: str) -> str:
    """Return the format that a text probably names, and for a uniform grid why."""
    letters = re.sub(r"[^A-Z0-9]", "", text).removeprefix("TORCH")
    spelled = _WIDTHS.sub("", letters)
    if spelled in _ALSO_CALLED:
        known = _ALSO_CALLED[spelled]
        uniform = ", whose numbers are evenly spaced" if known.startswith("E1M") else ""
        return f"{known!r}{uniform}"
    if spelled != text and _EXMY.fullmatch(spelled):
        try:
            return repr(FloatFormat.from_string(spelled).name)
        except ValueError:  # of more than eight bits
            pass
    # names of P3109 have an underscore
    likely = text if text.startswith("P3109") else spelled
    return repr(difflib.get_close_matches(likely, NAMED_FORMATS, n=1, cutoff=0.0)[0])


def _unreadable(name: str, text: str, why: str) -> str:
    why = "" if "at most 8 bits" in why else why  # "x + y <= 7" below says it as well
    return (
        f"unknown float format {name!r}; did you mean {_meant(text)}? allowed: ExMy with x >= 1 "
        f"and x + y <= 7, with or without FN, FNUZ, IEEE or FINITE, such as E5M2FNUZ; P3109_8P1 to "
        f"P3109_8P7, with or without F{why}"
    )


_NAMES: Final = (
    "E4M3 E5M2 E3M4 E2M5 E6M1 E1M6 E7M0 E4M3FNUZ E5M2FNUZ E2M3 E3M2 E2M1 "
    "P3109_8P1 P3109_8P2 P3109_8P3 P3109_8P4 P3109_8P5 P3109_8P6 P3109_8P7 "
    "P3109_8P1F P3109_8P2F P3109_8P3F P3109_8P4F P3109_8P5F P3109_8P6F P3109_8P7F"
)
NAMED_FORMATS: Final[dict[str, FloatFormat]] = {}
"""The formats with a name; :meth:`FloatFormat.from_string` reads any other ExMy too."""
NAMED_FORMATS.update((name, FloatFormat.from_string(name)) for name in _NAMES.split())
