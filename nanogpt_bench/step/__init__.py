"""One training step and what it is built from: optimizer, schedule, clipping, the points at which it is watched."""
