"""What autocast makes of a weight: the same codes under another dtype, for as long as they stay what they were."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._encoded.dispatch import View, runs_inside
from fp8manifold._encoded.storage import is_traced

__all__ = ["check_current", "check_own", "is_lent_here", "lent"]

_MOVES: Final = (nn.Module._apply.__code__,)


def is_lent_here(x: Any) -> bool:
    """Whether a cast of a tensor of codes may share them: under autocast, which casts every weight that it meets.

    Not of what a module moves, or several processes hold, and not while a compiler looks on.
    """
    root = _root(x)
    if root.is_share or is_traced(root.codes) or root.codes.is_inference():
        return False
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting > 0 and not runs_inside(_MOVES)


def _root(x: Any) -> Any:
    return _root(x.base) if isinstance(x, View) else x


def lent(x: Any, dtype: torch.dtype) -> Any:
    """A tensor of codes, or a view of one, under another dtype: in memory of its own it has nothing."""
    if isinstance(x, View):
        return View(lent(x.base, dtype), x.replay, x.size(), x.stride(), x.storage_offset())
    twin = x.with_parts(lambda part: part, dtype)
    twin.remainder = None
    twin.lent_from = x.lent_from or tuple((part, part._version) for part in (x.codes, x.kept_scale))
    return twin


def check_current(x: Any) -> None:
    """Raise RuntimeError where codes are lent, and no longer those of the cast."""
    if x.lent_from is not None and any(part._version != version for part, version in x.lent_from):
        raise RuntimeError(
            f"an {type(x).__name__} has changed since it was cast under autocast, which shares its codes: leave the "
            "autocast region before the optimizer's step, and take that after the backward pass; a clone() is a copy"
        )


def check_own(x: Any) -> None:
    """Raise RuntimeError where codes are lent: to write to them would be to write to the weight."""
    if x.lent_from is not None:
        raise RuntimeError(
            f"an {type(x).__name__} that was cast under autocast shares the codes of the one that was cast: write to "
            "that, or to a clone() of it"
        )


Lent = tuple[tuple[Tensor, int], ...]
"""Parts of the tensor that was cast, and their versions then."""
