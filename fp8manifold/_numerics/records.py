"""The records that C reads: the same fields in the same order as in ``format.h``,
``step.h`` and ``grid.c``.
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
        *[
            (name, np.int32)
            for name in ("mantissa_bits", "bias", "emin", "emax", "bits", "sign_bit", "max_code")
        ],
        *[
            (name, np.int32)
            for name in ("top", "signed_zero", "coarse", "one_nan", "many_nans", "inf_code")
        ],
        ("largest", np.float32),
    ],
    align=True,
)
SPEC: Final = np.dtype(
    [
        *[
            (name, np.int32)
            for name in ("direction", "storage", "writeback", "moments", "geometry", "stiffness")
        ],
        *[(name, np.int32) for name in ("metric", "decays", "nesterov", "maximize")],
        ("format", FORMAT),
    ],
    align=True,
)
JOB: Final = np.dtype(
    [
        # spec, weight, gradient, scale, residual, first, second, largest, first_bound,
        # second_bound, reached
        ("pointers", np.uint64, 11),
        ("rows", np.int64),
        ("length", np.int64),
        ("facts", np.int32, 4),  # scales, repeats, low_exponent, high_exponent
        ("keys", np.int32, 8),
        ("hyper", np.float32, 19),
    ],
    align=True,
)


#: format, from, to, scale, rows, length, then shared, stochastic, rescale, bfloat16,
#: nan_code, spacing, keys, position
ARRAY: Final = Struct(f"{FORMAT.itemsize}s3Q2q6i4ii0q")


@lru_cache(maxsize=256)
def format_record(fmt: FloatFormat) -> NDArray[np.void]:
    """A format as a record of C, which lives as long as the cache."""
    record = np.zeros(1, dtype=FORMAT)
    record[0] = (
        *(fmt.mantissa_bits, fmt.bias, fmt.emin, fmt.emax, fmt.bits, fmt.sign_bit, fmt.max_code),
        largest_bits(fmt),
        fmt.has_negative_zero,
        fmt.ulp_min > 1,
        fmt.nan_codes[0] if len(fmt.nan_codes) == 1 else -1,
        len(fmt.nan_codes) > 1,
        -1 if fmt.inf_code is None else fmt.inf_code,
        fmt.max,
    )
    return record
