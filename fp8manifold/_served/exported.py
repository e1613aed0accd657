"""Units of a model that this library quantised: what an export of it has.

A server that was made from the exported folder takes these tensors: names are those
that transformers writes, so experts, which the model has in one stack, are one matrix
each, and codes that no linear layer has are floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import import_optional
from fp8manifold._base.wrappers import plain_name
from fp8manifold._doors.exchange import (
    ExportLayout,
    ScaleSharing,
    check_exportable,
    check_no_adapters,
    codes_of_floats,
    computed_names,
    is_transformers_model,
    settings_of,
)
from fp8manifold._encoded.dispatch import FLOAT8
from fp8manifold._encoded.stored_scale import are_powers_of_two, exponents_of
from fp8manifold._published.layout import entries_of, places_of
from fp8manifold._published.places import Place
from fp8manifold._published.stored_weight import StoredWeight, scale_shapes, torch_dtype
from fp8manifold._ranks import local_of, share_of
from fp8manifold._served.unit import CodesUnit, FloatUnit, TensorMetadata, Unit
from fp8manifold.formats import FloatFormat
from fp8manifold.nn._carried import turned_names
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._scalers import Scale
from fp8manifold.scaling import BLOCK_SIZE, StoredGranularity
from fp8manifold.tensor import FP8Tensor

_SHARING: Final = {
    "tensor": ScaleSharing.TENSOR,
    "channel": ScaleSharing.CHANNEL,
    "row": ScaleSharing.CHANNEL,
    "block": ScaleSharing.BLOCK,
    "square": ScaleSharing.SQUARE,
}
"""What settings call the weights that share a scale."""
_CODES: Final = "F8_E4M3"
"""The dtype of codes, as files name it."""


def exported_units(model: nn.Module, layout: ExportLayout) -> list[Unit]:
    """Return what an export of a model has, in the order of its parameters.

    Raises:
        TypeError, ValueError: as :func:`fp8manifold.files.layout_state_dict`.
    """
    check_no_adapters(model)
    entries = entries_of(model)
    layers = _layers(model, layout)
    if not layers:
        raise ValueError("the model has no quantised weight: call quantize_model first")
    turned = {plain_name(name) for name in turned_names(model)}
    order = {name: number for number, name in enumerate(entries)}
    units: list[Unit] = []
    for name, (place, shape) in _places(model, entries, turned).items():
        entry = entries[place.target]
        if place.target in layers:
            units.append(_layer_unit(name, place, shape, layers[place.target], layout))
        else:
            header = TensorMetadata(name, entry.dtype, shape)
            units.append(FloatUnit(header, place, entry, place.target in turned))
    units.sort(key=lambda unit: order[unit.target])
    return units


@dataclass(frozen=True)
class _Described:
    """What settings say of a weight."""

    name: str
    format: FloatFormat
    sharing: ScaleSharing


def exported_settings(model: nn.Module, layout: ExportLayout) -> dict[str, Any]:
    """Return ``quantization_config`` of an export of a model, which may be sharded."""
    described = []
    for name, layer in _layers(model, layout).items():
        shape = tuple(layer.weight.shape)
        stored = _stored_of(name, shape, layer, layout)
        sharing = _SHARING[stored.granularity]
        if sharing is ScaleSharing.BLOCK and stored.scale_dtype == "F32":
            sharing = ScaleSharing.GROUP
        described.append(_Described(name, stored.format, sharing))
    return settings_of(model, layout, described, "float")


def _layers(model: nn.Module, layout: ExportLayout) -> dict[str, QuantizedLinear]:
    """Return the quantised layers by the names of their weights."""
    layers = {}
    for wrapped_name, layer in model.named_modules():
        name = plain_name(wrapped_name)
        if isinstance(layer, QuantizedLinear) and layer.weight_format is not None:
            check_exportable(name, layer, layer.weight_format, layout)
            layers[f"{name}.weight".lstrip(".")] = layer
    return layers


def _places(
    model: Any, entries: Mapping[str, Tensor], turned: set[str]
) -> dict[str, tuple[Place, tuple[int, ...]]]:
    """Return place and shape of every tensor by the name that files have for it."""
    shapes = {}
    for name in computed_names(model, entries):
        shape = tuple(entries[name].shape)
        shapes[name] = (*shape[:-2], shape[-1], shape[-2]) if name in turned else shape
    places = {name: (Place(name), shape) for name, shape in shapes.items()}
    if not is_transformers_model(model):
        return places
    loading = import_optional("transformers.core_model_loading", "hf", "served_weights")
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    written = loading.revert_weight_conversion(model, state)
    if written.keys() == state.keys():
        return places
    file_shapes = {name: tuple(value.shape) for name, value in written.items()}
    places = {
        name: (place, file_shapes[name]) for name, place in places_of(model, file_shapes).items()
    }
    lost = sorted(written.keys() - places.keys())
    if lost:
        raise ValueError(
            f"transformers writes {lost[0]!r}, and would not read it into the model: this model "
            "can't be served"
        )
    return places


def _layer_unit(
    name: str, place: Place, shape: tuple[int, ...], layer: QuantizedLinear, layout: ExportLayout
) -> CodesUnit:
    entry = layer.weight
    stored = _stored_of(name, shape, layer, layout)
    if isinstance(local_of(entry), FP8Tensor):
        return CodesUnit(stored, place, entry, _written_parts)
    if share_of(entry) is not None:
        raise TypeError(f"{place.target!r} is sharded: only weights in codes are served as shards")
    return CodesUnit(stored, place, partial(_encoded, layer, stored), _written_parts)


def _stored_of(
    name: str, shape: tuple[int, ...], layer: QuantizedLinear, layout: ExportLayout
) -> StoredWeight:
    """Return the description of a layer's weight, or of a part of it, in a layout."""
    weight = local_of(layer.weight)
    granularity: str | None
    if isinstance(weight, FP8Tensor):
        granularity = weight.granularity
    else:
        granularity = layer.spec.operands["weight"].granularity
    if granularity == "block" and shape[-1] == BLOCK_SIZE:
        granularity = "channel"
    has_exponents = granularity == "block" and _has_exponents(layer)
    return _stored(name, shape, granularity, has_exponents, layout)


def _has_exponents(layer: QuantizedLinear) -> bool:
    """Return whether all scales of blocks are powers of two."""
    weight = local_of(layer.weight)
    if not isinstance(weight, FP8Tensor):
        scaler = layer.weight_scaler
        # a measured scale of blocks is; one that was given is looked at
        is_measured = isinstance(scaler, Scale) and scaler.policy != "static"
        return is_measured or are_powers_of_two(layer.weight_scale())
    if weight.exponents is not None:
        return True
    # the rows of other processes are not seen
    return share_of(layer.weight) is None and are_powers_of_two(weight.scale)


def _stored(
    name: str,
    shape: tuple[int, ...],
    granularity: str | None,
    has_exponents: bool,
    layout: ExportLayout,
) -> StoredWeight:
    """Return the description of a weight in a layout."""
    suffix = "_scale_inv" if layout is ExportLayout.FP8 else "_scale"
    own_shape = next(known for kind, known in scale_shapes(shape) if kind == granularity)
    return StoredWeight(
        name=name,
        codes=name,
        scale=name + suffix,
        format=next(fmt for fmt in FLOAT8 if fmt.name == "E4M3"),
        granularity=cast("StoredGranularity", granularity),
        shape=shape,
        code_dtype=_CODES,
        code_shape=shape,
        scale_dtype="U8" if granularity == "block" and has_exponents else "F32",
        scale_shape=own_shape or (1,),
        file="the export",
    )


def _encoded(layer: QuantizedLinear, stored: StoredWeight) -> FP8Tensor:
    """Return the codes of a layer whose weights are stored as floats."""
    name = stored.name.removesuffix(".weight")
    codes, scale = codes_of_floats(name, layer, stored.format)
    return FP8Tensor.from_codes(codes, scale, stored.format, block_size=stored.block_size, seed=0)


def _written_parts(stored: StoredWeight, weight: FP8Tensor) -> dict[str, Tensor]:
    """Return codes and scales as the exports write them."""
    if torch_dtype(stored.scale_dtype) is torch.uint8:
        scale = exponents_of(weight.scale) if weight.exponents is None else weight.exponents
    else:
        scale = weight.scale
    return {
        stored.codes: weight.codes.view(torch_dtype(stored.code_dtype)),
        stored.scale: scale.reshape(stored.scale_shape),
    }
