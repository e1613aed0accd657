"""Published files of weights in codes: read and written to the byte.

::

    stored_weight   one weight: which dtypes and shapes, and FP8Tensor <-> two tensors
    find_weights    which tensors of a folder are codes and which scales, by headers
    layout          a folder as a whole, and where its tensors go in a model
    places          one parameter of a model from the tensors of files, and back
    replace_files   a folder written over an earlier one, wholly or not at all
    options         options of transformers' from_pretrained

``find_weights`` and ``stored_weight`` open no file and know no model: headers come in,
and tensors by a function that reads one by its name.
"""

from fp8manifold._published.find_weights import quantization_of, stored_weights
from fp8manifold._published.stored_weight import (
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
