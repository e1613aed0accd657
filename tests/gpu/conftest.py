"""Warnings of torch's own on a card, in every test of this folder.

They come from its profiler, its graphs and its compiler.
"""

import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "library"
sys.path[:0] = map(str, (LIBRARY, LIBRARY / "kernels"))  # tests import from those of the library

WARNINGS = (
    "ignore:Warning. Profiler clears events:UserWarning",
    "ignore:Synchronization debug mode is a prototype:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    # The compiler records an empty one to have a pool of memory.
    "ignore:The CUDA Graph is empty:UserWarning",
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "gpu":
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
