"""Runs over any settings: a grid or random points, tuned rates, the sensitivity of
layers.
"""
