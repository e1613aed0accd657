"""What a checkpoint holds of a run, and how a run is made to go on from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nanogpt_bench.checkpoint import Contents
from nanogpt_bench.checkpoint.format import capture_tree, plain_copy, restore_tree
from nanogpt_bench.model.weights import fill, tensors_of
from nanogpt_bench.monitors.points import Observer
from nanogpt_bench.setup.optimizers import sdnq_state, sdnq_state_back
from nanogpt_bench.system.errors import BenchError, one_line

if TYPE_CHECKING:
    from nanogpt_bench.training.trainer import Trainer

#: what may go wrong with a state that was not made by this code
_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def capture(step: int, trainer: Trainer, observers: Sequence[Observer], facts: dict[str, Any]) -> Contents | None:
    """Return everything that the steps after `step` depend on, and `facts` beside it; all tensors are copies.

    Model, optimizer, observers and random generators are taken. Batches and schedules are functions of the step, and
    need not be. Scales, histories of magnitudes and counters of random bits are the model's.

    Of several processes, which hold the same, the first gets it and the others None.
    """
    if not trainer.ranks.first:
        return None
    files = {"model": {name: plain_copy(tensor) for name, tensor in tensors_of(trainer.model).items()}}
    outlines = {}
    for stem, tree in (
        ("optimizer", {"state": _saved(trainer)}),
        ("observers", {type(observer).__name__: observer.state() for observer in observers}),
        ("random", _random_states(trainer.device)),
    ):
        files[stem], outlines[stem] = capture_tree(tree)
    return Contents(step, files, facts={"step": step, **facts, "state": outlines})


def restore(contents: Contents, trainer: Trainer, observers: Sequence[Observer]) -> None:
    """Put a run that has just been made into the state that `capture` took; the tensors are the run's own afterwards.

    An observer that the checkpoint knows nothing of begins anew.

    Raises:
        BenchError: the state is that of another model, optimizer or monitor.
    """
    source = f"the checkpoint of step {contents.step}"
    fill(trainer.model, contents.tensors.get("model", {}), contents.metadata.get("model", {}), f"{source}'s weights")
    with _fitting(f"{source} does not fit the optimizer"):
        _restore_optimizer(contents, trainer, _state_classes(trainer))
    with _fitting(f"{source} does not fit the monitors"):
        states = _tree(contents, "observers", device=trainer.device)
        for observer in observers:
            if saved := states.get(type(observer).__name__):
                observer.load_state(saved)
    with _fitting(f"{source} has no random state"):
        states = _tree(contents, "random")
        torch.set_rng_state(states["cpu"])
        if trainer.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], trainer.device)


def _of_sdnq(trainer: Trainer) -> bool:
    return (trainer.config.optimizer.name or "").startswith("sdnq")


def _saved(trainer: Trainer) -> dict[str, Any]:
    state = trainer.optimizer.state_dict()
    return sdnq_state(state) if _of_sdnq(trainer) else state


def expected_bytes(trainer: Trainer) -> int:
    """Return about what a checkpoint will take: the model and two float32 averages of every weight."""
    averages = sum(8 * parameter.numel() for parameter in trainer.model.parameters())
    return averages + sum(tensor.nbytes for tensor in tensors_of(trainer.model).values())


@contextmanager
def _fitting(what: str) -> Iterator[None]:
    try:
        yield
    except BenchError:
        raise
    except _MISFITS as error:
        raise BenchError(f"{what}: {type(error).__name__}: {one_line(error)}") from None


def _tree(contents: Contents, stem: str, classes: Sequence[type] = (), device: torch.device | None = None) -> Any:
    tensors = contents.tensors.get(stem, {})
    moved = tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}
    return restore_tree(moved, contents.facts["state"][stem], classes)


def _restore_optimizer(contents: Contents, trainer: Trainer, classes: Sequence[type]) -> None:
    tree = _tree(contents, "optimizer", classes)
    state = sdnq_state_back(tree["state"], trainer.optimizer) if _of_sdnq(trainer) else tree["state"]
    if trainer.config.optimizer.writeback_end is not None:  # which a state of the last steps has already
        for group, saved in zip(trainer.optimizer.param_groups, state["param_groups"], strict=True):
            group["writeback"] = saved["writeback"]
    trainer.optimizer.load_state_dict(state)


def _random_states(device: torch.device) -> dict[str, Any]:
    """Those of the generators that dropout draws from; all other random numbers are functions of a seed and a count."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _state_classes(trainer: Trainer) -> tuple[type, ...]:
    """Return the tensor subclasses that the optimizer's state may consist of."""
    if not (trainer.config.optimizer.name or "").startswith("torchao"):
        return ()
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    return OptimState8bit, OptimStateFp8
