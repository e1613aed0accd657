"""What of a model is quantised and what is not, and why."""

from dataclasses import dataclass

from torch import nn

from fp8manifold.nn._code_products import chosen_products
from fp8manifold.nn._in_place import in_place_parameters
from fp8manifold.nn._linear import QuantizedLinear
from fp8manifold.nn._plan import Entry, plan
from fp8manifold.nn._selection import NEVER_CALLED
from fp8manifold.parameter import FP8Parameter


@dataclass(frozen=True)
class ReportedLayer:
    """What became of one layer of a model."""

    name: str
    """Its dotted name; empty where the model is the layer."""
    kind: str
    """Its class."""
    parameters: int
    """How many numbers its own parameters hold, those it shares among them."""
    quantized: bool
    """Whether its weight or what it is multiplied by is quantised."""
    detail: str
    """Formats and storage, or why it was left."""


@dataclass(frozen=True)
class QuantizationReport:
    """What of a model is quantised and what is not; as a string a table."""

    layers: tuple[ReportedLayer, ...]
    """Every layer with a weight of two dimensions or more, in the model's order."""
    parameters: int
    """How many numbers the parameters of the model hold, those that are shared once."""
    quantized_parameters: int
    """How many of them have a format."""

    @property
    def quantized(self) -> tuple[ReportedLayer, ...]:
        """The layers that are quantised."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def left(self) -> tuple[ReportedLayer, ...]:
        """The layers that are not."""
        return tuple(layer for layer in self.layers if not layer.quantized)

    def __str__(self) -> str:
        """A line for each layer, and one for all of them."""
        rows = [("layer", "class", "parameters", "")]
        for layer in self.layers:
            detail = layer.detail if layer.quantized else f"left: {layer.detail}"
            rows.append((layer.name or "(the model)", layer.kind, f"{layer.parameters:,}", detail))
        name, kind, count = (max(len(row[i]) for row in rows) for i in range(3))
        lines = [f"{a:<{name}}  {b:<{kind}}  {c:>{count}}  {d}".rstrip() for a, b, c, d in rows]
        share = self.quantized_parameters / self.parameters if self.parameters else 0.0
        total = f"quantised: {len(self.quantized)} of {len(self.layers)} layers"
        weights = f"{self.quantized_parameters:,} of {self.parameters:,} parameters ({share:.1%})"
        return "\n".join([*lines, f"{total}, {weights}"])


def quantization_report(model: nn.Module) -> QuantizationReport:
    """What of a model is quantised, in which formats, what is not, and why; nothing is changed.

    Args:
        model: any, of :func:`quantize_model` or not.

    Returns:
        A :class:`QuantizationReport`, to print or to look through.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> from fp8manifold import quantize_model
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        >>> print(quantization_report(quantize_model(model, {"1": "E4M3"}, storage="fp8")))
        layer  class            parameters
        0      Embedding                32  left: not a linear layer
        1      QuantizedLinear          20  weight=E4M3, activation=none, storage=fp8
        2      Linear                   10  left: no pattern names it, or one that says 'none'
        quantised: 1 of 3 layers, 16 of 62 parameters (25.8%)
    """
    layers = [_reported(model, entry) for entry in plan(model, None).entries]
    quantized = (m for m in model.modules() if isinstance(m, QuantizedLinear) and m.weight_format is not None)
    weights = {id(m.weight): m.weight.numel() for m in quantized}
    weights |= {id(p): p.numel() for p in in_place_parameters(model).values()}
    return QuantizationReport(tuple(layers), sum(p.numel() for p in model.parameters()), sum(weights.values()))


def _reported(model: nn.Module, entry: Entry) -> ReportedLayer:
    name, module, left = entry.name, entry.module, entry.left
    held = [f"{key}={p.format.name}" for key, p in module._parameters.items() if isinstance(p, FP8Parameter)]
    detail = f"{', '.join(held)}, storage=fp8" if held else ""
    if isinstance(module, QuantizedLinear):
        read = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        chosen = chosen_products(module.spec, module.in_features, module.out_features, module.weight.device)
        left, detail = NEVER_CALLED, "" if read else module._described_formats() + chosen
    count = sum(p.numel() for p in module.parameters(recurse=False))
    return ReportedLayer(name, type(module).__name__, count, bool(detail), detail or left)
