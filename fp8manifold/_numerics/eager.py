"""A decorator that keeps a function out of compiled graphs."""

# torch.compiler.disable does the same and imports the whole compiler at once: more than half of this library's import.
from torch._compile import _disable_dynamo as eager_only

__all__ = ["eager_only"]
