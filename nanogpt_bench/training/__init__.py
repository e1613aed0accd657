"""One training step: forward, clipping, schedule, the optimizer, the points at which it is watched."""
