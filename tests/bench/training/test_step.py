"""One step: accumulation, clipping, learning rate, and the order of the observer points."""

from collections.abc import Callable

import pytest
import torch
from bench_runs import trainer_of

from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import batch
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import Observer, Step

Tiny = Callable[..., Config]


def one_step(trainer: Trainer, number: int = 1, observers: tuple[Observer, ...] = ()) -> Step:
    step = trainer.new_step(number, last=False)
    trainer.train_step(step, observers)
    return step


def test_accumulation_is_the_mean_over_the_micro_batches(tiny: Tiny) -> None:
    trainer = trainer_of(tiny(rule="fp32", train__accumulation=2, optimizer__grad_clip=0))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    step = one_step(trainer)
    trainer.model.load_state_dict(before)
    pairs = [batch(trainer.corpus.train, 4, 16, seed=42, step=0, micro_step=index) for index in (0, 1)]
    loss = sum(trainer.model.loss(*pair) for pair in pairs) / 2
    gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
    assert step.record["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step.record["grad/norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_the_points_of_a_step_come_in_their_order(tiny: Tiny) -> None:
    calls: list[str] = []

    class Recorder(Observer):
        def __getattribute__(self, name: str) -> object:
            if not name.startswith("_"):
                calls.append(name)
            return super().__getattribute__(name)

    one_step(trainer_of(tiny(train__accumulation=2)), observers=(Recorder(),))
    micro = ["before_forward", "after_forward", "after_backward"]
    assert calls == [*micro, *micro, "before_step", "after_step"]


def test_validation_changes_nothing_and_repeats(tiny: Tiny) -> None:
    trainer = trainer_of(tiny(rule="fp32", model__dropout=0.5))
    before = trainer.model.lm_head.weight.clone()
    assert trainer.validate() == trainer.validate()
    assert torch.equal(trainer.model.lm_head.weight, before)
    assert trainer.model.training
