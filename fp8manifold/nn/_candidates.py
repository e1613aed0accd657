"""Which modules are linear layers, and what keeps some of them from being replaced by quantised ones."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["Obstacle", "is_conv1d", "is_linear", "obstacle"]


@dataclass(frozen=True)
class Obstacle:
    """Why a linear layer can't be replaced.

    Args:
        reason: what it is, and what to do about it.
        is_done_to_it: whether it is something that was done to the layer, and can be undone; otherwise it is its class.
    """

    reason: str
    is_done_to_it: bool


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of transformers' GPT-2, with a transposed weight; nothing is imported for it."""
    return any(c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils" for c in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Whether a pattern may mean this module."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def obstacle(module: nn.Module) -> Obstacle | None:
    """What keeps a linear layer from being replaced."""
    done = _done(module)
    if done is not None:
        return Obstacle(done, True)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return Obstacle("nn.MultiheadAttention reads its weight and never calls it", False)
    kind = type(module)
    if kind is nn.Linear or (kind.__name__ == "Conv1D" and is_conv1d(module)):
        return None
    base = "transformers' Conv1D" if is_conv1d(module) else "nn.Linear"
    return Obstacle(f"{kind.__name__} is a subclass of {base} with a forward of its own", False)


def _done(module: nn.Module) -> str | None:
    """What was done to a layer that would be lost."""
    if parametrize.is_parametrized(module):
        names = " and ".join(repr(name) for name in module.parametrizations)  # type: ignore[union-attr]
        return f"it is parametrised: call torch.nn.utils.parametrize.remove_parametrizations for its {names} first"
    computed = [
        name
        for name in ("weight", "bias")
        if getattr(module, name, None) is not None and name not in module._parameters
    ]
    if computed:
        return f"its {' and '.join(computed)} is computed by {_what_computes(module, computed[0])}"
    if "forward" in vars(module):
        return "its forward was replaced on the object itself: take that back first, and do it again afterwards"
    if vars(module).get("_compiled_call_impl") is not None:
        return "it was compiled with compile(): quantise first, compile then"
    return None


def _what_computes(module: nn.Module, name: str) -> str:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            return f"pruning: call torch.nn.utils.prune.remove(layer, {name!r}) first"
        if isinstance(hook, WeightNorm):
            return "weight_norm: call torch.nn.utils.remove_weight_norm(layer) first"
        if isinstance(hook, SpectralNorm):
            return "spectral_norm: call torch.nn.utils.remove_spectral_norm(layer) first"
    return "something that put another tensor in place of the parameter: make it one first"
