"""Steps in which something is not finite: what it was and where it was first seen.

After every step the `Sentry` checks loss, gradient, weights and optimizer state. If
only loss or gradient is bad, the step is skipped, the model's buffers are restored, and
the step is repeated on a copy of the model to find the layer where it began. The
`AnomalyObserver` commits a checkpoint of the state before such a step.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

import fp8manifold as fm
from nanogpt_bench.checkpoint import commit_checkpoint
from nanogpt_bench.checkpoint.format import CheckpointNotWritten
from nanogpt_bench.config import metrics
from nanogpt_bench.loop.resume import capture
from nanogpt_bench.model.weights import dequantized
from nanogpt_bench.monitors.points import Anomaly, Observer, Step
from nanogpt_bench.system.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from nanogpt_bench.loop.trainer import Trainer

#: flags of a step's record, 0 or 1, by the kind of the anomaly
_FLAG_BY_KIND = dict(zip(("loss", "gradient", "weight", "state"), metrics.FLAGS, strict=True))
_LOG = logging.getLogger("nanogpt_bench")


class Sentry:
    """Checks every step of a run for values that are not finite.

    It restores the scales and counters that a skipped step has changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._copies: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def copy_buffers(self) -> None:
        """Copy the model's buffers; called before a step."""
        self._copies = []
        for module in self._trainer.model.modules():
            copies = {}
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copies[name] = buffer.clone()
            self._copies.append((module, copies))

    def check(self, step: Step) -> Anomaly | None:
        """Fill in the step's flags and return what was not finite; called after a step.

        The buffers are restored if the step was skipped.
        """
        step.record[metrics.WEIGHT_HAS_NAN.name] = 0
        step.record[metrics.STATE_HAS_NAN.name] = 0
        loss_is_bad = step.record[metrics.LOSS_IS_NAN.name]
        gradient_is_bad = step.record[metrics.GRAD_HAS_NAN.name]
        was_taken = not (loss_is_bad or gradient_is_bad)
        if was_taken and self._norm_is_finite():
            return None
        bad_weight = first_bad_weight(self._trainer.model, self._trainer.ranks)
        bad_state = first_bad_state(self._trainer)
        if was_taken and bad_weight is None and bad_state is None:
            # All is finite, only the norm overflowed.
            return None
        step.record[metrics.WEIGHT_HAS_NAN.name] = int(bad_weight is not None)
        step.record[metrics.STATE_HAS_NAN.name] = int(bad_state is not None)
        kinds = tuple(kind for kind, flag in _FLAG_BY_KIND.items() if step.record[flag.name])
        if bad_weight is None and bad_state is None:
            self._restore_buffers()
            return Anomaly(step.number, kinds, first_seen(self._trainer, step))
        # If the step was taken, a bad state made the weight bad. If not, the bad weight
        # made the loss bad.
        origin = bad_weight or bad_state
        if was_taken and bad_state is not None:
            origin = bad_state
        return Anomaly(step.number, kinds, origin or "")

    def _restore_buffers(self) -> None:
        for module, copies in self._copies:
            module._buffers.update(copies)

    def _norm_is_finite(self) -> bool:
        """Check weights and optimizer state by one norm.

        If it is not finite, the norm may also have overflowed.
        """
        tensors: list[Tensor] = []
        for weight in self._trainer.model.parameters():
            if not isinstance(weight, fm.FP8Tensor):
                tensors.append(dequantized(weight))
            elif _can_be_bad(weight):
                # Codes are decoded one layer at a time: all at once would take four
                # times the memory of the weights.
                tensors.append(dequantized(weight).norm())
        tensors.extend(entry.values for entry in _state_entries(self._trainer))
        is_bad = bool(tensors) and not math.isfinite(get_total_norm(tensors).item())
        return not self._trainer.ranks.any(is_bad)


@torch.no_grad()
def first_bad_weight(model: nn.Module, ranks: Ranks = ALONE) -> str | None:
    """Return the first parameter with a value that is not finite, or None.

    >>> layer = nn.Linear(2, 1)
    >>> first_bad_weight(layer)
    >>> layer.weight.data[0, 1] = math.inf
    >>> first_bad_weight(layer)
    'weight of weight'
    """
    values = {
        name: dequantized(weight)
        for name, weight in model.named_parameters()
        if _can_be_bad(weight)
    }
    return _first_bad("weight of ", values, ranks)


def first_bad_state(trainer: Trainer) -> str | None:
    """Return the first entry of the optimizer's state that is not finite, or None."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    tensors = {}
    for entry in _state_entries(trainer):
        parameter_name = names.get(entry.parameter, "a parameter")
        tensors[f"{entry.name} of {parameter_name}"] = entry.values
    return _first_bad("optimizer state ", tensors, trainer.ranks)


def first_seen(trainer: Trainer, step: Step) -> str:
    """Return where a loss or gradient that is not finite began.

    The step is repeated on a copy of the model. Of activations the result is the first
    in the order of the forward pass, of gradients the first in that of the backward
    pass. If the repetition stays finite, the gradients of the step itself are searched.
    """
    # Several processes could leave the repetition at different places.
    if trainer.ranks.size == 1:
        place = _first_seen_again(trainer, step)
        if place is not None:
            return place
    if step.record[metrics.LOSS_IS_NAN.name]:
        return "loss"
    return _last_bad_gradient(trainer.model, trainer.ranks) or "gradient"


def _first_seen_again(trainer: Trainer, step: Step) -> str | None:
    """Repeat a step on a copy of the model; return where it is first not finite."""
    copied_model = copy.deepcopy(trainer.model)
    for batch in trainer.micro_batches(step.number):
        activation = _first_bad_activation(trainer, copied_model, batch)
        if activation is not None:
            return activation
    return _last_bad_gradient(copied_model)


def _first_bad_activation(trainer: Trainer, model: Any, batch: tuple[Tensor, Tensor]) -> str | None:
    """Take a micro-batch forward and, if that is finite, backward.

    Gradients accumulate.
    """
    bad_activations: list[str] = []

    def watch(name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if bad_activations or not isinstance(output, Tensor):
                return
            if not bool(output.isfinite().all()):
                bad_activations.append(f"activation of {name}")

        return check

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name)))
    with torch.random.fork_rng():
        loss = trainer.loss(*batch, model.loss) / trainer.config.train.accumulation
    for handle in handles:
        handle.remove()
    if bad_activations:
        return bad_activations[0]
    if not math.isfinite(loss.item()):
        return "loss"
    loss.backward()
    return None


def _last_bad_gradient(model: nn.Module, ranks: Ranks = ALONE) -> str | None:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    # The backward pass goes through the model from its end, and so reached the last bad
    # gradient first.
    return _first_bad("gradient of ", dict(reversed(gradients.items())), ranks)


def _first_bad(prefix: str, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> str | None:
    """Return the name of the first tensor that is not finite, in any process."""
    if ranks.size == 1:
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                return prefix + name
        return None
    flags = [float(not bool(tensor.isfinite().all())) for tensor in tensors.values()]
    for name, count in zip(tensors, ranks.total(flags), strict=False):
        if count:
            return prefix + name
    return None


def _can_be_bad(parameter: Tensor) -> bool:
    """Return False for formats without codes for NaN and Inf."""
    if not isinstance(parameter, fm.FP8Tensor):
        return True
    return parameter.format.finite_codes < 2**parameter.format.bits


class _StateEntry(NamedTuple):
    """A float tensor in the optimizer's state of a parameter."""

    name: str
    parameter: Tensor
    values: Tensor


def _state_entries(trainer: Trainer) -> Iterator[_StateEntry]:
    for parameter, state in trainer.optimizer.state.items():
        for name, values in _float_leaves(state):
            yield _StateEntry(name, parameter, values)


def _float_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors of a tree by their path.

    Tensor subclasses are taken apart.
    """
    children: Sequence[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        children = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        children = [(part, getattr(value, part)) for part in value.__tensor_flatten__()[0]]
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield name, value.detach() if value.element_size() > 1 else value.detach().float()
    for key, item in children:
        yield from _float_leaves(item, f"{name}.{key}" if name else key)


class AnomalyObserver(Observer):
    """Commits one checkpoint as anomaly/checkpoints/step-N.safetensors.

    No run is resumed from it. If step N was skipped, it has the weights and the
    optimizer state before the step. `run_dir` is None where another process writes the
    checkpoint.
    """

    def __init__(self, run_dir: Path | None, trainer: Trainer) -> None:
        self._folder = None if run_dir is None else run_dir / "anomaly"
        self._trainer = trainer
        self._saved = False

    def take_record(self, step: Step) -> None:
        if self._saved or step.anomaly is None:
            return
        self._saved = True
        facts = {"anomaly": dataclasses.asdict(step.anomaly)}
        contents = capture(step.number, self._trainer, [], facts)
        if self._folder is None or contents is None:
            return
        self._folder.mkdir(exist_ok=True)
        try:
            commit_checkpoint(self._folder, contents, keep_last=1)
        except CheckpointNotWritten as error:
            # The checkpoint is for debugging: the run goes on without it.
            _LOG.warning("anomaly: %s", error)

    def state(self) -> dict[str, Any]:
        return {"saved": self._saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._saved = state["saved"]
