"""What a gradient looks like, alone, over time and against that of a float32 shadow."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8manifold._base.blocks import BLOCK, runs_in_blocks
from fp8manifold._base.checks import check_entries, check_int, check_number
from fp8manifold._base.float_bits import working_dtype
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.grid import from_chart, round_to_grid, to_chart, ulp
from fp8manifold.monitor._passes import ScaleLike, blocks, check_shapes, fitting, inside, plain, spacing, unit_blocks
from fp8manifold.monitor.histogram import Histogram

__all__ = [
    "DeadRuns",
    "GradientFigures",
    "ShadowFigures",
    "gradient_figures",
    "shadow_figures",
    "update_to_noise",
    "zero_gradient_zone",
]

_LONGEST = 32767
_ROUNDING = 2.0**-20  # a variance, relative to the mean square, that float32 leaves of a constant
_LARGE = 2.0**100  # stands for no slack at all: times 0 it is 0
_HALVES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GradientFigures:
    """What :func:`gradient_figures` finds."""

    size: int
    """Elements."""
    l2: float
    """Euclidean norm."""
    linf: float
    """Largest magnitude."""
    snr: float | None
    """Magnitude of the mean over the standard deviation, across the elements; None where it exceeds 1000."""
    zero: float
    """Share of zeros."""


@torch.no_grad()
def gradient_figures(g: Tensor) -> GradientFigures:
    """Norms, signal to noise, and zeros of a gradient.

    .. math:: snr = |\\bar g| / \\sqrt{\\overline{(g - \\bar g)^2}}

    Args:
        g: float tensor of any shape.

    Returns:
        A :class:`GradientFigures`.  NaN or Inf in ``g`` make the norms NaN or Inf and ``snr`` None, -0 is a zero; of an
        empty tensor all is 0 but ``snr``, which is None.

    Raises:
        TypeError: ``g`` is not a float tensor.

    Example:
        >>> gradient_figures(torch.tensor([3.0, 4.0, 0.0, 1.0]))
        GradientFigures(size=4, l2=5.0990195135927845, linf=4.0, snr=1.2649110640673518, zero=0.25)
    """
    g = plain(g, "g")
    n = g.numel()
    if n == 0:
        return GradientFigures(0, 0.0, 0.0, None, 0.0)
    found = []
    for (part,) in blocks(g):
        magnitude = part.abs()
        top = magnitude.amax()
        unit = torch.where((top > 0) & top.isfinite(), top, 1.0)
        scaled = part / unit
        zeros = torch.eq(magnitude, 0.0, out=magnitude).sum(dtype=torch.float64)
        one = [unit, scaled.sum(), torch.dot(scaled, scaled), top, zeros]
        found.append(torch.stack([value.double() for value in one]))
    unit, sums, squares, tops, zeros = torch.stack(found).unbind(1)
    mean, square = (sums * unit).sum() / n, (squares * unit * unit).sum() / n
    figures = torch.stack([mean, square, tops.amax(), zeros.sum()]).tolist()
    return _figures(n, *figures)


def _figures(n: int, mean: float, square: float, linf: float, zeros: float) -> GradientFigures:
    variance = square - mean * mean
    noisy = math.isfinite(variance) and variance > square * _ROUNDING
    snr = abs(mean) / math.sqrt(variance) if noisy else None
    return GradientFigures(n, math.sqrt(square * n), linf, snr, zeros / n)


@dataclass(frozen=True)
class ShadowFigures:
    """What :func:`shadow_figures` finds."""

    size: int
    """Elements."""
    cosine: float | None
    """Cosine of the angle between the two; None where one of them is zero or not finite."""
    quant_snr_db: float | None
    """Power of the reference over that of the difference, in decibels; infinite where they are equal."""


@torch.no_grad()
def shadow_figures(g: Tensor, reference: Tensor) -> ShadowFigures:
    """How well a gradient agrees with the one that a float32 model has for the same batch.

    .. math:: cosine = \\frac{g \\cdot g_{32}}{|g| |g_{32}|}, \\qquad
              quant\\_snr\\_db = 10 \\log_{10} \\frac{|g_{32}|^2}{|g - g_{32}|^2}

    Args:
        g: the gradient of the quantised model.
        reference: that of the shadow, of the same shape.

    Returns:
        A :class:`ShadowFigures`.  The cosine of equal gradients is 1 exactly.  Both figures are None where either
        tensor holds NaN or Inf, where both are zero (+0 or -0), and for empty tensors.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ.

    Example:
        >>> shadow_figures(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
        ShadowFigures(size=2, cosine=0.7071067811865475, quant_snr_db=3.010299956639812)
    """
    g, reference = plain(g, "g"), plain(reference, "reference")
    check_shapes(g=g, reference=reference)
    if g.numel() == 0:
        return ShadowFigures(0, None, None)
    tops = torch.stack([torch.stack([x.abs().amax().double() for x in pair]) for pair in blocks(g, reference)]).amax(0)
    units = [top if top != 0 else 1.0 for top in tops.tolist()]
    if not all(map(math.isfinite, units)):
        return ShadowFigures(g.numel(), None, None)
    dtype = torch.promote_types(g.dtype, reference.dtype)
    pieces = [_products(a, b, units) for a, b in blocks(g.to(dtype), reference.to(dtype))]
    both, own, shadow, noise = torch.stack(pieces).sum(0).tolist()
    cosine = max(-1.0, min(1.0, both / math.sqrt(own * shadow))) if own and shadow else None
    return ShadowFigures(g.numel(), cosine, _decibels(shadow * (units[1] / max(units)) ** 2, noise))


def _products(a: Tensor, b: Tensor, units: list[float]) -> Tensor:
    """Of the two, each in its own unit, and the power of their difference in the larger one."""
    first, second, difference = a / units[0], b / units[1], (a - b) / max(units)
    pairs = (first, second), (first, first), (second, second), (difference, difference)
    return torch.stack([torch.dot(*pair) for pair in pairs]).double()


def _decibels(signal: float, noise: float) -> float | None:
    if noise == 0:
        return math.inf if signal else None
    return 10 * math.log10(signal / noise) if signal else -math.inf


@torch.no_grad()
def update_to_noise(before: Tensor, target: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0) -> float | None:
    """Power of a step's updates over the variance that stochastic rounding adds to them.

    .. math:: \\frac{\\sum (target - before)^2}{\\sum f (1 - f) S(target)^2}, \\qquad
              f = |target| / S - \\lfloor |target| / S \\rfloor

    Args:
        before: weights before the step.
        target: weights the step asked for, before rounding; of the same shape.
        fmt: a format or its name.
        scale: positive, broadcasting against the weights.

    Returns:
        The ratio; infinite where rounding adds no noise, None where nothing was asked for, as in an empty tensor.
        Beyond the range there is no noise.  NaN gives NaN, Inf gives Inf (NaN where both
        are Inf); +0 and -0 are one weight.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ, or a scale that does not fit them or is not positive.

    Example:
        >>> update_to_noise(torch.tensor([1.0]), torch.tensor([1.03125]), "E4M3")  # f = 1/4 of a step of 1/8
        0.3333333333333333
    """
    before, target = plain(before, "before"), plain(target, "target")
    check_shapes(before=before, target=target)
    fmt, sums = as_format(fmt), []
    for scales, start, wanted in unit_blocks(fitting(scale, before), before, target):
        end = inside(wanted, fmt)
        gap = spacing(end, fmt)
        fraction = (end / gap).abs_().frac_()
        step = (gap * scales).double()
        noise = (fraction * (1 - fraction)).double() * step * step
        sums.append(torch.stack([((wanted - start) * scales).double().square().sum(), noise.sum()]))
    asked, added = torch.stack(sums).sum(0).tolist()
    if asked == 0:
        return None
    return float(asked / added if added else asked * math.inf)


class DeadRuns:
    """For how many steps in a row each element of a gradient has been as good as zero.

    .. math:: r_i \\leftarrow (r_i + 1) [\\,|g_i| < threshold\\,], \\qquad dead = \\frac1n \\#\\{r_i \\ge patience\\}

    Two bytes an element are kept; runs are counted up to 32767 steps.  NaN and Inf end a run, -0 is a zero; of an empty
    gradient no share is dead.

    Args:
        patience: steps after which an element is dead.
        threshold: the magnitude below which a gradient counts as zero.

    Raises:
        ValueError: ``patience`` below 1, a negative threshold.

    Example:
        >>> runs = DeadRuns(patience=2)
        >>> for g in ([0.0, 1.0], [0.0, 0.0]):
        ...     runs.update(torch.tensor(g))
        >>> runs.dead, runs.lengths()
        (0.5, Histogram(edges=(0.0, 1.0, 2.0, 4.0), counts=(0, 1, 1)))
    """

    def __init__(self, patience: int = 100, threshold: float = 1e-8) -> None:
        check_int("patience", patience, 1, _LONGEST)
        check_number("threshold", threshold, 0.0)
        self.patience, self.threshold = patience, threshold
        self.runs: Tensor | None = None
        self._bound = 0  # no run is longer

    @torch.no_grad()
    def update(self, g: Tensor, steps: int = 1) -> None:
        """Count the gradient of one step, or, where only some are looked at, of the ``steps`` since the last look.

        Args:
            g: float tensor, of one shape in all updates.
            steps: how many steps it stands for.

        Raises:
            TypeError: ``g`` is not a float tensor.
            ValueError: a gradient of another shape than the first one's, ``steps`` out of range.
        """
        g = plain(g, "g")
        check_int("steps", steps, 1, _LONGEST)
        if self.runs is None:
            self.runs = torch.zeros(g.shape, dtype=torch.int16, device=g.device)
        if self.runs.shape != g.shape:
            raise ValueError(f"g has shape {tuple(g.shape)}, but runs are counted for {tuple(self.runs.shape)}")
        if self._bound + steps > _LONGEST:
            self.runs.clamp_(max=_LONGEST - steps)
        self._bound = min(self._bound + steps, _LONGEST)
        if not runs_in_blocks(g.device, g.numel()):
            self._count(self.runs, g.to(working_dtype(g)), steps)
            return
        for runs, (part,) in zip(self.runs.view(-1).split(BLOCK), blocks(g), strict=True):
            self._count(runs, part, steps)

    def _count(self, runs: Tensor, g: Tensor, steps: int) -> None:
        small = g.abs().lt_(self.threshold).to(runs.dtype)  # a comparison into a mask costs four times as much
        if steps > 1:
            runs.add_(steps - 1)
        torch.addcmul(small, runs, small, out=runs)

    @property
    def dead(self) -> float:
        """Share of the elements whose run is at least ``patience`` long; 0 before the first update."""
        if self.runs is None:
            return 0.0
        return int((self.runs >= self.patience).sum()) / max(self.runs.numel(), 1)

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes: ``runs``, a copy, and ``bound``, which no run is longer than."""
        return {"runs": None if self.runs is None else self.runs.clone(), "bound": self._bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where ``state_dict`` was called; ``runs`` is held, not copied.

        Args:
            state: what :meth:`state_dict` gave.

        Raises:
            TypeError: ``runs`` is neither None nor an int16 tensor.
            ValueError: an entry is missing.
        """
        check_entries("state", state, ("runs", "bound"))
        runs = state["runs"]
        if runs is not None and not (isinstance(runs, Tensor) and runs.dtype == torch.int16):
            raise TypeError(f"runs must be None or an int16 tensor, not {getattr(runs, 'dtype', type(runs).__name__)}")
        self.runs, self._bound = runs, int(state["bound"])

    def lengths(self) -> Histogram:
        """How many elements have a run of 0, 1, 2-3, 4-7, ... steps at present."""
        counts = [0] if self.runs is None else self._by_octave()
        edges = (0.0, *(2.0**i for i in range(len(counts))))
        return Histogram(edges, tuple(counts))

    def _by_octave(self) -> list[int]:
        assert self.runs is not None
        octave = torch.frexp(self.runs.flatten().float()).exponent  # 0 of 0, 1 of 1, 2 of 2 and 3, ...
        counts: list[int] = torch.bincount(octave).tolist()
        return counts or [0]


@torch.no_grad()
def zero_gradient_zone(
    weight: Tensor,
    inputs: Tensor,
    fmt: FormatLike,
    scale: ScaleLike = 1.0,
    *,
    output: FormatLike | torch.dtype = torch.bfloat16,
    output_scale: ScaleLike = 1.0,
    bias: Tensor | None = None,
) -> float:
    """Share of a linear layer's weights for which half an ULP, up or down, leaves every output unchanged.

    .. math:: \\frac{1}{n} \\#\\{(i, j) : \\forall t : Q(y_{ti} \\pm x_{tj} S(w_{ij}) / 2) = Q(y_{ti})\\}, \\qquad
              y = x W^T + b

    A finite difference of the loss with respect to such a weight is zero.

    Args:
        weight: (O, I), as it is multiplied: quantised.
        inputs: (..., I) what it is multiplied by; time grows with the number of rows, a few dozen tell.  Fewer rows
            give a larger share, or the same.
        fmt: the weight's format, or its name.
        scale: of the weight; positive, broadcasting against it.
        output: format that the layer's output is rounded to, or the float dtype that it has.
        output_scale: of that format: a number or a tensor of one element.
        bias: (O,), or None.

    Returns:
        A number in [0, 1]; 0 for an empty weight, 1 without rows.  An output beyond the range of its format stays
        there for every step that does not bring it back, an output that is NaN or Inf in a float dtype for every step;
        a weight that is NaN, or meets an input that is NaN or Inf, is in no zone; +0 and -0 are one weight.

    Raises:
        TypeError: not float tensors, or an output dtype other than bfloat16, float16 and float32.
        ValueError: shapes that don't belong together, or a scale that does not fit or is not positive.

    Example:
        >>> weight, inputs = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, 0.1, 0.0]])
        >>> zero_gradient_zone(weight, inputs, "E4M3", output="E4M3")  # outputs near 1 are 0.125 apart
        0.6666666666666666
    """
    w, x = plain(weight, "weight"), plain(inputs, "inputs")
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"weight must be (O, I) and inputs (..., I): got {tuple(w.shape)} and {tuple(x.shape)}")
    if not w.numel():
        return 0.0
    fitted = fitting(scale, w)
    half = ulp(w.to(fitted.dtype) / fitted, as_format(fmt)) * (fitted / 2)
    rows = x.reshape(-1, w.shape[1]).float()
    outputs = torch.nn.functional.linear(rows, w.float(), None if bias is None else bias.detach().float())
    slack = _slack(outputs, output, output_scale)
    ratios = _largest_ratios(rows, slack, half.expand(w.shape))
    return sum(int((ratio * part < 1).sum()) for ratio, part in ratios) / max(w.numel(), 1)


def _largest_ratios(rows: Tensor, slack: Tensor, half: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """``max_t |x_tj| / slack_ti`` for blocks of outputs i, with their part of ``half``."""
    size = max(BLOCK // max(rows.shape[1], 1), 1)
    inverse = (1 / slack).nan_to_num_(nan=0.0, posinf=_LARGE).clamp_(max=_LARGE)
    rows = rows.abs()
    for inverses, part in zip(inverse.split(size, dim=1), half.split(size), strict=True):
        worst = rows.new_zeros(part.shape)
        scratch = torch.empty_like(worst)
        for margin, x in zip(inverses, rows, strict=True):
            torch.maximum(worst, torch.mul(margin[:, None], x, out=scratch), out=worst)
        yield worst, part


def _slack(outputs: Tensor, output: FormatLike | torch.dtype, scale: ScaleLike) -> Tensor:
    """How far each output is from the nearest value that rounds to something else."""
    if not isinstance(output, torch.dtype):
        return _slack_of_format(outputs, as_format(output), scale)
    if output not in _HALVES:
        raise TypeError(f"output={output} must be torch.bfloat16, torch.float16, torch.float32 or a format")
    rounded = outputs.to(output)
    infinity = torch.full_like(rounded, float("inf"))
    ends = [torch.nextafter(rounded, end).double() for end in (-infinity, infinity)]
    low, high = ((rounded.double() + end) / 2 for end in ends)
    exact = outputs.double()
    return torch.minimum(exact - low, high - exact).float()


def _slack_of_format(outputs: Tensor, fmt: FloatFormat, scale: ScaleLike) -> Tensor:
    fitted = fitting(scale, outputs.reshape(-1)[:1].reshape(())) if outputs.numel() else torch.ones(())
    units = (outputs / fitted).to(working_dtype(outputs))
    code = to_chart(round_to_grid(units, fmt), fmt)
    high = torch.where(code >= fmt.max_code, float("inf"), from_chart(code + 0.5, fmt))
    low = torch.where(code <= -fmt.max_code, -float("inf"), from_chart(code - 0.5, fmt))
    return torch.minimum(units - low, high - units) * fitted
