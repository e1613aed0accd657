"""One set of weights measured in one format: a row of what `evaluate` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nanogpt_bench.config.metrics import OF_LABELS, VAL_PERPLEXITY
from nanogpt_bench.step.surgery import quantized_layers
from nanogpt_bench.step.trainer import Trainer
from nanogpt_bench.training.summary import count


@dataclass(frozen=True)
class Evaluation:
    """One set of weights in one format; loss and gap to the float weights in nats a token, or a label."""

    format: str
    storage: str
    val_loss: float
    gap: float | None
    perplexity: float | None
    bits_per_byte: float | None
    quantized_parameters: int
    #: of a run, whose weights these are
    checkpoint: str | None = None
    #: of the task classify, by `config.metric.Metric.figure`
    of_labels: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The row as it is written to a file."""
        facts = asdict(self)
        return {**facts, **facts.pop("of_labels")}


def measured(name: str, trainer: Trainer, first: float | None, checkpoint: str | None = None) -> Evaluation:
    """Return the row of a model called `name`, its gap to the loss of the first one."""
    loss, config = trainer.validate(), trainer.config
    figures = trainer.figures(loss)
    layers = quantized_layers(trainer.model)
    return Evaluation(
        format=name,
        storage=config.model.storage or "",
        val_loss=loss,
        gap=None if first is None else loss - first,
        perplexity=figures.get(VAL_PERPLEXITY.name),
        bits_per_byte=trainer.bits_per_byte(loss),
        quantized_parameters=count(layer.weight for layer in layers.values()),
        checkpoint=checkpoint,
        of_labels={metric.figure: figures[metric.name] for metric in OF_LABELS if metric.name in figures},
    )
