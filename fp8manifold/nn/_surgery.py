"""The surgery that puts quantised layers into a model whose code stays as it is.

`quantize_model` makes a plan (`_plan`) and carries it out, `dequantize_model` is the
way back, and `quantization_report` says what became of every layer. Hooks and
attributes of replaced layers are moved by `_carried`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

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
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._plan import Embeddings, ParameterFormats, PlanEntry, SurgeryPlan, Tied, plan
from fp8manifold.nn._products import byte_weight, chosen_products
from fp8manifold.nn._selection import (
    NEVER_CALLED,
    computation,
    is_conv1d,
    linear_around,
    linear_of,
    obstacle,
)
from fp8manifold.nn._spec import Formats, Products, Storage
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import WeightGranularity
from fp8manifold.tensor import FP8Tensor

#: The method by which transformers knows a model of its own quantiser.
_ATTACHED_AS: Final = "fp8manifold"
#: An attribute of a model of transformers: the layout in which it was published.
PUBLISHED: Final = "_fp8_published"


class LayerRequest(NamedTuple):
    """A quantised layer to make.

    Attributes:
        name: in the model.
        replaced: the float layer that it takes the place of.
        spec: its formats and options.
        options: further arguments of :class:`QuantizedLinear`.
    """

    name: str
    replaced: nn.Module
    spec: Any
    options: Mapping[str, Any]


def quantize_model(
    model: nn.Module,
    formats: Formats | None = "E4M3",
    storage: Storage = "codes",
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
    parameters: ParameterFormats | None = None,
    embeddings: Embeddings | None = None,
) -> nn.Module:
    """Put a model's linear weights into one byte each.

    Call it once weights are loaded and on their device, before ``torch.compile``,
    ``DistributedDataParallel`` and ``fully_shard``, and before the optimizer is made.
    An optimizer that was made earlier keeps working, since parameters stay the same
    objects, as under ``Module.to``. Some weights can't: one that is copied or
    transposed, one that a graph, a weak reference or C++ code holds, or that of a model
    that is a layer itself. The next step of that optimizer then raises RuntimeError and
    names them.

    The linear layers become :class:`QuantizedLinear`; the model's own code does not
    change. Quantisation-aware training is ``storage="master"``.

    A pattern is a glob over whole dotted parts of a layer's name: ``mlp`` matches
    ``blocks.0.mlp.fc``, ``*`` matches everything. The pattern with the most literal
    characters wins; of two with equally many, the later one.

    Layers of ``nn.Linear`` itself and transformers' ``Conv1D`` are replaced, with their
    hooks, attributes and gradients. Embeddings, norms and attention products are not,
    unless ``parameters`` or ``embeddings`` says so. PEFT's adapters are not, unless a
    pattern names their part (``lora_*``). A mixture's routers are not, unless a pattern
    names them. Routers are parts called ``router`` or ``shared_expert_gate``, or a
    ``gate`` in a module that has ``experts``. A layer whose weight is computed or whose
    ``forward`` was replaced is skipped by ``*`` and refused if a pattern names it.
    :func:`quantization_report` says what was replaced, what was not, and why.

    Args:
        model: changed in place.
        formats: one format or :class:`LayerSpec` for every linear layer, or a mapping
            from pattern to format, spec, dict of :class:`LayerSpec`'s arguments, or
            ``"none"`` (not quantised); None leaves all layers.
        storage: ``codes`` (one byte per weight, no copy), ``grid`` (the same values in
            float32) or ``master`` (quantisation-aware training: float weights, rounded
            in the forward pass).
        granularity: which weights share a scale, if only a format is given, as in
            :class:`OperandSpec`.
        headroom: how many times stored weights may grow before they saturate, as in
            :class:`FP8Tensor`.
        rounding: how stored weights are rounded by writers that have no such option,
            such as geoopt's and torch's optimizers.
        seed: key of the random bits of stored weights and of stochastic rounding; each
            layer's seed is derived from it.
        keep_remainder: store the remainder of rounding the weights, as in
            :class:`QuantizedLinear`.
        defer_weight_gradients: leave the weights' gradients in float for
            :func:`quantize_weight_gradients`.
        tied: what becomes of a layer that shares its weight with another module:
            ``refuse`` it, ``untie`` it (it gets a quantised copy) or ``leave`` it in
            float.
        draws: random draws for stored weights: ``independent``, or ``dither``
            (:func:`fp8manifold.random_bits`). An optimizer's own option takes
            precedence; other operators that write always use independent draws.
        retraction: the path on which Riemannian optimizers step stored weights:
            ``exponential``, along the chart, or ``euclidean``, straight in value
            (:class:`FP8Manifold`). An optimizer's own option takes precedence.
        products: what the matmul multiplies, if only a format is given, as in
            :class:`LayerSpec`.
        parameters: with ``codes``, other parameters of two or more dimensions to
            quantise: patterns over their names such as ``"*.experts.*"``, or a mapping
            from pattern to format. Each becomes an :class:`FP8Parameter` of its module,
            with a scale per row of the last dimension, or per filter of a convolution,
            unless ``granularity`` says otherwise.
        embeddings: with ``codes``, a format for every ``nn.Embedding``, or a mapping from
            pattern to format; only the rows that are looked up are decoded, and a head
            that shares the weight shares its codes.

    Returns:
        The model; a new layer if ``model`` is itself an ``nn.Linear``.

    Raises:
        TypeError, ValueError: a pattern that matches no linear layer that can be
            replaced; an unknown format or option; a layer that is quantised already, is
            in two places, or is shared under ``tied="refuse"``; weights that are not
            finite.
        RuntimeError: ``products`` that the device lacks; ``grid`` under a
            ``FakeTensorMode``.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = quantize_model(model, {"*": "E4M3", "2": "none"})
        >>> [type(layer).__name__ for layer in model]
        ['QuantizedLinear', 'ReLU', 'Linear']
    """
    planned = plan(
        model,
        formats,
        storage,
        granularity=granularity,
        headroom=headroom,
        rounding=rounding,
        seed=seed,
        keep_remainder=keep_remainder,
        defer_weight_gradients=defer_weight_gradients,
        tied=tied,
        draws=draws,
        retraction=retraction,
        products=products,
        parameters=parameters,
        embeddings=embeddings,
    )
    return carry_out(model, planned, keep_objects=True)


def carry_out(
    model: nn.Module,
    planned: SurgeryPlan,
    codes: Mapping[str, FP8Parameter] = MappingProxyType({}),
    *,
    keep_objects: bool = False,
) -> nn.Module:
    """Put the planned layers and parameters into a model.

    Args:
        model: changed in place.
        planned: the plan of this model.
        codes: that are ready, by the first names of their parameters.
        keep_objects: let the model's parameters be the same objects as before, where
            torch allows that.
    """
    layers = layers_of(planned, codes)
    parameters = parameters_of(model, planned, codes)
    check_layers(model, layers)
    for entry, parameter in zip(planned.in_place, parameters, strict=True):
        put_parameter(model, entry.parameters, parameter, keep_object=keep_objects)
    return replace_layers(model, layers, keep_objects=keep_objects)


def layers_of(
    planned: SurgeryPlan, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
) -> dict[str, nn.Module]:
    """Return the new layers by name.

    The float weight of a layer whose codes are ready is not read.
    """
    return made_layers(_layer_requests(planned, codes))


def _layer_requests(
    planned: SurgeryPlan, codes: Mapping[str, FP8Parameter]
) -> Iterator[LayerRequest]:
    """Yield the layers to make; copies of weights are made one after the other."""
    for entry in planned.layers:
        replaced = entry.module
        ready_codes = codes.get(entry.parameters[0])
        if entry.is_copied:
            ready_codes = None
            # a Conv1D copies its weight itself
            if not is_conv1d(replaced):
                replaced = linear_of(replaced)
        options = dict(planned.options)
        options["storage"] = planned.storage
        options["seed"] = entry.seed
        options["codes"] = ready_codes
        yield LayerRequest(entry.name, replaced, entry.spec, options)


def made_layers(requests: Iterable[LayerRequest]) -> dict[str, nn.Module]:
    """Return quantised layers by name.

    Gradients under ``scale="global"`` share the magnitude of the first layer that has
    one.
    """
    layers: dict[str, nn.Module] = {}
    first_global: QuantizedLinear | None = None
    for request in requests:
        kind: Any = QuantizedConv1D if is_conv1d(request.replaced) else QuantizedLinear
        layer = kind(request.replaced, request.spec, global_with=first_global, **request.options)
        layers[request.name] = layer
        if first_global is None and layer.shared_amax is not None:
            first_global = layer
    return layers


def parameters_of(
    model: nn.Module, planned: SurgeryPlan, codes: Mapping[str, FP8Parameter] = MappingProxyType({})
) -> list[FP8Parameter]:
    """Return the new parameters.

    Those of ``codes`` get their seed. A parameter that the model has in codes already
    stays as it is.
    """
    parameters = []
    for entry in planned.in_place:
        parameter: Any = codes.get(entry.name, model.get_parameter(entry.name))
        if not isinstance(parameter, FP8Parameter):
            parameter = encode_parameter(
                planned, entry, parameter, requires_grad=parameter.requires_grad
            )
        elif entry.name in codes:
            parameter.seed = entry.seed
        parameters.append(parameter)
    return parameters


@torch.no_grad()
def encode_parameter(
    planned: SurgeryPlan, entry: PlanEntry, weight: Tensor, *, requires_grad: bool
) -> FP8Parameter:
    """Return the codes of a float weight, which has its module's layout."""
    assert entry.format is not None
    assert entry.granularity is not None
    transposed = entry.spec is not None and is_conv1d(entry.module)
    floats = weight.detach().t().contiguous() if transposed else weight.detach()
    options = planned.options
    try:
        return byte_weight(
            floats.requires_grad_(requires_grad),
            entry.format,
            seed=entry.seed,
            granularity=entry.granularity,
            rounding=options["rounding"],
            draws=options["draws"],
            retraction=options["retraction"],
            headroom=options["headroom"],
            keep_remainder=options["keep_remainder"],
        )
    except (TypeError, ValueError) as error:
        subject = "parameter" if entry.spec is None else "the weight of"
        raise type(error)(f"{subject} {entry.name!r}: {error}") from None


def quantize_weight_gradients(model: nn.Module) -> None:
    """Quantise the weight gradients of one backward pass.

    The model was quantised with ``defer_weight_gradients=True``. Call it after the
    backward pass and clipping, once for each micro-batch. Gradients do not change their
    dtype; one that contains Inf or NaN becomes NaN as a whole.

    Args:
        model: of :func:`quantize_model`.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> from fp8manifold import LayerSpec
        >>> spec = LayerSpec(gradient={"weight": {"format": "E4M3", "scale": 1.0}})
        >>> model = nn.Sequential(nn.Linear(2, 1))
        >>> model = quantize_model(model, spec, defer_weight_gradients=True)
        >>> model(torch.tensor([[900.0, 1.0]])).sum().backward()
        >>> _ = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> quantize_weight_gradients(model)
        >>> model[0].weight.grad.tolist()  # unclipped it would be at most 448
        [[1.0, 0.001953125]]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.quantize_weight_gradient()


def dequantize_model(model: nn.Module) -> nn.Module:
    """Put ordinary layers back (``nn.Linear``, ``Conv1D``).

    The weights' quantised values become float parameters, and so do other parameters in
    codes. Hooks and attributes are transferred as in :func:`quantize_model`. Afterwards
    transformers treats its model as one of floats.

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
    layers: dict[str, nn.Module] = {}
    # a layer that is in several places is replaced by one layer
    float_layers: dict[nn.Module, nn.Module] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, QuantizedLinear):
            continue
        if layer not in float_layers:
            float_layers[layer] = _float_layer(name, layer)
        layers[name] = float_layers[layer]
    names = parameter_names(model)
    for parameter in in_place_parameters(model).values():
        values = nn.Parameter(parameter.dequantize(), requires_grad=parameter.requires_grad)
        put_parameter(model, names[id(parameter)], values)
    _carried.turn_back(model)
    for module in model.modules():
        vars(module).pop(PUBLISHED, None)
        quantizer: Any = getattr(module, "hf_quantizer", None)
        if getattr(module, "quantization_method", None) == _ATTACHED_AS and quantizer is not None:
            quantizer.remove_quantization_config(module)
    return replace_layers(model, layers)


def _float_layer(name: str, layer: QuantizedLinear) -> nn.Module:
    """Return an ordinary layer with the values of a quantised one; refuse by name."""
    prevention = obstacle(layer)
    if prevention is not None and prevention.is_undoable:
        raise ValueError(f"layer {name!r} can't be dequantised: {prevention.reason}")
    weight = layer.quantized_weight().detach()
    if isinstance(weight, FP8Tensor):
        values = weight.dequantize()
    else:
        values = weight.clone().as_subclass(Tensor)
    if isinstance(layer, QuantizedConv1D):
        return layer.restored(values)
    return linear_around(values, layer)


@dataclass(frozen=True)
class ReportedLayer:
    """The result for one layer of a model."""

    #: Its dotted name; empty where the model is the layer.
    name: str
    #: Its class.
    kind: str
    #: Count of numbers in its parameters, shared ones among them.
    parameters: int
    #: Bytes of its parameters, codes with their scales, shared ones among them.
    bytes: int
    #: True for a quantised layer, and for a module with a parameter in codes.
    quantized: bool
    #: Formats and storage, or why it was left.
    detail: str


@dataclass(frozen=True)
class QuantizationReport:
    """The quantised and the other layers of a model; its string is a table."""

    #: Every layer with a weight of two dimensions or more, in the model's order.
    layers: tuple[ReportedLayer, ...]
    #: Count of numbers in the model's parameters, shared ones once.
    parameters: int
    #: Count of those that have a format.
    quantized_parameters: int
    #: Bytes of the model's parameters, shared ones once.
    bytes: int

    @property
    def quantized(self) -> tuple[ReportedLayer, ...]:
        """Quantised layers."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def left(self) -> tuple[ReportedLayer, ...]:
        """Layers that were left."""
        return tuple(layer for layer in self.layers if not layer.quantized)

    def __str__(self) -> str:
        """Return a table with a line for each layer, and a line for all of them."""
        rows = [("layer", "class", "parameters", "bytes", "")]
        for layer in self.layers:
            detail = layer.detail if layer.quantized else f"left: {layer.detail}"
            counts = (f"{layer.parameters:,}", f"{layer.bytes:,}")
            rows.append((layer.name or "(the model)", layer.kind, *counts, detail))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, kind, count, size, detail in rows:
            cells = [name.ljust(widths[0]), kind.ljust(widths[1])]
            cells += [count.rjust(widths[2]), size.rjust(widths[3]), detail]
            lines.append("  ".join(cells).rstrip())
        share = self.quantized_parameters / self.parameters if self.parameters else 0.0
        total = f"quantised: {len(self.quantized)} of {len(self.layers)} layers"
        weights = f"{self.quantized_parameters:,} of {self.parameters:,} parameters ({share:.1%})"
        return "\n".join([*lines, f"{total}, {weights}, {self.bytes:,} bytes"])


def quantization_report(model: nn.Module) -> QuantizationReport:
    """Return a report on the quantised layers of a model, and why others are not.

    Args:
        model: any model, quantised or not.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> from fp8manifold import quantize_model
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        >>> print(quantization_report(quantize_model(model, "E4M3")))
        layer  class            parameters  bytes
        0      Embedding                32    128  left: not a linear layer
        1      QuantizedLinear          20     48  weight=E4M3, activation=none, storage=codes
        quantised: 1 of 2 layers, 16 of 52 parameters (30.8%), 176 bytes
    """
    layers = [_reported(model, entry) for entry in plan(model, None).entries]
    # by identity, so that a shared weight counts once
    quantized_sizes = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.weight_format is not None:
            # None while a parametrisation computes it
            weight = module._parameters.get("weight")
            if weight is not None:
                quantized_sizes[id(weight)] = weight.numel()
    for parameter in in_place_parameters(model).values():
        quantized_sizes[id(parameter)] = parameter.numel()
    return QuantizationReport(
        layers=tuple(layers),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        quantized_parameters=sum(quantized_sizes.values()),
        bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )


def _reported(model: nn.Module, entry: PlanEntry) -> ReportedLayer:
    module = entry.module
    if isinstance(module, QuantizedLinear):
        detail, reason_kept = _quantized_layer_detail(model, entry.name, module)
    else:
        detail, reason_kept = _in_place_detail(module), entry.reason_kept
    return ReportedLayer(
        name=entry.name,
        kind=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
        bytes=sum(parameter.nbytes for parameter in module.parameters(recurse=False)),
        quantized=bool(detail),
        detail=detail or reason_kept,
    )


def _quantized_layer_detail(model: nn.Module, name: str, layer: QuantizedLinear) -> tuple[str, str]:
    """Return formats and storage, or "" and why the layer has no effect."""
    computed = computation(layer)
    if computed is not None and "weight" not in layer._parameters:
        return "", computed
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "", NEVER_CALLED
    device = layer.weight.device
    products = chosen_products(layer.spec, layer.in_features, layer.out_features, device)
    return layer._described_formats() + products, ""


def _in_place_detail(module: nn.Module) -> str:
    """Return the formats of a module's own parameters in codes, or ""."""
    formats = [
        f"{name}={parameter.format.name}"
        for name, parameter in module._parameters.items()
        if isinstance(parameter, FP8Parameter)
    ]
    return f"{', '.join(formats)}, storage=codes" if formats else ""
