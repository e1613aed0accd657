"""The memory that training a language model takes, by arithmetic.

architecture.py   settings of a model -> shapes and roles of its parameters
training.py       these and a way of training -> bytes, moment by moment
memory_needed     the moment with the most
"""

from dataclasses import dataclass
from typing import Any, Final

from fp8manifold._base.checks import check_choice, check_int
from fp8manifold._interface import MomentStorage
from fp8manifold._memory.architecture import architecture
from fp8manifold._memory.training import OptimizerName, TrainingRecipe, moments_of_step

__all__ = ["MemoryNeeded", "memory_needed"]

OPTIMIZERS: Final = tuple(name.value for name in OptimizerName)
STORAGES: Final = ("codes", "float")
DTYPES: Final = ("bfloat16", "float32")
MOMENTS: Final = ("8bit", "bfloat16", "float32")
DEVICES: Final = ("cuda", "cpu")
_MOST_TOKENS: Final = 2**40


@dataclass(frozen=True)
class MemoryNeeded:
    """The bytes of a training step, part by part, at the moment when the sum is largest.

    :func:`memory_needed` returns it. ``gradients`` are those that exist at once,
    ``activations`` what blocks have saved, ``logits`` those of the loss with their
    gradients, and ``workspace`` decoded weights and what a step needs meanwhile.

    Args:
        parameters: the number of the model's parameters.
        moment: when the sum is largest: ``loss``, ``output layer``, ``block``,
            ``embedding`` or ``step``.
        weights, state, gradients, activations, logits, workspace: bytes.

    Example:
        >>> sizes = MemoryNeeded(10, "loss", 10.0, 20.0, 0.0, 30.0, 40.0, 0.0)
        >>> sizes.peak
        100.0
    """

    parameters: int
    moment: str
    weights: float
    state: float
    gradients: float
    activations: float
    logits: float
    workspace: float

    @property
    def peak(self) -> float:
        """Bytes of all parts."""
        return (
            self.weights
            + self.state
            + self.gradients
            + self.activations
            + self.logits
            + self.workspace
        )


def memory_needed(
    config: Any,
    optimizer: str = "adamw",
    *,
    storage: str = "codes",
    dtype: str = "bfloat16",
    moments: str | None = None,
    embeddings: bool = True,
    in_backward: bool = True,
    chunk: int | None = None,
    checkpointing: bool = True,
    tokens: int = 2048,
    sequences: int = 1,
    device: str = "cuda",
) -> MemoryNeeded:
    r"""Return the memory that a step of training all weights of a language model takes.

    .. math:: \max_t \; \text{weights} + \text{state} + \text{gradients}_t
              + \text{activations}_t + \text{logits}_t + \text{workspace}_t

    Parameters are counted by shape. The moments t are those of the loss, of the output
    layer, of a block, of the embedding and of a parameter's step. Peaks of real steps
    on a CPU are within 5% of it (``benchmarks/fits.py``). Attention is that of
    ``scaled_dot_product_attention``, which stores no scores. A GPU's context, the
    kernels' code and what the allocator reserves unused are not counted.

    Args:
        config: a configuration of transformers, a mapping of its settings (without
            ``model_type`` that of Llama), or the name of a ``config.json``. For a folder or
            an id on the hub transformers is imported.
        optimizer: ``adamw``, ``muon`` (``StiffnessMuon.for_model``), ``lion`` or
            ``adafactor`` of this library, ``torch_adamw`` (on a GPU with ``fused=True``), or
            ``adamw8bit`` of torchao or bitsandbytes.
        storage: ``codes`` stores each linear weight in a byte, with a scale per row;
            ``float`` leaves it in ``dtype``.
        dtype: ``bfloat16`` or ``float32``: the dtype of arithmetic, of gradients, and
            of what is not in codes.
        moments: ``8bit``, which is the default, ``bfloat16`` or ``float32``; for
            ``adamw``, ``muon`` and ``lion`` only.
        embeddings: whether embeddings are in codes too.
        in_backward: whether each parameter steps in the backward pass.
        chunk: tokens per chunk of :func:`fp8manifold.huggingface.chunked_loss`; None
            computes the loss from all logits.
        checkpointing: whether each block is computed again in the backward pass.
        tokens: the number per sequence.
        sequences: the number per step.
        device: ``cuda``, or ``cpu``, where some products and steps copy their operands.

    Returns:
        Bytes by part, at the moment when their sum is largest.

    Raises:
        ImportError: transformers is missing, for a folder or an id.
        TypeError: settings, a number or a flag of another type.
        ValueError: a kind of model whose parameters are not known, a setting that is
            missing or out of range, or an unknown option.

    Example:
        >>> llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        >>> llama |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        >>> needed = memory_needed(llama, "muon", chunk=256)
        >>> needed.moment, round(needed.weights / 1e9, 2), round(needed.peak / 1e9, 1)
        ('output layer', 8.04, 20.0)
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    stepper = OptimizerName(optimizer)
    check_choice("storage", storage, STORAGES)
    check_choice("dtype", dtype, DTYPES)
    if moments is not None:
        _check_moments(moments, stepper)
    check_choice("device", device, DEVICES)
    check_int("tokens", tokens, 1, _MOST_TOKENS)
    check_int("sequences", sequences, 1, _MOST_TOKENS)
    if chunk is not None:
        check_int("chunk", chunk, 1, _MOST_TOKENS)
    if storage == "codes" and not stepper.steps_codes:
        raise ValueError(
            f"optimizer={optimizer!r} does not step weights in codes: take storage='float', or an "
            "optimizer of fp8manifold"
        )
    flags = {"embeddings": embeddings, "in_backward": in_backward, "checkpointing": checkpointing}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    recipe = TrainingRecipe(
        stepper,
        storage,
        dtype,
        MomentStorage(moments or MOMENTS[0]),
        embeddings,
        in_backward,
        chunk,
        checkpointing,
        device,
    )
    model = architecture(config)
    largest = max(moments_of_step(model, recipe, tokens * sequences), key=lambda m: m.total)
    return MemoryNeeded(
        model.size,
        largest.name,
        largest.weights,
        largest.state,
        largest.gradients,
        largest.activations,
        largest.logits,
        largest.workspace,
    )


def _check_moments(moments: str, optimizer: OptimizerName) -> None:
    check_choice("moments", moments, MOMENTS)
    if not optimizer.has_moments:
        others = ", ".join(name for name in OptimizerName if name.has_moments)
        raise ValueError(
            f"moments={moments!r} is not an option of optimizer={optimizer.value!r}: leave it out, "
            f"or take one of the optimizers {others}"
        )
