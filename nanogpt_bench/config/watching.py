"""The sections of the configuration that say what is compared, told, kept and judged of a run: shadow to failures."""

from __future__ import annotations

from typing import Any

from nanogpt_bench.config.field import Section, setting
from nanogpt_bench.config.metrics import LIMITS

WANDB_MODES = ("off", "auto", "offline", "online")
#: what an alert can be about, and how loud it is
ALERT_KINDS = (
    *("loss_is_nan", "grad_has_nan", "weight_has_nan", "state_has_nan"),
    *("no_step", "no_change", "bit_stall", "overflow", "kurtosis", "entropy_collapse"),
    *("early_divergence", "geometry_budget", "budget"),
)
ALERT_LEVELS = ("WARN", "ERROR", "off")


class ShadowConfig(Section):
    """A float32 model with the run's current weights, whose gradients the run's are compared with."""

    enabled: bool = setting(False, "compare gradients with a float32 model's on the same batches")
    interval: int = setting(100, "steps between two comparisons", minimum=1)


class AlertsConfig(Section):
    """When a run raises an alert, which goes to alerts.jsonl, the terminal and the trackers."""

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
    stall: float = setting(LIMITS["stall"], "largest share of stalled weights", minimum=0.0, maximum=1.0)
    overflow: float = setting(LIMITS["overflow"], "largest share of values beyond the range", minimum=0.0, maximum=1.0)
    kurtosis: float = setting(
        LIMITS["kurtosis"], "largest kurtosis of a tensor; a normal distribution has 3", minimum=1.0
    )
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


class TrackingConfig(Section):
    """Where the record of every step goes, beside metrics.jsonl."""

    wandb: str = setting(
        "off",
        "Weights & Biases, whose WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS are read; auto: online with a key, "
        "otherwise offline",
        choices=WANDB_MODES,
    )
    wandb_id: str | None = setting(None, "run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False, "at the end, keep the last and the best checkpoint there, as artifacts with the aliases latest and best"
    )
    tensorboard: bool = setting(False, "write TensorBoard's event files into the run folder")


class CheckpointConfig(Section):
    """When the state of a run is committed to its folder, and which of these checkpoints stay."""

    every: int | None = setting(
        500,
        "steps between two checkpoints, best a multiple of eval.interval; null: none on the way. A signal that ends "
        "the run is always answered with one",
        minimum=1,
    )
    last: bool = setting(True, "a checkpoint where the run ends, too, unless it failed")
    keep: int = setting(
        2, "newest checkpoints that stay; the one with the lowest validation loss stays beside them", minimum=1
    )
    best: bool = setting(
        False,
        "one more checkpoint at every validation whose loss is the lowest so far, in best/, where it replaces the one "
        "before; without it the lowest loss has a checkpoint only if one was due at that step",
    )


class FailureConfig(Section):
    """When a run counts as failed, and how: the thresholds of `nanogpt_bench.failures`."""

    patience: int = setting(
        3, "looks in a row at which a criterion must hold; all of them if there are fewer", minimum=1
    )
    smoothing: int = setting(10, "window of the moving average the training loss is judged by, in steps", minimum=1)
    stall: float = setting(
        LIMITS["stall"],
        "stall: share of the weights whose requested update nearest rounding lost",
        above=0.0,
        maximum=1.0,
    )
    noise: float = setting(
        1.0, "rounding_noise: power of the updates over the variance of their rounding, on a plateau", above=0.0
    )
    batch_fall: float = setting(
        0.02, "rounding_noise: nats by which the plateau is lower at a larger batch size", above=0.0
    )
    overflow: float = setting(
        LIMITS["overflow"], "overflow: share of the values beyond the format's largest", above=0.0, maximum=1.0
    )
    kurtosis: float = setting(
        LIMITS["kurtosis"], "outlier_explosion: raw kurtosis of a block's output (normal: 3)", above=0.0
    )
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
