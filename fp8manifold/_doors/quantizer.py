"""Quantised models in transformers: its functions preserve every bit.

transformers asks a quantiser what to do as it loads and saves. Ours is ``_Quantizer``,
with ``_Config`` as the settings that ``config.json`` has::

    quantizing(formats)            from_pretrained reads floats, and each becomes codes
    config.json with layers        from_pretrained makes the layers, then reads parts of
                                   weights, which _Gather puts together
    reading(published, reader)     load reads codes itself
    reading_parts(..., reader)     load gives transformers the parts of a saved folder
    attach(model)                  transformers saves adapters of a model in codes

The method is registered as soon as transformers has the module for it, whoever imports
that. Both classes inherit from transformers' own, which may be missing: they are made at the
first call (``_classes``). TRL needs help, without being imported here: it reads a
trainer's reference model by its name (``_guard_references``).

Weights come from a reader, which is made before the model and called by ``_Quantizer``
while transformers reads:

    nn._loading.Reader         ``wants`` weights that transformers reads as floats, and
                               encodes each; ``finish`` puts the layers around them
    published._CodeReader      ``begin`` reads all codes itself, ``finish`` puts them in
    saved_folder.SavedReader   ``begin`` reads the parts of weights, which transformers
                               puts in by ``_Gather`` (``reads_parts``)
"""

import copy
import functools
import re
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.after_import import when_imported
from fp8manifold._base.checks import import_optional
from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._doors.exchange import has_own_head, is_transformers_model
from fp8manifold._published.find_weights import FLOATS
from fp8manifold._published.replace_files import SIDE_FILE
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
from fp8manifold.nn._surgery import PUBLISHED, dequantize_model
from fp8manifold.nn._tensor_files import check_floats
from fp8manifold.tensor import FP8Tensor

_METHOD: Final = "fp8manifold"
_REGISTRY: Final = "transformers.quantizers.auto"
_CALLER: Final = "fp8manifold"
_CONFIG_NAME: Final = "Fp8ManifoldConfig"
_QUANTIZER_NAME: Final = "Fp8ManifoldQuantizer"
_CODES_SUFFIX: Final = "_fp8_codes"
"""What transformers finds behind the name of a parameter's codes while it loads."""

# Functions of TRL's modules: one finds a model's name in its settings, the other reads
# a model by its name.
_TRL_NAMES_MODEL: Final = "get_config_model_id"
_TRL_LOADS_MODEL: Final = "create_model_from_path"
_TRL_IS_GUARDED: Final = "_fp8_is_guarded"
"""An attribute of functions of TRL that are replaced."""
_QUANTIZED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Models that may be quantised. TRL must not read their references in float."""


def register() -> None:
    """Register the quantisation method ``fp8manifold`` with transformers, once.

    ``from_pretrained`` then reads models that were saved with it.

    Raises:
        ImportError: transformers is missing, or older than version 5.
    """
    config, quantizer = _classes()
    auto = import_optional(_REGISTRY, "hf", _CALLER)
    if _METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(_METHOD)(config)
        auto.register_quantizer(_METHOD)(quantizer)


def _register_with(registry: ModuleType) -> None:
    """Register with transformers' module of quantisers, once it is imported.

    Versions that the classes can't serve are left alone.
    """
    with suppress(ImportError):
        register()


def quantizing(formats: Formats = "E4M3", storage: str = "codes", **options: Any) -> Any:
    """Return a ``quantization_config`` with which ``from_pretrained`` quantises.

    With ``storage="codes"`` each weight becomes codes once it is read, as by
    ``quantize_model``; one that is tied or has another dtype does at the end. Codes and
    ``state_dict=`` are refused.

    Args:
        formats: of :func:`fp8manifold.quantize_model`.
        storage: of it.
        **options: of it.
    """
    register()
    return _classes()[0](formats=formats, storage=storage, options=options)


def reading(published: dict[str, Any], reader: Any) -> Any:
    """Return a ``quantization_config`` with which ``from_pretrained`` reads a published model.

    ``reader`` puts its codes in.
    """
    register()
    return _classes()[0](layers=[], published=published, reader=reader)


def reading_parts(
    layers: list[dict[str, Any]],
    parameters: list[dict[str, Any]],
    turned: list[str],
    reader: Any,
) -> dict[str, Any]:
    """Return settings under which ``reader`` gives a model's weights as parts.

    As an entry of ``config.json`` they say that the model is quantised already.
    """
    register()
    settings = {"layers": layers, "parameters": parameters, "reader": reader}
    if turned:
        settings["published"] = {"turned": turned}
    return settings | {"quant_method": _METHOD}


def detach(model: Any) -> Any:
    """Let a model that was read with our quantiser be saved as one without.

    It still knows the layout in which it was published.
    """
    if is_attached(model):
        published = published_of(model)
        if published is not None:
            _note_published(model, published)
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
        model.is_quantized = False
    return model


def _note_published(model: nn.Module, published: dict[str, Any]) -> None:
    """Note the layout of a published model, and of the models inside, such as its base."""
    for module in model.modules():
        if is_transformers_model(module):
            setattr(module, PUBLISHED, published)


def is_attached(model: Any) -> bool:
    """Return whether a model is saved and read by our quantiser."""
    return isinstance(getattr(model, "hf_quantizer", None), _Quantizer)


def published_of(model: Any) -> dict[str, Any] | None:
    """Return the layout in which a model in codes was published, from its settings."""
    known: dict[str, Any] | None = getattr(model, PUBLISHED, None)
    if known is not None:
        return known
    config = getattr(model, "config", None)
    settings = getattr(config, "quantization_config", None)
    published: dict[str, Any] | None = getattr(settings, "published", None)
    return published


def attach(model: Any) -> Any:
    """Let transformers save a quantised model with its parts as they are.

    The model is changed in place, with its ``config``.

    Raises:
        TypeError: no model of transformers.
        ValueError: no quantised layer, or one that can't be saved.
    """
    wrapped = model
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not is_transformers_model(model):
        raise TypeError(
            f"model is a {type(model).__name__}, not a transformers model: save its state_dict() "
            "instead"
        )
    register()
    guard_savers(model)
    config, quantizer = _classes()
    check_ties(model)
    layers = recipe_of(model)
    parameters = parameters_recipe_of(model)
    if not layers and not parameters:
        raise ValueError("the model has no quantised layer: call quantize_model first")
    model.hf_quantizer = quantizer(config(layers=layers, parameters=parameters), pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = _METHOD
    _update_config(model)
    if _add_wrapper_names not in model._load_state_dict_pre_hooks.values():
        model.register_load_state_dict_pre_hook(_add_wrapper_names)
    return wrapped


def check_ties(model: nn.Module) -> None:
    """Refuse codes that a quantised layer shares with another module.

    Each would be made again by itself, and one of them without its scales.
    """
    for names in _names_in_codes(model):
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
    """Let TRL's trainers refuse a float model as the reference of a quantised one.

    Those that are imported by now are guarded.
    """
    if is_transformers_model(model):
        _QUANTIZED.add(model)
    for name, module in list(sys.modules.items()):
        functions = vars(module) if name.startswith("trl.") else {}
        if not functions.keys() >= {_TRL_NAMES_MODEL, _TRL_LOADS_MODEL}:
            continue
        if not hasattr(functions[_TRL_LOADS_MODEL], _TRL_IS_GUARDED):
            setattr(module, _TRL_NAMES_MODEL, _noting_quantized(functions[_TRL_NAMES_MODEL]))
            setattr(module, _TRL_LOADS_MODEL, _refusing_floats(functions[_TRL_LOADS_MODEL]))


def _noting_quantized(name_of: Any) -> Any:
    """Wrap TRL's function that finds a model's name in its settings.

    The name of a quantised model is a ``_NameOfQuantized``.
    """

    @functools.wraps(name_of)
    def get_config_model_id(config: Any) -> Any:
        name = name_of(config)
        is_quantized = any(
            model.config is config and _has_quantized_layer(model) for model in _QUANTIZED
        )
        if is_quantized or isinstance(getattr(config, "quantization_config", None), _Config):
            return _NameOfQuantized(name)
        return name

    return get_config_model_id


def _refusing_floats(load: Any) -> Any:
    """Wrap TRL's function that reads a model by its name.

    A trainer calls it for the reference that it was not given. The name of a quantised
    model is refused if its files are floats.
    """

    @functools.wraps(load)
    def create_model_from_path(model_id: Any, *args: Any, **options: Any) -> Any:
        is_quantized = isinstance(model_id, _NameOfQuantized)
        has_config = options.get("quantization_config") is not None
        if is_quantized and not has_config and not _files_are_of_codes(model_id):
            raise ValueError(
                f"the reference would be read in float from {str(model_id)!r}, and the model "
                "that is trained is quantised: give ref_model=copy.deepcopy(model), or save the "
                "model and set model.config._name_or_path to that folder"
            )
        return load(model_id, *args, **options)

    setattr(create_model_from_path, _TRL_IS_GUARDED, True)
    return create_model_from_path


def _has_quantized_layer(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _files_are_of_codes(name: Any) -> bool:
    """Return whether a model that is read by its name is quantised again.

    Its files are codes, or floats with a file that brings codes back. False if they can't
    be read, too.
    """
    if (Path(name) / SIDE_FILE).is_file():
        return True
    settings = import_optional("transformers", "hf", _CALLER).AutoConfig
    try:
        config = settings.from_pretrained(name)
    except (OSError, ValueError):
        return False
    return getattr(config, "quantization_config", None) is not None


def _add_wrapper_names(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename a state's tensors before a model loads it, as a hook.

    Names in a saved folder are those without compiled blocks, which torch names by
    their wrapper.
    """
    for name, _ in model.named_modules():
        if not name.endswith("_orig_mod"):
            continue
        wrapped_prefix = f"{prefix}{name}."
        plain_prefix = f"{prefix}{plain_name(name)}."
        for key in list(state):
            if key.startswith(plain_prefix) and not key.startswith(wrapped_prefix):
                state[wrapped_prefix + key.removeprefix(plain_prefix)] = state.pop(key)


def _prepare_to_save(model: Any, arguments: Mapping[str, Any]) -> None:
    """Attach a model that transformers is about to save in codes.

    Note the state that ``save_pretrained`` was given, too.
    """
    if getattr(model, "hf_quantizer", None) is None:
        if not any(is_in_codes(parameter) for parameter in model.parameters()):
            return
        attach(model)
    if isinstance(model.hf_quantizer, _Quantizer):
        model.hf_quantizer.state_to_save = arguments.get("state_dict")


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Make the classes of configurations and of quantisers, from transformers' own."""
    transformers = import_optional("transformers", "hf", _CALLER)
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(
            f"{_CALLER} needs transformers 5 or newer, not {transformers.__version__}"
        )
    configs = import_optional("transformers.utils.quantization_config", "hf", _CALLER)
    quantizers = import_optional("transformers.quantizers.base", "hf", _CALLER)
    attributes = {"__module__": __name__}
    config_bases = (_Config, configs.QuantizationConfigMixin)
    quantizer_bases = (_Quantizer, quantizers.HfQuantizer)
    return (
        type(_CONFIG_NAME, config_bases, dict(attributes)),
        type(_QUANTIZER_NAME, quantizer_bases, dict(attributes)),
    )


def __getattr__(name: str) -> Any:
    """Return the classes that need transformers, when a pickle asks for them."""
    if name in (_CONFIG_NAME, _QUANTIZER_NAME):
        register()
        config, quantizer = _classes()
        return config if name == _CONFIG_NAME else quantizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Config:
    """A configuration in JSON's types.

    It has formats to quantise to, or the layers and parameters that are quantised, and
    of a published model its layout. The names of its attributes are a file format.
    """

    def __init__(
        self,
        formats: Formats | None = None,
        storage: str = "codes",
        options: Mapping[str, Any] | None = None,
        layers: list[dict[str, Any]] | None = None,
        parameters: list[dict[str, Any]] | None = None,
        published: dict[str, Any] | None = None,
        quant_method: str = _METHOD,
        reader: Any = None,
    ) -> None:
        self.quant_method = quant_method
        # An entry of this name in config.json is no reader.
        if hasattr(reader, "begin"):
            self.reader = reader
        if published is not None:
            self.published = published
        if layers is not None:
            self.layers = layers
            if parameters:
                self.parameters = parameters
        else:
            self.formats = _formats_as_json(formats)
            self.storage = storage
            self.options = {
                name: _formats_as_json(value) for name, value in (options or {}).items()
            }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a file has them, without a path of this machine."""
        settings = copy.deepcopy(vars(self))
        settings.get("published", {}).pop("source", None)
        return settings


def _formats_as_json(formats: Any) -> Any:
    if isinstance(formats, Mapping):
        return {pattern: _formats_as_json(value) for pattern, value in formats.items()}
    if isinstance(formats, LayerSpec):
        return spec_as_json(formats)
    return formats.name if isinstance(formats, FloatFormat) else formats


class _Quantizer:
    """The answers to transformers as it loads and saves, before its own class (``_classes``).

    Attributes:
        reader: what makes codes of tensors from transformers, or puts in those that it
            read itself.
        state_to_save: the state that ``save_pretrained`` is to write in place of the
            model's own.
        bare_parameters: names of parameters in codes that are no module's ``weight``,
            such as experts.
    """

    quantization_config: Any
    pre_quantized: bool
    reader: Any = None
    state_to_save: Mapping[str, Tensor] | None = None
    bare_parameters: tuple[str, ...] = ()
    requires_calibration = False
    is_qat_trainable = True

    @property
    def is_trainable(self) -> bool:
        """True; every trainer asks when it is made.

        TRL's trainers read a reference model after that, so reading is guarded here.
        """
        _guard_references()
        return True

    def is_serializable(self, *_: Any) -> bool:
        return True

    @property
    def _reads_parts(self) -> bool:
        """Whether weights in codes come as parts, which are gathered."""
        return self.pre_quantized or getattr(self.reader, "reads_parts", False)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Return whether a tensor becomes codes as it is read.

        One that may have another shape, as a measured scale may, counts too.
        """
        if self.reader is not None and not self._reads_parts:
            return bool(self.reader.wants(param_name))
        owner, _dot, entry = param_name.rpartition(".")
        return entry in ("value", "history") and isinstance(model.get_submodule(owner), Scale)

    def get_quantize_ops(self) -> Any:
        loading = import_optional("transformers.core_model_loading", "hf", _CALLER)
        operation = type("Encoded", (Encode, loading.ConversionOps), {})()
        operation.reader = self.reader
        return operation

    def update_device_map(self, device_map: Any) -> Any:
        """Refuse to leave weights on a disk, where codes can't be."""
        is_map = hasattr(device_map, "values")
        devices = device_map.values() if is_map else (device_map,)
        if "disk" in map(str, devices):
            raise ValueError(
                "device_map has 'disk': weights in codes can't be left there; take devices or 'cpu'"
            )
        return device_map

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        return 1.0 if isinstance(param, FP8Tensor) else float(param.element_size())

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Return the dtype that a tensor gets, or None if it stays what it is.

        Codes, their scales and counts stay. ``_Gather`` lets the weight appear in the
        layer's own dtype.
        """
        if _is_ours(converter):
            return None
        present = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        return dtype if present in FLOATS else None

    def get_weight_conversions(self) -> list[Any]:
        """Return conversions that gather the parts of weights."""
        if not self._reads_parts:
            return []
        loading = import_optional("transformers.core_model_loading", "hf", _CALLER)
        operation = type("Gather", (_Gather, loading.ConversionOps), {})()
        operation.keeps_dtypes = getattr(self.reader, "keeps_dtypes", False)
        renamings = []
        # the codes of a layer have the weight's own name, the other parts a suffix to it
        suffixes_of = {"weight": PARTS}
        for name in self.bare_parameters:
            # A conversion that transformers has for this very name, as those before
            # 5.4 have for gpt-oss, would take the codes for floats. Renamings come
            # before all conversions.
            renamings.append(
                loading.WeightRenaming(rf"(?<!\w){re.escape(name)}$", f"{name}{_CODES_SUFFIX}")
            )
            suffixes_of[name] = (_CODES_SUFFIX, *PARTS[1:])
        converters = []
        for name, suffixes in suffixes_of.items():
            start = "weight" if name == "weight" else rf"(?<!\w){re.escape(name)}"
            # With a $: transformers before 5.22 takes a longer name that begins alike
            # for this one.
            patterns = [f"{start}{suffix}$" for suffix in suffixes]
            converters.append(loading.WeightConverter(patterns, name, operations=[operation]))
        return renamings + converters

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Any = None, **_: Any
    ) -> None:
        config = self.quantization_config
        reader = vars(config).pop("reader", None)
        if reader is not None:
            # of `reading` or `reading_parts`
            self.reader = reader
            reader.begin(model)
            if self._reads_parts:
                self._put_layers(model)
        elif not self.pre_quantized:
            # of `quantizing`
            # transformers casts tensors in memory before it asks a quantiser.
            if checkpoint_files is None:
                raise ValueError(
                    "state_dict= can't be used with quantization_config=: leave "
                    "quantization_config= out, and call quantize_model afterwards"
                )
            check_floats(model, checkpoint_files)
            self.reader = Reader(
                model, config.formats, config.storage, config.options, checkpoint_files
            )
        else:
            # a model that was saved in codes
            self._put_layers(model)

    def _put_layers(self, model: nn.Module) -> None:
        """Make the quantised layers and parameters of a saved model, without values."""
        config = self.quantization_config
        turned = getattr(config, "published", {}).get("turned", ())
        parameters = dict(model.named_parameters())
        turn(model, list(_names_in_model(model, turned, parameters).values()))
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters())
        # The default is that of the weights, and not of measured scales.
        dtype = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32)
            put_layers(model, [_group_for_model(model, group, modules) for group in config.layers])
        finally:
            torch.set_default_dtype(dtype)
        groups = [
            _group_for_model(model, group, parameters)
            for group in getattr(config, "parameters", ())
        ]
        put_parameters(model, groups)
        prefix = f"{model.base_model_prefix}."
        names = []
        for group in groups:
            for name in group["seeds"]:
                if not name.endswith(".weight"):
                    names.append(name.removeprefix(prefix))
        self.bare_parameters = tuple(names)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        if self.reader is not None:
            self.reader.finish(model)
            self.reader = None
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [x for x in conversions if not _is_ours(x)]
        # It can be saved from now on. The quantiser, which is not needed for that, goes.
        attach(model)
        detach(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        # None leaves the dtypes.
        return dequantize_model(model).to(dtype)

    def get_state_dict_and_metadata(
        self, model: Any, *_: Any
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the state of the model, or the one given to ``save_pretrained``.

        The settings, which it brings up to date, are written after that.
        """
        check_ties(model)
        _update_config(model)
        _keep_whole(model)
        given_state, self.state_to_save = self.state_to_save, None
        state = {plain_name(name): value for name, value in model.state_dict().items()}
        if given_state is not None:
            state = checked_state(model, given_state, state)
        in_codes: set[str] = set()
        for names in _names_in_codes(model):
            first, *others = [plain_name(name) for name in names]
            in_codes.add(first)
            # transformers knows of one tied weight, and not of its parts.
            for name in others:
                for suffix in PARTS:
                    state.pop(name + suffix, None)
        # A class may leave out what it can compute. In codes it is saved: what is
        # computed has other values.
        model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ())} - in_codes
        return state, {}


def _names_in_codes(model: nn.Module) -> Iterator[list[str]]:
    """Yield all names of every parameter in codes."""
    for names in parameter_names(model).values():
        if is_in_codes(model.get_parameter(names[0])):
            yield names


def checked_state(
    model: nn.Module, given_state: Mapping[str, Tensor], present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state that ``save_pretrained`` was given, if it is one of this model.

    Raises:
        ValueError: it lacks a tensor, or has a weight otherwise than in the model's
            codes.
    """
    state = {plain_name(name): value for name, value in given_state.items()}
    missing = [name for name in present if name not in state and not name.endswith(PARTS[-1])]
    if missing:
        raise ValueError(
            f"state_dict has no {missing[0]!r}: give a copy of the model's own state_dict()"
        )
    for names in _names_in_codes(model):
        name = plain_name(names[0])
        traits = f"{name}_traits"
        has_shape = state[name].shape == present[name].shape
        # The first four traits are those of the format.
        if not has_shape or not torch.equal(state[traits][:4].cpu(), present[traits][:4].cpu()):
            raise ValueError(
                f"state_dict has {name!r} in another format or shape than the model: give a copy "
                "of the model's own state_dict()"
            )
    return state


def _group_for_model(
    model: Any, group: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """Return a group of the settings with its seeds by the names in this model."""
    saved_seeds = group.get("seeds", {})
    new_names = _names_in_model(model, saved_seeds, names)
    seeds = {name: saved_seeds[saved_name] for saved_name, name in new_names.items()}
    return {**group, "seeds": seeds}


def _names_in_model(
    model: Any, saved_names: Collection[str], names: Collection[str]
) -> dict[str, str]:
    """Return the name in this model by each name in the settings.

    The model may be the base of the one that was saved, or have it as its base. What
    the model does not have, such as another output layer, is left out, as transformers
    leaves out its weights.
    """
    prefix = f"{model.base_model_prefix}."
    saved_base = [name for name in saved_names if name.startswith(prefix)]
    model_is_saved_base = any(name.removeprefix(prefix) in names for name in saved_base)
    new_names = {}
    for saved_name in saved_names:
        candidates = (saved_name, saved_name.removeprefix(prefix), prefix + saved_name)
        name = next((candidate for candidate in candidates if candidate in names), None)
        # An output layer is beside the base of the model that was saved.
        is_beside_base = bool(saved_base) and saved_name not in saved_base
        if name is not None:
            new_names[saved_name] = name
        elif not model_is_saved_base and not is_beside_base:
            # It should be here: passed on, it is refused.
            new_names[saved_name] = saved_name
    return new_names


def _keep_whole(model: Any) -> None:
    """Let transformers write parameters in codes whole.

    It would take experts apart, which codes can't be.
    """
    names = [name for name in in_place_parameters(model) if not name.endswith(".weight")]
    if not names:
        return
    loading = import_optional("transformers.core_model_loading", "hf", _CALLER)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        mapping = import_optional("transformers.conversion_mapping", "hf", _CALLER)
        conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
        prefix_change = getattr(loading, "PrefixChange", ())
        conversions = [x for x in conversions if not isinstance(x, prefix_change)]

    def takes_apart(conversion: Any) -> bool:
        if not isinstance(conversion, loading.WeightConverter):
            return False
        pairs = product(conversion.target_patterns, names)
        return any(target in name for target, name in pairs)

    model._weight_conversions = [x for x in conversions if not takes_apart(x)]


def _is_ours(conversion: Any) -> bool:
    """Return whether a conversion is one of ``_Quantizer.get_weight_conversions``."""
    if any(target.endswith(_CODES_SUFFIX) for target in conversion.target_patterns):
        return True
    operations = getattr(conversion, "operations", ())
    return any(isinstance(operation, _Gather) for operation in operations)


def _update_config(model: Any) -> None:
    """Write to a model's settings how its layers are quantised.

    They also say whether its output layer still is the embedding.
    """
    if has_own_head(model):
        model.config.tie_word_embeddings = False
    layers = recipe_of(model)
    parameters = parameters_recipe_of(model)
    if layers or parameters:
        config, _ = _classes()
        model.config.quantization_config = config(
            layers=layers, parameters=parameters, published=published_of(model)
        )
    else:
        vars(model.config).pop("quantization_config", None)


class _Gather:
    """The conversion of a weight's parts in a file to the layer's parameter.

    It has the layer's dtype, or with ``keeps_dtypes`` the one that it was saved in.
    """

    keeps_dtypes = False

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: Any,
        full_layer_name: str,
        missing_keys: Any = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Return the parameter of a layer's name."""
        parts = {}
        for pattern, value in input_dict.items():
            suffix = next((suffix for suffix in PARTS[1:] if pattern.endswith(suffix + "$")), "")
            parts[f"weight{suffix}"] = value[0] if isinstance(value, list) else value
        owner, _dot, entry = full_layer_name.rpartition(".")
        layer = model.get_submodule(owner)
        # without values
        parameter = getattr(layer, entry)
        if missing_keys is not None:
            # transformers counts only the weight's own name as read: its parts are not
            # missing.
            missing_keys.difference_update({full_layer_name + suffix for suffix in PARTS[1:]})
        gather_parts(parts, "weight", parameter)
        value = parts["weight"]
        if isinstance(value, FP8Tensor):
            _check_is_same_kind(full_layer_name, value, parameter)
            dtype = value.dtype if self.keeps_dtypes else parameter.dtype
            value = value.with_parts(lambda part: part, dtype)
            value = value.requires_grad_(parameter.requires_grad)
        else:
            if value.dtype in FLOATS and not self.keeps_dtypes:
                value = value.to(parameter.dtype)
            # files have the float weight of a Conv1D as that has it, (in, out)
            if isinstance(layer, QuantizedConv1D):
                value = value.t().contiguous()
        if isinstance(layer, QuantizedLinear) and layer.manifold is not None:
            value = GridParameter(value, manifold=layer.manifold)
        return {full_layer_name: value}


def _check_is_same_kind(name: str, value: FP8Tensor, parameter: Tensor) -> None:
    """Refuse codes of another format or granularity than the settings say."""
    if not isinstance(parameter, FP8Tensor):
        return
    if (value.format, value.scale.shape) != (parameter.format, parameter.scale.shape):
        in_file = (value.format.name, value.granularity)
        in_config = (parameter.format.name, parameter.granularity)
        raise ValueError(f"{name} is {in_file} in the file, but {in_config} in config.json")


when_imported(_REGISTRY, _register_with)
# what the guard of `save_pretrained` calls for every model of transformers
prepare_with("PreTrainedModel", _prepare_to_save)
when_guarded(_guard_references)
