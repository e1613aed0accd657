"""Steps in the backward pass: the hooks, clipping by the norm of another pass, accumulation over several passes."""

from fp8manifold.optim._in_backward.hooks import InBackward, step_in_backward

__all__ = ["InBackward", "step_in_backward"]
