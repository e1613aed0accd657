"""Linear layers that can be quantised, and patterns over their dotted names.

`obstacle` says why a linear layer can't be quantised. `adapters_of` and `routers_of`
name the layers that only a pattern of their own takes, and `by_pattern` decides which
pattern a layer takes.
"""

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

NEVER_CALLED: Final = "nn.MultiheadAttention reads its weight and never calls it"
CONVOLUTIONS: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_WILD: Final = frozenset("*?[")
_EXPERTS: Final = frozenset(("experts", "shared_expert", "shared_experts"))
#: Names of parts that choose among experts where there are any, and are ordinary layers
#: elsewhere.
_GATES: Final = frozenset(("gate", "gating", "wg"))


@dataclass(frozen=True)
class Obstacle:
    """Why a linear layer can't be quantised.

    Attributes:
        reason: in words, as a part of a message.
        is_undoable: True for a change of the layer that can be undone, False for its
            class.
    """

    reason: str
    is_undoable: bool


def is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear layer of transformers' GPT-2.

    Its weight is transposed. It is known by its name: nothing is imported for it.
    """
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def obstacle(module: nn.Module) -> Obstacle | None:
    """Return why a linear layer can't be quantised, or None if it can."""
    change = _change_that_would_be_lost(module)
    if change is not None:
        return Obstacle(change, is_undoable=True)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return Obstacle(NEVER_CALLED, is_undoable=False)
    kind = type(module)
    if kind is nn.Linear or (kind.__name__ == "Conv1D" and is_conv1d(module)):
        return None
    base = "transformers' Conv1D" if is_conv1d(module) else "nn.Linear"
    reason = f"{kind.__name__} is a subclass of {base} with a forward of its own"
    return Obstacle(reason, is_undoable=False)


def computation(module: nn.Module) -> str | None:
    """Return what computes a layer's weight or bias; None if they are parameters."""
    if parametrize.is_parametrized(module):
        names = " and ".join(repr(name) for name in module.parametrizations)  # type: ignore[union-attr]
        return (
            "it is parametrised: call torch.nn.utils.parametrize.remove_parametrizations for its "
            f"{names} first"
        )
    computed = [
        name
        for name in ("weight", "bias")
        if getattr(module, name, None) is not None and name not in module._parameters
    ]
    if computed:
        source = _source_of_computed(module, computed[0])
        return f"its {' and '.join(computed)} is computed by {source}"
    return None


def _change_that_would_be_lost(module: nn.Module) -> str | None:
    """Return the change of a layer that its replacement would not have, or None."""
    computed = computation(module)
    if computed is not None:
        return computed
    if "forward" in vars(module):
        return (
            "its forward was replaced on the object itself: undo that, quantise, and replace it "
            "again"
        )
    if vars(module).get("_compiled_call_impl") is not None:
        return "it was compiled with compile(): quantise first, compile then"
    return None


def _source_of_computed(module: nn.Module, name: str) -> str:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            return f"pruning: call torch.nn.utils.prune.remove(layer, {name!r}) first"
        if isinstance(hook, WeightNorm):
            return "weight_norm: call torch.nn.utils.remove_weight_norm(layer) first"
        if isinstance(hook, SpectralNorm):
            return "spectral_norm: call torch.nn.utils.remove_spectral_norm(layer) first"
    return "something that replaced the parameter by a tensor: make it an nn.Parameter first"


def adapters_of(model: nn.Module) -> dict[str, str]:
    """Return the modules inside PEFT's adapters by name.

    The values are the names of the adapters' parts, such as ``lora_A``.
    """
    adapters: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_peft_layer(module):
            continue
        for part in getattr(module, "adapter_layer_names", ()):
            adapter = getattr(module, part, None)
            if not isinstance(adapter, nn.Module):
                continue
            prefix = f"{name}.{part}".lstrip(".")
            for inner_name, _ in adapter.named_modules():
                adapters[f"{prefix}.{inner_name}".rstrip(".")] = part
    return adapters


def _is_peft_layer(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "BaseTunerLayer" and kind.__module__.startswith("peft.")
        for kind in type(module).__mro__
    )


def routers_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of what chooses among experts, with the part that makes it so.

    A part is a router by its name (``router``, ``modality_router``,
    ``shared_expert_gate``), or as a ``gate`` in a module that has ``experts``. All that
    is within a router belongs to it.
    """
    names = list(names)
    parts_in: dict[str, set[str]] = {}
    for name in names:
        words = name.split(".")
        for depth, word in enumerate(words):
            parts_in.setdefault(".".join(words[:depth]), set()).add(word)
    routers: dict[str, str] = {}
    for name in names:
        words = name.split(".")
        for depth, word in enumerate(words):
            siblings = parts_in[".".join(words[:depth])]
            if _is_router(word, siblings):
                routers[name] = word
                break
    return routers


def _is_router(part: str, siblings: Collection[str]) -> bool:
    """Return True for the name of a router among the names of one module's parts."""
    words = part.split("_")
    has_experts = not _EXPERTS.isdisjoint(siblings)
    is_expert_gate = words[-1] == "gate" and not {"expert", "experts"}.isdisjoint(words)
    return "router" in words or is_expert_gate or (part in _GATES and has_experts)


def linear_of(layer: Any) -> nn.Linear:
    """Return an ``nn.Linear`` with the values of a linear layer or a ``Conv1D``.

    The weight is a copy, and the bias is the layer's own.
    """
    weight = layer.weight.detach()
    values = weight.clone() if isinstance(layer, nn.Linear) else weight.t().contiguous()
    return linear_around(values, layer)


def linear_around(values: Tensor, layer: Any) -> nn.Linear:
    """Return an ``nn.Linear`` with these values, ``(out, in)``, as its weight.

    Everything else is as in ``layer``.
    """
    linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(values, requires_grad=layer.weight.requires_grad)
    linear.bias = layer.bias
    return linear.train(layer.training)


def by_pattern(
    patterns: Iterable[str],
    names: Mapping[str, Sequence[str]],
    check: Callable[[str, list[str]], None],
) -> dict[str, str]:
    """Return the pattern that each entry takes.

    It is the most literal pattern that matches one of the entry's names; the last one
    wins a tie.

    Args:
        patterns: globs over runs of whole dotted parts of a name.
        names: by which an entry can be matched, by its key.
        check: called with every pattern and the keys of the entries that it matches.
    """
    runs_of: dict[str, list[str]] = {}
    for key, all_names in names.items():
        runs_of[key] = []
        for name in all_names:
            runs_of[key] += _runs_of_parts(name)
    chosen: dict[str, str] = {}
    for pattern in sorted(patterns, key=_literal_length):
        matched = [key for key, runs in runs_of.items() if _matches(pattern, runs)]
        check(pattern, matched)
        chosen.update(dict.fromkeys(matched, pattern))
    return chosen


def _matches(pattern: str, runs: Collection[str]) -> bool:
    if pattern in runs:
        return True
    if _WILD.isdisjoint(pattern):
        return False
    return any(fnmatch.fnmatchcase(run, pattern) for run in runs)


def literal(pattern: str) -> str:
    """Return the characters of a pattern that stand for themselves.

    Brackets, and what is in them, count as such.
    """
    return pattern.replace("*", "").replace("?", "")


def _literal_length(pattern: str) -> int:
    return len(literal(pattern))


def names_part(pattern: str, part: str) -> bool:
    """Return True if a pattern names a part itself, and not only a part around it."""
    return any(literal(word) and fnmatch.fnmatchcase(part, word) for word in pattern.split("."))


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message: the part of a name most like a pattern, or ""."""
    runs: set[str] = set()
    for name in names:
        runs.update(_runs_of_parts(name))
    matches = difflib.get_close_matches(pattern, sorted(runs), n=1, cutoff=0.0)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _runs_of_parts(name: str) -> list[str]:
    """Return every run of whole dotted parts of a name."""
    words = name.split(".")
    runs = []
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            runs.append(".".join(words[start:end]))
    return runs
