"""The least memory that a training, or a measurement, takes by its settings, and the refusal of more than is free."""

from __future__ import annotations

import torch

from nanogpt_bench.config.schema import OPTIONS, PEERS, Config
from nanogpt_bench.data.batches import Corpus
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.setup.start import model_shape
from nanogpt_bench.setup.task import BYTES_HELD
from nanogpt_bench.system.free_memory import check_memory

#: bytes of an optimizer's one average of a weight, by `optimizer.moments`; many have two
_AVERAGE = {"float32": 4, "bfloat16": 2, "8bit": 1}
#: settings that decide on it
DECIDING = ("rule", "task", "model.", "train.", "optimizer.", "eval.batches", "runtime.device")


def check_fits(config: Config, corpus: Corpus | None = None, *, trained: bool = True) -> None:
    """Refuse a model or batches of more than the memory that is free, before anything of them is made.

    Counted is what nothing does without. A model: its weights. A training, in one process on a CPU: weights, gradients,
    an average of each, logits, and what a block keeps for the backward pass. A text: its validation batches. Without a
    `corpus` its tokens or labels are not counted. On a GPU, of which nothing is asked here, a model is made before it
    goes there. Weights of others are looked at where they are read.

    Raises:
        BenchError: the settings that decide, and what is free.
    """
    shape, train = model_shape(config, corpus), config.train
    tokens = 0 if config.task == "classify" else train.batch_size * shape.block_size  # documents may be few, and short
    parameters = 0 if config.model.pretrained else parameters_of(shape)
    needed = 4 * parameters
    if trained and train.parallel is None and (config.runtime.device == "cpu" or not torch.cuda.is_available()):
        kept = 0 if train.recompute else 8 * shape.n_layer * shape.n_embd
        needed = max(needed, bytes_each(config) * parameters + tokens * (8 * shape.vocab_size + kept))
    needed += BYTES_HELD * tokens * config.eval.batches
    sizes = ", ".join(f"model.{name} {getattr(shape, name)}" for name in ("n_layer", "n_embd", "block_size"))
    asked = f"{sizes}, train.batch_size {train.batch_size} and eval.batches {config.eval.batches}"
    source = "" if config.model.init_from is None else f" from {str(config.model.init_from)!r}"
    check_memory(needed, f"a training{source} with {asked}" if trained else f"a model{source} with {asked}")


def bytes_each(config: Config) -> int:
    """Return the fewest bytes that a weight takes with its gradient and one average of it, in a resolved configuration.

    >>> bytes_each(Config())
    8
    """
    pure = 2 if config.train.precision == "bf16-pure" else 4
    weight = pure if config.model.storage in (None, "float32", "master", "continuous") else 1
    options = config.optimizer
    if options.name in PEERS:  # whose state is theirs
        return weight
    gradient = 0 if config.train.step_in_backward else pure
    keeps = "beta1" in OPTIONS.get(options.name or "", {}) or bool(options.momentum)
    return weight + gradient + (_AVERAGE.get(options.moments or "", pure) if keeps else 0)


def parameters_of(shape: GPTShape) -> int:
    """Return the weights of a GPT's matrices and embeddings, by arithmetic.

    >>> parameters_of(GPTShape(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=10, tie_weights=True))
    880
    """
    outputs = shape.labels or (0 if shape.tie_weights else shape.vocab_size)
    return shape.n_embd * (12 * shape.n_layer * shape.n_embd + shape.vocab_size + shape.block_size + outputs)
