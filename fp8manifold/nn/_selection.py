"""Linear layers that can be quantised, why others can't be, and patterns over their
dotted names.
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
_GATES: Final = frozenset(("gate", "gating", "wg"))
"""Names of parts that choose among experts where there are any, and are ordinary layers
elsewhere.
"""


@dataclass(frozen=True)
class Obstacle:
    reason: str
    is_done_to_it: bool  #: True for a change of the layer that can be undone, False for its class.


def is_conv1d(module: nn.Module) -> bool:
    """True for the linear layer of transformers' GPT-2, with a transposed weight;
    nothing is imported for it.
    """
    return any(
        c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils"
        for c in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def obstacle(module: nn.Module) -> Obstacle | None:
    done = _done(module)
    if done is not None:
        return Obstacle(done, True)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return Obstacle(NEVER_CALLED, False)
    kind = type(module)
    if kind is nn.Linear or (kind.__name__ == "Conv1D" and is_conv1d(module)):
        return None
    base = "transformers' Conv1D" if is_conv1d(module) else "nn.Linear"
    return Obstacle(f"{kind.__name__} is a subclass of {base} with a forward of its own", False)


def computation(module: nn.Module) -> str | None:
    """What computes a layer's weight or bias, which is no parameter then, or None."""
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
    return None


def _done(module: nn.Module) -> str | None:
    """The change to a layer that would be lost, or None."""
    computed = computation(module)
    if computed is not None:
        return computed
    if "forward" in vars(module):
        return "its forward was replaced on the object itself: undo that, quantise, and replace it again"
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
    return "something that replaced the parameter by a tensor: make it an nn.Parameter first"


def adapters_of(model: nn.Module) -> dict[str, str]:
    """The modules inside PEFT's adapters by name, with the name of the adapters' part,
    such as ``lora_A``.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        if not any(
            kind.__name__ == "BaseTunerLayer" and kind.__module__.startswith("peft.")
            for kind in kinds
        ):
            continue
        for part in getattr(module, "adapter_layer_names", ()):
            if isinstance(held := getattr(module, part, None), nn.Module):
                prefix = f"{name}.{part}".lstrip(".")
                found |= {
                    f"{prefix}.{inner}".rstrip("."): part for inner, _ in held.named_modules()
                }
    return found


def routers_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of what chooses among experts, with the part that says so.

    A part is a router by its name (``router``, ``modality_router``,
    ``shared_expert_gate``), or as a ``gate`` beside ``experts``; so is all within it.
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
            if _is_router(word, parts_in[".".join(words[:depth])]):
                routers[name] = word
                break
    return routers


def _is_router(part: str, beside: Collection[str]) -> bool:
    """True for the name of a router among the names of parts of one module."""
    words = part.split("_")
    has_experts = not _EXPERTS.isdisjoint(beside)
    is_expert_gate = words[-1] == "gate" and not {"expert", "experts"}.isdisjoint(words)
    return "router" in words or is_expert_gate or (part in _GATES and has_experts)


def linear_of(layer: Any) -> nn.Linear:
    """An ``nn.Linear`` with a copy of the weight of a linear layer or ``Conv1D``, and
    with its bias itself.
    """
    weight = layer.weight.detach()
    return linear_around(
        weight.clone() if isinstance(layer, nn.Linear) else weight.t().contiguous(), layer
    )


def linear_around(values: Tensor, layer: Any) -> nn.Linear:
    """An ``nn.Linear`` with these values, ``(out, in)``, for its weight, and everything
    else of a layer.
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
    """The pattern that each thing takes: the most literal that matches one of its
    names, of two alike the later one.

    ``check`` is called with every pattern and the things it matches.
    """
    parts = {each: [part for name in its for part in _parts(name)] for each, its in names.items()}
    chosen: dict[str, str] = {}
    for pattern in sorted(patterns, key=lambda p: len(literal(p))):
        wild = not _WILD.isdisjoint(pattern)
        matched = [
            each
            for each, its in parts.items()
            if pattern in its or (wild and any(fnmatch.fnmatchcase(part, pattern) for part in its))
        ]
        check(pattern, matched)
        chosen.update(dict.fromkeys(matched, pattern))
    return chosen


def literal(pattern: str) -> str:
    """The characters of a pattern that stand for themselves."""
    return pattern.replace("*", "").replace("?", "")


def names_part(pattern: str, part: str) -> bool:
    """True if a pattern names a part of a model itself, and not only a part around it."""
    return any(literal(word) and fnmatch.fnmatchcase(part, word) for word in pattern.split("."))


def nearest(pattern: str, names: Iterable[str]) -> str:
    parts = sorted({part for name in names for part in _parts(name)})
    found = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)
    return f"; did you mean {found[0]!r}?" if found else ""


def _parts(name: str) -> list[str]:
    """Every run of whole dotted parts of a name."""
    words = name.split(".")
    return [".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
