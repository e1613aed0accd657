"""The bytes that a model and its optimizer hold, counted or estimated.

An estimate is made before they exist. Counts go by memory and not by tensor: a tensor
subclass counts as the tensors inside it, a memory that several tensors share counts
once, and a view as the whole memory it keeps alive.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.config.schema import (
    OPTIONS,
    PEERS,
    Config,
    OptimizerName,
    Precision,
    Storage,
    Task,
)
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.setup.task import BYTES_HELD, model_shape
from nanogpt_bench.system.free_memory import check_memory


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, buffers, and the optimizer's state and groups.

    Gradients of parameters are left out, even where the optimizer's state refers to
    them. Caches that an optimizer has beside its state are left out, too: they depend
    on the last step, and a resume makes them again.

    >>> model = nn.Linear(8, 4, bias=False)
    >>> held_bytes(model, torch.optim.SGD(model.parameters(), lr=0.1))
    128
    """
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *tensors_in([optimizer.state, optimizer.param_groups]),
    ]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    sizes = _sizes(tensors)
    gradient_sizes = _sizes(gradients)
    return sum(size for memory, size in sizes.items() if memory not in gradient_sizes)


class GradientPeak:
    """The most bytes that a model's gradients take at once in its next backward pass.

    They are counted as each gradient is computed.
    """

    def __init__(self, model: nn.Module) -> None:
        #: None before the backward pass
        self.bytes: int | None = None
        self._peak = 0
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        # Registered before an optimizer's hooks, which may free a gradient.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._count)
            for parameter in self._parameters
        ]

    def _count(self, _: Tensor) -> None:
        gradients = (parameter.grad for parameter in self._parameters)
        alive = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._peak = max(self._peak, memory_of(alive))

    def finish(self) -> None:
        """Fix the result and stop counting; called after a backward pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._peak == 0 and self.bytes is None:
            # torch does not call hooks of sharded parameters.
            gradients = (parameter.grad for parameter in self._parameters)
            self._peak = memory_of(gradient for gradient in gradients if gradient is not None)
        # A second call keeps the result. 0 means that no gradient was seen.
        self.bytes = self.bytes or self._peak or None


def bytes_with_state(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of these parameters and of the optimizer's state for each."""
    tensors: list[Tensor] = []
    for parameter in parameters:
        tensors.append(parameter)
        tensors += tensors_in(optimizer.state.get(parameter))
    return memory_of(tensors)


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct memories behind tensors.

    >>> memory_of([torch.zeros(3), torch.zeros(5)])
    32
    """
    return sum(_sizes(tensors).values())


def _sizes(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Return the bytes of the distinct memories of tensors, by device and address."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        for part in plain_tensors(tensor):
            storage = part.untyped_storage()
            sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sizes


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's memory.

    They are the tensor itself, or those inside a wrapper subclass, however deep.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for part in [getattr(tensor, name) for name in names]:
        # A DTensor has its mesh among the parts.
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, the keys of mappings among them.

    >>> len(tensors_in({"a": [torch.zeros(1), 2.0], torch.zeros(1): None}))
    2
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    tensors: list[Tensor] = []
    if isinstance(value, list | tuple | set):
        for item in value:
            tensors += tensors_in(item)
    return tensors


#: storages with a float of every weight; None is not resolved yet
FLOAT_STORAGES = (None, Storage.FLOAT32, Storage.MASTER, Storage.CONTINUOUS, Storage.GRID)
#: optimizers with two running averages of every weight
_WITH_TWO_AVERAGES = (
    OptimizerName.ADAMW,
    OptimizerName.STIFFNESS_ADAMW,
    OptimizerName.RIEMANNIAN_ADAM,
    OptimizerName.FISHER,
)
#: bytes per weight of one running average, by `optimizer.moments`
_AVERAGE = {"float32": 4, "bfloat16": 2, "8bit": 1}
#: settings that the memory of a run depends on
DECIDING = ("rule", "task", "model.", "train.", "optimizer.", "eval.batches", "runtime.device")


def check_fits(config: Config, shape: GPTShape | None = None, *, trained: bool = True) -> int:
    """Refuse a model or batches that need more than the free memory.

    It is called before they are made, and returns the bytes that they need at least.
    They are those of

    * the validation batches
    * the weights, also on a GPU, since a model is made on the CPU before it is moved
    * where training is in one process on a CPU, gradients, the averages of each weight,
      logits, and what a block keeps for the backward pass

    Without the model's `shape`, which a corpus completes, the weights of tokens and
    labels are not counted. A pretrained model is checked where it is read.
    """
    if shape is None:
        shape = model_shape(config, None)
    train = config.train
    # Documents may be few, and short.
    tokens = 0 if config.task == Task.CLASSIFY else train.batch_size * shape.block_size
    parameters = 0 if config.model.pretrained else parameters_of(shape)
    needed = 4 * parameters
    if trained and train.parallel is None and trains_on_cpu(config):
        # 8: two floats.
        activations = 0 if train.recompute else 8 * shape.n_layer * shape.n_embd
        states = bytes_each(config) * parameters
        needed = max(needed, states + tokens * (8 * shape.vocab_size + activations))
    needed += BYTES_HELD * tokens * _held_batches(config)
    check_memory(needed, _request(config, shape, trained))
    return needed


def check_batches_fit(config: Config) -> None:
    """Refuse validation batches of an evaluation that need more than the free memory.

    Those of a training are part of `check_fits`. Batches of documents may be few, and
    are not counted.
    """
    if config.task == Task.CLASSIFY:
        return
    size, block_size = config.train.batch_size, config.model.block_size or 0
    request = (
        f"eval.batches {config.eval.batches} with train.batch_size {size} and model.block_size "
        f"{block_size}"
    )
    check_memory(BYTES_HELD * _held_batches(config) * size * block_size, request)


def _held_batches(config: Config) -> int:
    """Return the validation batches in memory, those of `eval.also` among them."""
    texts = 1 if config.eval.also is None else 2
    return texts * config.eval.batches


def _request(config: Config, shape: GPTShape, trained: bool) -> str:
    kind = "a training" if trained else "a model"
    source = "" if config.model.init_from is None else f" from {str(config.model.init_from)!r}"
    return (
        f"{kind}{source} with model.n_layer {shape.n_layer}, model.n_embd {shape.n_embd}, "
        f"model.block_size {shape.block_size}, train.batch_size {config.train.batch_size} and "
        f"eval.batches {config.eval.batches}"
    )


def trains_on_cpu(config: Config) -> bool:
    """Return whether a run of this configuration is on the CPU of this machine."""
    return config.runtime.device == "cpu" or not torch.cuda.is_available()


def bytes_each(config: Config) -> int:
    """Return the fewest bytes per weight, with its gradient and running averages.

    The configuration is resolved.

    >>> bytes_each(Config())
    8
    """
    float_bytes = 2 if config.train.precision == Precision.BF16_PURE else 4
    has_floats = config.model.storage in FLOAT_STORAGES
    weight = float_bytes if has_floats else 1
    if config.optimizer.name in PEERS:
        # The size of their state is not known here.
        return weight
    gradient = 0 if config.train.step_in_backward else float_bytes
    return weight + gradient + bytes_of_averages(config)


def bytes_of_averages(config: Config) -> int:
    """Return the bytes of a weight's running averages, the fewest that its optimizer keeps.

    Muon keeps two of embeddings and one of matrices, which count here. What Adafactor
    keeps for rows and columns is next to nothing for a weight.

    >>> bytes_of_averages(Config())
    0
    """
    optimizer = config.optimizer
    if optimizer.name in _WITH_TWO_AVERAGES:
        count = 2
    elif "beta1" in OPTIONS.get(optimizer.name or "", {}) or optimizer.momentum:
        count = 1
    else:
        count = 0
    float_bytes = 2 if config.train.precision == Precision.BF16_PURE else 4
    return count * _AVERAGE.get(optimizer.moments or "", float_bytes)


def parameters_of(shape: GPTShape) -> int:
    """Return the number of weights in a GPT's matrices and embeddings, by arithmetic.

    >>> shape = GPTShape(1, n_head=1, n_embd=8, block_size=4, vocab_size=10)
    >>> parameters_of(shape)
    960
    """
    outputs = shape.labels or (0 if shape.tie_weights else shape.vocab_size)
    return shape.n_embd * (
        12 * shape.n_layer * shape.n_embd + shape.vocab_size + shape.block_size + outputs
    )
