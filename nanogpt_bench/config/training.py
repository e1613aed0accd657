"""The sections `train` and `eval` of a configuration: which steps, and what is measured on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

from nanogpt_bench.config.field import setting

PRECISIONS = ("float32", "bf16-mixed", "bf16-pure")
STOPS = ("nan", "divergence", "plateau")
PARALLEL = ("ddp", "fsdp")
ANOMALY_POLICIES = ("skip", "stop", "rollback")


@dataclass
class TrainConfig:
    """The length and the shape of the training."""

    max_steps: int = setting(
        2000,
        "optimizer steps",
        minimum=1,
        instead="nanogpt-bench evaluate measures a loss without training",
        of_task=True,
    )
    batch_size: int = setting(12, "sequences in a micro-batch", minimum=1, of_task=True)
    accumulation: int = setting(1, "micro-batches in a step", minimum=1, of_task=True)
    precision: str | None = setting(
        None,
        "float32, bf16-mixed (autocast) or bf16-pure; null: the rule's, or bf16-mixed",
        choices=PRECISIONS,
        of_rule=True,
    )
    step_in_backward: bool = setting(
        False,
        "step each parameter as soon as its gradient is there, and free the gradient: the library's optimizers, "
        "without clipping or accumulation; what is watched of gradients is left out",
    )
    recompute: bool = setting(
        False, "model.pretrained: keep no activations inside a block, compute them once more in the backward pass"
    )
    parallel: str | None = setting(
        None,
        "how the processes of torchrun share a run: ddp (each holds the model) or fsdp (each holds rows of every "
        "weight), and train.batch_size / processes sequences of every batch; null: one process",
        choices=PARALLEL,
        changes_numbers=False,
    )
    max_seconds: float | None = setting(
        None, "stop after this many seconds; null: never", above=0.0, changes_numbers=False
    )
    on_anomaly: str = setting(
        "skip",
        "what becomes of a step whose loss or gradient is not finite: skip it, and end the run after "
        "alerts.nan_patience of them in a row; stop at the first; rollback: skip, and then go back to the newest "
        "checkpoint and read on with other batches. Weights or optimizer state that are not finite are never skipped",
        choices=ANOMALY_POLICIES,
    )
    max_rollbacks: int = setting(3, "on_anomaly rollback: times that a run goes back before it fails", minimum=0)
    stop_on: list[str] = setting(
        lambda: ["nan"],
        "end the run on alerts.nan_patience steps in a row whose loss or gradient is not finite (nan), on a loss "
        "that stays above where it was or should be (divergence: alerts.divergence), on a validation loss that no "
        "longer falls (plateau: alerts.plateau)",
        choices=STOPS,
        changes_numbers=False,
    )


@dataclass
class EvalConfig:
    """The validation: always the same batches."""

    interval: int = setting(250, "steps between validations", minimum=1)
    batches: int = setting(20, "batches of train.batch_size sequences", minimum=1, of_task=True)
    also: str | None = setting(
        None, "another prepared text, in the same tokens, to validate on as well: what a fine-tuning forgets"
    )
    seed: int = setting(1337, "chooses the validation batches", minimum=0, of_task=True)
