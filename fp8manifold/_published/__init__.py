"""Published files of weights in codes: which tensors are codes and which scales, read
and written to the byte.

Nothing here opens a file or knows a model: headers come in, and tensors by a function
that reads one by its name.
"""

from fp8manifold._published.found import quantization_of, stored_weights
from fp8manifold._published.stored import (
    Header,
    StoredWeight,
    dtype_name,
    read_parts,
    written_parts,
)

__all__ = [
    "Header",
    "StoredWeight",
    "dtype_name",
    "quantization_of",
    "read_parts",
    "stored_weights",
    "written_parts",
]
