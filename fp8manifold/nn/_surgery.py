"""The surgery that puts quantised layers into a model whose code stays as it is, the
way back, and a report of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fp8manifold._numerics.charts import Retraction
from fp8manifold.nn import _carried
from fp8manifold.nn._carried import (
    check_layers,
    in_place_parameters,
    parameter_names,
    put_parameter,
    replace_layers,
)
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear, Storage
from fp8manifold.nn._plan import Embeddings, Entry, Parameters, Plan, Tied, plan
from fp8manifold.nn._products import byte_weight, chosen_products
from fp8manifold.nn._selection import (
    NEVER_CALLED,
    computation,
    is_conv1d,
    linear_around,
    linear_of,
    obstacle,
)
from fp8manifold.nn._spec import Formats, Products
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import WeightGranularity
from fp8manifold.tensor import FP8Tensor

Wanted = tuple[str, nn.Module, Any, Mapping[str, Any]]
_ATTACHED_AS: Final = "fp8manifold"
"""The method by which transformers knows a model that ``huggingface.attach`` took."""


def quantize_model(
    model: nn.Module,
    formats: Formats | None = "E4M3",
    storage: Storage = "fp8",
    *,
    granularity: WeightGranularity = "channel",
    headroom: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "stochastic",
    seed: int = 0,
    keep_remainder: bool = False,
    defer_weight_gradients: bool = False,
    tied: Tied = "refuse",
    draws: Draws = "independent",
    retraction: Retraction = "exponential",
    products: Products = "decoded",
    parameters: Parameters | None = None,
    embeddings: Embeddings | None = None,
) -> nn.Module:
    """Put a model's linear weights into one byte each; quantisation-aware training is
    ``storage="master"``.

    Its linear layers become :class:`QuantizedLinear`; the model's own code does not
    change. Make optimizers afterwards: the next step of one that was made before raises
    RuntimeError.

    A pattern is a glob over whole dotted parts of a layer's name: ``mlp`` matches
    ``blocks.0.mlp.fc``, ``*`` matches everything. The one with the most literal
    characters wins, or the later one of two that have equally many. ``nn.Linear``
    itself and transformers' ``Conv1D`` are replaced, with their hooks, attributes and
    gradients; embeddings, norms and attention products are not, unless ``parameters``
    or ``embeddings`` says so, nor are PEFT's adapters, unless a pattern names their
    part (``lora_*``), nor a mixture's routers: parts called ``router`` or
    ``shared_expert_gate``, or a ``gate`` beside ``experts``. A layer whose weight is computed or whose ``forward`` was
    replaced is skipped by ``*`` and refused if a pattern names it.
    :func:`quantization_report` says what was replaced, what was not, and why.

    Args:
        model: changed in place.
        formats: one format or :class:`LayerSpec` for every linear layer, or a mapping
            from pattern to format, spec, dict of :class:`LayerSpec`'s arguments, or
            ``"none"`` (not quantised); None leaves all layers.
        storage: ``fp8`` (one byte per weight, no copy), ``grid`` (the same values in
            float32) or ``master`` (quantisation-aware training: float weights, rounded
            in the forward pass).
        granularity: of the weight scales, if only a format is given, as in
            :class:`OperandSpec`.
        headroom, keep_remainder: of stored weights, as in :class:`FP8Tensor` and
            :class:`QuantizedLinear`.
        rounding: of stored weights, for writers without such an option, such as
            geoopt's and torch's optimizers.
        seed: of stored weights and of stochastic rounding; each layer's seed is derived
            from it.
        defer_weight_gradients: leave the weights' gradients in float for
            :func:`quantize_weight_gradients`.
        tied: for a layer that shares its weight with another module: ``refuse``,
            ``untie`` it (a copy) or ``leave`` it.
        draws: of stored weights: ``independent``, or ``dither``
            (:func:`fp8manifold.random_bits`); an optimizer's own option takes
            precedence, and other operators that write always have independent ones.
        retraction: of stored weights, for Riemannian optimizers: ``exponential``, along
            the chart, or ``euclidean``, straight in value (:class:`FP8Manifold`); an
            optimizer's own option takes precedence.
        products: how the matmul runs, if only a format is given, as in
            :class:`LayerSpec`.
        parameters: with ``fp8``, other parameters of two or more dimensions, by
            patterns over their names such as ``"*.experts.*"``, or a mapping from
            pattern to format. Each becomes an :class:`FP8Parameter` of its module, a
            scale per row of the last dimension or filter of a convolution unless
            ``granularity`` differs.
        embeddings: with ``fp8``, a format for every ``nn.Embedding``, or a mapping from
            pattern to format; only the rows that are looked up are decoded, and a head
            that shares the weight shares its codes.

    Returns:
        The model; a new layer if ``model`` is itself an ``nn.Linear``.

    Raises:
        TypeError, ValueError: a pattern that matches no linear layer that can be
            replaced; an unknown format or option; a layer that is quantised already, in
            two places or shared under ``tied="refuse"``; weights not finite.
        RuntimeError: ``products`` that the device lacks; ``grid`` under a
            ``FakeTensorMode``.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = quantize_model(model, {"*": "E4M3", "2": "none"})
        >>> [type(layer).__name__ for layer in model]
        ['QuantizedLinear', 'ReLU', 'Linear']
    """
    return carry_out(model, plan(**locals()))


def carry_out(
    model: nn.Module, planned: Plan, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
) -> nn.Module:
    """Do what was planned; ``codes`` made already are by the first names of their
    parameters.
    """
    layers, parameters = layers_of(planned, codes), parameters_of(model, planned, codes)
    check_layers(model, layers)
    for entry, parameter in zip(planned.in_place, parameters, strict=True):
        put_parameter(model, entry.parameters, parameter)
    return replace_layers(model, layers)


def layers_of(
    planned: Plan, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
) -> dict[str, nn.Module]:
    """The new layers by name; for those with codes made already, the float weight is
    not read.
    """

    def wanted() -> Iterator[Wanted]:  # one copy of a weight after the other
        for entry in planned.layers:
            own = None if entry.is_copied else codes.get(entry.parameters[0])
            old = (
                linear_of(entry.module)
                if entry.is_copied and not is_conv1d(entry.module)
                else entry.module
            )
            options = {
                **planned.options,
                "storage": planned.storage,
                "seed": entry.seed,
                "codes": own,
            }
            yield entry.name, old, entry.spec, options

    return made_layers(wanted())


def made_layers(wanted: Iterable[Wanted]) -> dict[str, nn.Module]:
    """Quantised layers by name, of names, old layers, specifications and options;
    gradients may share a magnitude.
    """
    made: dict[str, nn.Module] = {}
    first_global: QuantizedLinear | None = None
    for name, old, spec, options in wanted:
        kind: Any = QuantizedConv1D if is_conv1d(old) else QuantizedLinear
        layer = made[name] = kind(old, spec, global_with=first_global, **options)
        if first_global is None and layer.shared_amax is not None:
            first_global = layer
    return made


def parameters_of(
    model: nn.Module, planned: Plan, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
) -> list[FP8Parameter]:
    """The new parameters; what is in codes already stays as it is, but for the seed."""
    made = []
    for entry in planned.in_place:
        old: Any = codes.get(entry.name, model.get_parameter(entry.name))
        if not isinstance(old, FP8Parameter):
            old = encoded(planned, entry, old, requires_grad=old.requires_grad)
        elif entry.name in codes:
            old.seed = entry.seed
        made.append(old)
    return made


@torch.no_grad()
def encoded(planned: Plan, entry: Entry, weight: Tensor, *, requires_grad: bool) -> FP8Parameter:
    """The codes of a float weight, which has its module's layout."""
    assert entry.format is not None
    assert entry.granularity is not None
    transposed = entry.spec is not None and is_conv1d(entry.module)
    floats = weight.detach().t().contiguous() if transposed else weight.detach()
    how = {
        name: planned.options[name]
        for name in ("rounding", "draws", "retraction", "headroom", "keep_remainder")
    }
    try:
        return byte_weight(
            floats.requires_grad_(requires_grad),
            entry.format,
            seed=entry.seed,
            granularity=entry.granularity,
            **how,
        )
    except (TypeError, ValueError) as error:
        what = "parameter" if entry.spec is None else "the weight of"
        raise type(error)(f"{what} {entry.name!r}: {error}") from None


def quantize_weight_gradients(model: nn.Module) -> None:
    """Quantise the weight gradients of one backward pass, in a model of
    ``defer_weight_gradients=True``.

    Call it after the backward pass and clipping, once for each micro-batch. Gradients
    do not change their dtype; one that contains Inf or NaN becomes NaN as a whole.

    Args:
        model: of :func:`quantize_model`.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> from fp8manifold import LayerSpec
        >>> spec = LayerSpec(gradient={"weight": {"format": "E4M3", "scale": 1.0}})
        >>> model = quantize_model(nn.Sequential(nn.Linear(2, 1)), spec, defer_weight_gradients=True)
        >>> model(torch.tensor([[900.0, 1.0]])).sum().backward()
        >>> _ = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> quantize_weight_gradients(model)
        >>> model[0].weight.grad.tolist()  # 448 at most, had it been quantised before it was clipped
        [[1.0, 0.001953125]]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.quantize_weight_gradient()


def dequantize_model(model: nn.Module) -> nn.Module:
    """Put ordinary layers back (``nn.Linear``, ``Conv1D``), with the weights' quantised
    values as float parameters.

    Other parameters in codes become floats too. Hooks and attributes are transferred as
    in :func:`quantize_model`. A model of transformers is no quantised one to it any more.

    Args:
        model: changed in place.

    Returns:
        The model; a new layer if ``model`` is itself a :class:`QuantizedLinear`.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: the ``forward`` of a layer was replaced, or the layer compiled by
            itself.

    Example:
        >>> model = quantize_model(nn.Sequential(nn.Linear(2, 2)), "E4M3")
        >>> type(dequantize_model(model)[0]).__name__
        'Linear'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    made: dict[nn.Module, nn.Module] = {}
    layers: dict[str, nn.Module] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, QuantizedLinear):
            continue
        if layer not in made:
            if (found := obstacle(layer)) is not None and found.is_done_to_it:
                raise ValueError(f"layer {name!r} can't be dequantised: {found.reason}")
            weight = layer.quantized_weight().detach()
            own = (
                weight.dequantize()
                if isinstance(weight, FP8Tensor)
                else weight.clone().as_subclass(Tensor)
            )
            made[layer] = (
                layer.restored(own)
                if isinstance(layer, QuantizedConv1D)
                else linear_around(own, layer)
            )
        layers[name] = made[layer]
    names = parameter_names(model)
    for parameter in in_place_parameters(model).values():
        values = nn.Parameter(parameter.dequantize(), requires_grad=parameter.requires_grad)
        put_parameter(model, names[id(parameter)], values)
    _carried.turn_back(model)
    for module in model.modules():
        quantizer: Any = getattr(module, "hf_quantizer", None)
        if getattr(module, "quantization_method", None) == _ATTACHED_AS and quantizer is not None:
            quantizer.remove_quantization_config(module)
    return replace_layers(model, layers)


@dataclass(frozen=True)
class ReportedLayer:
    """The result for one layer of a model."""

    name: str  #: Its dotted name; empty where the model is the layer.
    kind: str  #: Its class.
    parameters: int  #: Count of numbers in its parameters, shared ones among them.
    quantized: bool  #: True for a quantised layer, and for a module with a parameter in codes.
    detail: str  #: Formats and storage, or why it was left.


@dataclass(frozen=True)
class QuantizationReport:
    """The quantised and the other layers of a model; its string is a table."""

    layers: tuple[
        ReportedLayer, ...
    ]  #: Every layer with a weight of two dimensions or more, in the model's order.
    parameters: int  #: Count of numbers in the model's parameters, shared ones once.
    quantized_parameters: int  #: Count of those that have a format.

    @property
    def quantized(self) -> tuple[ReportedLayer, ...]:
        """Quantised layers."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def left(self) -> tuple[ReportedLayer, ...]:
        """Layers that were left."""
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
    """A report on the layers of a model that are quantised, in which formats, and why
    others are not.

    Args:
        model: any model, quantised or not.

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
    weights = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.weight_format is not None:
            # None while a parametrisation computes it
            weight = module._parameters.get("weight")
            if weight is not None:
                weights[id(weight)] = weight.numel()
    weights |= {id(p): p.numel() for p in in_place_parameters(model).values()}
    return QuantizationReport(
        tuple(layers), sum(p.numel() for p in model.parameters()), sum(weights.values())
    )


def _reported(model: nn.Module, entry: Entry) -> ReportedLayer:
    name, module, left = entry.name, entry.module, entry.left
    held = [
        f"{key}={p.format.name}"
        for key, p in module._parameters.items()
        if isinstance(p, FP8Parameter)
    ]
    detail = f"{', '.join(held)}, storage=fp8" if held else ""
    if isinstance(module, QuantizedLinear):
        read = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        chosen = chosen_products(
            module.spec, module.in_features, module.out_features, module.weight.device
        )
        left, detail = NEVER_CALLED, "" if read else module._described_formats() + chosen
        computed = computation(module)
        if computed is not None and "weight" not in module._parameters:
            left, detail = computed, ""
    count = sum(p.numel() for p in module.parameters(recurse=False))
    return ReportedLayer(name, type(module).__name__, count, bool(detail), detail or left)
