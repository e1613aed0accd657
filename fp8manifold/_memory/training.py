"""The memory of a training step, moment by moment.

    needed(architecture, recipe, tokens)   the `Moment` in which it is largest

Weights and state are there all the time, and all else comes and goes:

    loss        the inputs of all blocks; logits of all tokens, or of a chunk
    head        the gradient of the output layer, and its decoded weight
    block       what a block saves, and the gradient of its largest weight
    embedding   its gradient; if it is the output layer too, one from each end
    step        of an optimizer that steps after the backward pass: all gradients

With steps in the backward pass gradients go one by one, but that of a tied embedding
waits from the loss to the end. Without, all are there at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fp8manifold._interface import MomentStorage
from fp8manifold._memory.architecture import Architecture, Parameter, Role

__all__ = ["LONGEST_BLOCK", "Moment", "OptimizerName", "TrainingRecipe", "moments_of_step"]

#: weights that share one bound in an 8-bit moment, at most
LONGEST_BLOCK: Final = 256
_BYTES: Final = {"float32": 4, "bfloat16": 2}
#: of a logit, at the loss: the log-probability, its gradient and that of the logit
_LOGIT_BYTES: Final = 12
#: widths that the last norm and the output layer save
_LAST_WIDTHS: Final = 3


class OptimizerName(StrEnum):
    """An optimizer, as the argument of :func:`fp8manifold.memory_needed` names it."""

    ADAMW = "adamw"
    MUON = "muon"
    LION = "lion"
    ADAFACTOR = "adafactor"
    TORCH_ADAMW = "torch_adamw"
    #: torchao's or bitsandbytes'
    ADAMW_8BIT = "adamw8bit"

    @property
    def steps_codes(self) -> bool:
        """Whether it is this library's; the state of the others is in their own dtype."""
        return self not in (OptimizerName.TORCH_ADAMW, OptimizerName.ADAMW_8BIT)

    @property
    def has_moments(self) -> bool:
        """Whether it has the option ``moments``."""
        return self.steps_codes and self is not OptimizerName.ADAFACTOR


@dataclass(frozen=True)
class TrainingRecipe:
    """A way of training, as :func:`fp8manifold.memory_needed` takes it."""

    optimizer: OptimizerName
    storage: str
    dtype: str
    moments: MomentStorage
    embeddings: bool
    in_backward: bool
    #: None computes the loss from all logits
    chunk: int | None
    checkpointing: bool
    #: cuda or cpu, which copies more
    device: str

    @property
    def number_bytes(self) -> int:
        """Bytes of an activation, a gradient, and a weight that is not in codes."""
        return _BYTES[self.dtype]

    def is_in_codes(self, parameter: Parameter) -> bool:
        """Return whether a parameter is in codes."""
        if self.storage != "codes" or parameter.role is Role.SMALL:
            return False
        return self.embeddings or parameter.role is not Role.EMBEDDING


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a step, by part."""

    name: str
    weights: float
    state: float
    gradients: float = 0
    activations: float = 0
    logits: float = 0
    #: decoded weights, and what a step needs meanwhile
    workspace: float = 0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return (
            self.weights
            + self.state
            + self.gradients
            + self.activations
            + self.logits
            + self.workspace
        )


def weight_bytes(parameter: Parameter, recipe: TrainingRecipe) -> float:
    """Return the bytes of a parameter; codes have a float32 scale per row."""
    if recipe.is_in_codes(parameter):
        return parameter.size + 4 * parameter.rows
    return recipe.number_bytes * parameter.size


def state_bytes(parameter: Parameter, recipe: TrainingRecipe) -> float:
    """Return the bytes of a parameter's optimizer state."""
    is_matrix = parameter.role in (Role.MATRIX, Role.EXPERTS)
    optimizer = recipe.optimizer
    if optimizer is OptimizerName.ADAFACTOR and len(parameter.shape) > 1:
        # a float32 number for each row and each column of every matrix
        matrices = parameter.size // (parameter.shape[-2] * parameter.shape[-1])
        return 4 * matrices * (parameter.shape[-2] + parameter.shape[-1])
    if optimizer is OptimizerName.ADAFACTOR:
        return 4 * parameter.size
    if optimizer is OptimizerName.TORCH_ADAMW:
        return 2 * recipe.number_bytes * parameter.size
    if optimizer is OptimizerName.ADAMW_8BIT:
        return 2 * (1 + 4 / LONGEST_BLOCK) * parameter.size
    has_one_moment = optimizer is OptimizerName.LION
    if optimizer is OptimizerName.MUON:
        has_one_moment = is_matrix
    number = 1 if has_one_moment else 2
    return number * moment_bytes(parameter, recipe.moments)


def moment_bytes(parameter: Parameter, storage: MomentStorage) -> float:
    """Return the bytes of one moment of a parameter.

    In 8 bits it has a float32 bound for each block; blocks are the longest that divide a row.
    """
    if storage is not MomentStorage.EIGHT_BIT:
        return _BYTES[storage] * parameter.size
    columns = parameter.shape[-1]
    longest = min(columns, LONGEST_BLOCK)
    block = max(size for size in range(1, longest + 1) if columns % size == 0)
    return parameter.size + 4 * parameter.size // block


def moments_of_step(model: Architecture, recipe: TrainingRecipe, tokens: int) -> list[Moment]:
    """Return the moments of a step in which memory may be largest."""
    return list(_Step(model, recipe, tokens).moments())


class _Step:
    """A step of a recipe, over so many tokens."""

    def __init__(self, model: Architecture, recipe: TrainingRecipe, tokens: int) -> None:
        self.model = model
        self.recipe = recipe
        self.tokens = tokens
        #: bytes of a number in activations and gradients
        self.number = recipe.number_bytes
        self.weights = 0.0
        self.state = 0.0
        for parameter in model.parameters:
            self.weights += parameter.count * weight_bytes(parameter, recipe)
            self.state += parameter.count * state_bytes(parameter, recipe)
        self.all_gradients = float(self.number * model.size)
        #: the output layer's weight, which may be the embedding
        role = Role.EMBEDDING if model.tied else Role.HEAD
        self.output = model.of(role)[0]
        #: tokens whose logits exist at a time
        self.chunk = min(recipe.chunk or tokens, tokens)

    def moments(self) -> Iterator[Moment]:
        """Yield the moments in their order."""
        yield self._loss()
        yield self._output_layer()
        yield self._block()
        yield self._embedding()
        yield from self._steps()

    @property
    def _is_split(self) -> bool:
        return self.chunk < self.tokens

    @property
    def _output_gradient(self) -> float:
        return self.number * self.output.size

    @property
    def _saved(self) -> float:
        """Bytes that blocks save, their inputs or everything, and the last norm."""
        numbers = self.model.width if self.recipe.checkpointing else self.model.saved_numbers
        all_numbers = numbers * self.model.layers + _LAST_WIDTHS * self.model.width
        return self.number * all_numbers * self.tokens

    def _moment(self, name: str, **parts: float) -> Moment:
        return Moment(name, self.weights, self.state, **parts)

    def _loss(self) -> Moment:
        """The logits' gradient; of a later chunk also the sum of the layer's gradients."""
        return self._moment(
            "loss",
            activations=self._saved,
            logits=_LOGIT_BYTES * self.model.vocabulary * self.chunk,
            gradients=self._output_gradient if self._is_split else 0,
        )

    def _output_layer(self) -> Moment:
        """The decoded weight of the output layer, and then its gradient."""
        is_coded = self.recipe.is_in_codes(self.output)
        copies = 1
        if self._is_split:
            # autograd adds a gradient of codes to the sum in place, others out of place
            copies = 2 if is_coded else 3
        elif is_coded and self.model.tied:
            copies = 2
        gradients = copies * self._output_gradient
        decoded = self._decoded(self.output)
        if self._is_split:
            decoded += self._output_gradient
        workspace = max(decoded - gradients, 0)
        return self._moment(
            "output layer",
            activations=self._saved,
            logits=self.number * self.model.vocabulary * self.chunk,
            gradients=gradients,
            workspace=workspace,
        )

    def _decoded(self, parameter: Parameter) -> float:
        """Return the bytes of a decoded weight; a CPU packs those in bfloat16 once more."""
        if not self.recipe.is_in_codes(parameter):
            return 0
        is_packed = self.recipe.device == "cpu" and self.recipe.dtype == "bfloat16"
        return self.number * parameter.size * (2 if is_packed else 1)

    @property
    def _waiting(self) -> float:
        """Bytes of gradients that are there while a block's backward pass runs."""
        if not self.recipe.in_backward:
            embedding = 0 if self.model.tied else self.number * self._embedding_size
            return self.all_gradients - embedding
        return self._output_gradient if self.model.tied else 0

    @property
    def _embedding_size(self) -> int:
        return self.model.of(Role.EMBEDDING)[0].size

    def _block(self) -> Moment:
        """A block, computed again, and the gradient of its largest weight."""
        matrices = self.model.of(Role.MATRIX, Role.EXPERTS)
        largest = max(matrices, key=lambda parameter: parameter.size)
        gradient = self.number * largest.size if self.recipe.in_backward else 0
        numbers = self.model.passing_numbers
        if self.recipe.checkpointing:
            numbers += self.model.saved_numbers
        return self._moment(
            "block",
            activations=self._saved + self.number * numbers * self.tokens,
            gradients=self._waiting + gradient,
            workspace=max(self._decoded(largest) - gradient, 0),
        )

    def _embedding(self) -> Moment:
        """The embedding's gradient, which is added to that of a tied output layer."""
        copies = 1
        if self.model.tied and not self._is_split:
            copies = 2
        return self._moment(
            "embedding",
            activations=self.number * self.model.width * self.tokens,
            gradients=self._waiting + copies * self.number * self._embedding_size,
        )

    def _steps(self) -> Iterator[Moment]:
        """Yield the steps of parameters: in the backward pass one gradient is there."""
        for parameter in self.model.parameters:
            gradients = self.all_gradients
            activations = 0.0
            if self.recipe.in_backward:
                gradients = self.number * parameter.size
                activations = self._saved
                if self.model.tied and parameter.role is not Role.EMBEDDING:
                    gradients += self._output_gradient
                if parameter.role is Role.EMBEDDING:
                    activations = self.number * self.model.width * self.tokens
            yield self._moment(
                "step",
                gradients=gradients,
                activations=activations,
                workspace=step_bytes(parameter, self.recipe),
            )


def step_bytes(parameter: Parameter, recipe: TrainingRecipe) -> float:
    """Return the bytes that the step of a parameter needs beside its gradient."""
    if recipe.optimizer is OptimizerName.MUON and parameter.role in (Role.MATRIX, Role.EXPERTS):
        # a direction in float32, two iterates and two products of them in bfloat16
        shorter = min(parameter.shape[-2:])
        matrices = parameter.size // (parameter.shape[-2] * parameter.shape[-1])
        return 8 * parameter.size + 4 * matrices * shorter**2
    if recipe.optimizer is OptimizerName.ADAFACTOR and recipe.device != "cpu":
        # a float32 row of sums for every 32 rows
        return parameter.size / 8
    if recipe.device != "cpu":
        return 0
    if recipe.optimizer is OptimizerName.TORCH_ADAMW:
        return 2 * recipe.number_bytes * parameter.size
    if recipe.optimizer is OptimizerName.ADAMW_8BIT:
        return 8 * parameter.size
    # the gradient in float32
    return 4 * parameter.size if recipe.dtype == "bfloat16" else 0
