"""What Python shares with C and with Triton's kernels, defined here alone.

::

    enumerations   choices of a step            C: enum { ADAM, SGD, ... }
    NUMBERS        the floats of a step         C: struct Hyper
    records        memory that Python fills     C: struct        NumPy: a dtype
                   and kernels read             Triton: offsets in words
    series, hash   constants of arithmetic      C: arrays and macros

``hatch_build.py`` writes C's form of it, ``_native/generated.h``, before it compiles
(``_native/_sources.py``). A library that was compiled from another form is not loaded.
NumPy's form is ``_numerics/records.py``. Triton's kernels read this file.

Nothing is imported here but the standard library: the build loads this file where torch
is not installed.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum, StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from fp8manifold.formats import FloatFormat

# Choices. They are strings too, as options and states have them. The numbers that C has
# for them count from 0, in the order of the members.


class KernelDirection(StrEnum):
    """The directions that native code and kernels have."""

    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    MUON = "muon"


class WeightStorage(StrEnum):
    """Where the result of a step goes."""

    #: one byte a weight
    CODES = "codes"
    #: floats on the grid of a format
    GRID = "grid"
    #: floats between the ends of a format
    FREE = "free"
    #: the floats of an ordinary parameter
    PLAIN = "plain"
    #: no weight: the direction itself is stored in its place; native code and kernels
    #: get it as a plain weight of 0
    DIRECTION = "direction"


class KernelWriteBack(StrEnum):
    """How the target of a step is rounded, as far as native code and kernels have it."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"
    #: stores eight more bits of the target
    RESIDUAL8 = "residual8"
    #: adds the rounding error to the first moment
    MOMENTUM = "momentum"


class MomentStorage(StrEnum):
    """How moments are stored between steps."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    #: codes in blocks of a row
    EIGHT_BIT = "8bit"


class Geometry(StrEnum):
    """How a step moves."""

    #: straight in value
    LINEAR = "linear"
    #: along the chart's geodesic
    EXPONENTIAL = "exponential"
    #: along the geodesic's tangent
    TANGENT = "tangent"


class StiffnessPower(StrEnum):
    """The exponents ``k`` of S / S_ref, by how the power is computed."""

    #: 0: the ratio is not computed
    NONE = "none"
    #: 1
    LINEAR = "linear"
    #: 1/2
    SQRT = "sqrt"
    #: 2
    SQUARE = "square"
    #: any other, by logarithms
    ANY = "power"


class KernelMetric(StrEnum):
    """The metrics that native code and kernels have."""

    ULP = "ulp"
    EUCLIDEAN = "euclidean"


class ScaleSharing(IntEnum):
    """How many elements of a parameter share a scale, in native code."""

    ONE_SCALE = 0
    SCALE_A_ROW = 1
    SCALE_AN_ELEMENT = 2


class Enumeration(NamedTuple):
    """A choice that C has too."""

    choice: type[Enum]
    #: what C has before each member's name
    prefix: str = ""


ENUMERATIONS: Final = (
    Enumeration(KernelDirection),
    Enumeration(WeightStorage),
    Enumeration(KernelWriteBack, "WRITE_"),
    Enumeration(MomentStorage),
    Enumeration(Geometry),
    Enumeration(StiffnessPower, "FIELD_"),
    Enumeration(KernelMetric, "METRIC_"),
    Enumeration(ScaleSharing),
)
"""The choices that C has."""


def numbers_in_c(choices: Mapping[str, Enum]) -> dict[str, int]:
    """Return the numbers that C has for choices, under the same names."""
    return {name: list(type(member)).index(member) for name, member in choices.items()}


# Reports of a step, in 32-bit words for each parameter.


class NativeReport(NamedTuple):
    """What native code says of a parameter's codes after a step."""

    #: whether a code is the format's last, of either sign
    is_saturated: int
    #: whether some tile is all 0; without one every scale has a weight that is not 0
    has_zero_tile: int


class GpuReport(NamedTuple):
    """What kernels say of a parameter after a step.

    A row for all parameters comes first. Its first word refuses the step.
    """

    #: whether a weight is at the end of its range
    is_saturated: int
    #: the number of scales that were doubled
    doubled: int
    #: whether its gradient, or the square of it, is not finite
    is_nonfinite: int
    #: whether all weights of some row are 0
    has_zero_row: int


# Numbers

NUMBERS: Final = (
    # decay of the first moment, and what the gradient adds to it
    "beta1",
    "gain1",
    # of the second moment
    "beta2",
    "gain2",
    "eps",
    # size of the step: the learning rate, bias corrections included
    "rate",
    # what decay leaves of the weight
    "keep",
    # 1 / S_ref, and log2 S_ref
    "inverse_reference",
    "log_reference",
    # bounds of S / S_ref, and their log2
    "low",
    "high",
    "log_low",
    "log_high",
    # the stiffness exponent k
    "power",
    # (1 - beta1) / beta1 / rate: how much of a rounding error goes into the first moment
    "inject",
    # what gradients with respect to codes are multiplied by, a power of two
    "per_unit",
    # of Adafactor: the least size of weights that a rate is multiplied by, and the
    # largest root mean square of a direction
    "least_size",
    "most",
)
"""Names of the numbers of a step, in the order in which C and kernels read them."""
POSITIONS: Final = {name: i for i, name in enumerate(NUMBERS)}
"""The position of each number in a row."""


# Records


@dataclass(frozen=True)
class Format:
    """The facts of a format that kernels compute with."""

    mantissa_bits: int
    bias: int
    emin: int
    emax: int
    bits: int
    sign_bit: int
    max_code: int
    #: float32 bits of the largest value
    top: int
    #: whether there is a -0
    signed_zero: int
    #: whether the smallest ulp exceeds 1
    coarse: int
    #: the code of NaN if there is exactly one, else -1
    one_nan: int
    #: whether all codes above max_code are special
    many_nans: int
    #: -1 if there is none
    inf_code: int
    #: what a NaN is encoded as
    nan_code: int
    largest: float


def format_facts(fmt: "FloatFormat") -> Format:
    """Return the facts of a format."""
    return Format(
        mantissa_bits=fmt.mantissa_bits,
        bias=fmt.bias,
        emin=fmt.emin,
        emax=fmt.emax,
        bits=fmt.bits,
        sign_bit=fmt.sign_bit,
        max_code=fmt.max_code,
        top=int(struct.unpack("=i", struct.pack("=f", fmt.max))[0]),
        signed_zero=int(fmt.has_negative_zero),
        coarse=int(fmt.ulp_min > 1),
        one_nan=fmt.nan_codes[0] if len(fmt.nan_codes) == 1 else -1,
        many_nans=int(len(fmt.nan_codes) > 1),
        inf_code=-1 if fmt.inf_code is None else fmt.inf_code,
        nan_code=fmt.nan_code or 0,
        largest=fmt.max,
    )


MOMENT_FORMAT: Final = "E4M3"
"""The format of both moments in 8 bits.

The second moment ``v`` is stored as its square root, which gives it 36 binades.
"""
MOMENTUM_FORMAT: Final = "E2M5"
"""The format of a fitted moment.

It is nearly evenly spaced: an error in an orthogonal factor counts beside the whole
matrix.
"""

# By C's type. Python has words as signed numbers.
_CODES: Final = {"int32_t": "i", "uint32_t": "i", "int64_t": "q", "float": "f"}
_ADDRESS: Final = "Q"


class Field(NamedTuple):
    """A field of a record."""

    name: str
    #: as C declares it, or a record in its place
    kind: "str | Record"
    #: the name of the array that NumPy has for neighbours of one kind; empty for a field
    #: that is alone
    array: str = ""


class Entry(NamedTuple):
    """A number or address in a record."""

    #: as `struct` and NumPy call its type
    code: str
    #: in bytes
    offset: int


@dataclass(frozen=True)
class Record:
    """Memory of fields one after another, as a C compiler lays out a struct."""

    name: str
    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The bytes before each field."""
        offsets = {}
        end = 0
        for field in self.fields:
            offsets[field.name] = _aligned(end, _alignment(field.kind))
            end = offsets[field.name] + _size(field.kind)
        return offsets

    @cached_property
    def alignment(self) -> int:
        """What addresses of the record are multiples of."""
        return max(_alignment(field.kind) for field in self.fields)

    @cached_property
    def size(self) -> int:
        """Its bytes, those after the last field included that the next record needs."""
        last = self.fields[-1]
        return _aligned(self.offsets[last.name] + _size(last.kind), self.alignment)

    def word(self, name: str) -> int:
        """Return the 32-bit words before a field."""
        return self.offsets[name] // 4

    def column(self, name: str) -> int:
        """Return the position of a field in its array."""
        array = next(field.array for field in self.fields if field.name == name)
        return [field.name for field in self.fields if field.array == array].index(name)


def entries(kind: "str | Record", start: int = 0) -> Iterator[Entry]:
    """Yield all numbers and addresses of a type that starts at an offset, in order."""
    if isinstance(kind, str):
        yield Entry(_code(kind), start)
        return
    for field in kind.fields:
        yield from entries(field.kind, start + kind.offsets[field.name])


def _code(kind: str) -> str:
    return _ADDRESS if kind.endswith("*") else _CODES[kind]


def _size(kind: str | Record) -> int:
    return kind.size if isinstance(kind, Record) else struct.calcsize(f"={_code(kind)}")


def _alignment(kind: str | Record) -> int:
    return kind.alignment if isinstance(kind, Record) else _size(kind)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _alike(names: tuple[str, ...], kind: str, array: str = "") -> tuple[Field, ...]:
    return tuple(Field(name, kind, array) for name in names)


class JobFacts(NamedTuple):
    """How a parameter's elements share scales, and where its chart ends."""

    #: a ScaleSharing
    scales: int
    #: rows, or elements of a run, that share one scale
    repeats: int
    #: exponents of values, between which the chart's exponent follows the format's
    low_exponent: int
    high_exponent: int


FORMAT: Final = Record(
    "Format",
    tuple(Field(f.name, "float" if f.type is float else "int32_t") for f in fields(Format)),
)
KEYS: Final = Record("Keys", _alike(("first", "second", "third", "phase"), "uint32_t"))
"""Keys of random words: three are added in the rounds of the hash, the phase at its end.

They stand in the order in which they are added, which kernels count on.
"""
HYPER: Final = Record("Hyper", _alike(NUMBERS, "float"))
SPEC: Final = Record(
    "Spec",
    (
        *_alike(
            (
                # KernelDirection, WeightStorage, ...
                "direction",
                "storage",
                "writeback",
                "moments",
                "geometry",
                "stiffness",
                "metric",
                # True or False
                "decays",
                "nesterov",
                "maximize",
            ),
            "int32_t",
        ),
        Field("format", FORMAT),
    ),
)
"""The choices of a step, the same in every step: those of ``optim/_spec.py``."""
FACTORS: Final = Record(
    "Factors",
    (
        # averages of the squares of rows and of columns, in the state; a vector has all
        # its squares in place of the latter
        Field("row_means", "float *", "pointers"),
        Field("column_means", "float *", "pointers"),
        # what the gradient is multiplied by
        Field("row", "float *", "pointers"),
        Field("column", "float *", "pointers"),
        # memory to work in: sums of squares of tiles of rows, of gradients and of
        # weights, and of columns; 0 for factors that are given
        Field("sums", "float *", "pointers"),
        Field("weight_sums", "float *", "pointers"),
        Field("column_sums", "float *", "pointers"),
        *_alike(("matrices", "rows", "columns"), "int64_t", "sizes"),
        # the largest product of two factors
        Field("cap", "float"),
        # what the rate is multiplied by
        Field("size", "float"),
    ),
)
"""Adafactor's second moment of a parameter, in native code."""
JOB: Final = Record(
    "Job",
    (
        Field("spec", "const Spec *", "pointers"),
        # uint8 codes or float32
        Field("weight", "void *", "pointers"),
        Field("gradient", "const float *", "pointers"),
        Field("scale", "const float *", "pointers"),
        Field("residual", "int8_t *", "pointers"),
        # moments: float32, bfloat16 or codes
        Field("first", "void *", "pointers"),
        Field("second", "void *", "pointers"),
        # of AMSGrad: the maxima of second moments so far
        Field("second_max", "float *", "pointers"),
        # bounds of each row's 8-bit moments; of a fitted first moment its largest
        # magnitude, ``avg_largest`` in the state
        Field("first_bound", "float *", "pointers"),
        Field("second_bound", "float *", "pointers"),
        # a report: NativeReport, or GpuReport
        Field("report", "int32_t *", "pointers"),
        # of Adafactor; for kernels of a GPU a `GPU_FACTORS`
        Field("factors", "Factors *", "pointers"),
        Field("rows", "int64_t"),
        Field("length", "int64_t"),
        *_alike(JobFacts._fields, "int32_t", "facts"),
        Field("weight_keys", KEYS, "keys"),
        Field("moment_keys", KEYS, "keys"),
        Field("hyper", HYPER, "hyper"),
    ),
)
"""One parameter's step.

The parameter is a matrix. The elements of a row share a block of 8-bit moments, and a scale
unless each has one.
"""
ARRAY: Final = Record(
    "Array",
    (
        Field("format", FORMAT),
        # set from the arguments of a call: the rest may be the same for many arrays
        Field("input", "const void *"),
        Field("output", "void *"),
        # 0 for 1
        Field("scale", "const float *"),
        Field("rows", "int64_t"),
        Field("length", "int64_t"),
        # whether all rows share one scale
        Field("shared", "int32_t"),
        Field("stochastic", "int32_t"),
        Field("rescale", "int32_t"),
        Field("bfloat16", "int32_t"),
        Field("keys", KEYS),
        # of the first element
        Field("position", "uint32_t"),
    ),
)
"""A whole array that is decoded, rounded or encoded."""
WIDENING: Final = Record(
    "Widening",
    (
        Field("codes", "uint8_t *", "pointers"),
        Field("residual", "int8_t *", "pointers"),
        # as they are stored
        Field("scales", "void *", "pointers"),
        Field("gradient", "const void *", "pointers"),
        # the first moment
        Field("moment", "const void *", "pointers"),
        # a GpuReport
        Field("report", "int32_t *", "pointers"),
        Field("rows", "int64_t"),
        Field("length", "int64_t"),
        Field("keys", KEYS, "keys"),
    ),
)
"""A parameter whose scales may double, which kernels of a GPU do alone."""
GPU_FACTORS: Final = Record(
    "GpuFactors",
    (
        # as in `FACTORS`
        *_alike(("row_means", "column_means", "row", "column"), "float *", "pointers"),
        *_alike(("sums", "weight_sums", "column_sums"), "float *", "pointers"),
        # of each matrix the mean of its row means
        Field("means", "float *", "pointers"),
        *_alike(("matrices", "rows", "columns"), "int64_t", "sizes"),
        # elements that share a scale, one after the other
        Field("neighbours", "int64_t"),
        # the largest product of two factors, before a direction is clipped
        Field("cap", "float"),
        # what the rate is multiplied by
        Field("size", "float"),
        # what factors of rows and the cap are multiplied by, to clip a direction
        Field("shrink", "float"),
    ),
)
"""Adafactor's second moment of a parameter, for kernels of a GPU.

Its last three fields are results of kernels.
"""

RECORDS: Final = (FORMAT, KEYS, HYPER, SPEC, FACTORS, JOB, ARRAY)
"""The records of C, each after those that it has in it."""

# Constants of arithmetic

FLOAT32_TERMS: Final = 8
"""Terms of a series that float32 takes."""
EXP2_SERIES: Final = tuple(math.log(2) ** i / math.factorial(i) for i in range(16))
"""The series of 2^x around 0."""
LOG2_SERIES: Final = tuple(2 / math.log(2) / (2 * i + 1) for i in range(18))
"""The series of log2((1 + t) / (1 - t)) / t in t^2."""

# of triple32, https://github.com/skeeto/hash-prospector
HASH_SHIFTS: Final = (17, 11, 15)
"""The shifts of the rounds that make a random word of a position."""
HASH_MULTIPLIERS: Final = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
"""The factors of these rounds."""
