"""Clipping by the norm of all gradients, which are never in memory together."""

import math
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice, check_number

KINDS: Final = ("previous", "exact")
_FIRSTS: Final = ("refuse", "measure")
_CLOSE: Final = 1e-5  # relative difference of two sums of the same squares in another order

Place = tuple[int, int]
"""The index of a parameter's group, and its index there."""


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm of a gradient, of shape (), in float32 or in the gradient's dtype where that is wider."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=None if dtype is gradient.dtype else dtype)
    return norm


def clip_factor(total: Tensor, max_norm: float) -> Tensor:
    """The factor of ``clip_grad_norm_``, at most 1.

    .. math:: c = \\min(1, \\mathrm{max\\_norm} / (\\lVert g \\rVert + 10^{-6}))
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class Clipping:
    """The norm of every gradient of the step under way, and the factor that clips them.

    Every group holds the norm of the last step as ``previous_norm``, None before the first.

    Args:
        kind: the norm that gives the factor: that of the step before (``previous``), or of an extra pass over the same
            batch (``exact``).
        max_norm: the largest norm after clipping.  With inf the factor is 1, and norms are still measured.
        first: without a previous norm ``refuse`` a pass, or ``measure`` its norm and step nothing.
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
        self.is_left_out = False  # the pass under way steps nothing: it only measures, or its norm is not finite
        self._measured: Tensor | None = None
        self._now: Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        return bool(self.norms)

    def watch(self, groups: list[dict[str, Any]]) -> None:
        """Add ``previous_norm`` to groups without one: that of the other groups, else None."""
        if self.kind == "previous":
            known = next((group["previous_norm"] for group in groups if "previous_norm" in group), None)
            for group in groups:
                group.setdefault("previous_norm", known)

    def forget(self) -> None:
        self.norms, self._measured, self.is_left_out = {}, None, False

    def lets(self, gradient: Tensor, place: Place, groups: list[dict[str, Any]]) -> bool:
        """Measure the norm of a gradient and clip it in place; returns whether its parameter steps.

        Raises:
            RuntimeError: no norm to clip by, or a second gradient of the same parameter.
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
        """Keep the norm of a pass that only measured.

        Raises:
            RuntimeError: the pass had no gradient.
        """
        if not self.norms:
            raise RuntimeError("measure() has seen no gradient: there was no backward pass in it, or none to step")
        total, self.norms = self._total(), {}
        if self.kind == "exact":
            self._measured = total.cpu()
        else:
            _keep(total, groups)

    def end(self, groups: list[dict[str, Any]]) -> bool:
        """End a step and keep its norm for the next; returns whether the step was skipped."""
        left_out = self.is_left_out and self.kind == "exact"
        if self.norms and self.kind == "previous":
            _keep(self._total(), groups)
        self.forget()
        return left_out

    def is_done_by(self, factor: float) -> bool:
        """True for 1, and for the factor of ``clip_grad_norm_`` in this step, whose gradients are clipped already."""
        if factor == 1:
            return True
        own = float(clip_factor(self._total(), self.max_norm)) if self.norms else math.inf
        return math.isclose(factor, own, rel_tol=_CLOSE) or (math.isnan(factor) and math.isnan(own))

    def _factor(self, groups: list[dict[str, Any]]) -> Tensor | None:
        """The factor of the pass that begins; None for a pass that only measures the first norm."""
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
        """The norm of all gradients of the step, in the order in which ``clip_grad_norm_`` reduces the parameters."""
        norms = [self.norms[place] for place in sorted(self.norms)]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return total


def _without_norm(kind: str, when: str) -> str:
    return (
        f"clip={kind!r} has no norm to clip by: before {when} take it with `with handle.measure(): loss.backward()`, "
        "which takes no step"
    )


def _keep(total: Tensor, groups: list[dict[str, Any]]) -> None:
    """Write the norm to all groups; one that is not finite leaves the previous one."""
    if math.isfinite(norm := float(total)):
        for group in groups:
            group["previous_norm"] = norm
