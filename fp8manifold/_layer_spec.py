"""What is quantised in which layer: the specification of a layer, and reading a mapping from patterns to them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from fp8manifold._checks import check_choice
from fp8manifold.fake_quant import STE, STES
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.scaling import POLICIES, STORAGE_GRANULARITIES, Policy, StorageGranularity

__all__ = ["NONE", "Formats", "LayerSpec", "read_formats"]

NONE: Final = "none"
"""The pattern's value that leaves a layer as it is."""


@dataclass(frozen=True)
class LayerSpec:
    """What is quantised in a linear layer, and how.

    Args:
        weight: format of the weight; None (or ``"none"``) leaves it as it is.
        activation: format of the layer's input; None leaves it as it is.
        granularity: of the weight's scale: one for the ``tensor``, for each ``channel`` (row), or with storage ``fp8``
            for each ``block`` of 32 along a row.  Activations have one scale a tensor.
        policy: of the amax scales (activations, and weights with a master copy): ``dynamic`` or ``static``, frozen
            after the first forward pass.  Stored weights always have a static power-of-two scale.
        ste: the straight-through gradient, as in :func:`fake_quantize`.

    Raises:
        TypeError, ValueError: a format or option that can't be read.

    Example:
        >>> LayerSpec("E4M3", activation="E5M2").weight.name
        'E4M3'
    """

    weight: FloatFormat | None
    activation: FloatFormat | None
    granularity: StorageGranularity
    policy: Policy
    ste: STE

    def __init__(
        self,
        weight: FormatLike | None = None,
        activation: FormatLike | None = None,
        granularity: StorageGranularity = "channel",
        policy: Policy = "dynamic",
        ste: STE = "identity",
    ) -> None:
        check_choice("granularity", granularity, STORAGE_GRANULARITIES)
        check_choice("policy", policy, POLICIES)
        check_choice("ste", ste, STES)
        values = (_format_or_none(weight), _format_or_none(activation), granularity, policy, ste)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def quantizes_nothing(self) -> bool:
        """Whether the layer stays as it is."""
        return self.weight is None and self.activation is None


Formats = FormatLike | LayerSpec | Mapping[str, FormatLike | LayerSpec | Mapping[str, Any] | None]


def _format_or_none(fmt: FormatLike | None) -> FloatFormat | None:
    return None if fmt is None or (isinstance(fmt, str) and fmt.lower() == NONE) else as_format(fmt)


def read_formats(formats: Formats, granularity: StorageGranularity) -> dict[str, LayerSpec]:
    """A specification for every pattern; one format alone is that of the pattern ``*``."""
    if not isinstance(formats, Mapping):
        formats = {"*": formats}
    if not formats:
        raise ValueError("formats is empty: give a format, or a mapping from layer pattern to format")
    for pattern in formats:
        if not isinstance(pattern, str):
            raise TypeError(f"formats has the key {pattern!r}: a layer pattern must be a string")
    return {pattern: _read_spec(pattern, value, granularity) for pattern, value in formats.items()}


def _read_spec(pattern: str, value: object, granularity: StorageGranularity) -> LayerSpec:
    if isinstance(value, LayerSpec):
        return value
    if value is None or isinstance(value, str | FloatFormat):
        return LayerSpec(value, granularity=granularity)
    if not isinstance(value, Mapping):
        raise TypeError(f"formats[{pattern!r}] must be a format, a LayerSpec or a dict, not {type(value).__name__}")
    known = [field.name for field in fields(LayerSpec)]
    for key in value:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"formats[{pattern!r}] has an unknown key {key!r}: one of {', '.join(known)}; did you mean {nearest!r}?"
            )
    return LayerSpec(**{"granularity": granularity, **value})
