"""What an optimizer asks of whoever takes its steps in the backward pass."""

from typing import Any, Protocol

__all__ = ["Hooks"]


class Hooks(Protocol):
    """What takes the steps in the backward pass, where something does."""

    def watch(self, group: dict[str, Any]) -> None:
        """Take the steps of a group's parameters from now on."""

    def finish(self) -> None:
        """What is left for :meth:`ManifoldOptimizer.step`."""
