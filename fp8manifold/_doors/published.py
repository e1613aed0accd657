"""Read published FP8 checkpoints into models of transformers, and write them back.

::

    reading     files --headers--> FolderLayout: which tensors are codes, scales, floats
                transformers makes the model without values, and calls
                    _CodeReader.begin: codes become parameters, which are kept out of
                    the model meanwhile
                transformers reads the floats
                _CodeReader.finish puts the parameters in
    saving      FolderLayout (from the model's settings) + model --> the same files
                    weights in codes and floats: from the model
                    small tensors without a place in it: from its settings
                    all others: from the folder that was read

What is read is what is written: a weight that was not trained has the same bytes.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, import_optional
from fp8manifold._base.tensor_writer import ready, write_tensors
from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._doors.quantizer import published_of, reading
from fp8manifold._encoded.scaled import WriteRounding
from fp8manifold._published import StoredWeight, written_parts
from fp8manifold._published.layout import (
    GENERATION,
    FolderLayout,
    describe_folder,
    entries_of,
    is_ignored,
)
from fp8manifold._published.options import ReadOptions, sorted_options
from fp8manifold._published.places import part_of, share_scale_, weight_of
from fp8manifold._published.replace_files import INDEX, replacing
from fp8manifold._ranks import share_of
from fp8manifold.nn._carried import turn
from fp8manifold.nn._loading import put_codes
from fp8manifold.nn._tensor_files import FileTensors, files_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws

LoadedActivations = Literal["float", "as stored"]
_ACTIVATIONS: Final = ("float", "as stored")
_CALLER: Final = "load"
_INPUT_SCALES: Final = ("input_scale", "activation_scale")
_PEFT_ENTRIES: Final = frozenset({"base_layer", "original_module"})
"""Names under which PEFT's modules have the layer that they adapt or copy."""
_TRANSPOSED_SUFFIX: Final = "_blocks"
"""The end of the names of codes of gpt-oss's experts."""
_DOWNLOADED: Final = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""Files of a repository that are downloaded: weights, settings and a tokenizer's."""
DTYPES_IN_FILES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_published(
    source: Path,
    chosen: ReadOptions,
    name: str,
    *,
    activations: LoadedActivations = "float",
    rounding: WriteRounding = "stochastic",
    draws: Draws = "independent",
    seed: int = 0,
) -> Any:
    r"""Read a published model from a local folder; its weights are codes.

    .. math:: w = s \cdot \operatorname{decode}(code)

    Codes, formats and scales are those of the files, in the layouts of DeepSeek
    (squares of 128 x 128), compressed-tensors, ModelOpt, torchao, MXFP8 and MXFP4. A
    linear layer becomes a :class:`QuantizedLinear`. Experts and other weights become an
    :class:`FP8Parameter` where they are, and floats stay float. Reading takes the memory
    of the codes and of one tensor.

    Args:
        source: the folder.
        chosen: options of the reading.
        name: what the model is called from then on.
        activations: ``float`` leaves inputs as they are; ``as stored`` rounds them at
            the files' ``input_scale``.
        rounding: of the weights, as in :func:`fp8manifold.quantize_model`.
        draws: of the weights, as there.
        seed: of the weights, as there.

    Raises:
        TypeError, ValueError: no weight in codes; an unsupported layout, dtype or
            option; a tensor that the model or the files lack; scales that one parameter
            can't hold where the model fuses weights; floats that the dtype does not
            hold exactly; ``activations="as stored"`` where no layer has an
            ``input_scale``.

    Source: DeepSeek-V3 (arXiv 2412.19437); compressed-tensors (vllm-project);
    Model-Optimizer; OCP MX Formats 1.0.
    """
    check_choice("activations", activations, _ACTIVATIONS)
    check_int("seed", seed, 0, 2**31 - 1)
    with closing(FileTensors(files_of(source))) as tensors:
        layout = FolderLayout(describe_folder(source, tensors))
        if not layout.stored:
            raise ValueError(
                f"{str(source)!r} has no weight in FP8 codes: read it with from_pretrained"
            )
        weight_options: dict[str, Any] = {
            "rounding": rounding,
            "draws": draws,
            "dtype": chosen.dtype,
            "device": chosen.device,
        }
        reader = _CodeReader(tensors, layout, weight_options, seed, activations)
        model = made_by_transformers(source, reading(layout.published, reader), reader, chosen)
        _check_floats_are_exact(model, tensors, layout)
    return complete_model(model, source, name, chosen)


def made_by_transformers(source: Path, quantization: Any, reader: Any, chosen: ReadOptions) -> Any:
    """Return the model of a folder's settings, with the floats of a reader.

    Args:
        source: a local folder.
        quantization: a configuration with the reader, or a dict of settings by which
            the model is quantised already.
        reader: has ``floats`` for transformers to read, once it knows the model.
        chosen: options of the reading.

    Raises:
        ValueError: a parameter that the folder lacks.
    """
    transformers = import_optional("transformers", "hf", chosen.caller)
    config = _config_of(transformers, source, chosen)
    quantization_option = {}
    if isinstance(quantization, dict):
        config.quantization_config = quantization
    else:
        quantization_option["quantization_config"] = quantization
    model, loading_info = class_of(transformers, config).from_pretrained(
        None,
        config=config,
        state_dict=reader.floats,
        dtype=chosen.dtype,
        output_loading_info=True,
        **quantization_option,
        **chosen.passed,
    )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ValueError(f"the model has {missing[0]!r}, which {str(source)!r} lacks")
    return model


def complete_model(model: Any, source: Path, name: str, chosen: ReadOptions) -> Any:
    """Give a model its name and the folder's settings of generation, and move it."""
    _set_name(model, name)
    has_generation_config = chosen.passed.get("generation_config") is not None
    if not has_generation_config and model.can_generate() and (source / GENERATION).is_file():
        transformers = import_optional("transformers", "hf", chosen.caller)
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model.to(chosen.device)


def _config_of(transformers: Any, source: Path, chosen: ReadOptions) -> Any:
    """Return the settings of a folder with some of them changed.

    Raises:
        TypeError: the settings do not have one of the changes.
    """
    config, unknown = transformers.AutoConfig.from_pretrained(
        source, return_unused_kwargs=True, **chosen.settings
    )
    for name in chosen.settings:
        if name in unknown:
            raise TypeError(
                f"{name!r} is neither an option of {chosen.caller} or from_pretrained, nor a "
                f"setting of {type(config).__name__}"
            )
    # The layout takes the place of the files' quantization_config.
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    return config


def class_of(transformers: Any, config: Any) -> Any:
    """Return the first class of transformers that settings name."""
    names = config.architectures or []
    for name in names:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    raise ValueError(
        f"config.json has architectures={names!r}: the name of a transformers class is needed"
    )


def _set_name(model: Any, name: str) -> None:
    """Note where a model was read: libraries write its name into an adapter."""
    model.config.name_or_path = name
    for module in model.modules():
        if "name_or_path" in vars(module):
            module.name_or_path = name


def save_published(
    model: Any,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    r"""Write a model back in the published layout that it was read in.

    A server loads it as it loads the original.

    .. math:: \operatorname{save}(\operatorname{load}(F)) = F

    Names, dtypes, shards, index and settings are those of the folder that was read, a
    weight that was not trained is the same bytes, and the tokenizer's files are copied.
    Floats are not rounded: a parameter that the file's dtype does not hold exactly is
    written in its own dtype.

    Args:
        model: also under ``torch.compile``, ``checkpoint_wrapper`` or ``DataParallel``.
            It does not change, except that rows of a fused weight that share a scale in
            the file take their largest (:meth:`FP8Tensor.rescale_`).
        folder: made if it is not there; once all files have been written they replace
            those of the same names, and of an earlier save the weights that would be
            read instead.
        source: the folder that was read, or its name on the Hub; by default where it
            was found.
        write_more: writes other files of the save into the folder that it gets, once
            the weights are written and before earlier files are replaced.

    Raises:
        FileNotFoundError: the folder that tensors without a place in the model are
            copied from is unknown or gone.
        TypeError, ValueError: a sharded model; one that does not say how it was
            published; a weight of another format; a tensor of the files that the model
            has lost (a layer that is gone, or is in a module of another name); a
            parameter that the files have no place for; an adapter or settings of other
            codes in ``folder``.

    Warns:
        UserWarning: the tokenizer's or other files beside the weights that can't be
            copied.
    """
    base = base_of(model)
    published = published_of(base)
    if published is None:
        raise ValueError(
            "the model was not read from a published layout, or was decoded since: leave source= "
            "out, and give a layout"
        )
    layout = FolderLayout(published)
    refuse_adapters(base)
    layout.find_places(base)
    entries = entries_of(base)
    check_complete(model, base, layout, entries)
    source_name = published.get("source")
    source_folder = None if source_name is None else Path(source_name)
    if source is not None:
        source_folder = local_source(source, {})
    documents = dict(published["documents"])
    has_index = "index" in published
    file_of: dict[str, str] = {}
    total_size = 0
    names = [*published["files"], *documents]
    if has_index:
        names.append(INDEX)
    with (
        closing(CopiedTensors(layout, source_folder)) as copied,
        replacing(Path(folder), names) as new_folder,
    ):
        for file, description in published["files"].items():
            tensors = _tensors_of_file(description["tensors"], layout, entries, copied)
            file_of |= dict.fromkeys(tensors, file)
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            to_write = {name: ready(tensor) for name, tensor in tensors.items()}
            write_tensors(new_folder / file, to_write, description["metadata"])
        if has_index:
            metadata = dict(published["index"])
            if "total_size" in metadata:
                metadata["total_size"] = total_size
            index = {"metadata": metadata, "weight_map": file_of}
            documents[INDEX] = json.dumps(index, indent=2, sort_keys=True) + "\n"
        for name, text in documents.items():
            (new_folder / name).write_text(text, "utf-8")
        _copy_others(published["others"], source_folder, new_folder)
        if write_more is not None:
            write_more(new_folder)


def base_of(model: Any) -> Any:
    """Return the model of transformers inside torch's wrappers and PEFT's."""
    inner: Any = unwrapped(model) if isinstance(model, nn.Module) else model
    if any(kind.__name__ == "PeftModel" for kind in type(inner).__mro__):
        base: Any = inner.get_base_model()
        return unwrapped(base)
    return inner


def refuse_adapters(model: nn.Module) -> None:
    """Refuse weights that have an adapter of PEFT, or a copy that PEFT trains."""
    for name, module in model.named_modules():
        if not _PEFT_ENTRIES.isdisjoint(vars(module)["_modules"]):
            raise ValueError(
                f"{plain_name(name)!r} has an adapter of PEFT, or a copy that PEFT trains, for "
                "which the files have no place: save the model that merge_and_unload() returns"
            )


def check_complete(
    model: nn.Module, base: Any, layout: FolderLayout, entries: Mapping[str, Tensor]
) -> None:
    """Refuse a model whose tensors are not those of the files.

    A tensor that the model has lost can't be left out: the settings promise it, and
    readers would draw it anew. A parameter that the files have no place for would be
    lost. ``base`` is the model without the wrappers of ``model``.
    """
    placed = {id(entries[place.target]) for place in layout.places.values()}
    ignored = base._keys_to_ignore_on_load_missing or ()
    without_place = []
    for name, parameter in model.named_parameters():
        is_ignored_name = any(re.search(pattern, name) for pattern in ignored)
        if id(parameter) not in placed and not is_ignored_name:
            without_place.append(plain_name(name))
    lost = layout.lost(base)
    if lost:
        instead = f", which has {without_place[0]!r}" if without_place else ""
        raise ValueError(
            f"{lost[0]!r}, read from {layout.headers[lost[0]].file!r}, is no longer in the "
            f"model{instead}: put its module back under the name that it had, or save the model as "
            "it is with layout='floats'"
        )
    if without_place:
        raise ValueError(
            f"the files that the model was read from have no place for {without_place[0]!r}: save "
            "the model with layout='floats'"
        )


def _copy_others(names: list[str], source: Path | None, folder: Path) -> None:
    """Copy what a server needs beside the weights from where the model was read.

    That is the tokenizer, for example.
    """
    present = [name for name in names if source is not None and (source / name).is_file()]
    missing = [name for name in names if name not in present]
    if missing:
        warnings.warn(
            f"not copied: {', '.join(missing)}; {_why_not_copied(source)}",
            UserWarning,
            stacklevel=3,
        )
    for name in present:
        shutil.copyfile(cast("Path", source) / name, folder / name)


def _why_not_copied(source: Path | None) -> str:
    if source is None:
        reason = "the model's settings do not say where it was read from"
    else:
        reason = f"not in {str(source)!r} any longer"
    return f"{reason}: give source=, the folder of the published model"


def stored_weights(folder: str | Path, **options: Any) -> dict[str, StoredWeight]:
    """Return the weights of a published model that are in codes.

    They are found by the headers of its files: no tensor is read.

    Args:
        folder: with ``*.safetensors`` and ``config.json``, or a model's name on the Hub.
        **options: ``subfolder`` and those for the Hub, which a local folder does not
            need.

    Returns:
        A description of each weight (format, granularity, file and more) by its name;
        empty for a model of floats.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`fp8manifold.load`.

    Example:
        >>> import fp8manifold as fm
        >>> weights = fm.files.stored_weights("Qwen3-8B-FP8")  # doctest: +SKIP
        >>> weights["model.layers.0.mlp.up_proj.weight"].granularity  # doctest: +SKIP
        'square'
    """
    chosen = sorted_options(options, None, None)
    others = [*chosen.settings, *chosen.passed]
    if others:
        raise TypeError(f"stored_weights has no option {others[0]!r}: it reads headers only")
    source = local_source(folder, chosen.hub, chosen.subfolder)
    with closing(FileTensors(files_of(source))) as tensors:
        return FolderLayout(describe_folder(source, tensors)).stored


def local_source(folder: str | Path, options: Mapping[str, Any], subfolder: str = "") -> Path:
    """Return a folder, or a folder inside; a model's name on the Hub is downloaded."""
    source = Path(folder)
    is_local = source.is_dir()
    if not is_local:
        hub = import_optional("huggingface_hub", "hf", _CALLER)
        try:
            download = hub.snapshot_download(str(folder), allow_patterns=_DOWNLOADED, **options)
        except (OSError, ValueError) as error:
            # of a bad name and of the network
            reason = str(error).partition("\n")[0]
            raise FileNotFoundError(
                f"{str(folder)!r} is neither a folder nor a model on the Hugging Face Hub: {reason}"
            ) from error
        source = Path(download)
    source = source / subfolder
    if not source.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} has no folder {subfolder!r}")
    # The Hub's cache is links, which are left as they are.
    return source.resolve() if is_local else source


class _CodeReader:
    """Reads codes before transformers reads the floats, and puts them in afterwards.

    Attributes:
        floats: floats for transformers to read, once it is known which the model has.
    """

    def __init__(
        self,
        tensors: FileTensors,
        layout: FolderLayout,
        options: dict[str, Any],
        seed: int,
        activations: LoadedActivations,
    ) -> None:
        self._tensors = tensors
        self._layout = layout
        self._options = options
        self._seed = seed
        self._activations = activations
        self._parameters: dict[str, FP8Parameter] = {}
        self._input_scales: dict[str, Tensor] = {}
        #: Names of parameters that are kept out of the model while transformers reads.
        self._hidden: list[str] = []
        self.floats: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CodeReader":
        """Return the reader itself: settings are copied, and files are not."""
        return self

    def wants(self, name: str) -> bool:
        """Return False: no tensor that transformers reads becomes codes."""
        return False

    def begin(self, model: Any) -> None:
        """Read every weight in codes for a model without values, one at a time."""
        layout = self._layout
        # In this order: tensors are looked for in turned experts, `left` is what was
        # not found, and `copied` what is left and not kept in the settings.
        self._turn_experts(model)
        layout.find_places(model)
        self._keep_small_tensors()
        self._check_copied(model)
        layout.record_left()
        for name in layout.floats:
            if name in layout.places:
                self.floats[name] = self._tensors.part(name)
        parts_of: dict[str, list[StoredWeight]] = {}
        for name, stored in layout.stored.items():
            if name in layout.places:
                parts_of.setdefault(layout.places[name].target, []).append(stored)
        float_at = {layout.places[name].target: name for name in self.floats}
        for number, (target, parts) in enumerate(parts_of.items()):
            self._check_is_codes_alone(model, target, parts[0], float_at.get(target))
            parameter = model.get_parameter(target)
            self._parameters[target] = weight_of(
                target,
                [(layout.places[stored.name].index, stored) for stored in parts],
                parameter.shape,
                self._tensors.read,
                self._tensors.was_read,
                seed=(self._seed << 32) + number,
                **self._options,
            )
            if self._activations != "float":
                self._take_input_scale(target, parts)
            self._hide(model, target, parameter)
        if self._activations != "float" and not self._input_scales:
            raise ValueError(
                "activations='as stored' needs an input_scale, and the files have none: take "
                "'float'"
            )

    def finish(self, model: Any) -> None:
        """Put the codes in."""
        for target in self._hidden:
            owner, _, entry = target.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[entry] = vars(module).pop(entry)
        put_codes(model, self._parameters, self._input_scales)

    def _turn_experts(self, model: Any) -> None:
        """Turn experts of gpt-oss to the layout of the files: transposed."""
        modules = dict(model.named_modules())
        names = []
        for stored in self._layout.stored.values():
            if not stored.codes.endswith(_TRANSPOSED_SUFFIX):
                continue
            owner = modules.get(stored.name.rpartition(".")[0])
            if not getattr(owner, "is_transposed", False):
                raise ValueError(
                    f"{stored.codes!r} of {stored.file!r} is stored as transposed experts are, and "
                    "the model has no such experts there: this layout is read for models such as "
                    "gpt-oss only"
                )
            names.append(stored.name)
        turn(model, names)
        if names:
            self._layout.published["turned"] = names

    def _keep_small_tensors(self) -> None:
        """Write small tensors that the model has no place for into its settings."""
        layout = self._layout
        small = [name for name in layout.left if layout.headers[name].shape in ((), (1,))]
        layout.published["kept"] = {
            name: self._tensors.read(name).tolist()
            for name in (*sorted(layout.extras), *small)
            if name in layout.headers
        }

    def _check_copied(self, model: Any) -> None:
        for name in self._layout.copied:
            if not is_ignored(model, name):
                raise ValueError(
                    f"the model has no place for {name!r} of {self._layout.headers[name].file!r}"
                )

    def _check_is_codes_alone(
        self, model: Any, target: str, stored: StoredWeight, float_name: str | None
    ) -> None:
        """Refuse a parameter of codes that the model ties, or joins with a float."""
        if float_name is not None:
            raise ValueError(
                f"{stored.codes!r} is in codes and {float_name!r} is not, but the model joins them "
                f"in {target!r}"
            )
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        if target in tied or target in tied.values():
            raise ValueError(
                f"{stored.codes!r} is in codes and tied by the model, which can't be read: see "
                "tie_word_embeddings in config.json"
            )

    def _take_input_scale(self, target: str, parts: list[StoredWeight]) -> None:
        names = []
        for stored in parts:
            names += [name for name in stored.extras if name.endswith(_INPUT_SCALES)]
        if len(parts) > 1 and names:
            raise ValueError(
                f"activations='as stored': {target!r} has {len(names)} input scales, not 1: take "
                "'float'"
            )
        if names:
            self._input_scales[target] = self._tensors.read(names[0]).float().reshape(())

    def _hide(self, model: Any, target: str, parameter: nn.Parameter) -> None:
        """Take a parameter out of a model, so that transformers does not miss its values.

        Its module has it as a plain attribute: the initialisation of a module around this
        one may read its weight.
        """
        owner, _, entry = target.rpartition(".")
        module = model.get_submodule(owner)
        module._parameters[entry] = None
        vars(module)[entry] = parameter
        module._is_hf_initialized = True
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self._hidden.append(target)


def _check_floats_are_exact(model: Any, tensors: FileTensors, layout: FolderLayout) -> None:
    """Refuse a dtype that does not hold a file's floats exactly.

    They could not be written back.
    """
    entries = entries_of(model)
    for name in layout.floats:
        place = layout.places.get(name)
        if place is None:
            continue
        value = entries[place.target][place.index]
        dtype_in_file = layout.headers[name].dtype
        dtype = DTYPES_IN_FILES.get(dtype_in_file, value.dtype)
        if dtype == value.dtype:
            continue
        if dtype.is_floating_point and torch.promote_types(dtype, value.dtype) == value.dtype:
            continue
        value_in_file = tensors.read(name)
        if not torch.equal(value.to(value_in_file), value_in_file):
            raise ValueError(
                f"{name!r} of {layout.headers[name].file!r} is {dtype_in_file}, but {value.dtype} "
                "can't hold all of its values: give dtype=torch.float32"
            )


class CopiedTensors:
    """Tensors that the model does not have, from the folder that it came from.

    The folder is opened only if there are any.
    """

    def __init__(self, layout: FolderLayout, source: Path | None) -> None:
        names = layout.copied
        self._tensors: FileTensors | None = None
        if not names:
            return
        if source is None or not source.is_dir():
            raise FileNotFoundError(
                f"{names[0]!r}, which the model lacks, can't be copied: {_why_not_copied(source)}"
            )
        self._tensors = FileTensors(files_of(source))
        for name in names:
            is_there_once = self._tensors.names().count(name) == 1
            if not is_there_once or self._tensors.header(name) != layout.headers[name]:
                raise ValueError(
                    f"{name!r} in {str(source)!r} has changed since the model was read"
                )

    def read(self, name: str) -> Tensor:
        assert self._tensors is not None
        return self._tensors.read(name)

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()


def _tensors_of_file(
    names: Iterable[str],
    layout: FolderLayout,
    entries: Mapping[str, Tensor],
    copied: CopiedTensors,
) -> dict[str, Tensor]:
    """Return the tensors of a file in their order, ready to be saved."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        if name not in tensors:
            tensors |= _tensors_written_with(name, layout, entries, copied)
    return {name: tensors[name].detach() for name in names}


@torch.no_grad()
def _tensors_written_with(
    name: str, layout: FolderLayout, entries: Mapping[str, Tensor], copied: CopiedTensors
) -> dict[str, Tensor]:
    """Return a tensor of the files, with those that are written together with it."""
    in_settings = layout.published["kept"]
    header = layout.headers[name]
    if name in in_settings:
        dtype = DTYPES_IN_FILES[header.dtype]
        return {name: torch.tensor(in_settings[name], dtype=dtype, device="cpu")}
    stored = layout.weight_of_tensor.get(name)
    place = layout.places.get(name if stored is None else stored.name)
    if place is None:
        return {name: copied.read(name)}
    entry = entries[place.target]
    if share_of(entry) is not None:
        raise TypeError(f"{place.target!r} is sharded: save the model in one process")
    if stored is not None:
        if not isinstance(entry, FP8Parameter):
            raise ValueError(
                f"{place.target!r} is no longer in codes: {name!r} can't be written back"
            )
        share_scale_(entry, place, stored)
        return written_parts(stored, part_of(entry, place, stored))
    if isinstance(entry, FP8Parameter):
        raise ValueError(
            f"{place.target!r} is in codes, but {name!r} is {header.dtype}: it can't be written "
            "back"
        )
    value = entry[place.index]
    in_dtype_of_file = value.to(DTYPES_IN_FILES.get(header.dtype, value.dtype))
    is_exact = torch.equal(in_dtype_of_file.to(value.dtype), value)
    return {name: in_dtype_of_file if is_exact else value}
