"""Export a model's codes and scales in the layouts of other libraries.

::

    QuantizedLinear --exported_weights--> ExportedWeight: codes, scales, format
                                               |  per layout
        compressed-tensors    weight (float8_e4m3fn), weight_scale
        fp8 (DeepSeek's)      weight (float8_e4m3fn), weight_scale_inv
        torchao               weight (Float8Tensor)
    all other tensors         as the model computes with them, codes as floats
    config.json               groups of layers, or one setting for all

Nothing is rounded: the tensors share the model's memory.
"""

import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, import_optional
from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._doors.float_files import files_of_tensors, write_shards
from fp8manifold._doors.grids import Decoded
from fp8manifold._encoded.dispatch import FLOAT8, float8_format
from fp8manifold._encoded.storage import SQUARE
from fp8manifold._encoded.stored_scale import are_powers_of_two, as_kept
from fp8manifold._published.replace_files import INDEX, WEIGHTS_FILE, replacing
from fp8manifold._ranks import local_of, share_of
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import decode
from fp8manifold.nn._carried import in_place_parameters, parameter_names, turned_names
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._parts import PARTS
from fp8manifold.nn._selection import computation, is_linear
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE
from fp8manifold.tensor import FP8Tensor

ExchangeLayout = Literal["compressed-tensors", "torchao", "fp8"]
ExportedActivations = Literal["float", "E4M3"]


class ExportLayout(StrEnum):
    """Whose layout is written; the option ``layout`` is the plain word."""

    COMPRESSED_TENSORS = "compressed-tensors"
    #: DeepSeek-V3's, with scales of squares
    FP8 = "fp8"
    TORCHAO = "torchao"


_FORMATS_BY_LAYOUT: Final = {
    ExportLayout.COMPRESSED_TENSORS: ("E4M3",),
    ExportLayout.FP8: ("E4M3",),
    ExportLayout.TORCHAO: tuple(fmt.name for fmt in FLOAT8),
}
"""The formats of weights that each layout describes."""


class ScaleSharing(StrEnum):
    """The weights that share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    #: 32 of a row, at any scale.
    GROUP = "group"
    #: 32 of a row, at a power of two.
    BLOCK = "block"
    #: 128 x 128.
    SQUARE = "square"


_STRATEGIES: Final[dict[ScaleSharing, dict[str, Any]]] = {
    ScaleSharing.TENSOR: {"strategy": "tensor"},
    ScaleSharing.CHANNEL: {"strategy": "channel"},
    ScaleSharing.GROUP: {"strategy": "group", "group_size": BLOCK_SIZE},
    ScaleSharing.BLOCK: {
        "strategy": "group",
        "group_size": BLOCK_SIZE,
        "scale_dtype": "torch.uint8",
    },
}
"""What compressed-tensors calls the weights that share a scale."""
_INPUT_STRATEGIES: Final = _STRATEGIES | {
    ScaleSharing.TENSOR: {"strategy": "token"},
    ScaleSharing.CHANNEL: {"strategy": "token"},
}
"""The same of a layer's inputs, which a server rounds as they come.

There is a scale per token, or one per 32 of its values (MXFP8).
"""
_SQUARES: Final = "a scale for each square of 128 x 128"
_NO_SQUARES: Final = "a scale for a tensor, a row or a block of 32"
_TAKE_FP8: Final = "take layout='fp8'"
_TAKE_SQUARES: Final = "quantise with granularity='square', or take another layout"
_WEIGHT_PARTS: Final = {f"weight{suffix}" for suffix in PARTS if suffix}
_FLOAT8_NAMES: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Dtypes of codes as files of safetensors name them."""
# Formats of groups in compressed-tensors' settings.
_FLOAT_GROUP: Final = "float-quantized"
_MX_GROUP: Final = "mxfp8-quantized"
_MIXED_GROUPS: Final = "mixed-precision"


def layout_state_dict(
    model: nn.Module,
    layout: ExchangeLayout = "compressed-tensors",
    *,
    activations: ExportedActivations = "float",
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    r"""Return a model's state in another library's layout.

    It has the model's codes and scales: nothing is rounded.

    .. math:: w = s \cdot \operatorname{decode}(code)

    - ``compressed-tensors``: ``weight`` is float8_e4m3fn, ``weight_scale`` float32
      ``(1,)`` or ``(R, 1)``, or for blocks ``(R, C/32)``: uint8 exponents (E8M0) if all
      are powers of two, otherwise float32.
    - ``torchao``: ``weight`` is a ``Float8Tensor``, whose ``block_size`` is the shape
      of the values that share a scale.
    - ``fp8``: ``weight_scale_inv`` is float32 ``(R/128, C/128)``, rounded up: the
      layout of DeepSeek-V3, of a model quantised with ``granularity="square"``.

    Only weights are described. The values that the other library decodes are
    :meth:`fp8manifold.QuantizedLinear.quantized_weight` to the bit, in float32, and in bfloat16
    where scales are powers of two. NaN and -0 are preserved.

    Args:
        model: a model of :func:`fp8manifold.quantize_model`; parameters in codes that
            are not weights of linear layers are written as floats.
        layout: ``compressed-tensors`` or ``fp8``, which take E4M3, or ``torchao``,
            which takes E4M3, E5M2, E4M3FNUZ and E5M2FNUZ. Squares of 128 x 128 are
            ``fp8``'s alone.
        activations: ``float`` (W8A16), or with ``compressed-tensors`` ``E4M3`` (W8A8):
            a server rounds inputs, at a scale per token, or per 32 values where blocks
            have scales. With ``fp8`` the reader decides.

    Returns:
        The tensors, which share the model's memory, and ``quantization_config`` of
        transformers' ``config.json``.

    Names have no parts of ``torch.compile``, ``checkpoint_wrapper`` or DDP.

    Raises:
        ImportError, TypeError: torchao is missing; ``model`` is not a module, or is
            sharded.
        ValueError: an unknown layout; activations, a format, scales or a layer that the
            layout can't describe; values between those of the format; PEFT's adapters;
            a weight that is missing from the model's ``state_dict``; or no quantised
            weight.

    Warns:
        UserWarning: with ``fp8``, of matrices that end in a partial square after a
            whole one, which transformers' ``dequantize=True`` reads wrongly or not at
            all.

    Example:
        >>> from fp8manifold import quantize_model
        >>> model = quantize_model(nn.Sequential(nn.Linear(4, 2)), "E4M3", storage="codes")
        >>> tensors, config = layout_state_dict(model)
        >>> tensors["0.weight"].dtype, tensors["0.weight_scale"].shape
        (torch.float8_e4m3fn, torch.Size([2, 1]))

    Source: compressed-tensors (vllm-project) 0.20; torchao 0.18; OCP MX Formats 1.0;
    DeepSeek-V3 (arXiv 2412.19437).
    """
    tensors, config = _tensors_in_layout(model, layout, activations)
    return _decode_all(tensors), config


def _decode_all(tensors: Mapping[str, Tensor | Decoded]) -> dict[str, Tensor]:
    """Return tensors as they are, and the floats of weights in codes."""
    return {
        name: value if isinstance(value, Tensor) else value.to_write.whole()
        for name, value in tensors.items()
    }


def _tensors_in_layout(
    model: nn.Module, layout: str, activations: str
) -> tuple[dict[str, Tensor | Decoded], dict[str, Any]]:
    """Return what :func:`layout_state_dict` does, with weights that are decoded later."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    check_choice("layout", layout, [known.value for known in ExportLayout])
    check_choice("activations", activations, get_args(ExportedActivations))
    kind = ExportLayout(layout)
    if activations != "float" and kind is not ExportLayout.COMPRESSED_TENSORS:
        raise ValueError(
            f"activations={activations!r} needs layout='compressed-tensors', not {layout!r}"
        )
    model = unwrapped(model)
    check_no_adapters(model)
    weights = {weight.name: weight for weight in exported_weights(model, kind)}
    if not weights:
        raise ValueError("the model has no quantised weight: call quantize_model first")
    if kind is ExportLayout.FP8:
        _warn_of_partial_squares(weights.values())
    tensors: dict[str, Tensor | Decoded] = {}
    remaining = dict(weights)
    for name, value in _computed_state(model):
        weight = remaining.pop(name, None)
        tensors |= {name: value} if weight is None else _TENSORS[kind](weight)
    if remaining:
        raise ValueError(
            f"the model's state_dict has no tensor {next(iter(remaining))!r}, a quantised weight: "
            "a hook of the model has renamed it or left it out; remove the hook to export the model"
        )
    return tensors, settings_of(model, kind, list(weights.values()), activations)


def save_in_layout(
    model: Any,
    folder: str | Path,
    layout: ExchangeLayout = "compressed-tensors",
    *,
    activations: ExportedActivations = "float",
) -> None:
    """Write a model of transformers to a folder that another library reads.

    ``from_pretrained`` reads it with that library. The folder has the tensors of
    :func:`layout_state_dict` as safetensors, and a ``config.json`` that describes
    them. The model does not change. Save the tokenizer separately
    (``tokenizer.save_pretrained(folder)``).

    Args:
        model: of transformers, and of :func:`fp8manifold.quantize_model`.
        folder: as of ``save_pretrained``; of an earlier save, the weights that would be
            read instead of the new ones are removed.
        layout: as in :func:`layout_state_dict`.
        activations: as there.

    Raises:
        ImportError: transformers or torchao is missing.
        TypeError, ValueError: a model that is not of transformers; as
            :func:`layout_state_dict`.
    """
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if isinstance(model, nn.Module):
        check_no_adapters(model)
    if not is_transformers_model(model):
        raise TypeError(
            f"model is a {type(model).__name__}, not a transformers model: save the tensors of "
            "fm.files.layout_state_dict with safetensors.torch.save_file"
        )
    quantizers = import_optional("transformers.quantizers.base", "hf", "save")
    tensors, config = _tensors_in_layout(model, layout, activations)
    metadata: dict[str, str] = {}
    if ExportLayout(layout) is ExportLayout.TORCHAO:
        tensors, metadata = _flattened(tensors)
    to_write = files_of_tensors(model, tensors, {})
    # What transformers itself writes: all tensors, where it does not say into which files.
    by_transformers: dict[str, Tensor] = {}
    if to_write is None:
        by_transformers = _decode_all(tensors)
    # What save_pretrained asks a quantiser for: here, the tensors that it writes. The
    # base class is known only once transformers is imported.
    methods = {
        "__init__": lambda self: None,
        "is_serializable": lambda self, *_: True,
        "is_trainable": False,
        "get_state_dict_and_metadata": lambda self, *_: (by_transformers, dict(metadata)),
    }
    exporter = type("Exported", (quantizers.HfQuantizer,), methods)()
    before = {key: vars(model)[key] for key in ("config", "hf_quantizer") if key in vars(model)}
    try:
        model.config = copy.deepcopy(model.config)
        model.hf_quantizer = exporter
        model.config.quantization_config = config
        if has_own_head(model):
            model.config.tie_word_embeddings = False
        with replacing(Path(folder)) as new_folder:
            model.save_pretrained(new_folder)
            if to_write is not None:
                write_shards(model, to_write, new_folder, {}, metadata)
            _check_all_codes_written(new_folder, tensors)
    finally:
        vars(model).pop("hf_quantizer", None)
        vars(model).update(before)


def _flattened(
    tensors: Mapping[str, Tensor | Decoded],
) -> tuple[dict[str, Tensor | Decoded], dict[str, str]]:
    """Return tensors by the names that torchao gives them in files, and its metadata.

    torchao copies what it flattens, so it is given one weight at a time, and the weight's
    own memory is written.
    """
    support = import_optional(
        "torchao.prototype.safetensors.safetensors_support", "torchao", "layout='torchao'"
    )
    flat: dict[str, Tensor | Decoded] = {}
    metadata: dict[str, str] = {}
    for name, value in tensors.items():
        given = value
        if isinstance(value, Decoded):
            given = torch.empty(value.shape, dtype=value.dtype, device="meta")
        copies, metadata_of_one = support.flatten_tensor_state_dict({name: given})
        metadata |= metadata_of_one
        for key in copies:
            # layer.weight_qdata is the attribute qdata of a Float8Tensor
            part = key.rpartition("weight_")[2]
            flat[key] = value if key == name else getattr(value, part)
    metadata["tensor_names"] = json.dumps(list(tensors))
    return flat, metadata


def _check_all_codes_written(folder: Path, tensors: Mapping[str, Tensor | Decoded]) -> None:
    """Raise RuntimeError where transformers has left out codes, as its classes may."""
    safetensors = import_optional("safetensors", "hf", "save")
    wanted = sum(float8_format(tensor.dtype) is not None for tensor in tensors.values())
    index = folder / INDEX
    file_names = [WEIGHTS_FILE]
    if index.exists():
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(file_of.values()))
    written = 0
    for file_name in file_names:
        with safetensors.safe_open(folder / file_name, "pt") as file:
            names = file.keys()
            dtypes = [file.get_slice(name).get_dtype() for name in names]
        written += sum(dtype in _FLOAT8_NAMES for dtype in dtypes)
    if written < wanted:
        raise RuntimeError(
            f"transformers writes {written} of {wanted} weights in codes, as the model's class "
            "leaves out tensors when it saves, so nothing was saved: leave their layers in float, "
            "or save the tensors of fm.files.layout_state_dict with safetensors.torch.save_file"
        )


def check_no_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model of PEFT's, or one with its modules inside.

    Their layers compute from two weights, which no layout describes.
    """
    for name, module in model.named_modules():
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__):
            subject = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{subject} is a {type(module).__name__} of PEFT: merge the adapters with "
                "fm.dequantize_model(model).merge_and_unload() and quantise again, or take them "
                "out with model.unload(), and export the model that this returns"
            )


def is_transformers_model(model: Any) -> bool:
    """Return whether a model is of transformers: other libraries save otherwise."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def has_own_head(model: Any) -> bool:
    """Return whether a model has an output layer that does not share the embedding.

    Its settings may say otherwise.
    """
    head = model.get_output_embeddings()
    return head is not None and head.weight is not model.get_input_embeddings().weight


class DescribedWeight(Protocol):
    """What settings say of a quantised weight."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> FloatFormat: ...

    @property
    def sharing(self) -> ScaleSharing: ...


@dataclass(frozen=True)
class ExportedWeight:
    """The codes of a quantised weight, and its scales.

    Scales have the shape (), (R, 1) or (R, C/32), or are of squares.
    """

    name: str
    codes: Tensor
    scale: Tensor
    format: FloatFormat
    dtype: torch.dtype
    in_squares: bool = False

    @property
    def sharing(self) -> ScaleSharing:
        """What shares a scale."""
        if self.in_squares:
            return ScaleSharing.SQUARE
        if not self.scale.dim():
            return ScaleSharing.TENSOR
        if self.scale.shape[-1] == 1:
            return ScaleSharing.CHANNEL
        return ScaleSharing.BLOCK if are_powers_of_two(self.scale) else ScaleSharing.GROUP


@torch.no_grad()
def exported_weights(model: nn.Module, layout: ExportLayout) -> Iterator[ExportedWeight]:
    """Yield the weights of quantised layers.

    Raises:
        TypeError, ValueError: a layer that the layout can't describe.
    """
    for wrapped_name, layer in model.named_modules():
        name = plain_name(wrapped_name)
        if isinstance(layer, QuantizedLinear) and layer.weight_format is not None:
            yield _exported_weight(name, layer, layer.weight_format, layout)


def _exported_weight(
    name: str, layer: QuantizedLinear, fmt: FloatFormat, layout: ExportLayout
) -> ExportedWeight:
    check_exportable(name, layer, fmt, layout)
    if share_of(layer.weight) is not None:
        raise TypeError(f"layer {name!r} is sharded: export the model in one process")
    weight = layer.weight
    in_squares = isinstance(weight, FP8Tensor) and weight.granularity == "square"
    if isinstance(weight, FP8Tensor):
        codes, scale = weight.codes, weight.scale
    else:
        codes, scale = codes_of_floats(name, layer, fmt)
    weight_name = f"{name}.weight".lstrip(".")
    return ExportedWeight(weight_name, codes, scale.float(), fmt, weight.dtype, in_squares)


def check_exportable(
    name: str, layer: QuantizedLinear, fmt: FloatFormat, layout: ExportLayout
) -> None:
    """Raise ValueError for a layer that a layout can't describe."""
    option = f"layout={layout.value!r}"
    computed = computation(layer)
    if computed is not None:
        raise ValueError(f"layer {name!r} can't be exported: {computed}")
    if isinstance(layer, QuantizedConv1D):
        raise ValueError(
            f"layer {name!r} is transformers' Conv1D, but {option} takes nn.Linear only"
        )
    allowed = _FORMATS_BY_LAYOUT[layout]
    if fmt.name not in allowed:
        raise ValueError(
            f"layer {name!r} is in {fmt.name}, but {option} takes one of {', '.join(allowed)}"
        )
    weight = local_of(layer.weight)
    in_squares = isinstance(weight, FP8Tensor) and weight.granularity == "square"
    if in_squares and layout is not ExportLayout.FP8:
        raise ValueError(
            f"layer {name!r} has {_SQUARES}, but {option} takes {_NO_SQUARES}: {_TAKE_FP8}"
        )
    if not in_squares and layout is ExportLayout.FP8:
        raise ValueError(
            f"layer {name!r} has {_NO_SQUARES}, but {option} takes {_SQUARES}: {_TAKE_SQUARES}"
        )


def codes_of_floats(name: str, layer: QuantizedLinear, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a layer whose weights are stored as floats."""
    codes = layer.weight_codes()
    decoded = (decode(codes, fmt) * layer.weight_scale()).to(layer.weight.dtype)
    if not torch.equal(decoded, layer.quantized_weight()):
        raise ValueError(f"layer {name!r} holds values that are not on the grid of {fmt.name}")
    return codes, _distinct_scales(layer.weight_scale(), layer)


def settings_of(
    model: nn.Module, layout: ExportLayout, weights: Sequence[DescribedWeight], activations: str
) -> dict[str, Any]:
    """Return ``quantization_config`` for these weights."""
    names = {weight.name for weight in weights}
    linears = (plain_name(name) for name, module in model.named_modules() if is_linear(module))
    ignored = [name for name in linears if f"{name}.weight".lstrip(".") not in names]
    if layout is ExportLayout.FP8:
        # Its readers know linear layers, and experts by their name.
        owners = {plain_name(name).rpartition(".")[0] for name in in_place_parameters(model)}
        ignored += sorted(owners - {*ignored, ""})
    return _CONFIGS[layout](weights, ignored, activations != "float")


def _distinct_scales(scale: Tensor, layer: QuantizedLinear) -> Tensor:
    """Return the distinct entries of a scale that broadcasts against the weight.

    Their shape is (), (R, 1) or (R, C/32).
    """
    if scale.numel() == 1 and layer.spec.operands["weight"].granularity == "tensor":
        return scale.reshape(())
    return scale[:, ::BLOCK_SIZE].contiguous() if scale.shape[-1] > 1 else scale


def _computed_state(model: nn.Module) -> Iterator[tuple[str, Tensor | Decoded]]:
    """Yield the tensors that the model computes with, by name; codes as floats to come."""
    in_codes = {plain_name(name): value for name, value in in_place_parameters(model).items()}
    turned = {plain_name(name) for name in turned_names(model)}
    state = {plain_name(name): value for name, value in model.state_dict().items()}
    for name in computed_names(model, state):
        if name in in_codes:
            yield name, Decoded(in_codes[name], in_codes[name].dtype, name in turned)
        else:
            yield name, state[name].mT.contiguous() if name in turned else state[name]


def computed_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the names of a model's tensors that it computes with.

    Tied ones are there once, and nothing is that only training needs.
    """
    in_codes = {plain_name(name) for name in in_place_parameters(model)}
    omitted: set[str] = set()
    for wrapped_names in parameter_names(model).values():
        plain_names = [plain_name(name) for name in wrapped_names]
        omitted.update(plain_names[1:])
        if plain_names[0] in in_codes:
            for name in plain_names:
                omitted.update(name + suffix for suffix in PARTS[1:])
    layers = {
        f"{plain_name(name)}.".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    return [name for name in names if name not in omitted and not _is_for_training(name, layers)]


def _is_for_training(name: str, layers: Mapping[str, QuantizedLinear]) -> bool:
    """Return whether a tensor is a quantised layer's own, beside weight and bias.

    ``layers`` are by their names with the dot that follows.
    """
    for prefix, layer in layers.items():
        if name.startswith(prefix):
            entry = name.removeprefix(prefix).partition(".")[0]
            return entry in layer._own_names | _WEIGHT_PARTS
    return False


# What `_TENSORS` and `_CONFIGS` have for each layout: the tensors of a weight, and the
# settings of all weights.


def _compressed_tensors(weight: ExportedWeight) -> dict[str, Tensor]:
    scale = weight.scale
    if weight.sharing is ScaleSharing.TENSOR:
        scale = scale.reshape(1)
    elif weight.sharing is ScaleSharing.BLOCK:
        scale = as_kept(scale, blocks=True)
    scale_name = f"{weight.name}_scale_inv" if weight.in_squares else f"{weight.name}_scale"
    return {weight.name: weight.codes.view(FLOAT8[weight.format]), scale_name: scale}


def _compressed_config(
    weights: Sequence[DescribedWeight], ignored: list[str], are_inputs_rounded: bool
) -> dict[str, Any]:
    """Return settings with a group for each way in which weights share scales."""
    layers_by_sharing: dict[ScaleSharing, list[str]] = {}
    for sharing in _STRATEGIES:
        layers = [w.name.rpartition(".")[0] for w in weights if w.sharing is sharing]
        if layers:
            layers_by_sharing[sharing] = layers
    groups = {}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    for index, (sharing, layers) in enumerate(layers_by_sharing.items()):
        inputs = {**number, "dynamic": True, **_INPUT_STRATEGIES[sharing]}
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(layers_by_sharing) == 1 else layers,
            "format": _MX_GROUP if sharing is ScaleSharing.BLOCK else _FLOAT_GROUP,
            "input_activations": inputs if are_inputs_rounded else None,
            "output_activations": None,
            "weights": {**number, "dynamic": False, **_STRATEGIES[sharing]},
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED_GROUPS,
        "config_groups": groups,
        "ignore": ignored,
    }


def _warn_of_partial_squares(weights: Iterable[ExportedWeight]) -> None:
    partial = []
    for weight in weights:
        sizes = weight.codes.shape
        if any(size > SQUARE_SIZE and size % SQUARE_SIZE for size in sizes):
            partial.append(weight)
    if not partial:
        return
    first, *others = partial
    end = f" and {len(others)} more end" if others else " ends"
    warnings.warn(
        f"{first.name!r} of shape {tuple(first.codes.shape)}{end} in partial squares of 128 x 128: "
        "inference servers read them, but transformers' dequantize=True reads wrong scales or "
        "raises an error",
        stacklevel=3,
    )


def _squares_config(
    weights: Sequence[DescribedWeight], ignored: list[str], are_inputs_rounded: bool
) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [*SQUARE],
        "modules_to_not_convert": ignored,
    }


def _float8_tensors(weight: ExportedWeight) -> dict[str, Tensor]:
    rows, columns = weight.codes.shape
    if weight.sharing is ScaleSharing.TENSOR:
        block_size, scale = [rows, columns], weight.scale.reshape(1, 1)
    elif weight.sharing is ScaleSharing.CHANNEL:
        block_size, scale = [1, columns], weight.scale
    else:
        block_size, scale = [1, BLOCK_SIZE], weight.scale
    torchao = import_optional("torchao.quantization", "torchao", "layout='torchao'")
    codes = weight.codes.view(FLOAT8[weight.format])
    tensor = torchao.Float8Tensor(codes, scale, block_size=block_size, dtype=weight.dtype)
    return {weight.name: tensor}


def _torchao_config(
    weights: Sequence[DescribedWeight], ignored: list[str], are_inputs_rounded: bool
) -> dict[str, Any]:
    torchao = import_optional("torchao.quantization", "torchao", "layout='torchao'")
    config = import_optional("torchao.core.config", "torchao", "layout='torchao'")
    weight_only = torchao.Float8WeightOnlyConfig(weight_dtype=FLOAT8[weights[0].format])
    return {
        "quant_method": "torchao",
        "quant_type": {"default": config.config_to_dict(weight_only)},
        "modules_to_not_convert": ignored,
    }


_TENSORS: Final = {
    ExportLayout.COMPRESSED_TENSORS: _compressed_tensors,
    ExportLayout.TORCHAO: _float8_tensors,
    ExportLayout.FP8: _compressed_tensors,
}
_CONFIGS: Final = {
    ExportLayout.COMPRESSED_TENSORS: _compressed_config,
    ExportLayout.TORCHAO: _torchao_config,
    ExportLayout.FP8: _squares_config,
}
