"""The sections of the configuration that say what is compared, told and kept of a run: shadow to checkpoints."""

from __future__ import annotations

from nanogpt_bench.config.field import Section, setting

WANDB_MODES = ("off", "auto", "offline", "online")


class ShadowConfig(Section):
    """A float32 model with the run's current weights, whose gradients the run's are compared with."""

    enabled: bool = setting(False, "compare gradients with a float32 model's on the same batches")
    interval: int = setting(100, "steps between two comparisons", minimum=1)


class AlertsConfig(Section):
    """What a run tells of failures as it goes, in alerts.jsonl, on the terminal and in the trackers."""

    enabled: bool = setting(True, "judge the run at every look of its monitors")
    save_on_anomaly: bool = setting(True, "keep the state before the first step that is not finite, in anomaly/")
    baseline: str | None = setting(
        None, "run folder whose losses divergence is measured against; null: the run's own", changes_numbers=True
    )


class TrackingConfig(Section):
    """Where the record of every step goes, beside metrics.jsonl."""

    wandb: str = setting(
        "off",
        "Weights & Biases, whose WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS are read; auto: online with an API key, "
        "otherwise offline",
        choices=WANDB_MODES,
    )
    wandb_id: str | None = setting(None, "run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False, "at the end, keep the last checkpoint there, as an artifact with the alias latest"
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
        "one more checkpoint at every validation whose loss is the lowest so far; without it the lowest loss has a "
        "checkpoint only if one was due at that step",
    )
