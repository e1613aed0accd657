"""Facts that kernels are compiled for: a format, a step, and how a program walks over a
parameter.

A kernel is compiled for each combination of them; nothing here needs Triton.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from fp8manifold._numerics.records import format_record
from fp8manifold._triton import is_interpreted
from fp8manifold.formats import FloatFormat

SAID: Final = 4
"""Words that kernels write for each parameter, after as many for all, of which the
first refuses the step: whether a weight is at the end of its range, how many scales
have been doubled, whether its gradient or a square of it is not finite, and whether
some weights in a row are 0 throughout.
"""
WIDENED: Final = np.dtype(
    [
        # codes, residual, scales as they are stored, gradient, first average, the
        # parameter's words in the report
        ("pointers", np.uint64, 6),
        ("rows", np.int64),
        ("length", np.int64),
        ("keys", np.int32, 4),
    ],
    align=True,
)
"""A parameter whose scales may double."""


def _kept_hash(known: Any) -> int:
    """The hash of a frozen dataclass, made once: a kernel is looked up by it for every
    parameter of every step.
    """
    if "_hash" not in vars(known):
        values = tuple(getattr(known, field.name) for field in fields(known))
        object.__setattr__(known, "_hash", hash(values))
    found: int = vars(known)["_hash"]
    return found


@dataclass(frozen=True)
class Format:
    """The facts of a format that kernels are compiled for."""

    M: int
    BIAS: int
    EMIN: int
    EMAX: int
    BITS: int
    SIGN: int
    MAX_CODE: int
    TOP: int  #: float32 bits of the largest value.
    SIGNED_ZERO: int
    COARSE: int  #: True if the smallest ulp exceeds 1.
    ONE_NAN: int
    MANY_NANS: int
    INF_CODE: int
    LARGEST: float
    NAN_CODE: int

    __hash__ = _kept_hash

    def fixed(self, extra: int = 0) -> bool:
        """True if steps in parts of 2^-24 fit in 31 bits, and the factor from values to
        them is a normal float32.
        """
        m = self.M + extra
        return m <= 5 and all(-127 < m + 24 - e <= 127 for e in (self.EMIN, self.EMAX))


@lru_cache(maxsize=256)
def format_of(fmt: FloatFormat) -> Format:
    """The facts of a format for kernels: those of native code's record."""
    facts: tuple[Any, ...] = (*format_record(fmt)[0].item(), fmt.nan_code or 0)
    return Format(*facts)


@dataclass(frozen=True)
class KernelSpec:
    """The facts of a step that its kernel is compiled for: the spec, its format, and
    the dtypes in memory.
    """

    direction: str
    storage: str
    writeback: str
    moments: str
    geometry: str
    stiffness: str
    metric: str
    decays: bool
    nesterov: bool
    maximize: bool
    #: True if there is a first average; ``second`` a second one, ``amsgrad`` the
    #: largest of the second.
    first: bool
    second: bool
    amsgrad: bool
    exact: bool  #: True if division by the scale is exact.
    draws: bool  #: True if the write-back draws, or 16-bit weights are rounded at random.
    extra: int  #: Bits of the residual.
    fixed: bool  #: True if draws are compared in fixed point.
    weight: str
    gradient: str
    format: Format
    average: Format
    fitted: bool  #: True if the first average's grid is fitted to each block's largest value.
    exponents: bool = False  #: True if scales are stored as exponents, one byte each.

    __hash__ = _kept_hash

    @property
    def covector(self) -> bool:
        """True if the direction is taken in coordinates of a chart."""
        return self.storage != "plain" and self.geometry in ("exponential", "tangent")

    @property
    def blocks(self) -> bool:
        """True if averages are stored in 8 bits, in blocks."""
        return self.moments == "8bit" and (self.first or self.second)


@dataclass(frozen=True)
class Widening:
    """The facts of a doubling of scales: the format, the residual's bits, how draws are
    compared and scales stored.
    """

    format: Format
    extra: int
    fixed: bool
    widest: float  #: The largest scale.
    exponents: bool  #: True if scales are stored as exponents, one byte each.
    gradient: str
    moments: str  #: How a first average is stored, as in :class:`KernelSpec`; empty without one.

    __hash__ = _kept_hash


@lru_cache(maxsize=256)
def widening_of(
    fmt: FloatFormat, residual_bits: int, exponents: bool, gradient: str, moments: str
) -> Widening:
    """The doubling of a format's scales, with the residual's bits and the dtypes of
    gradient and first average.
    """
    known = format_of(fmt)
    return Widening(
        known,
        residual_bits,
        known.fixed(residual_bits),
        widest_scale(fmt),
        exponents,
        gradient,
        moments,
    )


def widest_scale(fmt: FloatFormat) -> float:
    """The largest power of two under which the format's largest value is still a
    float32.
    """
    return 2.0 ** min(127, 127 - math.floor(math.log2(fmt.max)))


@dataclass(frozen=True)
class Tile:
    """The way of a program over a parameter."""

    rows: int
    width: int
    length: int
    """The length of a row; 0 for that of the record, with a single row, or with rows
    that are taken piece by piece.
    """
    #: ``one`` in all, one per ``row``, one per ``run`` of elements, or one per
    #: ``element``.
    scales: str
    #: True if all arrays begin at multiples of 16 bytes, and have a multiple of 16
    #: elements.
    aligned: bool
    #: True if a program takes a row piece by piece, after a pass that finds its largest
    #: gradient.
    long: bool = False

    __hash__ = _kept_hash


class Constants:
    """A dataclass of this file with ``constexpr`` values: Triton below 3.8 takes
    attributes for values on the GPU.
    """

    def __init__(self, known: Any) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from triton.language import constexpr

        return constexpr(as_constants(getattr(self._known, name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._known == other._known

    def __hash__(self) -> int:
        return hash(self._known)

    def __repr__(self) -> str:
        """The values: the key by which Triton finds compiled code on disk."""
        return repr(self._known)


def as_constants(fact: Any) -> Any:
    """The argument of a kernel for a fact that it is compiled for; the interpreter
    reads a dataclass as it is.
    """
    compiles = is_dataclass(fact) and not is_interpreted()
    return _constants(fact) if compiles else fact


_constants = lru_cache(maxsize=1024)(Constants)
