"""A quantised model as floats that any library reads, and the side file beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from fp8manifold._base.wrappers import plain_name
from fp8manifold._doors.grids import Decoded
from fp8manifold._doors.quantizer import check_ties, checked_state
from fp8manifold._doors.side_file import Content, SideFile
from fp8manifold._ranks import share_of
from fp8manifold.nn._carried import parameter_names, turned_names
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._parts import PARTS, is_in_codes, unflatten
from fp8manifold.nn._saved import parameters_recipe_of, recipe_of
from fp8manifold.tensor import FP8Tensor

_WEIGHT_PARTS: Final = frozenset(f"weight{suffix}" for suffix in PARTS[1:])


@dataclass
class Saved:
    """What is written of a model.

    Attributes:
        side: the side file.
        floats: the tensors of a float model, by its names; tied ones are one object.
            Without those of weights in codes where these are not decoded.
        weights: those of them that are in codes, by their first names.
    """

    side: SideFile
    floats: dict[str, Tensor | Decoded] = field(default_factory=dict)
    weights: dict[str, FP8Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The floats with all weights decoded at once."""
        values = {}
        for value in self.floats.values():
            if isinstance(value, Decoded) and id(value) not in values:
                values[id(value)] = value.to_write.whole()
        return {
            name: value if isinstance(value, Tensor) else values[id(value)]
            for name, value in self.floats.items()
        }


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model has a quantised layer or a parameter in codes."""
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return True
    return any(is_in_codes(parameter) for parameter in model.parameters())


@torch.no_grad()
def saved_form(
    model: nn.Module, given_state: Mapping[str, Tensor] | None = None, *, with_floats: bool = True
) -> Saved:
    """Return what is written of a model.

    Args:
        model: of transformers, quantised.
        given_state: a copy of its state, to be written in its place.
        with_floats: whether weights in codes are decoded.

    Raises:
        TypeError: a sharded weight.
        ValueError: a layer that can't be saved.
    """
    check_ties(model)
    side = SideFile(
        Content.FLOATS,
        recipe_of(model),
        parameters_recipe_of(model),
        [plain_name(name) for name in turned_names(model)],
    )
    saved = Saved(side)
    state = _state_to_save(model, given_state)
    side.tensors |= {name: state.pop(name) for name in _own_tensors(model, state)}
    first_names = _names_of_tied(model)
    for name in first_names:
        for suffix in PARTS:
            state.pop(name + suffix, None)
    transposed = {*side.turned, *_weights_of_conv1d(model)}
    for name, value in unflatten(state).items():
        if not isinstance(value, FP8Tensor):
            saved.floats[name] = value
            continue
        saved.weights[name] = value
        parts = {suffix: state[name + suffix] for suffix in PARTS[1:] if name + suffix in state}
        side.add_parts(name, parts)
        if with_floats:
            dtype = side.add_exceptions(name, value)
            saved.floats[name] = Decoded(value, dtype, name in transposed)
    if with_floats:
        saved.floats |= {name: saved.floats[first] for name, first in first_names.items()}
    return saved


def _state_to_save(model: nn.Module, given_state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the state to save, by plain names.

    Raises:
        TypeError: a sharded tensor.
        ValueError: a given state that is none of this model.
    """
    own_state = {plain_name(name): value for name, value in model.state_dict().items()}
    state = own_state if given_state is None else checked_state(model, given_state, own_state)
    for name, value in state.items():
        if share_of(value) is not None:
            raise TypeError(f"{name!r} is sharded: save the model's full state")
    return state


def _names_of_tied(model: nn.Module) -> dict[str, str]:
    """Return the first name of a parameter in codes, by each further name that it has."""
    first_names = {}
    for wrapped_names in parameter_names(model).values():
        if is_in_codes(model.get_parameter(wrapped_names[0])):
            first, *others = [plain_name(name) for name in wrapped_names]
            first_names.update(dict.fromkeys(others, first))
    return first_names


def _own_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that quantised layers have beside their weights."""
    names = []
    for wrapped_name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        prefix = f"{plain_name(wrapped_name)}.".lstrip(".")
        own_names = layer._own_names | _WEIGHT_PARTS
        in_codes = is_in_codes(layer.weight)
        for name in state:
            entry = name.removeprefix(prefix).partition(".")[0]
            if not name.startswith(prefix) or entry not in own_names:
                continue
            # the parts of a weight in codes go to the side file with it
            if not (in_codes and entry in _WEIGHT_PARTS):
                names.append(name)
    return names


def _weights_of_conv1d(model: nn.Module) -> list[str]:
    """Return the weights in codes that a float model has transposed."""
    return [
        f"{plain_name(name)}.weight".lstrip(".")
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedConv1D)
    ]
