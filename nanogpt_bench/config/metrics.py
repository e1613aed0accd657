"""The definition of a metric, and the metrics of every run.

A definition has name, title, unit, meaning, the reduction over layers and the bad side.
Recording, judging, drawing and documenting a metric all use this one definition. Its
name is a key of metrics.jsonl, beside `step`: `NAMESPACE/FIGURE`, then `/OPERAND` where
several are measured, then `/LAYER`. The metrics that a monitor records are in its
module of `nanogpt_bench.monitors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from nanogpt_bench.config.field import SettingsSection, setting

#: what is measured: a layer's operands, forward and backward, and the residual stream
#: behind each block
OPERANDS: Final = ("weight", "activation", "gradient", "weight_gradient", "residual")
#: the side on which a value is bad
ABOVE, BELOW = "above", "below"
#: reductions over layers; TOGETHER: the observer measures all layers as one
MEAN, LARGEST, SUM, TOGETHER = "mean", "largest", "sum", "together"
#: scale of a chart
LINEAR, LOG = "linear", "log"
SHARE, NATS, ULPS, RATIO = "share", "nats", "ULPs", "ratio"


@dataclass(frozen=True)
class Metric:
    """A quantity that a run records.

    >>> overflow = Metric("quant/overflow", "Overflow", SHARE, "", operands=OPERANDS)
    >>> overflow.part("weight").layer_key("lm_head"), VAL_LOSS.figure
    ('quant/overflow/weight/lm_head', 'loss')
    """

    name: str
    title: str
    unit: str
    #: one sentence; with the title it is the caption of its chart and its row in the
    #: documentation
    meaning: str
    #: the monitor that records it; empty where it is always recorded
    monitor: str = ""
    #: reduction over layers; empty where it is not measured by layer
    over: str = ""
    operands: tuple[str, ...] = ()
    #: ABOVE or BELOW; empty where neither side is bad
    bad: str = ""
    #: LINEAR or LOG where the report has a chart of it; empty where it has none, or
    #: another metric's chart shows it
    chart: str = ""

    def layer_key(self, layer: str) -> str:
        """Return the key of one layer's value."""
        return f"{self.name}/{layer}"

    def part(self, operand: str) -> Metric:
        """Return the metric of one operand."""
        title = f"{self.title}, {operand.replace('_', ' ')}s"
        return replace(self, name=f"{self.name}/{operand}", title=title, operands=())

    @property
    def namespace(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def figure(self) -> str:
        """The second part of the name; only for names of two or more parts."""
        return self.name.split("/")[1]

    @property
    def parts(self) -> tuple[Metric, ...]:
        """The metric of each operand, or itself where it has no operands."""
        return tuple(map(self.part, self.operands)) or (self,)


#: monitors, each a module of `nanogpt_bench.monitors`, in the order of the report
MONITORS = ("resources", "gradients", "stall", "zones", "ranges", "bits", "attention", "geometry")
#: the monitor of where the losses are heading
TREND = "trend"
WATCHED = (*MONITORS, TREND)
#: formats of which `monitor.floor_formats` measures the floor
FLOOR_FORMATS = ("E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")


class MonitorConfig(SettingsSection):
    """Settings of the monitors."""

    watch: list[str] = setting(
        lambda: list(WATCHED),
        "what is measured: memory and speed (resources), weight gradients (gradients), updates "
        "that stall (stall), zones in which a weight has no effect (zones), ranges and code use "
        "of what is quantised (ranges, bits), entropy of attention (attention), spacing and "
        "constraints of weights (geometry), and where the losses are heading (trend), which "
        "train.stop_on needs",
        choices=WATCHED,
    )
    interval: int = setting(100, "steps between two measurements", minimum=1)
    turns: int = setting(
        1,
        "how many measurements share the layers: with 4, each takes a quarter of them in turn "
        "(the first takes all), values over all layers use each layer's latest, and attention is "
        "measured on a quarter of the sequences",
        minimum=1,
    )
    activation_format: str | None = setting(
        None,
        "format by which unquantised activations are measured; null: leave out what needs a format",
    )
    gradient_format: str | None = setting(
        None,
        "format by which unquantised gradients are measured; null: leave out what needs a format",
    )
    dead_interval: int = setting(
        1,
        "steps between two checks for dead gradients; a check stands for all these steps",
        minimum=1,
        maximum=1000,
    )
    floor_formats: list[str] = setting(
        list,
        "formats whose rounding floor is recorded at the last step: a quarter of the averaged "
        "gradient's L1 norm in codes, mean over the last quarter of the steps; it predicts what "
        "rounding would cost at an equilibrium",
        choices=FLOOR_FORMATS,
    )


LOSS_IS_NAN = Metric(
    "loss_is_nan",
    "Loss not finite",
    "0 or 1",
    "Whether the training loss is NaN or Inf.",
    bad=ABOVE,
)
GRAD_HAS_NAN = Metric(
    "grad_has_nan",
    "Gradient not finite",
    "0 or 1",
    "Whether the gradient's norm is NaN or Inf.",
    bad=ABOVE,
)
TRAIN_LOSS = Metric(
    "train/loss", "Training loss", NATS, "Of the step's batch, per token or label.", bad=ABOVE
)
LR = Metric("lr", "Learning rate", "", "As scheduled.")
STIFFNESS_EXPONENT = Metric("stiffness/exponent", "Stiffness exponent", "", "As scheduled.")
WEIGHT_HAS_NAN = Metric(
    "weight_has_nan", "Weight not finite", "0 or 1", "Whether any weight is NaN or Inf.", bad=ABOVE
)
STATE_HAS_NAN = Metric(
    "state_has_nan", "State not finite", "0 or 1", "NaN or Inf in the optimizer's state.", bad=ABOVE
)
TOKENS = Metric("tokens", "Tokens", "tokens", "Trained on so far.")
ELAPSED = Metric("time/elapsed_s", "Time", "s", "Since the run began, measurements included.")
SPEED = Metric("time/tokens_per_s", "Speed", "tokens/s", "Of the step.", bad=BELOW)
FLAGS = (LOSS_IS_NAN, GRAD_HAS_NAN, WEIGHT_HAS_NAN, STATE_HAS_NAN)

# validations
VAL_LOSS = Metric(
    "val/loss",
    "Validation loss",
    NATS,
    "On the same held-out batches, per token or label.",
    bad=ABOVE,
)
VAL_LOSS_SE = Metric(
    "val/loss_se",
    "Standard error of the validation loss",
    NATS,
    "Over the batches, or documents, of the validation.",
    bad=ABOVE,
)
VAL_ALSO_LOSS = Metric(
    "val/also_loss",
    "Loss on the other text",
    NATS,
    "On the text of `eval.also`, per token.",
    bad=ABOVE,
)
VAL_PERPLEXITY = Metric(
    "val/perplexity", "Perplexity", "", "exp of the validation loss.", bad=ABOVE
)
VAL_BITS_PER_BYTE = Metric(
    "val/bits_per_byte", "Bits per byte", "bits", "Validation loss per byte of text.", bad=ABOVE
)
_labels = partial(Metric, bad=BELOW, chart=LINEAR)
MICRO_F1 = _labels(
    "val/micro_f1", "Micro F1", "F1", "Of all labels of all held-out documents together."
)
MACRO_F1 = _labels(
    "val/macro_f1",
    "Macro F1",
    "F1",
    "Mean over the labels; a label that no document has or gets counts as 0.",
)
R_PRECISION = _labels(
    "val/r_precision", "R-precision", SHARE, "Share of a document's R labels in its R best scores."
)
#: metrics of the task classify, at validations
OF_LABELS = (MICRO_F1, MACRO_F1, R_PRECISION)
#: metrics of a validation beside its loss
BESIDE_LOSS = (*OF_LABELS, VAL_ALSO_LOSS)

_trend = partial(Metric, monitor=TREND)
SMOOTHED_LOSS = _trend(
    "train/loss_smoothed", "Smoothed training loss", NATS, "Over about twenty steps.", bad=ABOVE
)
EXCESS = _trend(
    "train/excess",
    "Excess of the training loss",
    SHARE,
    "Smoothed loss over the baseline's, or over its own lowest, minus 1; at validations.",
    bad=ABOVE,
)
# neither side of the norm is bad by itself: it may vanish, and it may explode
GRAD_NORM = Metric("grad/norm", "Gradient norm", "L2 norm", "Before clipping.", chart=LOG)
GRAD_CLIPPED = Metric(
    "grad/clipped", "Gradient clipped", "0 or 1", "Whether any micro-step's gradient was clipped."
)
