"""What is allowed of formats for layers of which only names and sizes are known: before there is a model."""

from collections.abc import Mapping

from fp8manifold._checks import check_choice
from fp8manifold._layer_checks import check_blocks, check_storage
from fp8manifold._layer_spec import Formats, LayerSpec, read_formats
from fp8manifold._surgery import TIED, Tied, patterns_chosen, refuse_shared
from fp8manifold.nn import STORAGES, Storage
from fp8manifold.scaling import Granularity

__all__ = ["check_formats"]


def check_formats(
    formats: Formats,
    layers: Mapping[str, tuple[int, int]],
    storage: Storage = "master",
    *,
    granularity: Granularity = "channel",
    keep_remainder: bool = False,
    shared: Mapping[str, tuple[str, ...]] | None = None,
    tied: Tied = "refuse",
) -> dict[str, LayerSpec]:
    """Read formats as :func:`quantize_model` does, and refuse what it would refuse of them; no model is needed.

    Args:
        formats, storage, granularity, keep_remainder, tied: as in :func:`quantize_model`.
        layers: ``(in_features, out_features)`` of every linear layer by its dotted name, in the model's order.
        shared: for a layer whose weight is another module's too, the names of that weight; None: there is none.

    Returns:
        The specification of every pattern, which :func:`quantize_model` takes as its ``formats``.

    Raises:
        TypeError: formats of another type.
        ValueError: a pattern that matches no layer; an unknown format or option, one that the storage does not have,
            or blocks that do not divide a row; a layer whose weight is shared under ``tied="refuse"``.

    Example:
        >>> layers = {"attn.qkv": (64, 192), "mlp.fc": (64, 256)}
        >>> {name: spec.weight.format.name for name, spec in check_formats({"attn": "e4m3"}, layers).items()}
        {'attn': 'E4M3'}
        >>> check_formats({"atn": "E4M3"}, layers)
        Traceback (most recent call last):
        ValueError: pattern 'atn' matches none of the 2 linear layers; did you mean 'attn'?
    """
    check_choice("storage", storage, STORAGES)
    check_choice("tied", tied, TIED)
    specs = read_formats(formats, granularity)
    chosen = patterns_chosen(specs, list(layers))
    quantized = {name: pattern for name, pattern in chosen.items() if not specs[pattern].quantizes_nothing}
    together = {name: names for name, names in (shared or {}).items() if name in quantized}
    if tied == "refuse":
        refuse_shared(together)
    kinds = dict.fromkeys((p, layers[name]) for name, p in quantized.items() if tied != "leave" or name not in together)
    for pattern, sizes in kinds:
        _check_layer(specs[pattern], sizes, storage, keep_remainder)
    return specs


def _check_layer(spec: LayerSpec, sizes: tuple[int, int], storage: Storage, keep_remainder: bool) -> None:
    check_storage(storage, spec, keep_remainder)
    check_blocks(spec.operands, *sizes)
