"""Settings under a task: what it fills in, and what means nothing under it, refused by name."""

from __future__ import annotations

from nanogpt_bench.config.keys import get
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError

#: under `task: classify`, what can't be used and why
_NOT_CLASSIFY = {
    "model.pretrained": "which brings a head for the next token",
    "model.tie_weights": "whose lm_head is no embedding's size",
    "data.train_tokens": "which trains on documents; --limit-tokens of prepare makes fewer of them",
    "eval.also": "whose labels another text does not have",
    "train.parallel": "whose losses are a document's each",
    "monitor.fisher": "whose labels are not drawn from a softmax",
}


def fill_task(config: Config) -> None:
    """Fill in what the task says of the model, before its size does.

    Raises:
        BenchError: a setting that means nothing under the task.
    """
    model = config.model
    if config.task != "classify":
        if model.pooling is not None:
            raise BenchError(f"model.pooling: {model.pooling!r} needs task 'classify', not {config.task!r}")
        return
    for key, why in _NOT_CLASSIFY.items():
        if (value := get(config, key)) not in (None, False):
            raise BenchError(f"{key}: {value!r} can't be used with task 'classify', {why}; leave it out")
    model.tie_weights, model.pooling = False, model.pooling or "mean"


def check_task(config: Config) -> None:
    """Refuse an optimizer that presupposes another loss.

    Raises:
        BenchError: names it.
    """
    if config.task == "classify" and config.optimizer.name == "fisher":
        raise BenchError(
            "optimizer.name: 'fisher' can't be used with task 'classify', whose labels are not drawn from a softmax; "
            "give another rule"
        )
