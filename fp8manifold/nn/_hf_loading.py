"""How transformers reads a float model into codes: each tensor is encoded in the turn in which it is read."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8manifold.nn._mapped_files import MappedFiles
from fp8manifold.nn._plan import Plan, plan
from fp8manifold.nn._surgery import carry_out
from fp8manifold.parameter import FP8Parameter

__all__ = ["Encode", "Reader"]


class Reader:
    """What is to become codes of a model that has no values yet, and what did.

    Left to the floats, and so to the end, is what transformers may tie, and what it reads in another dtype than the
    model's.

    Args:
        model: of transformers, without values; ``torch.get_default_dtype()`` is the dtype it is loaded in.
        formats, storage, options: of :func:`fp8manifold.quantize_model`.
        files: that the model is read from.

    Raises:
        TypeError, ValueError: as :func:`fp8manifold.quantize_model`, before a weight is read.
    """

    def __init__(
        self, model: Any, formats: Any, storage: str, options: Mapping[str, Any], files: Iterable[str] | None
    ) -> None:
        self._how = formats, storage, dict(options)
        self._plan = self._planned(model)
        self._codes: dict[str, FP8Parameter] = {}
        self._files = MappedFiles(files or ())
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        dtype, tied = torch.get_default_dtype(), {*ties, *ties.values()}
        self._wanted = {
            f"{name}.weight".lstrip(".")
            for name in self._plan.specs
            if self._plan.takes(name) and _weight(model, name).dtype == dtype
        } - tied
        self._placed = {name for name in self._plan.in_place if model.get_parameter(name).dtype == dtype} - tied
        self._in_place: dict[str, FP8Parameter] = {}

    def _planned(self, model: Any) -> Plan:
        formats, storage, options = self._how
        return plan(model, formats, storage, **options)

    def wants(self, name: str) -> bool:
        """Whether the tensor of that name becomes codes."""
        return name in self._wanted or name in self._placed

    def encoded(self, model: nn.Module, name: str, value: Tensor) -> Tensor:
        """The codes of a tensor that was read; what does not fit stays as it is, for those to refuse who do."""
        if name in self._placed:
            return self._encoded_in_place(model.get_parameter(name), name, value)
        layer = name.rpartition(".")[0]
        if name not in self._wanted or value.shape != _weight(model, layer).shape:
            self._wanted.discard(name)
            return value
        try:
            self._codes[layer] = self._plan.codes(layer, model.get_submodule(layer), value)
        except (TypeError, ValueError):
            self._wanted.discard(name)
            return value
        self._files.was_read(value.nbytes)
        return self._codes[layer]

    def _encoded_in_place(self, own: Tensor, name: str, value: Tensor) -> Tensor:
        try:
            if value.shape != own.shape:
                raise ValueError(f"parameter {name!r} is of another shape")
            self._in_place[name] = self._plan.encoded(name, value, requires_grad=own.requires_grad)
        except (TypeError, ValueError):
            self._placed.discard(name)
            return value
        self._files.was_read(value.nbytes)
        return self._in_place[name]

    def finish(self, model: nn.Module) -> None:
        """Put the quantised layers in, around the codes that are there already.

        Raises:
            TypeError, ValueError: as :func:`fp8manifold.quantize_model`.
        """
        planned = self._planned(model)
        codes = {name: weight for name, weight in self._codes.items() if _weight(model, name) is weight}
        if lost := sorted(codes.keys() - planned.specs.keys()):
            raise ValueError(
                f"the weight of {lost[0]!r} was tied while it was loaded, which the model did not say it is"
            )
        placed = {name: weight for name, weight in self._in_place.items() if model.get_parameter(name) is weight}
        carry_out(model, planned, codes, {name: placed[name] for name in placed.keys() & planned.in_place.keys()})


def _weight(model: nn.Module, layer: str) -> Tensor:
    weight: Any = model.get_submodule(layer).weight
    return weight  # type: ignore[no-any-return]


class Encode:
    """What transformers runs on a tensor that becomes codes; put before its own class."""

    reader: Reader

    def convert(self, input_dict: dict[str, Any], *, model: Any, **_: Any) -> dict[str, Any]:
        """The same tensors by their names in the model, in codes where they are to be."""
        made = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            made[name] = self.reader.encoded(model, name, value)
        return made
