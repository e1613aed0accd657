"""The natural gradient: an optimizer, and nngeometry's factors of layers whose weights are in one byte."""

from fp8manifold.optim._fisher.natural_gradient import FisherNaturalGradient

__all__ = ["FisherNaturalGradient"]
