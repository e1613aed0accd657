"""The sections of the configuration that say how a run is watched: monitors, shadow, alerts, trackers and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanogpt_bench.config.field import setting

#: what a shadow's weights are copied from
SHADOW_OF = ("dequantised", "master")
FISHER_MATRICES = ("kfac", "diagonal")
WANDB_MODES = ("off", "auto", "offline", "online")
#: what an alert can be about, and how loud it is
ALERT_KINDS = (
    *("loss_is_nan", "grad_has_nan", "weight_has_nan", "state_has_nan", "rollback"),
    *("bit_stall", "overflow", "kurtosis", "entropy_collapse"),
    *("early_divergence", "geometry_budget", "budget"),
)
ALERT_LEVELS = ("WARN", "ERROR", "off")


@dataclass
class MonitorConfig:
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
    fisher: bool = setting(False, "trace and largest eigenvalues of the Fisher matrix (extra fisher)")
    fisher_matrix: str = setting("kfac", "what stands for a layer's Fisher matrix", choices=FISHER_MATRICES)
    fisher_eigenvalues: int = setting(5, "how many of each layer's largest eigenvalues are recorded", minimum=1)
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


@dataclass
class ShadowConfig:
    """A float32 model with the run's current weights, whose gradients the run's are compared with."""

    enabled: bool = setting(False, "compare gradients with a float32 model's on the same batches")
    interval: int = setting(100, "steps between two comparisons", minimum=1)
    of: str = setting(
        "dequantised", "the weights as the forward pass uses them, or their float32 master copy", choices=SHADOW_OF
    )


@dataclass
class AlertsConfig:
    """When a run speaks up: an alert goes to alerts.jsonl, the terminal and the trackers."""

    enabled: bool = setting(True, "watch the thresholds below")
    nan_patience: int = setting(
        3,
        "steps in a row with a loss or gradient that is not finite, all skipped, before the run ends",
        minimum=1,
        changes_numbers=True,
    )
    save_on_anomaly: bool = setting(True, "keep the state before the first step that is not finite, in anomaly/")
    nan_cooldown_s: float = setting(60.0, "seconds before the same alert about NaN is repeated", minimum=0.0)
    cooldown_s: float = setting(300.0, "seconds before any other alert is repeated", minimum=0.0)
    stall: float = setting(0.5, "largest share of stalled weights", minimum=0.0, maximum=1.0)
    overflow: float = setting(0.01, "largest share of values beyond the range", minimum=0.0, maximum=1.0)
    kurtosis: float = setting(10.0, "largest kurtosis of a tensor; a normal distribution has 3", minimum=1.0)
    attention_entropy: float = setting(0.1, "smallest mean entropy of an attention head, in nats", minimum=0.0)
    baseline: str | None = setting(
        None, "run folder whose losses divergence is measured against; null: the run's own", changes_numbers=True
    )
    divergence: float = setting(
        0.1,
        "smoothed training loss above the baseline's at the same step, or the run's own best: share",
        above=0.0,
        changes_numbers=True,
    )
    divergence_evals: int = setting(3, "validations in a row that make a divergence", minimum=1, changes_numbers=True)
    plateau: float = setting(
        0.001, "fall of the best validation loss that counts: share", minimum=0.0, changes_numbers=True
    )
    plateau_evals: int = setting(
        5, "validations in a row without one that make a plateau", minimum=1, changes_numbers=True
    )
    at_most: dict[str, Any] = setting(
        dict, "metric -> its budget, the largest value that raises no alert; null takes it away"
    )
    at_least: dict[str, Any] = setting(dict, "metric -> the smallest value that raises no alert; null takes it away")
    levels: dict[str, Any] = setting(dict, "kind of alert -> WARN, ERROR or off, where it is not to be WARN")


@dataclass
class TrackingConfig:
    """Where the record of every step goes, beside metrics.jsonl."""

    wandb: str = setting(
        "off", "Weights & Biases; auto: online with an API key, otherwise offline", choices=WANDB_MODES
    )
    wandb_project: str = setting("nanogpt-bench", "project of the runs")
    wandb_entity: str | None = setting(None, "user or team; null: the key's own")
    wandb_id: str | None = setting(None, "run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False, "at the end, keep the last and the best checkpoint there, as artifacts with the aliases latest and best"
    )
    tags: list[str] = setting(list, "words to find the run by")
    tensorboard: bool = setting(False, "write TensorBoard's event files into the run folder")


@dataclass
class FailureConfig:
    """When a run counts as failed, and how: the thresholds of `nanogpt_bench.failures`."""

    patience: int = setting(
        3, "looks in a row at which a criterion must hold; all of them if there are fewer", minimum=1
    )
    smoothing: int = setting(10, "window of the moving average the training loss is judged by, in steps", minimum=1)
    stall: float = setting(
        0.5, "stall: share of the weights whose requested update nearest rounding lost", above=0.0, maximum=1.0
    )
    noise: float = setting(
        1.0, "rounding_noise: power of the updates over the variance of their rounding, on a plateau", above=0.0
    )
    batch_fall: float = setting(
        0.02, "rounding_noise: nats by which the plateau is lower at a larger batch size", above=0.0
    )
    overflow: float = setting(0.01, "overflow: share of the values beyond the format's largest", above=0.0, maximum=1.0)
    kurtosis: float = setting(10.0, "outlier_explosion: raw kurtosis of a block's output (normal: 3)", above=0.0)
    kurtosis_growth: float = setting(3.0, "outlier_explosion: and that kurtosis over its first value", minimum=1.0)
    entropy: float = setting(
        0.1, "attention_collapse: attention's entropy over that of uniform attention", above=0.0, below=1.0
    )
    zero_gradients: float = setting(
        0.9, "zero_gradients: share of the gradient's elements that are zero, or dead", above=0.0, maximum=1.0
    )
    gradient_norm: float = setting(1e-8, "zero_gradients: gradient norm that counts as zero", minimum=0.0)
    exploding: float = setting(
        100.0, "exploding_gradients: gradient norm over the median of the steps before", above=1.0
    )
    plateau: float = setting(
        0.02, "plateau: share of the loss's whole fall that counts as no fall any more", above=0.0, below=1.0
    )
    plateau_share: float = setting(
        0.5, "plateau: share of the run by which the loss had ceased to fall", above=0.0, below=1.0
    )
    divergence: float = setting(
        0.5, "divergence: nats above the first loss, or above the lowest so far and never back", above=0.0
    )
    early_plateau: int = setting(10, "E7M0's prediction: step from which on the loss does not fall", minimum=1)
    sparsity: float = setting(
        0.9, "E7M0's prediction: share of the weights whose requested update is lost", above=0.0, maximum=1.0
    )
    zero_zone: float = setting(
        0.5, "E7M0's prediction: share of the weights that half a ULP leaves without effect", above=0.0, maximum=1.0
    )
