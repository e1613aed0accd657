"""Clipping by the norm of a whole gradient that is never in memory at once."""

import math
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._numerics.checks import check_choice, check_number

__all__ = ["KINDS", "Clipping", "clip_factor", "norm_of"]

KINDS: Final = ("previous", "exact")
_FIRSTS: Final = ("refuse", "measure")
_CLOSE: Final = 1e-5  # of two sums of the same squares in another order

Place = tuple[int, int]
"""Of a parameter: its group, and its position there."""


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm of a gradient, without dimensions, in float32, or in its dtype where that is wider."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=None if dtype is gradient.dtype else dtype)
    return norm


def clip_factor(total: Tensor, max_norm: float) -> Tensor:
    """What ``clip_grad_norm_`` multiplies by: at most 1.

    .. math:: c = \\min(1, \\mathrm{max\\_norm} / (\\lVert g \\rVert + 10^{-6}))
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class Clipping:
    """The norms of the gradients that pass in a step, and the factor that they are multiplied by.

    The norm of the last step is ``previous_norm`` in every group, None before there is one.

    Args:
        kind: whose norm the factor is taken from: that of the step before (``previous``), or of a pass of its own over
            the same batch (``exact``).
        max_norm: what the norm is clipped to; with inf the factor is 1, and norms are taken all the same.
        first: without a previous norm ``refuse`` a pass, or ``measure`` it and take no step.
    """

    def __init__(self, kind: str, max_norm: float | None, first: str) -> None:
        check_choice("clip", kind, KINDS)
        check_choice("first", first, _FIRSTS)
        if max_norm is None:
            raise ValueError(f"clip={kind!r} needs max_norm, what the norm of the whole gradient is clipped to")
        check_number("max_norm", max_norm, 0.0, math.inf, open_low=True)
        if first != "refuse" and kind != "previous":
            raise ValueError(f"first={first!r} is for clip='previous': every step of clip={kind!r} has its own pass")
        self.kind, self.max_norm, self.first = kind, float(max_norm), first
        self.measuring = False
        self.norms: dict[Place, Tensor] = {}
        self.is_left_out = False  # whether the pass under way is taken for its norm alone, or has no finite norm
        self._measured: Tensor | None = None
        self._now: Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun that has not ended."""
        return bool(self.norms)

    def watch(self, groups: list[dict[str, Any]]) -> None:
        """Show in groups that there is no norm yet, where there is none; new ones get that of the others."""
        if self.kind == "previous":
            known = next((group["previous_norm"] for group in groups if "previous_norm" in group), None)
            for group in groups:
                group.setdefault("previous_norm", known)

    def forget(self) -> None:
        """Forget what has passed in a step that will not end."""
        self.norms, self._measured, self.is_left_out = {}, None, False

    def lets(self, gradient: Tensor, place: Place, groups: list[dict[str, Any]]) -> bool:
        """Take the norm of a gradient and clip it in place; whether a step may be taken with it.

        Raises:
            RuntimeError: there is no norm to clip by, or a gradient passes twice.
        """
        if place in self.norms:
            end = "measure() takes the norm of one backward pass" if self.measuring else "call optimizer.step() after"
            raise RuntimeError(
                f"a second backward pass before the step of the first has ended, under clip={self.kind!r}: {end}"
                f"{'' if self.measuring else ' each, which ends a step and keeps its norm'}"
            )
        if not self.norms:
            self._now = None if self.measuring else self._factor(groups)
        self.norms[place] = norm_of(gradient)
        if self._now is None or self.is_left_out:
            return False
        if self._now != 1:
            gradient.mul_(self._now)
        return True

    def measured(self, groups: list[dict[str, Any]]) -> None:
        """Keep the norm of a pass that was taken for it.

        Raises:
            RuntimeError: no gradient has passed.
        """
        if not self.norms:
            raise RuntimeError("measure() has seen no gradient: there was no backward pass in it, or none to step")
        total, self.norms = self._total(), {}
        if self.kind == "exact":
            self._measured = total.cpu()
        else:
            _keep(total, groups)

    def end(self, groups: list[dict[str, Any]]) -> bool:
        """End a step: what has passed is what came before the next; whether it was left out."""
        left_out = self.is_left_out and self.kind == "exact"
        if self.norms and self.kind == "previous":
            _keep(self._total(), groups)
        self.forget()
        return left_out

    def is_done_by(self, factor: float) -> bool:
        """Whether a factor is 1, or that which ``clip_grad_norm_`` has for this step, whose gradients were clipped."""
        if factor == 1:
            return True
        own = float(clip_factor(self._total(), self.max_norm)) if self.norms else math.inf
        return math.isclose(factor, own, rel_tol=_CLOSE) or (math.isnan(factor) and math.isnan(own))

    def _factor(self, groups: list[dict[str, Any]]) -> Tensor | None:
        """None where there is no norm yet and the pass is to give it."""
        if math.isinf(self.max_norm):
            return torch.ones(())
        if self.kind == "exact":
            if self._measured is None:
                raise RuntimeError(_without_norm("exact", "each step"))
            self.is_left_out = not math.isfinite(self._measured)
            return clip_factor(self._measured, self.max_norm)
        known = groups[0].get("previous_norm")
        if known is not None:
            return clip_factor(torch.tensor(known, dtype=torch.float32), self.max_norm)
        if self.first == "refuse":
            more = ", or give step_in_backward(first='measure'), which takes no step in the first pass"
            raise RuntimeError(_without_norm("previous", "the first step") + more)
        self.is_left_out = True
        return None

    def _total(self) -> Tensor:
        """Of all that passed, as ``clip_grad_norm_`` has it for the groups' parameters in their order."""
        norms = [self.norms[place] for place in sorted(self.norms)]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return total


def _without_norm(kind: str, when: str) -> str:
    return (
        f"clip={kind!r} has no norm to clip by: before {when} take it with `with handle.measure(): loss.backward()`, "
        "which takes no step"
    )


def _keep(total: Tensor, groups: list[dict[str, Any]]) -> None:
    """Show the norm in all groups; one that is not finite is no norm to clip by, and the one before stays."""
    if math.isfinite(norm := float(total)):
        for group in groups:
            group["previous_norm"] = norm
