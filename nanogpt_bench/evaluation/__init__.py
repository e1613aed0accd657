"""Weights as they are and rounded to formats, measured without training."""
