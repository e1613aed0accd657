"""Facts that kernels are compiled for: a format, a step, a tile of a parameter.

A kernel is compiled once for each combination of them::

    Format      constants of a format                   FORMAT in kernels, SPEC.format
    KernelSpec  what a step does, and its dtypes        SPEC of a step
    Widening    the same for scales that double         SPEC of widen_kernel
    Tile        how a program walks over a parameter    TILE
    Statistics  of Adafactor: how squares are added up  SPEC of kernels of ``factors.py``

They are frozen and hashable: the key by which a kernel is looked up. Nothing here needs
Triton.
"""

import math
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from fp8manifold import _interface
from fp8manifold._triton import is_interpreted
from fp8manifold.formats import FloatFormat


def _cached_hash(facts: Any) -> int:
    """Return the hash of a frozen dataclass, computed once.

    A kernel is looked up by it for every parameter of every step.
    """
    if "_hash" not in vars(facts):
        values = tuple(getattr(facts, field.name) for field in fields(facts))
        object.__setattr__(facts, "_hash", hash(values))
    cached: int = vars(facts)["_hash"]
    return cached


@dataclass(frozen=True)
class Format(_interface.Format):
    """A format as kernels are compiled for it."""

    __hash__ = _cached_hash

    def in_fixed_point(self, extra_bits: int = 0) -> bool:
        """Return whether parts of 2^-24 of a step can be counted in 31 bits.

        The factor from values to parts must be a normal float32, too.
        """
        mantissa_bits = self.mantissa_bits + extra_bits
        if mantissa_bits > 5:
            return False
        return all(-127 < mantissa_bits + 24 - e <= 127 for e in (self.emin, self.emax))


@lru_cache(maxsize=256)
def format_of(fmt: FloatFormat) -> Format:
    """Return a format's facts for kernels."""
    return Format(**asdict(_interface.format_facts(fmt)))


@dataclass(frozen=True)
class KernelSpec:
    """The facts of a step that its kernel is compiled for.

    They are those of ``Spec`` in ``optim/_spec.py``, and the dtypes in memory by name.
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
    #: Whether there is a first moment, a second one, and the largest of the second.
    first: bool
    second: bool
    amsgrad: bool
    #: Whether division by the scale is exact.
    exact: bool
    #: Whether the write-back draws, or 16-bit weights are rounded at random.
    draws: bool
    residual_bits: int
    #: Whether draws are compared in fixed point.
    fixed_point: bool
    #: Dtypes of the stored weight and of the gradient.
    weight: str
    gradient: str
    format: Format
    moment_format: Format
    #: Whether the first moment's grid is fitted to each block's largest value.
    fitted: bool
    #: Whether scales are stored as exponents, one byte each.
    exponents: bool = False
    #: Whether the gradient is multiplied by Adafactor's factors, and whether each row of
    #: a tile is a part of a row that has one.
    factored: bool = False
    in_rows: bool = False

    __hash__ = _cached_hash

    @property
    def covector(self) -> bool:
        """Whether the direction is taken in coordinates of a chart."""
        return self.storage != "plain" and self.geometry in ("exponential", "tangent")

    @property
    def blocks(self) -> bool:
        """Whether moments are stored in 8 bits, in blocks."""
        return self.moments == "8bit" and (self.first or self.second)


@dataclass(frozen=True)
class Widening:
    """The facts of a doubling of scales that its kernel is compiled for.

    To widen a scale is to double it.
    """

    format: Format
    residual_bits: int
    #: Whether draws are compared in fixed point.
    fixed_point: bool
    #: The largest scale.
    widest: float
    #: Whether scales are stored as exponents, one byte each.
    exponents: bool
    #: The gradient's dtype.
    gradient: str
    #: How a first moment is stored, as in :class:`KernelSpec`; empty without one.
    moments: str

    __hash__ = _cached_hash


@lru_cache(maxsize=256)
def widening_of(
    fmt: FloatFormat, residual_bits: int, exponents: bool, gradient: str, moments: str
) -> Widening:
    """Return the doubling of a format's scales; the arguments are its fields."""
    kernel_format = format_of(fmt)
    return Widening(
        format=kernel_format,
        residual_bits=residual_bits,
        fixed_point=kernel_format.in_fixed_point(residual_bits),
        widest=widest_scale(fmt),
        exponents=exponents,
        gradient=gradient,
        moments=moments,
    )


def widest_scale(fmt: FloatFormat) -> float:
    """Return the largest power of two times which the largest value is a float32."""
    return 2.0 ** min(127, 127 - math.floor(math.log2(fmt.max)))


class TileScales(StrEnum):
    """The elements of a parameter that share a scale.

    Kernels, which can't name an enumeration, compare the values.
    """

    #: All of them.
    ONE = "one"
    #: Those of a row, or of as many rows as the record says.
    ROW = "row"
    #: As many elements as the record says, wherever rows end.
    RUN = "run"
    #: None: each has a scale.
    ELEMENT = "element"


@dataclass(frozen=True)
class Tile:
    """The elements of a parameter that a program takes at a time."""

    rows: int
    width: int
    #: The length of a row; 0 if it is read from the record: where a tile is a part of a
    #: row, of a single one or of long ones.
    length: int
    scales: TileScales
    #: Whether all arrays begin at multiples of 16 bytes, and have a multiple of 16
    #: elements.
    aligned: bool
    #: Whether a program takes a row tile by tile, after a pass that finds its largest
    #: gradient.
    long: bool = False

    __hash__ = _cached_hash


@dataclass(frozen=True)
class Statistics:
    """The facts of Adafactor's statistics of a parameter that their kernels are compiled for."""

    #: Whether weights are codes, or else the dtype that they have in memory.
    coded: bool
    weight: str
    #: The gradient's dtype.
    gradient: str
    format: Format
    #: Whether scales are stored as exponents, one byte each.
    exponents: bool
    #: The elements of a matrix that share a scale. A whole number of runs is a row.
    scales: TileScales
    #: The elements of a run, or 0.
    neighbours: int
    #: Neighbours in a row that are added up by halves, a power of two.
    tile: int
    #: Rows that are added up one after the other.
    run: int
    #: Whether arrays begin at multiples of 16 bytes, and rows have a multiple of 16
    #: elements.
    aligned: bool

    __hash__ = _cached_hash


class Constants:
    """A dataclass of this file whose attributes are ``constexpr``.

    Triton below 3.8 takes attributes for values on the GPU.
    """

    def __init__(self, facts: Any) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from triton.language import constexpr

        return constexpr(as_constants(getattr(self._facts, name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    def __repr__(self) -> str:
        """Return the values: the key by which Triton finds compiled code on disk."""
        return repr(self._facts)


def as_constants(facts: Any) -> Any:
    """Return a kernel's argument for facts that it is compiled for.

    The interpreter reads a dataclass as it is.
    """
    is_compiled = is_dataclass(facts) and not is_interpreted()
    return _constants(facts) if is_compiled else facts


_constants = lru_cache(maxsize=1024)(Constants)
