"""Runs over any settings: grids, random points, tuned rates, sensitivity of layers."""
