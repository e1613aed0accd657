"""How many weights a step asked to move and did not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold.formats import FormatLike, as_format
from fp8manifold.grid import check_codes
from fp8manifold.monitor._passes import (
    ScaleLike,
    blocks,
    chart_steps,
    check_shapes,
    fitting,
    inside,
    plain,
    share,
    spacing,
    unit_blocks,
)

__all__ = [
    "Arrival",
    "StallFigures",
    "code_drift",
    "code_unchanged",
    "residual_saturation",
    "stall_figures",
    "update_arrived",
    "update_lost",
]


def update_lost(before: Tensor, target: Tensor, after: Tensor) -> float:
    """Share of all weights whose requested update was not zero and was lost in the write-back.

    .. math:: \\frac{1}{n} \\#\\{i : target_i \\ne before_i \\text{ and } after_i = before_i\\}

    Args:
        before: weights before the step.
        target: weights the step asked for, before rounding.
        after: weights after the write-back; all of one shape.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.  A NaN in ``target`` counts as a request, as Inf does; a NaN in
        ``before`` has moved.  +0 and -0 are one weight.

    Raises:
        TypeError: not tensors.
        ValueError: shapes that differ.

    Example:
        >>> before = torch.tensor([1.0, 1.0, 1.0, 1.0])
        >>> update_lost(before, torch.tensor([1.0, 1.01, 1.01, 1.2]), torch.tensor([1.0, 1.0, 1.125, 1.25]))
        0.25
    """
    check_shapes(before=before, target=target, after=after)
    return share((target != before) & (after == before))


def code_unchanged(before_codes: Tensor, after_codes: Tensor, before: Tensor, after: Tensor) -> float:
    """Share of all master weights that moved without their code moving.

    .. math:: \\frac{1}{n} \\#\\{i : after_i \\ne before_i \\text{ and } code(after_i) = code(before_i)\\}

    Args:
        before_codes, after_codes: uint8 codes of the quantised weights before and after a step.
        before, after: the master weights themselves; all of one shape.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.  A NaN has moved, Inf has where the other is not Inf; +0 and -0 are
        one weight.

    Raises:
        TypeError: not tensors.
        ValueError: shapes that differ.

    Example:
        >>> codes = torch.tensor([56, 56], dtype=torch.uint8)
        >>> code_unchanged(codes, codes, torch.tensor([1.0, 1.0]), torch.tensor([1.01, 1.0]))
        0.5
    """
    check_shapes(before_codes=before_codes, after_codes=after_codes, before=before, after=after)
    return share((after != before) & (after_codes == before_codes))


@dataclass(frozen=True)
class Arrival:
    """What :func:`update_arrived` finds in one step of one tensor; those of several tensors add up."""

    projected: float
    """Sum of ``(after - before) * (target - before)``, in value squared."""
    requested: float
    """Sum of ``(target - before)**2``, in value squared."""

    @property
    def share(self) -> float | None:
        """``projected / requested``; None where no update was requested."""
        return self.projected / self.requested if self.requested else None

    def __add__(self, other: "Arrival") -> "Arrival":
        return Arrival(self.projected + other.projected, self.requested + other.requested)


@torch.no_grad()
def update_arrived(before: Tensor, target: Tensor, after: Tensor) -> Arrival:
    """How much of the movement that a step requested the write-back made, along the direction requested.

    .. math:: \\mathrm{share} = \\frac{\\langle after - before,\\ target - before\\rangle}
              {\\lVert target - before\\rVert^2}

    Where :func:`update_lost` counts the weights that stood still, this says what their number means.  A write-back
    that is unbiased, as stochastic rounding is, has an expected share of 1 however many weights stand still in a step:
    the few that move go as much too far as the others fall short.  One that rounds to nearest has 0 where every update
    is below half a spacing.  Over :math:`n` weights with updates of :math:`u` spacings the share of one stochastic
    step scatters around 1 by about :math:`1 / \\sqrt{n u}`.

    Args:
        before, target, after: as in :func:`update_lost`, and float tensors.

    Returns:
        An :class:`Arrival`, summed in float64; both sums are 0 for empty tensors.  What a target beyond the format's
        largest value asks for is requested and does not arrive.  NaN or Inf in any of them makes the sums NaN or Inf;
        +0 and -0 are one weight.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ.

    Example:
        >>> before = torch.tensor([1.0, 1.0, 1.0, 1.0])
        >>> target = before + 0.03125  # a quarter of a spacing of E4M3: one in four moves
        >>> update_arrived(before, target, torch.tensor([1.0, 1.125, 1.0, 1.0])).share
        1.0
        >>> update_arrived(before, target, before).share
        0.0
    """
    before, target, after = plain(before, "before"), plain(target, "target"), plain(after, "after")
    check_shapes(before=before, target=target, after=after)
    sums = []
    for start, wanted, end in blocks(before, target, after):
        asked = wanted.double() - start.double()
        sums.append(torch.stack([asked.dot(end.double() - start.double()), asked.dot(asked)]))
    projected, requested = torch.stack(sums).sum(0).tolist()
    return Arrival(projected, requested)


@dataclass(frozen=True)
class StallFigures:
    """What :func:`stall_figures` finds in one step of one tensor."""

    size: int
    """Weights."""
    update_lost: float
    """Of :func:`update_lost`."""
    update_success: float | None
    """Share of the requested updates that moved their weight; None where none was requested."""
    update_ulps: float
    """Mean size of the requested updates, in ULPs at the weight."""
    move_probability: float
    """Mean probability with which stochastic rounding to the format would move a weight."""


@torch.no_grad()
def stall_figures(
    before: Tensor, target: Tensor, after: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0
) -> StallFigures:
    """What became of the updates that a step requested, and how large they were in units of the format.

    .. math:: update\\_success = \\frac{\\#\\{target \\ne before, after \\ne before\\}}{\\#\\{target \\ne before\\}},
              \\quad update\\_ulps = \\overline{|target - before| / S(before)}, \\quad
              move\\_probability = \\overline{\\min(1, |\\varphi(target) - \\varphi(before)|)}

    For weights on the grid the last is exact: it counts the finer steps below a power of two.  For others it is the
    number of steps asked for, at most 1.

    Args:
        before, target, after: as in :func:`update_lost`.
        fmt: a format or its name.
        scale: positive, broadcasting against the weights.

    Returns:
        A :class:`StallFigures`.  A NaN in ``target`` or ``before`` makes the two means NaN, Inf makes ``update_ulps``
        Inf (NaN where both are Inf); +0 and -0 are one weight.  All is 0 for an empty tensor, and ``update_success``
        None.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ, or a scale that does not fit them or is not positive.

    Example:
        >>> before = torch.tensor([1.0, 1.0])
        >>> found = stall_figures(before, torch.tensor([1.03125, 0.96875]), before, "E4M3")
        >>> found.update_lost, found.update_success, found.update_ulps, found.move_probability
        (1.0, 0.0, 0.25, 0.375)
    """
    before, target, after = plain(before, "before"), plain(target, "target"), plain(after, "after")
    check_shapes(before=before, target=target, after=after)
    fmt, sums = as_format(fmt), []
    for _, start, wanted, end in unit_blocks(fitting(scale, before), before, target, after):
        asked, moved = wanted != start, end != start
        steps = chart_steps(wanted, start, fmt).clamp_(max=1.0)
        ulps = (wanted - start).abs_().div_(spacing(inside(start, fmt), fmt))
        sums.append(torch.stack([asked.sum(), moved.logical_and_(asked).sum(), ulps.sum(), steps.sum()]).double())
    asked_for, done, ulps_sum, steps_sum = torch.stack(sums).sum(0).tolist()
    n = max(before.numel(), 1)
    return StallFigures(
        size=before.numel(),
        update_lost=(asked_for - done) / n,
        update_success=done / asked_for if asked_for else None,
        update_ulps=ulps_sum / n,
        move_probability=steps_sum / n,
    )


def residual_saturation(residual: Tensor) -> float:
    """Share of ULP residuals that stand at an end of their range.

    .. math:: \\frac1n \\#\\{i : r_i \\in \\{-128, 127\\}\\}

    Args:
        residual: what an optimizer with ``writeback="residual8"`` keeps as ``state[p]["residual"]``, int8.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.  Of residuals spread evenly it is 2/256, for what exceeds an end is
        carried to the code.

    Raises:
        TypeError: no tensor of int8.

    Example:
        >>> residual_saturation(torch.tensor([-128, 5, 127, 0], dtype=torch.int8))
        0.5
    """
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual must be a tensor, not {type(residual).__name__}")
    if residual.dtype is not torch.int8:
        raise TypeError(f"residual has dtype {residual.dtype}: int8 is needed")
    return share((residual == -128) | (residual == 127))


def code_drift(start: Tensor, now: Tensor, fmt: FormatLike) -> float:
    """Mean distance of codes from those of another moment, such as the first, in steps of the format.

    .. math:: \\overline{|\\varphi(now) - \\varphi(start)|}

    Args:
        start, now: uint8 codes of one shape, at one scale.
        fmt: the format, or its name.

    Returns:
        Steps; 0 for an empty tensor.  Codes of NaN and Inf count as the numbers beyond the largest value, those of +0
        and -0 as one.

    Raises:
        TypeError: not uint8.
        ValueError: shapes that differ.

    Example:
        >>> code_drift(torch.tensor([56, 1], dtype=torch.uint8), torch.tensor([58, 129], dtype=torch.uint8), "E4M3")
        2.0
    """
    fmt = as_format(fmt)
    check_codes(start, "start")
    check_codes(now, "now")
    check_shapes(start=start, now=now)
    moved = (_signed(now, fmt.sign_bit) - _signed(start, fmt.sign_bit)).abs_()
    return int(moved.sum()) / max(moved.numel(), 1)


def _signed(codes: Tensor, sign_bit: int) -> Tensor:
    """The position of a code on the line, from its sign and magnitude."""
    code = codes.to(torch.int16)
    return torch.where(code >= sign_bit, sign_bit - code, code)
