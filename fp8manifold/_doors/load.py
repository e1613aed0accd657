"""One way in: `load` finds out what a folder has, and reads it."""

import logging
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from fp8manifold._base.checks import import_optional
from fp8manifold._doors.folder_kind import Folder, FolderKind, check_has_settings, found_folder
from fp8manifold._doors.published import (
    class_of,
    complete_model,
    made_by_transformers,
    read_published,
)
from fp8manifold._doors.quantizer import quantizing, reading_parts
from fp8manifold._doors.saved_folder import SavedReader, SavedWeights, saved_files
from fp8manifold._doors.side_file import Content, SideFile, read_side_file
from fp8manifold._published.options import HUB_OPTIONS, ReadOptions, sorted_options
from fp8manifold.nn._spec import Formats, Storage, check_storage_name
from fp8manifold.nn._surgery import PUBLISHED, quantize_model
from fp8manifold.nn._tensor_files import FileTensors

_LOG: Final = logging.getLogger("fp8manifold")
_CALLER: Final = "load"
_OF_ENCODING: Final = (
    "granularity",
    "headroom",
    "rounding",
    "seed",
    "keep_remainder",
    "defer_weight_gradients",
    "tied",
    "draws",
    "retraction",
    "products",
    "parameters",
)
"""Options of `quantize_model`, for floats."""
_OF_CODES: Final = ("activations", "rounding", "draws", "seed")
"""Options of published codes."""


def load(
    name_or_folder: str | Path,
    formats: Formats | None = None,
    *,
    embeddings: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    storage: Storage = "codes",
    **transformers_options: Any,
) -> Any:
    r"""Read a model of transformers into codes, whatever its folder holds.

    .. math:: w = s \cdot \operatorname{decode}(code)

    - Floats become codes of ``formats`` as they are read, one tensor at a time.
    - Published codes (FP8, MXFP8, MXFP4) are taken as they are, with their scales.
    - A folder of :func:`save` gives back exactly the codes, scales, seeds and counts
      that were saved.
    - GGUF is read as floats by transformers, and then quantised.

    One line in the log ``fp8manifold`` says what was read and how many bytes. The
    model trains, and is saved by :func:`save` or its ``save_pretrained``, without
    another call.

    Args:
        name_or_folder: a local folder, a GGUF file, or a model's name on the Hub.
        formats: the formats for floats and GGUF, as in :func:`quantize_model`; other
            folders have formats of their own.
        embeddings: formats of embeddings, for floats and GGUF, as in
            :func:`quantize_model`.
        dtype: float32 or bfloat16: the dtype of what stays float, and the apparent
            dtype of weights in codes. The default depends on the folder. For floats it
            is ``"auto"`` of ``from_pretrained``, so that a folder of float16 or float64
            needs a ``dtype``. For codes it is that of ``config.json``, or bfloat16 if
            that is neither. In a folder of :func:`save` it is the dtype in which each
            tensor was saved; another ``dtype`` rounds it.
        device: where the model goes; by default the CPU.
        storage: the storage for floats and GGUF, as in :func:`quantize_model`.
        **transformers_options: options of ``from_pretrained``. ``subfolder``,
            ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and
            ``force_download`` say where the files are. Floats also take the other
            options of :func:`quantize_model`. Published codes take ``rounding``,
            ``draws`` and ``seed`` of the weights, which replace those that :func:`save`
            has stored, and ``activations``: ``float`` leaves inputs as they are, ``as
            stored`` rounds them at the files' ``input_scale``. For codes, any other
            option is a setting of ``config.json`` (``attention_dropout=0.1``), which
            :func:`save` does not write, or it is refused.

    Returns:
        The model, of the class that ``config.json`` names, in evaluation mode; for
        floats with ``output_loading_info=True`` also what transformers found missing or
        unexpected. NaN and -0 among codes are preserved.

    Raises:
        ImportError, FileNotFoundError: transformers is missing; no such folder or
            model, or a folder without weights or settings.
        TypeError, ValueError: floats without ``formats``; an option that this kind of
            folder does not take; floats that were changed since :func:`save` wrote them
            with their scales; an unsupported layout; a tensor that the model or the
            files lack; scales that one parameter can't hold where the model fuses
            weights; floats beside published codes that ``dtype`` does not hold exactly;
            as :func:`quantize_model`.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.load("Qwen/Qwen3-8B", "E4M3")  # doctest: +SKIP
        >>> model = fm.load("Qwen/Qwen3-8B-FP8")  # doctest: +SKIP
        >>> from tempfile import mkdtemp
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 8}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
        >>> floats = mkdtemp()
        >>> LlamaForCausalLM(config).save_pretrained(floats)
        >>> model = fm.load(floats, {"*": "E4M3", "lm_head": "none"})
        >>> model.lm_head.weight.dtype, model.model.layers[0].mlp.up_proj.weight.format.name
        (torch.float32, 'E4M3')

    Source: safetensors; DeepSeek-V3 (arXiv 2412.19437); compressed-tensors
    (vllm-project); Model-Optimizer; OCP MX Formats 1.0; GGUF by transformers.
    """
    check_storage_name(storage)
    options = dict(transformers_options)
    hub: dict[str, Any] = {name: options[name] for name in HUB_OPTIONS if name in options}
    subfolder = options.get("subfolder") or ""
    folder = found_folder(name_or_folder, hub, subfolder, options.pop("gguf_file", None))
    check_has_settings(folder)
    is_local = Path(name_or_folder).exists()
    name = str(folder.path) if is_local else str(name_or_folder)
    given = {"formats": formats, "embeddings": embeddings}
    given |= {"storage": None if storage == "codes" else storage}
    if folder.kind in (FolderKind.FLOATS, FolderKind.GGUF):
        chosen_formats = given | {"storage": storage}
        gives_info = bool(options.pop("output_loading_info", False))
        model, loading_info = _quantized(folder, name, chosen_formats, dtype, device, options)
        if not gives_info:
            _refuse_missing(loading_info, folder)
    else:
        gives_info = False
        _refuse_options(folder, given | options)
        chosen, codes_options = _options_of_codes(folder, dtype, device, options)
        model = _READERS[folder.kind](folder, name, chosen, codes_options)
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    held = sum(parameter.nbytes for parameter in parameters.values())
    _LOG.info(
        "read %s from %r: %s bytes of files, %s bytes of parameters",
        folder.kind,
        name,
        f"{folder.size:,}",
        f"{held:,}",
    )
    return (model, loading_info) if gives_info else model


def _refuse_options(folder: Folder, options: Mapping[str, Any]) -> None:
    """Refuse options that only mean something for another kind of folder."""
    is_published = folder.kind is FolderKind.PUBLISHED or folder.content is Content.PUBLISHED
    allowed: Collection[str] = _OF_CODES if is_published else ()
    for name in ("formats", "embeddings", "storage", *_OF_ENCODING, *_OF_CODES):
        value = options.get(name)
        if value is not None and name not in allowed:
            raise ValueError(
                f"{name}={value!r:.60} can't be used with {str(folder.path)!r}, which has "
                f"{folder.kind}: its weights are in codes already, and are read as they are"
            )


def _options_of_codes(
    folder: Folder, dtype: Any, device: Any, options: Mapping[str, Any]
) -> tuple[ReadOptions, dict[str, Any]]:
    """Return options of transformers, and those of codes."""
    codes_options = {name: value for name, value in options.items() if name in _OF_CODES}
    rest = {name: value for name, value in options.items() if name not in _OF_CODES}
    chosen = sorted_options(rest, dtype, device, _CALLER)
    # As transformers says it.
    if chosen.dtype in (None, "auto"):
        chosen = replace(chosen, dtype=_default_dtype(folder), keeps_dtypes=True)
    return chosen, codes_options


def _default_dtype(folder: Folder) -> torch.dtype:
    """Return the dtype of a folder's settings, if weights in codes can appear in it."""
    transformers = import_optional("transformers", "hf", _CALLER)
    dtype: torch.dtype = transformers.AutoConfig.from_pretrained(folder.path).dtype
    return dtype if dtype in (torch.float32, torch.bfloat16) else torch.bfloat16


def _quantized(
    folder: Folder,
    name: str,
    chosen: Mapping[str, Any],
    dtype: Any,
    device: Any,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Read floats or GGUF, and quantise them.

    What transformers says about the reading is returned, too.
    """
    if chosen["formats"] is None and not options.get("parameters") and not chosen["embeddings"]:
        raise ValueError(
            f"{str(folder.path)!r} has {folder.kind}: give formats=, such as 'E4M3', or read it "
            "with from_pretrained"
        )
    if "activations" in options:
        raise ValueError(
            f"activations={options['activations']!r:.60} can't be used with {str(folder.path)!r}, "
            f"which has {folder.kind}: give formats= a specification with activations"
        )
    if device is not None and options.get("device_map") is not None:
        raise ValueError(f"device={device!r} and device_map are given: give one of them")
    transformers = import_optional("transformers", "hf", _CALLER)
    encoding = {key: value for key, value in options.items() if key in _OF_ENCODING}
    encoding |= chosen
    dropped = (*HUB_OPTIONS, "subfolder", *_OF_ENCODING)
    passed = {key: value for key, value in options.items() if key not in dropped}
    passed["dtype"] = _given_dtype(dtype, passed.pop("torch_dtype", None))
    if folder.kind is FolderKind.GGUF:
        model, loading_info = _floats_of_gguf(transformers, folder, passed)
        model = quantize_model(model, **encoding)
    else:
        settings = transformers.AutoConfig.from_pretrained(folder.path)
        settings.architectures = options.get("architectures") or settings.architectures
        model, loading_info = class_of(transformers, settings).from_pretrained(
            folder.path,
            quantization_config=quantizing(**encoding),
            output_loading_info=True,
            **passed,
        )
    model.config.name_or_path = name
    return (model if device is None else model.to(device)), loading_info


def _refuse_missing(loading_info: Mapping[str, Any], folder: Folder) -> None:
    """Refuse a model whose files lack a tensor, which transformers would draw anew."""
    missing = sorted(loading_info.get("missing_keys") or ())
    if missing:
        raise ValueError(f"the model has {missing[0]!r}, which {str(folder.path)!r} lacks")


def _given_dtype(dtype: Any, torch_dtype: Any) -> Any:
    if dtype is not None and torch_dtype is not None:
        raise ValueError(f"dtype={dtype} and torch_dtype={torch_dtype} are given: give dtype alone")
    given = torch_dtype if dtype is None else dtype
    return "auto" if given is None else given


def _floats_of_gguf(
    transformers: Any, folder: Folder, passed: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if hasattr(transformers, "GgufConfig"):
        passed = passed | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    settings = transformers.AutoConfig.from_pretrained(folder.path, gguf_file=folder.file)
    architectures = settings.architectures
    model_class = class_of(transformers, settings) if architectures else None
    model_class = model_class or transformers.AutoModelForCausalLM
    model, loading_info = model_class.from_pretrained(
        folder.path, gguf_file=folder.file, output_loading_info=True, **passed
    )
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    return model, loading_info


def _published(folder: Folder, name: str, chosen: ReadOptions, options: dict[str, Any]) -> Any:
    return read_published(folder.path, chosen, name, **options)


def _saved(folder: Folder, name: str, chosen: ReadOptions, options: dict[str, Any]) -> Any:
    """Read a folder of `save`."""
    side = read_side_file(folder.path)
    if side.content is Content.PUBLISHED:
        model = _published(folder, name, chosen, options)
        # Whoever gives draws of their own takes the codes as they were published.
        if not options.keys() & {"rounding", "draws", "seed"}:
            _resume_counts(model, side, folder)
        return model
    with closing(FileTensors(saved_files(folder.path, side))) as tensors:
        weights = SavedWeights(side, tensors, chosen.device)
        reader = SavedReader(weights, keeps_dtypes=chosen.keeps_dtypes)
        quantization = reading_parts(side.layers, side.parameters, side.turned, reader)
        model = made_by_transformers(folder.path, quantization, reader, chosen)
    # The settings above say how its parameters lie, and not how it was published.
    for module in model.modules():
        vars(module).pop(PUBLISHED, None)
    return complete_model(model, folder.path, name, chosen)


def _resume_counts(model: Any, side: SideFile, folder: Folder) -> None:
    """Give published codes the seeds and counts that they were saved with."""
    # With a layer's other tensors: it would measure the scales of its inputs anew.
    owners = tuple(f"{name.rpartition('.')[0]}." for name in side.names)
    own_state = model.state_dict()
    state: dict[str, Any] = {key: own_state[key] for key in own_state if key.startswith(owners)}
    for name in side.names:
        weight = model.get_parameter(name)
        side.tensors[f"{name}_scale"] = weight.kept_scale
        state |= side.parts_of(name, weight.codes)
    result = model.load_state_dict(state, strict=False)
    if result.unexpected_keys:
        raise ValueError(
            f"{str(folder.path)!r} has {result.unexpected_keys[0]!r} in its side file, which the "
            "model lacks"
        )


def _attached(folder: Folder, name: str, chosen: ReadOptions, options: dict[str, Any]) -> Any:
    """Read what `save_pretrained` of an earlier version wrote."""
    transformers = import_optional("transformers", "hf", _CALLER)
    settings = transformers.AutoConfig.from_pretrained(folder.path)
    model = class_of(transformers, settings).from_pretrained(
        folder.path, dtype=chosen.dtype, **chosen.passed, **chosen.settings
    )
    return complete_model(model, folder.path, name, chosen)


_READERS: Final = {
    FolderKind.PUBLISHED: _published,
    FolderKind.SAVED: _saved,
    FolderKind.ATTACHED: _attached,
}
