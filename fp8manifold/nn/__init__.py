"""Quantised linear layers."""

from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._spec import STORAGES, Storage

__all__ = ["STORAGES", "QuantizedLinear", "Storage"]
