"""PEFT's adapters: the small layers beside a frozen one, which stay float unless a pattern names them."""

import fnmatch
import warnings
from collections.abc import Mapping
from typing import Final

from torch import nn

from fp8manifold.nn._selection import literal

_SHOWN: Final = 3


def adapters_of(model: nn.Module) -> dict[str, str]:
    """The modules inside PEFT's adapters by name, with the name of the adapters' part, such as ``lora_A``."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_tuned(module):
            continue
        for part in getattr(module, "adapter_layer_names", ()):
            if isinstance(held := getattr(module, part, None), nn.Module):
                prefix = f"{name}.{part}".lstrip(".")
                found |= {f"{prefix}.{inner}".rstrip("."): part for inner, _ in held.named_modules()}
    return found


def _is_tuned(module: nn.Module) -> bool:
    """Whether it is a layer with adapters beside it; nothing is imported for it."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "BaseTunerLayer" and kind.__module__.startswith("peft.") for kind in kinds)


def names_part(pattern: str, part: str) -> bool:
    """Whether a pattern means the adapters themselves, and not all that is in some part of the model."""
    return any(literal(word) and fnmatch.fnmatchcase(part, word) for word in pattern.split("."))


def without_adapters(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, str]:
    """The patterns of layers by name, but for adapters that are not named; one warning says which are left.

    Warns:
        UserWarning: adapters are left as they are.
    """
    adapters = adapters_of(model)
    left = [name for name, pattern in chosen.items() if name in adapters and not names_part(pattern, adapters[name])]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        warnings.warn(
            f"adapters of PEFT stay as they are: {', '.join(left[:_SHOWN])}{more}. They are small, and trained; "
            f"a pattern that names them, such as {adapters[left[0]]!r}, quantises them",
            UserWarning,
            stacklevel=5,
        )
    return {name: pattern for name, pattern in chosen.items() if name not in left}
