"""Quantised models in transformers: ``from_pretrained``, ``save_pretrained`` and
``Trainer`` preserve every bit.
"""

import copy
import functools
import math
import re
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, import_optional
from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._published.found import FLOATS
from fp8manifold.exchange import has_own_head, is_transformers_model
from fp8manifold.formats import FloatFormat
from fp8manifold.nn._carried import in_place_parameters, parameter_names, turn
from fp8manifold.nn._grid_weight import GridParameter
from fp8manifold.nn._linear import QuantizedConv1D, QuantizedLinear
from fp8manifold.nn._loading import Encode, Reader
from fp8manifold.nn._parts import PARTS, gather_parts, is_in_codes
from fp8manifold.nn._saved import (
    parameters_recipe_of,
    put_layers,
    put_parameters,
    recipe_of,
    spec_as_json,
)
from fp8manifold.nn._savers import guard_savers, prepare_with, when_guarded
from fp8manifold.nn._scalers import Scale
from fp8manifold.nn._spec import Formats, LayerSpec
from fp8manifold.nn._surgery import dequantize_model
from fp8manifold.nn._tensor_files import check_floats
from fp8manifold.optim import StiffnessAdamW, StiffnessMuon, step_in_backward
from fp8manifold.tensor import FP8Tensor

__all__ = ["attach", "check_floats", "quantization_config", "register", "trainer_optimizer"]

_METHOD: Final = "fp8manifold"
_BY: Final = "fp8manifold.huggingface"
_CONFIG: Final = "Fp8ManifoldConfig"
_QUANTIZER: Final = "Fp8ManifoldQuantizer"
_NAMES_MODEL: Final = "get_config_model_id"
_LOADS_MODEL: Final = "create_model_from_path"
"""Functions of TRL's modules."""
_QUANTIZED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_GUARDED: Final = "_fp8_is_guarded"
_RULES: Final = ("adamw", "muon")
_OWN_CODES: Final = "_fp8_codes"
"""What transformers finds behind the name of a parameter's codes while it loads."""


def register() -> None:
    """Register the quantisation method ``fp8manifold``, so that ``from_pretrained``
    reads models saved with it.

    Call it before ``from_pretrained``; :func:`attach` and :func:`quantization_config`
    call it too.

    Raises:
        ImportError: transformers is missing, or older than version 5.

    Example:
        >>> register()
        >>> from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
        >>> AUTO_QUANTIZER_MAPPING["fp8manifold"].__name__
        'Fp8ManifoldQuantizer'
        >>> model = AutoModelForCausalLM.from_pretrained("saved")  # doctest: +SKIP
    """
    config, quantizer = _classes()
    auto = import_optional("transformers.quantizers.auto", "hf", _BY)
    if _METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(_METHOD)(config)
        auto.register_quantizer(_METHOD)(quantizer)


def quantization_config(formats: Formats = "E4M3", storage: str = "fp8", **options: Any) -> Any:
    """The ``quantization_config`` with which ``from_pretrained`` quantises a float
    model while it loads it.

    Args:
        formats, storage, options: of :func:`fp8manifold.quantize_model`; here one byte
            per weight by default.

    Returns:
        A configuration of transformers; with ``storage="fp8"`` each weight becomes
        codes once it is read (one that is tied or has another dtype, at the end), as by
        ``quantize_model``. Codes and ``state_dict=`` are refused.

    Raises:
        ImportError: as :func:`register`.

    Example:
        >>> config = quantization_config({"*": "E4M3", "lm_head": "none"}, tied="leave")
        >>> config.formats, config.storage, config.options
        ({'*': 'E4M3', 'lm_head': 'none'}, 'fp8', {'tied': 'leave'})
        >>> AutoModelForCausalLM.from_pretrained("my_model", quantization_config=config)  # doctest: +SKIP
    """
    register()
    return _classes()[0](formats=formats, storage=storage, options=options)


def reading(published: dict[str, Any], reader: Any) -> Any:
    """A configuration under which ``from_pretrained`` lets ``reader`` put codes of a
    published model in.
    """
    register()
    config = _classes()[0](layers=[], published=published)
    config.reader = reader
    return config


def published_of(model: Any) -> dict[str, Any] | None:
    """The layout in which a model in codes was published, from its settings, or None."""
    config = getattr(model, "config", None)
    found: dict[str, Any] | None = getattr(
        getattr(config, "quantization_config", None), "published", None
    )
    return found


def attach(model: Any) -> Any:
    """Let transformers save a model that :func:`fp8manifold.quantize_model` quantised,
    and its ``Trainer`` train it.

    The first ``save_pretrained`` of a model with weights in codes calls it by itself;
    one with storage ``grid`` or ``master`` is saved as floats until it is attached.

    ``save_pretrained`` then writes the tensors that
    :func:`fp8manifold.unflatten_state_dict` describes, and each layer's options to
    ``config.json``; ``from_pretrained`` and ``Trainer``'s ``resume_from_checkpoint``
    read all of it to the bit, NaN and -0 included. A model that ``from_pretrained`` has
    read or quantised is attached already.

    Args:
        model: of transformers; changed in place, with its ``config``.

    Returns:
        The model.

    Raises:
        ImportError, TypeError: as :func:`register`; no model of transformers.
        ValueError: no quantised layer, or one on the continuous manifold.

    Example:
        >>> import fp8manifold as fm
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=20))
        >>> model = attach(fm.quantize_model(model, {"*": "E4M3"}, storage="fp8", tied="leave"))
        >>> [(group["storage"], len(group["seeds"])) for group in model.config.quantization_config.layers]
        [('fp8', 4)]
        >>> model.save_pretrained("saved")  # doctest: +SKIP

    Source: the interface of transformers 5 for quantisers (``register_quantizer``).
    """
    given = model
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not is_transformers_model(model):
        raise TypeError(
            f"model is a {type(model).__name__}, not a transformers model: save its state_dict() "
            f"instead"
        )
    register()
    guard_savers(model)
    config, quantizer = _classes()
    _check_ties(model)
    layers, parameters = recipe_of(model), parameters_recipe_of(model)
    if not layers and not parameters:
        raise ValueError("the model has no quantised layer: call quantize_model first")
    model.hf_quantizer = quantizer(config(layers=layers, parameters=parameters), pre_quantized=True)
    model.is_quantized, model.quantization_method = True, _METHOD
    _describe(model)
    if _name_as_wrapped not in model._load_state_dict_pre_hooks.values():
        model.register_load_state_dict_pre_hook(_name_as_wrapped)
    return given


def _check_ties(model: nn.Module) -> None:
    """Refuse codes that a quantised layer shares with another module.

    Each would be made again by itself, and one of them without its scales.
    """
    for names in _in_codes(model):
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        layers = [name for name, owner in owners.items() if isinstance(owner, QuantizedLinear)]
        if not layers:
            continue
        layer = layers[0]
        others = [name for name in names if owners[name] is not owners[layer]]
        if others:
            raise ValueError(
                f"{layer!r}, the weight of a quantised layer, is also {others[0]!r}: they were "
                "tied after the layer was quantised; call fm.dequantize_model(model), and quantise "
                "again with embeddings= and tied='leave'"
            )


class _NameOfQuantized(str):
    """The name of the files from which a model was read that is quantised now."""

    __slots__ = ()


def _guard_references(model: Any = None) -> None:
    """Let TRL's trainers that are imported by now refuse a float model as the reference
    of a quantised one.
    """
    if is_transformers_model(model):
        _QUANTIZED.add(model)
    for name, module in list(sys.modules.items()):
        functions = vars(module) if name.startswith("trl.") else {}
        if not functions.keys() >= {_NAMES_MODEL, _LOADS_MODEL}:
            continue
        if not hasattr(functions[_LOADS_MODEL], _GUARDED):
            setattr(module, _NAMES_MODEL, _noting_quantized(functions[_NAMES_MODEL]))
            setattr(module, _LOADS_MODEL, _refusing_floats(functions[_LOADS_MODEL]))


def _noting_quantized(name_of: Any) -> Any:
    """TRL's function that finds a model's name in its settings."""

    @functools.wraps(name_of)
    def get_config_model_id(config: Any) -> Any:
        name = name_of(config)
        known = any(model.config is config and _is_quantized(model) for model in _QUANTIZED)
        if known or isinstance(getattr(config, "quantization_config", None), _Config):
            return _NameOfQuantized(name)
        return name

    return get_config_model_id


def _refusing_floats(load: Any) -> Any:
    """TRL's function that reads a model by its name, which a trainer calls for the
    reference that it was not given.
    """

    @functools.wraps(load)
    def create_model_from_path(model_id: Any, *args: Any, **options: Any) -> Any:
        is_told = options.get("quantization_config") is not None
        if isinstance(model_id, _NameOfQuantized) and not is_told and not _holds_codes(model_id):
            raise ValueError(
                f"the reference would be read in float from {str(model_id)!r}, and the model "
                "that is trained is quantised: give ref_model=copy.deepcopy(model), or save the "
                "model and set model.config._name_or_path to that folder"
            )
        return load(model_id, *args, **options)

    setattr(create_model_from_path, _GUARDED, True)
    return create_model_from_path


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _holds_codes(name: Any) -> bool:
    """True for a model whose files are in codes; False where it can't be read, too."""
    settings = import_optional("transformers", "hf", _BY).AutoConfig
    try:
        config = settings.from_pretrained(name)
    except (OSError, ValueError):
        return False
    return getattr(config, "quantization_config", None) is not None


def _name_as_wrapped(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before a model loads: names in a saved folder are those without compiled
    blocks, which torch names by their wrapper.
    """
    for name, _module in model.named_modules():
        if not name.endswith("_orig_mod"):
            continue
        wrapped, plain = f"{prefix}{name}.", f"{prefix}{plain_name(name)}."
        for key in list(state):
            if key.startswith(plain) and not key.startswith(wrapped):
                state[wrapped + key.removeprefix(plain)] = state.pop(key)


def _prepare(model: Any, arguments: Mapping[str, Any]) -> None:
    """Attach a model with codes that transformers is about to save, and note the state
    that it was given.
    """
    if getattr(model, "hf_quantizer", None) is None:
        if not any(is_in_codes(own) for own in model.parameters()):
            return
        attach(model)
    if isinstance(model.hf_quantizer, _Quantizer):
        model.hf_quantizer.given_state = arguments.get("state_dict")


prepare_with("PreTrainedModel", _prepare)
when_guarded(_guard_references)


@functools.cache
def _classes() -> tuple[Any, Any]:
    loading = import_optional("transformers", "hf", _BY)
    if int(loading.__version__.split(".")[0]) < 5:
        raise ImportError(f"{_BY} needs transformers 5 or newer, not {loading.__version__}")
    config = import_optional(
        "transformers.utils.quantization_config", "hf", _BY
    ).QuantizationConfigMixin
    quantizer = import_optional("transformers.quantizers.base", "hf", _BY).HfQuantizer
    return (
        type(_CONFIG, (_Config, config), {"__module__": __name__}),
        type(_QUANTIZER, (_Quantizer, quantizer), {"__module__": __name__}),
    )


def __getattr__(name: str) -> Any:
    """The classes that need transformers, made when a pickle of a model asks for them."""
    if name in (_CONFIG, _QUANTIZER):
        register()
        return _classes()[(_CONFIG, _QUANTIZER).index(name)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Config:
    """A configuration in JSON's types: formats to quantise to, or the layers that are
    quantised.
    """

    def __init__(
        self,
        formats: Formats | None = None,
        storage: str = "fp8",
        options: Mapping[str, Any] | None = None,
        layers: list[dict[str, Any]] | None = None,
        parameters: list[dict[str, Any]] | None = None,
        published: dict[str, Any] | None = None,
        quant_method: str = _METHOD,
    ) -> None:
        self.quant_method = quant_method
        if published is not None:
            self.published = published
        if layers is not None:
            self.layers = layers
            if parameters:
                self.parameters = parameters
        else:
            self.formats, self.storage = _formats_as_json(formats), storage
            self.options = {
                name: _formats_as_json(value) for name, value in (options or {}).items()
            }

    def to_dict(self) -> dict[str, Any]:
        """Settings as a file has them: no path of this machine."""
        said = copy.deepcopy(vars(self))
        said.get("published", {}).pop("source", None)
        return said


def _formats_as_json(formats: Any) -> Any:
    if isinstance(formats, Mapping):
        return {pattern: _formats_as_json(each) for pattern, each in formats.items()}
    if isinstance(formats, LayerSpec):
        return spec_as_json(formats)
    return formats.name if isinstance(formats, FloatFormat) else formats


class _Quantizer:
    """The answers to transformers as it loads and saves; put before its own class."""

    quantization_config: Any
    pre_quantized: bool
    reader: Any = None
    """A reader that makes codes of tensors from transformers, or puts in those that it
    read itself.
    """
    given_state: Mapping[str, Tensor] | None = None
    """The state that ``save_pretrained`` is to write in place of the model's own."""
    own_parameters: tuple[
        str, ...
    ] = ()  #: Names of parameters in codes that are called otherwise than ``weight``.
    requires_calibration = False
    is_qat_trainable = True

    @property
    def is_trainable(self) -> bool:
        """True; every trainer asks when it is made, before TRL's reads a reference."""
        _guard_references()
        return True

    def is_serializable(self, *_: Any) -> bool:
        return True

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """True where a tensor becomes codes as it is read, or may have another shape,
        as a measured scale may.
        """
        if self.reader is not None:
            return bool(self.reader.wants(param_name))
        owner, entry = param_name.rpartition(".")[::2]
        return entry in ("value", "history") and isinstance(model.get_submodule(owner), Scale)

    def get_quantize_ops(self) -> Any:
        package = import_optional("transformers.core_model_loading", "hf", _BY)
        operation = type("Encoded", (Encode, package.ConversionOps), {})()
        operation.reader = self.reader
        return operation

    def update_device_map(self, device_map: Any) -> Any:
        """Refuse to leave weights on a disk, where codes can't be."""
        if "disk" in map(str, getattr(device_map, "values", lambda: (device_map,))()):
            raise ValueError(
                "device_map has 'disk': weights in codes can't be left there; take devices or 'cpu'"
            )
        return device_map

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        return 1.0 if isinstance(param, FP8Tensor) else float(param.element_size())

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Codes, their scales and counts stay what they are; ``_Gather`` lets the
        weight appear as the layer's own.
        """
        if _is_ours(converter):
            return None
        return (
            dtype
            if (param.get_dtype() if hasattr(param, "get_dtype") else param.dtype) in FLOATS
            else None
        )

    def get_weight_conversions(self) -> list[Any]:
        if not self.pre_quantized:
            return []
        package = import_optional("transformers.core_model_loading", "hf", _BY)
        operation = type("Gather", (_Gather, package.ConversionOps), {})()
        renamings = []
        names = {"weight": PARTS}
        for name in self.own_parameters:
            # A conversion that transformers has for this very name, as those before
            # 5.4 have for gpt-oss, would take the codes for floats. Renamings come
            # before all conversions.
            renamings.append(
                package.WeightRenaming(rf"(?<!\w){re.escape(name)}$", f"{name}{_OWN_CODES}")
            )
            names[name] = (_OWN_CODES, *PARTS[1:])
        # With a $: transformers before 5.22 takes a longer name that begins alike for
        # this one
        converters = []
        for name, suffixes in names.items():
            start = "weight" if name == "weight" else rf"(?<!\w){re.escape(name)}"
            patterns = [f"{start}{suffix}$" for suffix in suffixes]
            converters.append(package.WeightConverter(patterns, name, operations=[operation]))
        return renamings + converters

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Any = None, **_: Any
    ) -> None:
        wanted = self.quantization_config
        if (reader := vars(wanted).pop("reader", None)) is not None:
            self.reader = reader
            reader.begin(model)
        elif not self.pre_quantized:
            if (
                checkpoint_files is None
            ):  # transformers casts tensors in memory before it asks a quantiser
                raise ValueError(
                    "state_dict= does not go with quantization_config=: call quantize_model "
                    "afterwards"
                )
            check_floats(model, checkpoint_files)
            self.reader = Reader(
                model, wanted.formats, wanted.storage, wanted.options, checkpoint_files
            )
        else:
            own = dict(model.named_parameters())
            turned = dict.fromkeys(getattr(wanted, "published", {}).get("turned", ()), 0)
            turn(model, list(_named_here(model, {"seeds": turned}, own)["seeds"]))
            modules, own = dict(model.named_modules()), dict(model.named_parameters())
            dtype = torch.get_default_dtype()  # that of the weights, and not of measured scales
            try:
                torch.set_default_dtype(torch.float32)
                put_layers(
                    model,
                    [
                        _named_here(model, group, modules)
                        for group in self.quantization_config.layers
                    ],
                )
            finally:
                torch.set_default_dtype(dtype)
            groups = getattr(self.quantization_config, "parameters", ())
            put_parameters(model, here := [_named_here(model, group, own) for group in groups])
            names = [
                name for group in here for name in group["seeds"] if not name.endswith(".weight")
            ]
            start = f"{model.base_model_prefix}."
            self.own_parameters = tuple(name.removeprefix(start) for name in names)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        if self.reader is not None:
            self.reader.finish(model)
            self.reader = None
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [each for each in conversions if not _is_ours(each)]
        attach(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return dequantize_model(model).to(dtype)  # None leaves the dtypes

    def get_state_dict_and_metadata(
        self, model: Any, *_: Any
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state of the model as it is now, or the one given to ``save_pretrained``;
        its settings are written after that.
        """
        _check_ties(model)
        _describe(model)
        _keep_whole(model)
        given, self.given_state = self.given_state, None
        state = {plain_name(name): value for name, value in model.state_dict().items()}
        if given is not None:
            state = _checked_state(model, given, state)
        kept: set[str] = set()
        for all_names in _in_codes(model):
            first, *others = [plain_name(name) for name in all_names]
            kept.add(first)
            # transformers knows of one tied weight, and not of its parts
            for name in others:
                for suffix in PARTS:
                    state.pop(name + suffix, None)
        # what a class leaves out it computes anew, to other values than those in codes
        model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ())} - kept
        return state, {}


def _in_codes(model: nn.Module) -> Iterator[list[str]]:
    """All names of every parameter in codes."""
    for names in parameter_names(model).values():
        if is_in_codes(model.get_parameter(names[0])):
            yield names


def _checked_state(
    model: nn.Module, given: Mapping[str, Tensor], present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A state that ``save_pretrained`` was given, if it is one of this model.

    Raises:
        ValueError: it lacks a tensor, or has a weight otherwise than in the model's
            codes.
    """
    state = {plain_name(name): value for name, value in given.items()}
    lacking = [name for name in present if name not in state and not name.endswith(PARTS[-1])]
    if lacking:
        raise ValueError(
            f"state_dict has no {lacking[0]!r}: give a copy of the model's own state_dict()"
        )
    for names in _in_codes(model):
        name = plain_name(names[0])
        traits = f"{name}_traits"
        same = state[name].shape == present[name].shape and torch.equal(
            state[traits][:4].cpu(), present[traits][:4].cpu()
        )
        if not same:
            raise ValueError(
                f"state_dict has {name!r} in another format or shape than the model: give a copy "
                "of the model's own state_dict()"
            )
    return state


def _named_here(model: Any, group: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A group by the names in this model, which may be the base of the one that was
    saved, or have it as one.

    What the model does not have, such as another output layer, is left out, as
    transformers leaves out its weights.
    """
    start, seeds = f"{model.base_model_prefix}.", group.get("seeds", {})
    is_base = any(name.startswith(start) and name.removeprefix(start) in names for name in seeds)
    named, is_whole = {}, any(name.startswith(start) for name in seeds)
    for name, seed in seeds.items():
        here = next(
            (each for each in (name, name.removeprefix(start), start + name) if each in names), name
        )
        if here in names or (not is_base and (name.startswith(start) or not is_whole)):
            named[here] = seed
    return {**group, "seeds": named}


def _keep_whole(model: Any) -> None:
    """Let transformers write parameters in codes whole: it would take experts apart,
    which codes can't be.
    """
    names = [name for name in in_place_parameters(model) if not name.endswith(".weight")]
    if not names:
        return
    package = import_optional("transformers.core_model_loading", "hf", _BY)
    kept = getattr(model, "_weight_conversions", None)
    if kept is None:
        mapping = import_optional("transformers.conversion_mapping", "hf", _BY)
        kept = mapping.get_model_conversion_mapping(model, add_legacy=False)
        kept = [each for each in kept if not isinstance(each, getattr(package, "PrefixChange", ()))]
    model._weight_conversions = [
        each
        for each in kept
        if not isinstance(each, package.WeightConverter)
        or not any(target in name for target in each.target_patterns for name in names)
    ]


def _is_ours(conversion: Any) -> bool:
    if any(target.endswith(_OWN_CODES) for target in conversion.target_patterns):
        return True
    return any(
        isinstance(operation, _Gather) for operation in getattr(conversion, "operations", ())
    )


def _describe(model: Any) -> None:
    """Write to a model's settings how its layers are quantised, and whether its output
    layer still is the embedding.
    """
    if has_own_head(model):
        model.config.tie_word_embeddings = False
    layers, parameters = recipe_of(model), parameters_recipe_of(model)
    if layers or parameters:
        published = published_of(model)
        model.config.quantization_config = _classes()[0](
            layers=layers, parameters=parameters, published=published
        )
    else:
        vars(model.config).pop("quantization_config", None)


class _Gather:
    """The conversion of a weight's parts in a file to the parameter that the layer
    takes, in the layer's dtype.
    """

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: Any,
        full_layer_name: str,
        missing_keys: Any = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        parts = {}
        for pattern, value in input_dict.items():
            suffix = next((suffix for suffix in PARTS[1:] if pattern.endswith(suffix + "$")), "")
            parts[f"weight{suffix}"] = value[0] if isinstance(value, list) else value
        owner, entry = full_layer_name.rpartition(".")[::2]
        layer = model.get_submodule(owner)
        own = getattr(layer, entry)  # without values
        if (
            missing_keys is not None
        ):  # names of the model's state, of which one alone stands for all parts
            missing_keys.difference_update({full_layer_name + suffix for suffix in PARTS[1:]})
        gather_parts(parts, "weight", own)
        value = parts["weight"]
        if isinstance(value, FP8Tensor):
            if isinstance(own, FP8Tensor) and (value.format, value.scale.shape) != (
                own.format,
                own.scale.shape,
            ):
                its, wanted = ((x.format.name, x.granularity) for x in (value, own))
                raise ValueError(
                    f"{full_layer_name} is {its} in the file, and {wanted} in config.json"
                )
            value = value.with_parts(lambda part: part, own.dtype).requires_grad_(own.requires_grad)
        else:
            value = value.to(own.dtype) if value.dtype in FLOATS else value
            value = value.t().contiguous() if isinstance(layer, QuantizedConv1D) else value
        if isinstance(layer, QuantizedLinear) and layer.manifold is not None:
            value = GridParameter(value, manifold=layer.manifold)
        return {full_layer_name: value}


class TrainerOptimizer:
    """The factory that a trainer makes, then calls with the model and the options of
    :func:`trainer_optimizer`.
    """

    def __init__(self, *parameters: Any, **options: Any) -> None:
        if parameters or options:
            raise TypeError(
                "this Trainer gives an optimizer its parameters and not the model: "
                "trainer_optimizer needs transformers 5.2 or newer"
            )

    def __call__(
        self,
        model: nn.Module,
        arguments: Any = None,
        *,
        rule: str,
        in_backward: dict[str, Any] | None,
        **options: Any,
    ) -> Any:
        """Make the optimizer of a model that is where it is trained; axolotl gives it
        the arguments once more.
        """
        made: Any
        if rule == "muon":
            made = StiffnessMuon.for_model(model, **options)
        else:
            made = StiffnessAdamW(_groups(model, options.pop("weight_decay")), **options)
        if in_backward is not None:
            step_in_backward(made, **in_backward)
        return made


def trainer_optimizer(
    arguments: Any, rule: str = "adamw", *, in_backward: bool = False, **options: Any
) -> tuple[type[Any], dict[str, Any]]:
    """The ``optimizer_cls_and_kwargs`` of a ``Trainer`` of transformers, or of a
    library that builds on it.

    .. math:: (F, o) \\text{ with } F()(\\text{model}, **o) = \\text{the optimizer}

    Learning rate, betas, eps and decay are those of the arguments, and biases and norms
    don't decay. ``in_backward`` uses :func:`fp8manifold.optim.step_in_backward`: with
    ``clip="previous"``, where the first step only measures the norm, or under
    ``gradient_accumulation_steps`` with ``accumulate="bfloat16"``, clipped by the norm
    of the sums.

    Args:
        arguments: ``TrainingArguments``, or those of a library that builds on it
            (``SFTConfig``).
        rule: ``adamw`` (:class:`~fp8manifold.optim.StiffnessAdamW`) or ``muon``
            (``StiffnessMuon.for_model``).
        in_backward: whether to step in the backward pass.
        options: the optimizer's, in place of the arguments'; for ``muon`` those of
            ``for_model`` too.

    Returns:
        A factory, and the options that it is called with beside the model.

    Raises:
        TypeError: no arguments of a trainer; in the factory, an unknown option.
        ValueError: another rule; ``fp16=True`` with ``in_backward``; in the factory,
            options of the optimizer's.
        ImportError, RuntimeError: in the factory, transformers is missing;
            ``in_backward`` in several processes.

    Example:
        >>> from transformers import TrainingArguments
        >>> from fp8manifold.huggingface import trainer_optimizer
        >>> arguments = TrainingArguments("out", learning_rate=2e-5, use_cpu=True, report_to=[])
        >>> factory, chosen = trainer_optimizer(arguments, "muon", moments="8bit", in_backward=True)
        >>> chosen["lr"], chosen["moments"], chosen["in_backward"]
        (2e-05, '8bit', {'clip': 'previous', 'max_norm': 1.0, 'first': 'measure'})
        >>> optimizer = factory()(nn.Sequential(nn.Linear(4, 4)), **chosen)
        >>> Trainer(model, arguments, optimizer_cls_and_kwargs=(factory, chosen))  # doctest: +SKIP

    Source: the interface of transformers 5 for optimizers that see the model.
    """
    check_choice("rule", rule, _RULES)
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    for name in (*names, "max_grad_norm", "gradient_accumulation_steps"):
        if not hasattr(arguments, name):
            raise TypeError(
                f"arguments is a {type(arguments).__name__} without {name}: TrainingArguments are "
                f"needed"
            )
    lr, weight_decay, *betas, eps = (getattr(arguments, name) for name in names)
    shared = {
        "lr": lr,
        "weight_decay": weight_decay,
        "betas": (*betas,),
        "adam_eps" if rule == "muon" else "eps": eps,
    }
    how: dict[str, Any] | None = None
    if in_backward and getattr(arguments, "fp16", False):
        raise ValueError(
            "in_backward=True does not go with fp16=True, whose gradients are scaled: use bf16=True"
        )
    if in_backward and arguments.gradient_accumulation_steps > 1:
        how = {"accumulate": "bfloat16"}
    elif in_backward:
        how = {
            "clip": "previous",
            "max_norm": float(arguments.max_grad_norm or math.inf),
            "first": "measure",
        }
    return TrainerOptimizer, shared | options | {"rule": rule, "in_backward": how}


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of the parameters that decay and of those that do not, as Trainer divides
    them.
    """
    trainer = import_optional(
        "transformers", "hf", "fp8manifold.huggingface.trainer_optimizer"
    ).Trainer
    decays = set(trainer.get_decay_parameter_names(None, model))
    groups: dict[bool, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decaying = name in decays
            groups.setdefault(
                decaying, {"params": [], "weight_decay": weight_decay if decaying else 0.0}
            )
            groups[decaying]["params"].append((name, p))
    return [groups[decaying] for decaying in (True, False) if decaying in groups]
