"""Values of buffers that no state dict holds, in a model that was made without values.

Such buffers (frequencies of rotations, positions) follow from a module's settings. They
are computed by what the module, or the model of transformers that it is in, has for it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

#: Before a computation buffers are filled with one of these. If it runs over both and
#: the results differ, it did not compute all buffers.
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
        missing = []
        for entry in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(entry)
            if buffer is not None and buffer.is_meta:
                missing.append(entry)
        if missing:
            computations = list(_computations(model, name, module))
            computed = _computed_by_first(module, missing, computations)
            for entry, value in computed.items():
                buffer_name = f"{name}.{entry}".lstrip(".")
                if value is None:
                    raise ValueError(
                        f"buffer {buffer_name!r} has no values, and no state dict holds it: give "
                        f"its {type(module).__name__} a reset_parameters() that computes it, or "
                        "replace the module by one made outside of torch.device('meta')"
                    )
                values[buffer_name] = value
    return values


def _computations(model: nn.Module, name: str, module: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that may compute a module's buffers, nearest model first."""
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


def _computed_by_first(
    module: nn.Module, entries: list[str], computations: list[Callable[[], Any]]
) -> dict[str, Tensor | None]:
    """Return buffers by the first function that computes all, or None for each."""
    nothing: dict[str, Tensor | None] = dict.fromkeys(entries)
    for compute in computations:
        try:
            first, second = (
                _computed_over(module, entries, compute, filling) for filling in _FILLINGS
            )
        except RuntimeError:
            # of torch: the function needs parameters, which have no values here
            continue
        if all(torch.equal(first[entry], second[entry]) for entry in entries):
            return {**first}
    return nothing


@torch.no_grad()
def _computed_over(
    module: nn.Module, entries: list[str], compute: Callable[[], Any], filling: int
) -> dict[str, Tensor]:
    """Return the buffers after a computation that began with a filling.

    The module does not change.
    """
    old_buffers = dict(module._buffers)
    old_parameters = dict(module._parameters)
    for entry, buffer in old_buffers.items():
        if buffer is not None and entry in entries:
            module._buffers[entry] = torch.full_like(buffer, filling, device="cpu")
        elif buffer is not None:
            module._buffers[entry] = buffer.clone()
    try:
        # random numbers for parameters, which have no values here, don't count
        with torch.random.fork_rng(devices=[]):
            compute()
        return {entry: torch.as_tensor(module._buffers[entry]) for entry in entries}
    finally:
        module._buffers = old_buffers
        module._parameters = old_parameters
