"""Steps in which something is not finite: what it was, where it was first seen, and the
state before the step.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

import fp8manifold as fm
from nanogpt_bench.checkpoint import commit
from nanogpt_bench.checkpoint.format import CheckpointNotWritten
from nanogpt_bench.config import metrics
from nanogpt_bench.loop.resume import capture
from nanogpt_bench.model.weights import plain
from nanogpt_bench.monitors.points import Anomaly, Observer, Step
from nanogpt_bench.system.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from nanogpt_bench.loop.trainer import Trainer

#: flags of a step's record, 0 or 1
_FLAGS = dict(zip(("loss", "gradient", "weight", "state"), metrics.FLAGS, strict=True))


class Sentry:
    """Checks every step of a run, and restores the scales and counters that a skipped
    step has changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._buffers: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def before(self) -> None:
        """Copy the model's buffers; called before a step."""
        self._buffers = [
            (
                module,
                {
                    name: buffer.clone()
                    for name, buffer in module._buffers.items()
                    if buffer is not None
                },
            )
            for module in self._trainer.model.modules()
        ]

    def after(self, step: Step) -> Anomaly | None:
        """Fill in the step's flags and return what was not finite; restore the buffers
        if the step is skipped.
        """
        step.record |= {metrics.WEIGHT_HAS_NAN.name: 0, metrics.STATE_HAS_NAN.name: 0}
        passed = not (
            step.record[metrics.LOSS_IS_NAN.name] or step.record[metrics.GRAD_HAS_NAN.name]
        )
        if passed and self._whole():
            return None
        weight, state = (
            first_bad_weight(self._trainer.model, self._trainer.ranks),
            first_bad_state(self._trainer),
        )
        if passed and weight is None and state is None:
            return None  # all is finite, only the norm overflowed
        step.record |= {
            metrics.WEIGHT_HAS_NAN.name: int(weight is not None),
            metrics.STATE_HAS_NAN.name: int(state is not None),
        }
        kinds = tuple(kind for kind, flag in _FLAGS.items() if step.record[flag.name])
        if weight is None and state is None:
            for module, buffers in self._buffers:
                module._buffers.update(buffers)
            return Anomaly(step.number, kinds, first_seen(self._trainer, step))
        # If the step was taken, a bad state made the weight bad. If not, the bad weight
        # made the loss bad.
        first, second = (state, weight) if passed else (weight, state)
        return Anomaly(step.number, kinds, first or second or "")

    def _whole(self) -> bool:
        """Check weights and optimizer state by one norm; False may also mean that the
        norm overflowed.
        """
        weights = [weight for weight in self._trainer.model.parameters() if _can_be_bad(weight)]
        # Codes are decoded one layer at a time: all at once would take four times the
        # memory of the weights.
        norms = [plain(weight).norm() for weight in weights if isinstance(weight, fm.FP8Tensor)]
        floats = [plain(weight) for weight in weights if not isinstance(weight, fm.FP8Tensor)]
        tensors = [*norms, *floats, *(leaf for _, _, leaf in _states(self._trainer))]
        return not self._trainer.ranks.any(
            bool(tensors) and not math.isfinite(get_total_norm(tensors).item())
        )


@torch.no_grad()
def first_bad_weight(model: nn.Module, ranks: Ranks = ALONE) -> str | None:
    """Return the first parameter with a value that is not finite, None where there is
    none.

    >>> layer = nn.Linear(2, 1)
    >>> first_bad_weight(layer)
    >>> layer.weight.data[0, 1] = math.inf
    >>> first_bad_weight(layer)
    'weight of weight'
    """
    values = {
        name: plain(weight) for name, weight in model.named_parameters() if _can_be_bad(weight)
    }
    return _first_bad("weight of ", values, ranks)


def first_bad_state(trainer: Trainer) -> str | None:
    """Return the first entry of the optimizer's state that is not finite, None where
    there is none.
    """
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    states = {
        f"{entry} of {names.get(owner, 'a parameter')}": leaf
        for entry, owner, leaf in _states(trainer)
    }
    return _first_bad("optimizer state ", states, trainer.ranks)


def first_seen(trainer: Trainer, step: Step) -> str:
    """Return where a loss or gradient that is not finite began: the step is repeated on
    a copy of the model.

    Of activations it is the first in the order of the forward pass, of gradients the
    first in that of the backward pass. If the repetition stays finite, the gradients of
    the step itself are searched.
    """
    repeated = None
    if trainer.ranks.size == 1:  # several processes could leave the repetition at different places
        copied = copy.deepcopy(trainer.model)
        for batch in trainer.micro_batches(step.number):
            where = _first_bad_activation(trainer, copied, batch)
            if where is not None:
                return where
        repeated = _last_bad_gradient(copied)
    return repeated or (
        "loss"
        if step.record[metrics.LOSS_IS_NAN.name]
        else _last_bad_gradient(trainer.model, trainer.ranks) or "gradient"
    )


def _first_bad_activation(trainer: Trainer, model: Any, batch: tuple[Tensor, Tensor]) -> str | None:
    """Take a micro-batch forward and, if that is finite, backward; gradients
    accumulate.
    """
    found: list[str] = []

    def watch(name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(f"activation of {name}")

        return check

    handles = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name
    ]
    with torch.random.fork_rng():
        loss = trainer.loss(*batch, model.loss) / trainer.config.train.accumulation
    for handle in handles:
        handle.remove()
    if found or not math.isfinite(loss.item()):
        return found[0] if found else "loss"
    loss.backward()
    return None


def _last_bad_gradient(model: nn.Module, ranks: Ranks = ALONE) -> str | None:
    named = [
        (name, parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    return _first_bad("gradient of ", dict(reversed(named)), ranks)


def _first_bad(prefix: str, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> str | None:
    """The name of the first tensor that is not finite, in this or another process."""
    bad = (float(not bool(tensor.isfinite().all())) for tensor in tensors.values())
    flags = bad if ranks.size == 1 else ranks.total(list(bad))
    return next((prefix + name for name, flag in zip(tensors, flags, strict=False) if flag), None)


def _can_be_bad(parameter: Tensor) -> bool:
    """True except for formats without codes for NaN and Inf, whose values are always
    finite.
    """
    return (
        not isinstance(parameter, fm.FP8Tensor)
        or parameter.format.finite_codes < 2**parameter.format.bits
    )


def _states(trainer: Trainer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every float tensor of the optimizer's state: the entry, the parameter it
    belongs to, the values.
    """
    for parameter, state in trainer.optimizer.state.items():
        for entry, leaf in _leaves(state):
            yield entry, parameter, leaf


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors of a tree by their path; tensor subclasses are taken
    apart.
    """
    inner: Sequence[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        inner = [(part, getattr(value, part)) for part in value.__tensor_flatten__()[0]]
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield name, value.detach() if value.element_size() > 1 else value.detach().float()
    for key, item in inner:
        yield from _leaves(item, f"{name}.{key}" if name else key)


_LOG = logging.getLogger("nanogpt_bench")


class AnomalyObserver(Observer):
    """Commits one checkpoint as anomaly/checkpoints/step-N.safetensors, from which no
    run is resumed.

    If step N was skipped, it has the weights and the optimizer state before the step.
    `run_dir` is None where another process writes the checkpoint.
    """

    def __init__(self, run_dir: Path | None, trainer: Trainer) -> None:
        self._folder, self._trainer = None if run_dir is None else run_dir / "anomaly", trainer
        self._saved = False

    def written(self, step: Step) -> None:
        if self._saved or step.anomaly is None:
            return
        self._saved = True
        facts = {"anomaly": dataclasses.asdict(step.anomaly)}
        contents = capture(step.number, self._trainer, [], facts)
        if self._folder is None or contents is None:
            return
        self._folder.mkdir(exist_ok=True)
        try:
            commit(self._folder, contents, keep_last=1)
        except CheckpointNotWritten as error:
            _LOG.warning(
                "anomaly: %s", error
            )  # the checkpoint is for debugging: the run goes on without it

    def state(self) -> dict[str, Any]:
        return {"saved": self._saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._saved = state["saved"]
