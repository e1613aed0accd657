"""Zones without gradient: weights that can move without changing their layer's output.

Such a weight can move half a spacing to either side. The outputs of a few tokens are
computed in float32. The slack of an output is its distance from the nearest number that
rounds to another value of the outputs' dtype. A weight is in a zone if half a spacing,
times its input, is below the slack of its output at every token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, LINEAR, MEAN, SHARE, Metric
from nanogpt_bench.config.schema import ROUNDED, Storage
from nanogpt_bench.model.weights import forward_weight, is_rounded
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import PIECE_ELEMENTS, Monitor, Scale, Step, scale_like

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
COMPARED_TOKENS = 16
#: in place of 1 / 0 where there is no slack, since times 0 it is 0 and not NaN
_LARGE = 2.0**100


@torch.no_grad()
def zero_gradient_zone(
    weight: Tensor,
    inputs: Tensor,
    fmt: fm.FloatFormat,
    scale: Scale = 1.0,
    *,
    output_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> float:
    """Return the share of weights that can move half a spacing without any effect.

    Moved up or down by half a spacing, such a weight leaves all outputs as they are, so
    that a finite difference of the loss with respect to it is zero. `weight` (O, I) is
    the one multiplied by, and `output_dtype` that of the outputs. Fewer rows of
    `inputs` (..., I) give a larger share, or an equal one: 1 without any. An output
    that is NaN or Inf does not change for any step. A weight that is NaN, or multiplied
    by NaN or Inf, is in no zone.

    >>> weight = torch.tensor([[1.0, 1.0, 1.0]])
    >>> inputs = torch.tensor([[1.0, 0.01, 0.0]])
    >>> fmt = fm.FloatFormat.from_string("E4M3")
    >>> zero_gradient_zone(weight, inputs, fmt)  # outputs near 1 are 0.0078 apart
    0.6666666666666666
    """
    scales = scale_like(scale, weight)
    half_spacings = fm.ulp(weight / scales, fmt) * (scales / 2)
    rows = inputs.reshape(-1, weight.shape[1]).float()
    float_bias = None if bias is None else bias.detach().float()
    outputs = torch.nn.functional.linear(rows, weight.float(), float_bias)
    half_spacings = half_spacings.expand(weight.shape)
    count = 0
    for ratios, halves in _largest_ratios(rows, _slack(outputs, output_dtype), half_spacings):
        count += int((ratios * halves < 1).sum())
    return count / max(weight.numel(), 1)


def _largest_ratios(
    rows: Tensor, slack: Tensor, half_spacings: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the largest |x_tj| / slack_ti over tokens t, for blocks of outputs i.

    With each block comes its part of `half_spacings`.
    """
    size = max(PIECE_ELEMENTS // max(rows.shape[1], 1), 1)
    inverse = (1 / slack).nan_to_num_(nan=0.0, posinf=_LARGE).clamp_(max=_LARGE)
    magnitudes = rows.abs()
    for inverses, halves in zip(inverse.split(size, dim=1), half_spacings.split(size), strict=True):
        largest = magnitudes.new_zeros(halves.shape)
        scratch = torch.empty_like(largest)
        for inverses_of_token, x in zip(inverses, magnitudes, strict=True):
            ratios = torch.mul(inverses_of_token[:, None], x, out=scratch)
            torch.maximum(largest, ratios, out=largest)
        yield largest, halves


def _slack(outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each output's distance from the nearest number that rounds elsewhere."""
    rounded = outputs.to(dtype)
    infinity = torch.full_like(rounded, float("inf"))
    value = rounded.double()
    next_below = torch.nextafter(rounded, -infinity).double()
    next_above = torch.nextafter(rounded, infinity).double()
    exact = outputs.double()
    slack_below = exact - (value + next_below) / 2
    slack_above = (value + next_above) / 2 - exact
    return torch.minimum(slack_below, slack_above).float()


class Zones(Monitor):
    """Records `stall/zero_gradient_zone/LAYER`.

    It is measured on `COMPARED_TOKENS` tokens spread over the batch.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers = watched.quantized
        self._capture = watched.capture

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not self.is_measured(step) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            inputs = self._capture.inputs.get(name)
            fmt = layer.weight_format
            if inputs is None or fmt is None or not is_rounded(layer):
                continue
            rows = layer.quantized_input(inputs).reshape(-1, inputs.shape[-1])
            stride = max(1, len(rows) // COMPARED_TOKENS)
            zone = zero_gradient_zone(
                forward_weight(layer),
                rows[::stride][:COMPARED_TOKENS].float(),
                fmt,
                layer.weight_scale().detach(),
                output_dtype=self._capture.output_dtypes[name],
                bias=layer.bias,
            )
            self._figures.add(ZERO_GRADIENT_ZONE, name, zone, layer.weight.numel())


def build(watched: Watched) -> Zones | None:
    """Return the monitor of a run whose weights have codes; None for others."""
    return Zones(watched) if watched.config.model.storage in (Storage.MASTER, *ROUNDED) else None
