"""Zones without gradient: weights that can move half a spacing to either side without
changing their layer's output.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, LINEAR, MEAN, SHARE, Metric
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.model.weights import forward_weight, is_rounded
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import BLOCK, Monitor, Scale, Step, fitting

ZERO_GRADIENT_ZONE = Metric(
    "stall/zero_gradient_zone",
    "Zero-gradient zones",
    SHARE,
    "Weights that can move half a ULP to either side without changing the layer's output.",
    monitor="zones",
    over=MEAN,
    bad=ABOVE,
    chart=LINEAR,
)
#: tokens whose outputs are compared: the time is proportional to them
ROWS = 16
#: in place of 1 / 0 where there is no slack, since times 0 it is 0 and not NaN
_LARGE = 2.0**100


@torch.no_grad()
def zero_gradient_zone(
    weight: Tensor,
    inputs: Tensor,
    fmt: fm.FloatFormat,
    scale: Scale = 1.0,
    *,
    output: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> float:
    """Return the share of a linear layer's weights for which half a spacing, up or
    down, leaves every output unchanged.

    A finite difference of the loss with respect to such a weight is zero. `weight` (O,
    I) is the one multiplied by, and `output` the dtype of the outputs. Fewer rows of
    `inputs` (..., I) give a larger share, or the same: 1 without any. An output that is
    NaN or Inf does not change for any step; a weight NaN, or multiplied by NaN or Inf,
    is in no zone.

    >>> weight, inputs = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, 0.01, 0.0]])
    >>> zero_gradient_zone(weight, inputs, fm.FloatFormat.from_string("E4M3"))  # outputs near 1 are 0.0078 apart
    0.6666666666666666
    """
    fitted = fitting(scale, weight)
    half = fm.ulp(weight / fitted, fmt) * (fitted / 2)
    rows = inputs.reshape(-1, weight.shape[1]).float()
    outputs = torch.nn.functional.linear(
        rows, weight.float(), None if bias is None else bias.detach().float()
    )
    ratios = _largest_ratios(rows, _slack(outputs, output), half.expand(weight.shape))
    return sum(int((ratio * part < 1).sum()) for ratio, part in ratios) / max(weight.numel(), 1)


def _largest_ratios(rows: Tensor, slack: Tensor, half: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The largest |x_tj| / slack_ti over tokens t, for blocks of outputs i, with their
    part of `half`.
    """
    size = max(BLOCK // max(rows.shape[1], 1), 1)
    inverse = (1 / slack).nan_to_num_(nan=0.0, posinf=_LARGE).clamp_(max=_LARGE)
    rows = rows.abs()
    for inverses, part in zip(inverse.split(size, dim=1), half.split(size), strict=True):
        worst = rows.new_zeros(part.shape)
        scratch = torch.empty_like(worst)
        for margin, x in zip(inverses, rows, strict=True):
            torch.maximum(worst, torch.mul(margin[:, None], x, out=scratch), out=worst)
        yield worst, part


def _slack(outputs: Tensor, output: torch.dtype) -> Tensor:
    """The distance of each output from the nearest number that rounds to another value."""
    rounded = outputs.to(output)
    infinity = torch.full_like(rounded, float("inf"))
    ends = [torch.nextafter(rounded, end).double() for end in (-infinity, infinity)]
    low, high = ((rounded.double() + end) / 2 for end in ends)
    exact = outputs.double()
    return torch.minimum(exact - low, high - exact).float()


class Zones(Monitor):
    """Records `stall/zero_gradient_zone/LAYER`, measured on `ROWS` tokens spread over
    the batch.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers, self._capture = watched.quantized, watched.capture

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not self.looks(step) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            inputs, fmt = self._capture.inputs.get(name), layer.weight_format
            if inputs is None or fmt is None or not is_rounded(layer):
                continue
            rows = layer.quantized_input(inputs).reshape(-1, inputs.shape[-1])
            some = rows[:: max(1, len(rows) // ROWS)][:ROWS].float()
            found = zero_gradient_zone(
                forward_weight(layer),
                some,
                fmt,
                layer.weight_scale().detach(),
                output=self._capture.output_dtypes[name],
                bias=layer.bias,
            )
            self._figures.add(ZERO_GRADIENT_ZONE, name, found, layer.weight.numel())


def build(watched: Watched) -> Zones | None:
    """Return the monitor of a run whose weights have codes; None for others."""
    return Zones(watched) if watched.config.model.storage in ("master", *ROUNDED) else None
