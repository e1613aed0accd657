"""Measuring weights as they are and rounded to formats, without training."""
