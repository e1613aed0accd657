"""Names and modules without the wrappers that torch puts around them: of compilation,
checkpointed activations and parallel training.
"""

from typing import Final

from torch import nn

#: names under which torch's wrappers have the module that they wrap
_WRAPPED: Final = (
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
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that wrappers of torch are around, or the module itself."""
    inner = _wrapped_by(model)
    while inner is not None:
        model, inner = inner, _wrapped_by(inner)
    return model


def _wrapped_by(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    children = vars(model)["_modules"]
    return next((children[name] for name in _WRAPPED if name in children), None)
