"""Records that the C code reads.

They have the fields of its structs, in the same order: ``Format`` in ``format.h``, ``Spec``
and ``Job`` in ``step.h``, ``Array`` in ``grid.c``. ``align=True`` pads them as a C compiler
does.
"""

from functools import lru_cache
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8manifold._numerics.codec import largest_bits
from fp8manifold.formats import FloatFormat

FORMAT: Final = np.dtype(
    [
        ("mantissa_bits", np.int32),
        ("bias", np.int32),
        ("emin", np.int32),
        ("emax", np.int32),
        ("bits", np.int32),
        ("sign_bit", np.int32),
        ("max_code", np.int32),
        # the float32 bits of ``largest``
        ("top", np.int32),
        ("signed_zero", np.int32),
        # whether the smallest ulp exceeds 1
        ("coarse", np.int32),
        ("one_nan", np.int32),
        ("many_nans", np.int32),
        ("inf_code", np.int32),
        ("largest", np.float32),
    ],
    align=True,
)
SPEC: Final = np.dtype(
    [
        ("direction", np.int32),
        ("storage", np.int32),
        ("writeback", np.int32),
        ("moments", np.int32),
        ("geometry", np.int32),
        ("stiffness", np.int32),
        ("metric", np.int32),
        ("decays", np.int32),
        ("nesterov", np.int32),
        ("maximize", np.int32),
        ("format", FORMAT),
    ],
    align=True,
)
JOB: Final = np.dtype(
    [
        # spec, weight, gradient, scale, residual, first, second, largest, first_bound,
        # second_bound, flags
        ("pointers", np.uint64, 11),
        ("rows", np.int64),
        ("length", np.int64),
        # scales, repeats, low_exponent, high_exponent
        ("facts", np.int32, 4),
        # weight_keys, moment_keys
        ("keys", np.int32, 8),
        # the floats of Hyper
        ("hyper", np.float32, 16),
    ],
    align=True,
)

ARRAY: Final = Struct(
    f"{FORMAT.itemsize}s"
    # from, to, scale
    "3Q"
    # rows, length
    "2q"
    # shared, stochastic, rescale, bfloat16, nan_code, spacing
    "6i"
    # keys
    "4i"
    # position
    "i"
    # padding to a multiple of eight bytes
    "0q"
)


@lru_cache(maxsize=256)
def format_record(fmt: FloatFormat) -> NDArray[np.void]:
    """Return a format as a record of C, whose memory lives as long as the cache."""
    record = np.zeros(1, dtype=FORMAT)
    fields = {
        "mantissa_bits": fmt.mantissa_bits,
        "bias": fmt.bias,
        "emin": fmt.emin,
        "emax": fmt.emax,
        "bits": fmt.bits,
        "sign_bit": fmt.sign_bit,
        "max_code": fmt.max_code,
        "top": largest_bits(fmt),
        "signed_zero": fmt.has_negative_zero,
        "coarse": fmt.ulp_min > 1,
        "one_nan": fmt.nan_codes[0] if len(fmt.nan_codes) == 1 else -1,
        "many_nans": len(fmt.nan_codes) > 1,
        "inf_code": -1 if fmt.inf_code is None else fmt.inf_code,
        "largest": fmt.max,
    }
    for name, value in fields.items():
        record[name] = value
    return record
