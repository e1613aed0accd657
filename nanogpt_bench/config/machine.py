"""The section `runtime` of a configuration: what a run is computed on."""

from __future__ import annotations

from dataclasses import dataclass

from nanogpt_bench.config.field import setting


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
