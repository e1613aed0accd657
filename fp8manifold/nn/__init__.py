"""Quantised linear layers."""

from fp8manifold.nn._linear import STORAGES, QuantizedLinear, Storage

__all__ = ["STORAGES", "QuantizedLinear", "Storage"]
