"""Linear layers that can be quantised, what is in the way of the others, and patterns over their dotted names."""

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fp8manifold.nn._spec import LayerSpec

_WILD: Final = frozenset("*?[")


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


def patterns_chosen(
    specs: Mapping[str, LayerSpec], names: Sequence[str], left: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The pattern that every layer takes, by name; ``left`` says why layers are left that can't be quantised.

    Raises:
        ValueError: a pattern that matches no layer, or none that can be quantised.
    """
    parts = {name: parts_of_name(name) for name in names}
    chosen: dict[str, str] = {}
    for pattern in sorted(specs, key=lambda p: len(literal(p))):
        matched = [name for name in names if matches(pattern, parts[name])]
        if not matched or (left.keys() >= set(matched) and not specs[pattern].quantizes_nothing):
            raise ValueError(_no_match(pattern, names, {name: left[name] for name in matched}, left))
        chosen.update(dict.fromkeys(matched, pattern))
    return chosen


def check_matched(what: str, pattern: str, matched: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a pattern of an option called ``what`` that matches none of the parameters there are."""
    if not matched:
        raise ValueError(
            f"{what}: pattern {pattern!r} matches none of the {len(names)} parameters of two or more dimensions that "
            f"no pattern of formats has taken{_nearest(pattern, names)}"
        )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    parts = sorted({part for name in names for part in parts_of_name(name)})
    nearest = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def literal(pattern: str) -> str:
    """What of a pattern stands for itself."""
    return pattern.replace("*", "").replace("?", "")


def _no_match(pattern: str, names: Sequence[str], matched: Mapping[str, str], left: Collection[str]) -> str:
    """What to say of a pattern that quantises nothing."""
    count = sum(name not in left for name in names)
    if matched:
        name, reason = next(iter(matched.items()))
        return (
            f"pattern {pattern!r} matches none of the {count} linear layers that can be quantised, but {name!r}, which "
            f"is left: {reason}"
        )
    return f"pattern {pattern!r} matches none of the {count} linear layers{_nearest(pattern, names)}"


def parts_of_name(name: str) -> list[str]:
    """Every run of whole dotted parts of a name."""
    words = name.split(".")
    return [".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]


def matches(pattern: str, parts: Sequence[str]) -> bool:
    return pattern in parts or (
        not _WILD.isdisjoint(pattern) and any(fnmatch.fnmatchcase(part, pattern) for part in parts)
    )
