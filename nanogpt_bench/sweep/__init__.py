"""Runs over any settings: a grid or random points, learning rate limits, the sensitivity of layers."""

from nanogpt_bench.sweep.command import main_sweep

__all__ = ["main_sweep"]
