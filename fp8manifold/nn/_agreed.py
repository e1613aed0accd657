"""Which operand a magnitude is of, for processes that share it: collectives are matched by their order alone.

Every message says what it is of, and the model says where its forward pass ends.  Processes that run other layers than
each other then meet in two messages that differ, which both see, before anything has been taken from the wrong one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8manifold._encoded.recall import is_backward
from fp8manifold._ranks import ALONE, Ranks

__all__ = ["UNSHARED", "Operand", "end_passes_together"]


class Operand(NamedTuple):
    """An operand whose magnitudes processes share: the same number and name in each of them."""

    ranks: Ranks
    number: int
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "Operand":
        """Itself: a copy's magnitudes are shared as these are."""
        return self

    def largest(self, amax: Tensor, member: int = 0) -> Tensor:
        """The largest of each element over the processes; one that is not finite is Inf, as NaN has no order.

        Args:
            amax: of the same shape in every process.
            member: which of several tensors it is of.

        Raises:
            RuntimeError: another process sends the magnitude of another operand, or has ended its pass; in all of them.
        """
        if self.ranks.size == 1:
            return amax
        amax = torch.where(amax.isnan(), torch.inf, amax)
        if torch.compiler.is_compiling():  # a graph is the same in all of them
            return self.ranks.largest(amax)
        first = amax if amax.numel() == 1 else amax.new_zeros(())
        said = self._agreed(first.double().reshape(1), member, amax.numel())
        return said.to(amax.dtype).reshape(amax.shape) if amax.numel() == 1 else self.ranks.largest(amax)

    def announce(self, device: torch.device, member: int = 0) -> None:
        """Say that a forward pass has come to this operand, whose magnitude the backward pass will send.

        Raises:
            RuntimeError: as :meth:`largest`.
        """
        if self.ranks.size > 1 and not torch.compiler.is_compiling():
            self._agreed(torch.zeros(1, dtype=torch.float64, device=device), member, -1)

    def _agreed(self, value: Tensor, member: int, count: int) -> Tensor:
        own = torch.tensor([self.number, member, count], dtype=torch.float64, device=value.device)
        said = self.ranks.largest(torch.cat([own, -own, value]))
        if not torch.equal(said[:3], -said[3:6]):
            raise RuntimeError(
                f"{self.name} is not what every process runs now (or its magnitudes have another shape there): where "
                "processes run other layers than each other, scales can't be shared; take policy='dynamic'"
            )
        return said[6:]


UNSHARED = Operand(ALONE, 0, "")
"""One of a single process."""


class _End:
    """A forward hook: the end of a model's pass in training, said as every operand is."""

    def __init__(self, ranks: Ranks) -> None:
        self.operand = Operand(ranks, -1, "the end of the forward pass")

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if module.training and not torch.compiler.is_compiling() and not is_backward():
            parameter = next(module.parameters(), None)
            self.operand.announce(torch.device("cpu") if parameter is None else parameter.device)


def end_passes_together(model: nn.Module, ranks: Ranks) -> None:
    """Let the model say where its forward pass ends, to these processes and no others."""
    hooks = model._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _End)]:
        del hooks[key]
    model.register_forward_hook(_End(ranks))
