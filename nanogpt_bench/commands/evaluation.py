"""One set of weights measured in one format: a row of what `evaluate` prints and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanogpt_bench.step.surgery import quantized_layers
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.training.summary import count


@dataclass(frozen=True)
class Evaluation:
    """One set of weights in one format; loss and gap to the float weights in nats a token."""

    format: str
    storage: str
    val_loss: float
    gap: float | None
    perplexity: float | None
    bits_per_byte: float
    quantized_parameters: int
    #: of a run, whose weights these are
    checkpoint: str | None = None


def measured(name: str, trainer: Trainer, first: float | None, checkpoint: str | None = None) -> Evaluation:
    """Return the row of a model called `name`, its gap to the loss of the first one."""
    loss, config = trainer.validate(), trainer.config
    layers = quantized_layers(trainer.model)
    return Evaluation(
        format=name,
        storage=config.model.storage or "",
        val_loss=loss,
        gap=None if first is None else loss - first,
        perplexity=math.exp(loss) if loss < 700 else None,
        bits_per_byte=trainer.bits_per_byte(loss),
        quantized_parameters=count(layer.weight for layer in layers.values()),
        checkpoint=checkpoint,
    )
