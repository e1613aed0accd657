"""Parts of what :func:`fp8manifold.load` and :func:`fp8manifold.save` do.

They are for models that are not of transformers, and for whoever reads or writes files
by other means.
"""

from fp8manifold._doors.exchange import layout_state_dict
from fp8manifold._doors.published import stored_weights
from fp8manifold._doors.state_files import load_state, save_state
from fp8manifold.nn._loading import load_into
from fp8manifold.nn._parts import unflatten
from fp8manifold.nn._plan import check_formats
from fp8manifold.nn._tensor_files import check_floats

__all__ = [
    "check_floats",
    "check_formats",
    "layout_state_dict",
    "load_into",
    "load_state",
    "save_state",
    "stored_weights",
    "unflatten",
]
