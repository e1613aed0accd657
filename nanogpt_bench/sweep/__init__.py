"""Runs over any settings: a grid or random points, learning rate limits, the sensitivity of layers."""
