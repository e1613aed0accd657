"""Optimizers that no configuration of a quick run names, through a checkpoint on disk: wrapped ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BASE, bits

import fp8manifold as fm
from nanogpt_bench.checkpoint import commit, read
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.training.run_state import capture, restore
from nanogpt_bench.training.trainer import Trainer

Settings = dict[str, Any]
HALF, ALL = 3, 7
pytestmark = pytest.mark.filterwarnings("ignore::fp8manifold.SaturationWarning")


@pytest.fixture
def configuration(small_corpus: Path) -> Callable[[Settings], Config]:
    more = {"data.dir": str(small_corpus), "model.format": "E4M3", "model.dropout": 0.1, "train.max_steps": ALL}
    base = {**BASE, **more, "optimizer.warmup_steps": 2}
    return lambda settings: resolve(build_config({**base, **settings}))


def trainer_of(config: Config, wrap: Callable[[Trainer], torch.optim.Optimizer] | None) -> Trainer:
    torch.manual_seed(0)  # dropout; what a process happens to hold must not matter
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    if wrap is not None:
        trainer.optimizer = wrap(trainer)
    return trainer


def take(trainer: Trainer, first: int, last: int) -> list[float]:
    return [trainer.train_step(trainer.new_step(n, last=n == ALL), []) for n in range(first, last + 1)]


def check_through_the_disk(
    config: Config, folder: Path, wrap: Callable[[Trainer], torch.optim.Optimizer] | None
) -> None:
    """A training taken up from its checkpoint ends where the uninterrupted one does, every bit of its state."""
    whole = trainer_of(config, wrap)
    losses = take(whole, 1, ALL)
    broken = trainer_of(config, wrap)
    assert take(broken, 1, HALF) == losses[:HALF]
    folder.mkdir()
    saved = commit(folder, capture(HALF, broken, [], {}), keep_last=1)
    del broken
    again = trainer_of(config, wrap)
    restore(read(saved), again, [])
    assert take(again, HALF + 1, ALL) == losses[HALF:]
    first, second = (capture(ALL, trainer, [], {}) for trainer in (whole, again))
    assert bits(first) == bits(second)
    assert first.facts == second.facts
    assert bits(first) != bits(read(saved))  # the steps in between have moved something
    assert any(name.startswith("optimizer/") for name in bits(first))


WRAPPED: dict[str, dict[str, Any]] = {
    "update": {"exponent": fm.optim.anneal(1.0, 0.0, 6), "writeback": "stochastic", "seed": 3, "refresh_every": 2},
    "scale": {"scale": lambda step: 1.0 / (1 + step), "exponent": 0.5, "writeback": "nearest"},
}


@pytest.mark.parametrize("storage", ["fp8", "grid", "continuous"])
@pytest.mark.parametrize("options", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_adamw_goes_on_with_the_same_bits(
    storage: str, options: dict[str, Any], configuration: Callable[[Settings], Config], tmp_path: Path
) -> None:
    config = configuration({"model.storage": storage, "optimizer.name": "stiffness_adamw"})

    def wrap(trainer: Trainer) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(trainer.model.parameters(), lr=0.02, weight_decay=0.1)
        return fm.optim.StiffnessWrapper(inner, **options)

    check_through_the_disk(config, tmp_path / "run", wrap)
