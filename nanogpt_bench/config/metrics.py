"""The metrics of a run, each told once: name on disk, title, unit, meaning, how layers make one, and what is bad.

Whoever records, judges, draws or documents a figure asks here; what turns a monitor on and off stands beside them. A
name is a key of metrics.jsonl, beside `step`, or of histograms.jsonl: `NAMESPACE/FIGURE`, then `/OPERAND` where several
are measured, then `/LAYER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from nanogpt_bench.config.field import Section, setting

#: what a layer multiplies, what comes back, and what the blocks add up; the last are measured for blocks
OPERANDS: Final = ("weight", "activation", "gradient", "weight_gradient", "residual")
OF_LAYERS: Final = OPERANDS[:-1]
#: the side on which a figure is bad
ABOVE, BELOW = "above", "below"
#: limits that the settings `alerts` (of a run as it goes), `failure` (of its records) and `compare` share by default
LIMITS: Final = {"stall": 0.5, "overflow": 0.01, "kurtosis": 10.0}
#: how the figures of all layers make one; TOGETHER: as one layer, which its observer sees to
MEAN, LARGEST, SMALLEST, TOGETHER = "mean", "largest", "smallest", "together"
#: scale of a chart
LINEAR, LOG = "linear", "log"
SHARE, NATS, ULPS, RATIO = "share", "nats", "ULPs", "ratio"


@dataclass(frozen=True)
class Alarm:
    """The alert that a figure raises: its kind, the setting of `alerts` that is its limit, and what is said."""

    kind: str
    setting: str
    #: with the `value`, and `where` it is of: a layer, or an operand of one
    text: str
    leaves_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A figure of a run's records.

    >>> UPDATE_LOST.of("lm_head"), OVERFLOW.by("weight").of("lm_head"), EXPONENT_BIT.number(3).name
    ('stall/update_lost/lm_head', 'quant/overflow/weight/lm_head', 'bits/exponent_bit_3')
    """

    name: str
    title: str
    unit: str
    #: one sentence; with the title it is the caption of its chart and its row in the documentation
    meaning: str
    #: the monitor that has to be on; none where it is always recorded
    monitor: str = ""
    #: how the figures of all layers make one; none where there is no figure of a layer
    over: str = ""
    operands: tuple[str, ...] = ()
    #: ABOVE or BELOW; neither where no side is
    bad: str = ""
    alarm: Alarm | None = None
    #: budget beyond which an alert is raised, unless `alerts.at_most` says otherwise
    at_most: float | None = None
    #: LINEAR or LOG where the report has a chart of it; none where it has not, or where it stands in another one
    chart: str = ""

    def of(self, layer: str) -> str:
        """Return the key of one layer's figure."""
        return f"{self.name}/{layer}"

    def by(self, operand: str) -> Metric:
        """Return the metric of one operand."""
        title = f"{self.title}, {operand.replace('_', ' ')}s"
        return replace(self, name=f"{self.name}/{operand}", title=title, operands=())

    def number(self, index: int) -> Metric:
        """Return the metric that the `I` at the end of the name counts."""
        return replace(self, name=f"{self.name.removesuffix('I')}{index}")

    @property
    def namespace(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def figure(self) -> str:
        """The second part of the name: what `fp8manifold.monitor` calls it."""
        return self.name.split("/")[1]

    @property
    def each(self) -> tuple[Metric, ...]:
        """The metric by operand, or itself where there is one only."""
        return tuple(map(self.by, self.operands)) or (self,)

    def in_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of one record that an alarm is about: of every layer, of operands as `OPERAND/LAYER`."""
        if not self.over:
            return {"": record[self.name]} if self.name in record else {}
        start, depth = f"{self.name}/", self.name.count("/") + 1 + bool(self.operands)
        found = {key: value for key, value in record.items() if key.startswith(start) and key.count("/") == depth}
        return {key.removeprefix(start): value for key, value in found.items()}


@dataclass(frozen=True)
class Spread(Metric):
    """A distribution of histograms.jsonl, by layer; the unit is its axis's."""


OVER: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {LARGEST: max, SMALLEST: min}


class MonitorConfig(Section):
    """What is watched beside the loss, each figure by layer and over all of them."""

    stall: bool = setting(True, "share of weights that an update did not move, and how far the others moved")
    ranges: bool = setting(True, "overflow, underflow, amax, kurtosis and scales of weights, activations and gradients")
    bits: bool = setting(True, "use of codes, exponents and mantissas by what is quantised")
    attention: bool = setting(True, "entropy of every attention head on a validation batch")
    gradients: bool = setting(True, "norms, signal to noise, zeros and dead weights of the weights' gradients")
    geometry: bool = setting(
        True, "stiffness, distances in ULPs and the warp of the chart, where weights have a format"
    )
    trend: bool = setting(
        True,
        "smoothed training loss, its excess over the baseline or its own best, plateaus; without it there is no alert "
        "of early divergence, and train.stop_on takes neither divergence nor plateau",
    )
    resources: bool = setting(True, "memory, and the share of the machine's speed, at every validation")
    interval: int = setting(100, "steps between two looks", minimum=1)
    stall_interval: int | None = setting(
        None, "steps between two looks at the stall; null: monitor.interval", minimum=1
    )
    turns: int = setting(
        1,
        "looks that share the layers: each takes one in so many, in turn, the first takes all; figures "
        "over all layers are those of the latest figure of each; attention is looked at on one in so many sequences",
        minimum=1,
    )
    histogram_interval: int = setting(
        500, "steps between two records of distributions, in steps that are looked at; the last is one", minimum=1
    )
    activation_format: str | None = setting(
        None, "format that activations are measured against where they have none; null: figures that need none only"
    )
    gradient_format: str | None = setting(
        None, "format that gradients are measured against where they have none; null: figures that need none only"
    )
    dead_threshold: float = setting(1e-8, "a gradient below this is dead", above=0.0)
    dead_steps: int = setting(100, "steps in a row that make a weight dead", minimum=1)
    dead_interval: int = setting(
        1, "steps between two looks for dead gradients, each of which stands for all of them", minimum=1, maximum=1000
    )


LOSS_IS_NAN = Metric("loss_is_nan", "Loss not finite", "0 or 1", "Whether the training loss is NaN or Inf.", bad=ABOVE)
GRAD_HAS_NAN = Metric("grad_has_nan", "Gradient not finite", "0 or 1", "Whether the gradient's norm is.", bad=ABOVE)
TRAIN_LOSS = Metric("train/loss", "Training loss", NATS, "Of the step's batch, a token or a label.", bad=ABOVE)
LR = Metric("lr", "Learning rate", "", "As scheduled.")
STIFFNESS_EXPONENT = Metric("stiffness/exponent", "Stiffness exponent", "", "As scheduled.")
WEIGHT_HAS_NAN = Metric("weight_has_nan", "Weight not finite", "0 or 1", "Whether any weight is NaN or Inf.", bad=ABOVE)
STATE_HAS_NAN = Metric("state_has_nan", "State not finite", "0 or 1", "Whether the optimizer's state is.", bad=ABOVE)
TOKENS = Metric("tokens", "Tokens", "tokens", "Trained on so far.")
ELAPSED = Metric("time/elapsed_s", "Time", "s", "Since the run began, all looks included.")
SPEED = Metric("time/tokens_per_s", "Speed", "tokens/s", "Of the step.", bad=BELOW)
FLAGS = (LOSS_IS_NAN, GRAD_HAS_NAN, WEIGHT_HAS_NAN, STATE_HAS_NAN)

# validations
VAL_LOSS = Metric("val/loss", "Validation loss", NATS, "On the same held-out batches, a token or a label.", bad=ABOVE)
VAL_LOSS_SE = Metric(
    "val/loss_se", "Standard error of the validation loss", NATS, "Over its batches, or documents.", bad=ABOVE
)
VAL_ALSO_LOSS = Metric("val/also_loss", "Loss on the other text", NATS, "On that of `eval.also`, a token.", bad=ABOVE)
VAL_PERPLEXITY = Metric("val/perplexity", "Perplexity", "", "exp of the validation loss.", bad=ABOVE)
VAL_BITS_PER_BYTE = Metric("val/bits_per_byte", "Bits a byte", "bits", "Validation loss a byte of text.", bad=ABOVE)
_labels = partial(Metric, bad=BELOW, chart=LINEAR)
MICRO_F1 = _labels("val/micro_f1", "Micro F1", "F1", "Of all labels of all held-out documents together.")
MACRO_F1 = _labels("val/macro_f1", "Macro F1", "F1", "Mean over the labels; 0 for one that nobody has or is given.")
R_PRECISION = _labels("val/r_precision", "R-precision", SHARE, "Of a document's R labels, those scored highest.")
#: of the task classify, at validations
OF_LABELS = (MICRO_F1, MACRO_F1, R_PRECISION)
#: what the last validation has of a run beside its loss
BESIDE_LOSS = (*OF_LABELS, VAL_ALSO_LOSS)

_trend = partial(Metric, monitor="trend")
SMOOTHED_LOSS = _trend("train/loss_smoothed", "Smoothed training loss", NATS, "Over about twenty steps.", bad=ABOVE)
EXCESS = _trend(
    "train/excess",
    "Excess of the training loss",
    SHARE,
    "Of the smoothed loss over the baseline's or its own best, at validations.",
    bad=ABOVE,
)
_resources = partial(Metric, monitor="resources")
PEAK_BYTES = _resources("memory/peak_bytes", "Peak memory", "bytes", "At validations: the GPU's, or the process's.")
MFU = _resources("mfu", "Model FLOPs utilisation", SHARE, "At validations, where the machine's speed is known.")

_shadow = partial(Metric, monitor="shadow")
COSINE = _shadow(
    "grad/cosine",
    "Gradient cosine",
    "cosine",
    "Against the float32 shadow, mean over the layers.",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
COSINE_MIN = _shadow(
    "grad/cosine_min",
    "Lowest gradient cosine",
    "cosine",
    "Against the shadow, the layer that is furthest off.",
    bad=BELOW,
    chart=LINEAR,
)
QUANT_SNR = _shadow(
    "grad/quant_snr_db",
    "Signal to quantisation noise",
    "dB",
    "10 log10 of |g32|² / |g8 - g32|².",
    over=MEAN,
    bad=BELOW,
    chart=LINEAR,
)
OVERHEAD = _shadow("shadow/overhead", "Time of the shadow", "steps", "What one comparison took.", bad=ABOVE)

# no side of the norm is bad by itself: a failure to vanish, and another to explode
GRAD_NORM = Metric("grad/norm", "Gradient norm", "L2 norm", "Before clipping.", chart=LOG)
GRAD_CLIPPED = Metric("grad/clipped", "Gradient clipped", "0 or 1", "Whether that of any micro-step was.")
_gradients = partial(Metric, monitor="gradients", over=MEAN)
GRAD_L2 = _gradients("grad/l2", "Norm of a layer's gradient", "L2 norm", "Before clipping.")
GRAD_LINF = _gradients("grad/linf", "Largest gradient", "magnitude", "Before clipping.", over=LARGEST)
GRAD_SNR = _gradients("grad/snr", "Gradient signal to noise", "|mean| / std", "Mean over the layers.", chart=LOG)
GRAD_ZERO = _gradients(
    "grad/zero", "Zero gradients", SHARE, "Gradient elements that are exactly zero.", bad=ABOVE, chart=LINEAR
)
GRAD_DEAD = _gradients(
    "grad/dead", "Dead gradients", SHARE, "Elements that stayed next to zero for many steps.", bad=ABOVE, chart=LINEAR
)
UPDATE_TO_NOISE = _gradients(
    "grad/update_to_noise",
    "Update against rounding noise",
    RATIO,
    "The requested update's power over the variance that stochastic rounding adds.",
    bad=BELOW,
    chart=LOG,
)

_stall = partial(Metric, monitor="stall", over=MEAN)
UPDATE_LOST = _stall(
    "stall/update_lost",
    "Updates lost",
    SHARE,
    "Weights that a requested update left where they were, of those without a copy.",
    bad=ABOVE,
    alarm=Alarm("bit_stall", "stall", "{value:.1%} of the weights of {where} lost their update"),
)
CODE_UNCHANGED = _stall(
    "stall/code_unchanged", "Codes unchanged", SHARE, "Weights whose master copy moved while their code did not."
)
ARRIVED = _stall(
    "stall/arrived",
    "Movement that arrived",
    SHARE,
    "Of the movement asked for, along its direction.",
    over=TOGETHER,
    chart=LINEAR,
)
UPDATE_SUCCESS = _stall(
    "stall/update_success", "Updates that moved a weight", SHARE, "Weights that moved, of those asked to.", chart=LINEAR
)
UPDATE_ULPS = _stall("stall/update_ulps", "Size of the updates", ULPS, "Mean requested update.", chart=LOG)
MOVE_PROBABILITY = _stall(
    "stall/move_probability", "Probability of moving", SHARE, "Mean over the weights.", chart=LINEAR
)
RESIDUAL_SATURATION = _stall(
    "stall/residual_saturation",
    "Residuals at their bound",
    SHARE,
    "Stored residuals that are at their end.",
    bad=ABOVE,
    chart=LINEAR,
)
CODE_DRIFT = _stall(
    "stall/code_drift", "Drift from the first codes", "codes", "Mean distance from the initial code.", chart=LINEAR
)
ZERO_GRADIENT_ZONE = _stall(
    "stall/zero_gradient_zone",
    "Zero-gradient zones",
    SHARE,
    "Weights for which half a ULP to either side leaves the layer's output as it was.",
    bad=ABOVE,
    chart=LINEAR,
)
#: the figure that is a run's stall: of weights on a grid, of those with a master copy
STALLS = (UPDATE_LOST, CODE_UNCHANGED)

_ranges = partial(Metric, monitor="ranges", over=MEAN, operands=OPERANDS)
OVERFLOW = _ranges(
    "quant/overflow",
    "Overflow",
    SHARE,
    "Values beyond the format's largest.",
    bad=ABOVE,
    alarm=Alarm("overflow", "overflow", "{value:.2%} of the values are beyond the range: {where}"),
    chart=LINEAR,
)
UNDERFLOW = _ranges(
    "quant/underflow", "Underflow", SHARE, "Values other than zero that become zero.", bad=ABOVE, chart=LINEAR
)
KURTOSIS = _ranges(
    "quant/kurtosis",
    "Kurtosis",
    "raw, normal = 3",
    "The largest of the layers.",
    over=LARGEST,
    bad=ABOVE,
    # gradients have heavy tails in every healthy run: most tokens are predicted well, some are not
    alarm=Alarm("kurtosis", "kurtosis", "kurtosis {value:.1f}: {where}", leaves_out=("gradient", "weight_gradient")),
    chart=LOG,
)
AMAX_OVER_STD = _ranges(
    "quant/amax_over_std", "Largest over standard deviation", RATIO, "Mean over the layers.", chart=LINEAR
)
LOG2_STD = _ranges(
    "quant/log2_std",
    "Spread of the logarithms",
    "binades, normal = 1.6",
    "Standard deviation of log2 of the magnitudes.",
)
LOG2_SKEWNESS = _ranges(
    "quant/log2_skewness", "Skewness of the logarithms", "normal = -1.54", "0 where magnitudes are log-normal."
)
SUBNORMAL = _ranges("quant/subnormal", "Subnormals", SHARE, "Values that become subnormal.")
CLAMPED = _ranges("quant/clamped", "Clamped", SHARE, "Values beyond the largest at all, rounded there.", bad=ABOVE)
AMAX = _ranges("quant/amax", "Largest magnitude", "value", "Of the finite ones.", over=LARGEST)
SCALE = _ranges("quant/scale", "Scale", "value", "Geometric mean of an operand's scales.", operands=OF_LAYERS)
SCALE_CHANGES = _ranges(
    "quant/scale_changes", "Scales changed", SHARE, "Scales that changed since the last look.", operands=OF_LAYERS
)

_bits = partial(Metric, monitor="bits", over=MEAN, operands=OPERANDS)
UNIFORMITY = _bits(
    "bits/uniformity", "Evenness of code use", SHARE, "Entropy over that of all finite codes alike.", chart=LINEAR
)
CODES_USED = _bits("bits/codes_used", "Codes in use", SHARE, "Of all finite codes.", chart=LINEAR)
TOP_EXPONENT = _bits(
    "bits/top_exponent", "Share in the top binade", SHARE, "Values in the largest exponent.", chart=LINEAR
)
CODE_ENTROPY = _bits("bits/entropy", "Entropy of the codes", "bits", "Of those that occur.")
CODES_EVER_USED = _bits("bits/codes_ever_used", "Codes ever in use", SHARE, "Of all finite codes, at any look so far.")
BINADES_OCCUPIED = _bits("bits/binades_occupied", "Binades in use", SHARE, "Of all exponents.")
MANTISSA_UTILISATION = _bits("bits/mantissa_utilisation", "Use of the mantissa", SHARE, "Its entropy over its bits.")
EXPONENT_UTILISATION = _bits(
    "bits/exponent_utilisation", "Use of the exponent", SHARE, "Its entropy over that of all exponents alike."
)
LONGEST_GAP = _bits("bits/longest_gap", "Longest gap", "codes", "Unused values in a row.", over=LARGEST)
EXPONENT_BIT = _bits("bits/exponent_bit_I", "Exponent bit I", SHARE, "Values that have it set.")
MANTISSA_BIT = _bits("bits/mantissa_bit_I", "Mantissa bit I", SHARE, "Values that have it set.")

_attention = partial(Metric, monitor="attention", bad=BELOW, chart=LINEAR)
ENTROPY = _attention(
    "attention/entropy", "Attention entropy", NATS, "Mean over heads, on a validation batch.", over=MEAN
)
ENTROPY_MIN = _attention(
    "attention/entropy_min",
    "Lowest attention entropy",
    NATS,
    "The most collapsed head.",
    alarm=Alarm("entropy_collapse", "attention_entropy", "an attention head's mean entropy is {value:.3g} nats"),
)

_geometry = partial(Metric, monitor="geometry", over=MEAN)
STIFFNESS_MEAN = _geometry("geometry/stiffness_mean", "Mean stiffness", "S", "Mean over the weights.", chart=LOG)
GRADIENT_STIFFNESS = _geometry(
    "geometry/gradient_stiffness_correlation",
    "Gradient and stiffness",
    "correlation",
    "Whether large gradients lie where the grid is coarse.",
    chart=LINEAR,
)
PATH_LENGTH = _geometry("geometry/path_length", "Path length", ULPS, "Mean distance walked by a weight.", chart=LOG)
DISPLACEMENT = _geometry("geometry/displacement", "Displacement", ULPS, "Mean distance from the start.", chart=LOG)
OFF_GRID = _geometry(
    "geometry/off_grid",
    "Off the grid",
    SHARE,
    "Weights that are no grid value; must stay 0.",
    bad=ABOVE,
    at_most=0.0,
    chart=LINEAR,
)
METRIC_MIN = _geometry(
    "geometry/metric_min_eigenvalue",
    "Smallest eigenvalue of the metric",
    RATIO,
    "To that of the mean stiffness.",
    over=SMALLEST,
)
WARP_SPREAD = _geometry("geometry/warp_spread", "Spread of the stiffness", "binades", "Deviation of log2 S.")
WARP_SLOPE = _geometry("geometry/warp_slope", "Slope of the stiffness", "", "Of log S over log |w|; 1 on powers of 2.")
WARP_CROSSINGS = _geometry("geometry/warp_crossings", "Binades crossed", SHARE, "Steps that end in another binade.")
WARP_DISTORTION = _geometry("geometry/warp_distortion", "Distortion of a step", ULPS, "Mean of |exp_x(u) - (x + u)|.")
_constraint = partial(_geometry, unit="distance", over=LARGEST, bad=ABOVE, chart=LOG)
_ORTHONORMAL = "|Q^T Q - I| of parameters on geoopt's."
ORTHOGONALITY = _constraint("geometry/orthogonality", "Off the Stiefel manifold", meaning=_ORTHONORMAL, at_most=1e-4)
OFF_SPHERE = _constraint("geometry/off_sphere", "Off the sphere", meaning="Rows' lengths less 1.", at_most=1e-4)
_ROUNDED = "The same of what their formats make of them."
CONSTRAINT_ROUNDED = _constraint("geometry/constraint_rounded", "Constraints, rounded", meaning=_ROUNDED)

_spread = partial(Spread, chart=LOG)
MAGNITUDES = _spread(
    "grad/magnitude", "Gradient magnitudes", "|gradient|", "By binade; zeros left out.", monitor="gradients"
)
DEAD_RUNS = _spread(
    "grad/dead_runs",
    "How long gradients stay dead",
    "steps",
    "Elements by their steps next to zero.",
    monitor="gradients",
)
WEIGHT_RESIDUALS = _spread(
    "stall/weight_residual",
    "Master weights between grid values",
    "(w - Q(w)) / S",
    "Where in its step each master weight lies.",
    monitor="geometry",
    chart=LINEAR,
)
GAP_LENGTHS = _spread(
    "bits/gap_lengths",
    "Gaps between used codes",
    "codes",
    "Runs of codes no weight uses, by length.",
    monitor="bits",
    operands=OPERANDS,
)
CODE_COUNTS = Spread(
    "bits/code_histogram",
    "Code use",
    "value",
    "Elements by the value of their code.",
    monitor="bits",
    operands=OPERANDS,
)
STIFFNESS_FIELD = Spread("geometry/stiffness", "Stiffness", "S", "Weights by their stiffness.", monitor="geometry")

_ALL = [value for value in list(globals().values()) if isinstance(value, Metric)]
#: every figure and every distribution, in the order in which they are shown
METRICS: Final = tuple(metric for metric in _ALL if not isinstance(metric, Spread))
SPREADS: Final = tuple(metric for metric in _ALL if isinstance(metric, Spread))
#: namespaces of figures that get charts
CHARTED: Final = tuple(dict.fromkeys(metric.namespace for metric in METRICS if metric.chart))


def charted(namespace: str) -> tuple[Metric, ...]:
    """Return the figures of a namespace that get a chart of their own, operand by operand."""
    return tuple(one for metric in METRICS if metric.chart and metric.namespace == namespace for one in metric.each)
