"""Values of buffers that no state dict holds, in a model that was made without values.

Such buffers (frequencies of rotations, positions) follow from a module's settings. They
are computed by what the module, or the model of transformers that it is in, has for it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

#: a buffer is computed over each: one that keeps any of the fillings was not computed
_FILLINGS: Final = (0, 1)


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return values on the CPU for all buffers without values that no state dict holds.

    The model does not change.

    Raises:
        ValueError: names a buffer that neither ``_init_weights`` of its model of
            transformers nor its module's ``reset_parameters`` computes.
    """
    values: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        missing = [
            entry
            for entry in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers.get(entry)) is not None and buffer.is_meta
        ]
        if missing:
            made = _computed(module, missing, list(_ways(model, name, module)))
            for entry, value in made.items():
                buffer_name = f"{name}.{entry}".lstrip(".")
                if value is None:
                    raise ValueError(
                        f"buffer {buffer_name!r} has no values, and no state dict holds it: give "
                        f"its {type(module).__name__} a reset_parameters() that computes it, or "
                        f"put in one that was made outside of torch.device('meta')"
                    )
                values[buffer_name] = value
    return values


def _ways(model: nn.Module, name: str, module: Any) -> Iterator[Callable[[], Any]]:
    """Functions that may compute a module's buffers, the nearest model's first."""
    owner = name
    while True:
        initialise = getattr(model.get_submodule(owner), "_init_weights", None)
        if callable(initialise):
            yield partial(initialise, module)
        if not owner:
            break
        owner = owner.rpartition(".")[0]
    if callable(getattr(module, "reset_parameters", None)):
        yield module.reset_parameters


def _computed(
    module: nn.Module, entries: list[str], ways: list[Callable[[], Any]]
) -> dict[str, Tensor | None]:
    """What the first way that computes all of a module's buffers makes of them."""
    nothing: dict[str, Tensor | None] = dict.fromkeys(entries)
    for compute in ways:
        try:
            first, second = (_over(module, entries, compute, filling) for filling in _FILLINGS)
        except RuntimeError:
            # of torch, whose parameters have no values here: this way needs them
            continue
        if all(torch.equal(first[entry], second[entry]) for entry in entries):
            return {**first}
    return nothing


@torch.no_grad()
def _over(
    module: nn.Module, entries: list[str], compute: Callable[[], Any], filling: int
) -> dict[str, Tensor]:
    """The buffers after a computation that began with a filling; the module is as before."""
    before = dict(module._buffers), dict(module._parameters)
    for entry, buffer in before[0].items():
        if buffer is not None and entry in entries:
            module._buffers[entry] = torch.full_like(buffer, filling, device="cpu")
        elif buffer is not None:
            module._buffers[entry] = buffer.clone()
    try:
        # what it draws for parameters, which have no values, is drawn for nothing
        with torch.random.fork_rng(devices=[]):
            compute()
        return {entry: torch.as_tensor(module._buffers[entry]) for entry in entries}
    finally:
        module._buffers, module._parameters = before
