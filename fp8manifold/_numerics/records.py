"""Records that native code and kernels read, as NumPy and `struct` have them.

The fields are those of ``_interface.py``, at the same offsets: C's structs are made of the
same tables.
"""

from dataclasses import astuple
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from struct import Struct, calcsize
from typing import Any, Final

import numpy as np

from fp8manifold._interface import (
    ARRAY,
    FACTORS,
    FORMAT,
    GPU_FACTORS,
    JOB,
    KEYS,
    SPEC,
    WIDENING,
    Entry,
    Record,
    entries,
    format_facts,
)
from fp8manifold.formats import FloatFormat


def dtype_of(record: Record) -> np.dtype[np.void]:
    """Return a record as NumPy has it: neighbours of one array are one field."""
    names: list[str] = []
    formats: list[Any] = []
    offsets: list[int] = []
    for name, neighbours in groupby(record.fields, lambda field: field.array or field.name):
        fields = list(neighbours)
        first = fields[0]
        numbers: list[Entry] = []
        for field in fields:
            numbers += entries(field.kind)
        names.append(name)
        offsets.append(record.offsets[first.name])
        if first.array:
            formats.append((numbers[0].code, len(numbers)))
        elif isinstance(first.kind, Record):
            formats.append(dtype_of(first.kind))
        else:
            formats.append(numbers[0].code)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": record.size}
    )


def struct_of(record: Record) -> Struct:
    """Return a record as `struct` packs it: records within it are bytes."""
    layout = "="
    end = 0
    for field in record.fields:
        kind = field.kind
        offset = record.offsets[field.name]
        code = f"{kind.size}s" if isinstance(kind, Record) else next(entries(kind)).code
        layout += f"{offset - end}x{code}"
        end = offset + calcsize(f"={code}")
    return Struct(f"{layout}{record.size - end}x")


FORMAT_DTYPE: Final = dtype_of(FORMAT)
FACTORS_DTYPE: Final = dtype_of(FACTORS)
GPU_FACTORS_DTYPE: Final = dtype_of(GPU_FACTORS)
JOB_DTYPE: Final = dtype_of(JOB)
SPEC_DTYPE: Final = dtype_of(SPEC)
WIDENING_DTYPE: Final = dtype_of(WIDENING)
_FORMAT: Final = struct_of(FORMAT)
KEYS_STRUCT: Final = struct_of(KEYS)
ARRAY_STRUCT: Final = struct_of(ARRAY)
array_values: Final = itemgetter(*[field.name for field in ARRAY.fields])
"""Return the values of a whole array's record in their order, of a dict by name."""


@lru_cache(maxsize=256)
def format_record(fmt: FloatFormat) -> bytes:
    """Return the facts of a format."""
    return _FORMAT.pack(*astuple(format_facts(fmt)))
