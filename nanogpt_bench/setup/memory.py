"""The bytes that a model and its optimizer hold: counted on live tensors, or estimated
before any is made.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_bench.config.schema import OPTIONS, PEERS, Config
from nanogpt_bench.data.batches import Corpus
from nanogpt_bench.model.gpt import GPTShape
from nanogpt_bench.setup.task import BYTES_HELD, model_shape
from nanogpt_bench.system.free_memory import check_memory


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the parameters, the buffers and the optimizer's state and
    groups.

    A tensor subclass counts as the tensors inside it, a memory that several tensors
    share once, and a view as the whole memory it keeps alive. Gradients are left out,
    unless the state has some that the model has not. Caches that an optimizer has
    beside its state are left out, too: they depend on the last step, and a resume makes
    them again.

    >>> model = nn.Linear(8, 4, bias=False)
    >>> held_bytes(model, torch.optim.SGD(model.parameters(), lr=0.1))
    128
    """
    held = [
        *model.parameters(),
        *model.buffers(),
        *tensors_in([optimizer.state, optimizer.param_groups]),
    ]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(_sizes(held).values()) - sum(
        size for key, size in _sizes(gradients).items() if key in _sizes(held)
    )


class GradientPeak:
    """The most bytes that a model's gradients take at once in its next backward pass,
    counted as each is computed.
    """

    def __init__(self, model: nn.Module) -> None:
        #: None before the backward pass
        self.bytes: int | None = None
        self._most, self._own = (
            0,
            [parameter for parameter in model.parameters() if parameter.requires_grad],
        )
        # Registered before an optimizer's hooks, which may free a gradient.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._count) for parameter in self._own
        ]

    def _count(self, _: Tensor) -> None:
        gradients = (parameter.grad for parameter in self._own)
        alive = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._most = max(self._most, memory_of(alive))

    def known(self) -> None:
        """Fix the result; called after a backward pass."""
        for hook in self._hooks:
            hook.remove()
        if not self._most and self.bytes is None:  # torch does not call hooks of sharded parameters
            self._most = memory_of(
                [parameter.grad for parameter in self._own if parameter.grad is not None]
            )
        self._hooks, self.bytes = [], self.bytes or self._most or None


def bytes_of(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of these parameters alone, with the optimizer's state for each."""
    held = [
        tensor
        for parameter in parameters
        for tensor in (parameter, *tensors_in(optimizer.state.get(parameter)))
    ]
    return memory_of(held)


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct memories behind tensors.

    >>> memory_of([torch.zeros(3), torch.zeros(5)])
    32
    """
    return sum(_sizes(tensors).values())


def _sizes(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Return the bytes of the distinct memories behind the tensors, by device and
    address.
    """
    storages = [inner.untyped_storage() for tensor in tensors for inner in plain_tensors(tensor)]
    return {(str(storage.device), storage.data_ptr()): storage.nbytes() for storage in storages}


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's memory: itself, or those inside a wrapper
    subclass, however deep.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in [getattr(tensor, name) for name in flatten()[0]]:
        if isinstance(part, Tensor):  # a DTensor has its mesh among them
            yield from plain_tensors(part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, the keys of mappings among them.

    >>> len(tensors_in({"a": [torch.zeros(1), 2.0], torch.zeros(1): None}))
    2
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    inner = value if isinstance(value, list | tuple | set) else ()
    return (
        [value]
        if isinstance(value, Tensor)
        else [tensor for item in inner for tensor in tensors_in(item)]
    )


#: bytes per weight of one running average, by `optimizer.moments`; many optimizers have
#: two
_AVERAGE = {"float32": 4, "bfloat16": 2, "8bit": 1}
#: settings that the memory of a run depends on
DECIDING = ("rule", "task", "model.", "train.", "optimizer.", "eval.batches", "runtime.device")


def check_fits(config: Config, corpus: Corpus | None = None, *, trained: bool = True) -> None:
    """Refuse a model or batches that need more than the free memory, before they are
    made.

    The count is a lower bound. Training in one process on a CPU: weights, gradients,
    one average per weight, logits, and what a block keeps for the backward pass.
    Otherwise: the weights, also on a GPU, since a model is made on the CPU before it is
    moved. Both: the validation batches. Without a `corpus` the weights of its tokens
    and labels are not counted. A pretrained model is checked where it is read.
    """
    shape, train = model_shape(config, corpus), config.train
    tokens = (
        0 if config.task == "classify" else train.batch_size * shape.block_size
    )  # documents may be few, and short
    parameters = 0 if config.model.pretrained else parameters_of(shape)
    needed = 4 * parameters
    if (
        trained
        and train.parallel is None
        and (config.runtime.device == "cpu" or not torch.cuda.is_available())
    ):
        activations = 0 if train.recompute else 8 * shape.n_layer * shape.n_embd
        needed = max(
            needed, bytes_each(config) * parameters + tokens * (8 * shape.vocab_size + activations)
        )
    needed += BYTES_HELD * tokens * config.eval.batches
    sizes = ", ".join(
        f"model.{name} {getattr(shape, name)}" for name in ("n_layer", "n_embd", "block_size")
    )
    asked = f"{sizes}, train.batch_size {train.batch_size} and eval.batches {config.eval.batches}"
    source = "" if config.model.init_from is None else f" from {str(config.model.init_from)!r}"
    check_memory(
        needed, f"a training{source} with {asked}" if trained else f"a model{source} with {asked}"
    )


def bytes_each(config: Config) -> int:
    """Return the fewest bytes per weight, with its gradient and one running average, in
    a resolved configuration.

    >>> bytes_each(Config())
    8
    """
    pure = 2 if config.train.precision == "bf16-pure" else 4
    weight = pure if config.model.storage in (None, "float32", "master", "continuous") else 1
    options = config.optimizer
    if options.name in PEERS:  # the size of their state is not known here
        return weight
    gradient = 0 if config.train.step_in_backward else pure
    keeps = "beta1" in OPTIONS.get(options.name or "", {}) or bool(options.momentum)
    return weight + gradient + (_AVERAGE.get(options.moments or "", pure) if keeps else 0)


def parameters_of(shape: GPTShape) -> int:
    """Return the number of weights in a GPT's matrices and embeddings, by arithmetic.

    >>> parameters_of(GPTShape(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=10, tie_weights=True))
    880
    """
    outputs = shape.labels or (0 if shape.tie_weights else shape.vocab_size)
    return shape.n_embd * (
        12 * shape.n_layer * shape.n_embd + shape.vocab_size + shape.block_size + outputs
    )
