"""Tokens a second and memory of a training step, over batch sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved, build_config
from nanogpt_bench.data.batches import Corpus, open_corpus
from nanogpt_bench.step.memory import held_bytes, plain_tensors
from nanogpt_bench.step.points import Observer, Step
from nanogpt_bench.step.resolve import resolve
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.training.train import runtime

WARMUP_STEPS = 2
COLUMNS = ("batch size", "tokens/step", "ms/step", "tokens/s", "weights+state", "gradients", "saved", "peak")
MIB = 2**20


def profile_batch_sizes(
    settings: Mapping[str, Any], sizes: Sequence[int], steps: int, *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row a batch size: median seconds of a step over `steps`, and the bytes it needs.

    A size that does not fit into the device's memory has a row without figures, and the larger ones are not tried.

    Raises:
        BenchError: settings or a corpus that can't be used.
    """
    configs = [resolve(build_config({**settings, "train.batch_size": size})) for size in sizes]
    rows: list[dict[str, Any]] = []
    for config in configs:
        say(f"batch size {config.train.batch_size}: {WARMUP_STEPS + steps} steps")
        with runtime(config) as device:
            corpus = open_corpus(config)
            try:
                rows.append(_measure(config, corpus, device, steps))
            except torch.OutOfMemoryError:
                rows.append(_out_of_memory(config))
                return rows
    return rows


def _measure(config: Resolved, corpus: Corpus, device: torch.device, steps: int) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(config, corpus, device)
    # The first step makes the optimizer's state and what the library compiles or looks up once.
    _step(trainer, 1)
    saved = SavedBytes(trainer.model)
    _step(trainer, 2, saved)
    gradients = sum(_bytes(p.grad) for p in trainer.model.parameters() if p.grad is not None)
    seconds = [_timed(trainer, WARMUP_STEPS + number) for number in range(1, steps + 1)]
    return {
        **_facts(config),
        "seconds_per_step": statistics.median(seconds),
        "tokens_per_s": _facts(config)["tokens_per_step"] / statistics.median(seconds),
        "held_bytes": held_bytes(trainer.model, trainer.optimizer),
        "gradient_bytes": gradients,
        "saved_bytes": saved.most,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "steps": steps,
        "device": str(device),
    }


def _facts(config: Config) -> dict[str, Any]:
    train = config.train
    tokens = train.batch_size * train.accumulation * (config.model.block_size or 0)
    return {"batch_size": train.batch_size, "tokens_per_step": tokens}


def _out_of_memory(config: Config) -> dict[str, Any]:
    figures = ("seconds_per_step", "tokens_per_s", "held_bytes", "gradient_bytes", "saved_bytes", "peak_bytes")
    return {**_facts(config), **dict.fromkeys(figures), "steps": 0, "device": "out of memory"}


def _step(trainer: Trainer, number: int, *observers: Observer) -> None:
    trainer.train_step(trainer.new_step(number, last=False), observers)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def _timed(trainer: Trainer, number: int) -> float:
    begun = perf_counter()
    _step(trainer, number)
    return perf_counter() - begun


class SavedBytes(Observer):
    """Measures what a forward pass keeps for its backward pass, parameters apart; `most` of all micro-batches.

    Memory that several operations keep counts once.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [inner for parameter in model.parameters() for inner in plain_tensors(parameter)]
        self._own = {inner.untyped_storage().data_ptr() for inner in held}
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.most = 0

    def before_forward(self, step: Step) -> None:
        self._sizes = {}
        self._hooks.__enter__()

    def after_forward(self, step: Step) -> None:
        self._hooks.__exit__(None, None, None)
        self.most = max(self.most, sum(self._sizes.values()))

    def _pack(self, tensor: Tensor) -> Tensor:
        for inner in plain_tensors(tensor):
            storage = inner.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def _bytes(tensor: Tensor) -> int:
    return sum(inner.untyped_storage().nbytes() for inner in plain_tensors(tensor))


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    seconds, speed = row["seconds_per_step"], row["tokens_per_s"]
    if seconds is None:
        return [str(row["batch_size"]), f"{row['tokens_per_step']:,}", "out of memory", *["-"] * 5]
    sizes = [row[key] for key in ("held_bytes", "gradient_bytes", "saved_bytes", "peak_bytes")]
    return [
        str(row["batch_size"]),
        f"{row['tokens_per_step']:,}",
        f"{1e3 * seconds:.1f}",
        f"{speed:,.0f}",
        *("-" if size is None else f"{size / MIB:,.1f} MiB" for size in sizes),
    ]
