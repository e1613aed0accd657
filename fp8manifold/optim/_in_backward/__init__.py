"""Steps taken while gradients come: the hooks, clipping by a norm of another pass, sums of several passes."""

from fp8manifold.optim._in_backward.hooks import InBackward, step_in_backward

__all__ = ["InBackward", "step_in_backward"]
