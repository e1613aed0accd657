"""Where a run takes place, and what of its state it leaves on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from nanogpt_bench.config.field import setting


@dataclass
class CheckpointConfig:
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


@dataclass
class RuntimeConfig:
    """The machine."""

    device: str = setting("auto", "auto takes a GPU when there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(None, "CPU threads; null: torch's own choice", minimum=1)
    compile: bool = setting(
        False,
        "compile the model with torch.compile: the first step and the first validation take long; steps into which a "
        "monitor hooks itself run uncompiled",
    )
    peak_tflops: float | None = setting(
        None,
        "10^12 operations a second of the machine, for mfu; null: those of known GPUs",
        above=0.0,
        changes_numbers=False,
    )
