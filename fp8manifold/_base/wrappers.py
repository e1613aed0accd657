"""Names and modules without the wrappers that torch puts around them.

There are wrappers of compilation, of checkpointed activations and of parallel training.
"""

from typing import Final

from torch import nn

#: names that torch's wrappers give the module inside
_INNER_NAMES: Final = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "_fpw_module",
)


def plain_name(name: str) -> str:
    """Return the name that a parameter, buffer or module has without torch's wrappers.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _INNER_NAMES)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of torch, or the module itself."""
    inner = _inner_module(model)
    while inner is not None:
        model = inner
        inner = _inner_module(model)
    return model


def _inner_module(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    children = vars(model)["_modules"]
    for name in _INNER_NAMES:
        child: nn.Module | None = children.get(name)
        if child is not None:
            return child
    return None
