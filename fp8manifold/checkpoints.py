"""Published FP8 checkpoints: read into models of transformers as they are, trained in
place, and written back.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, check_int, import_optional
from fp8manifold._base.wrappers import plain_name, unwrapped
from fp8manifold._encoded.scaled import Rounding
from fp8manifold._published import StoredWeight, written_parts
from fp8manifold._published.layout import (
    GENERATION,
    Layout,
    described,
    entries_of,
    is_ignored,
)
from fp8manifold._published.options import sorted_options
from fp8manifold._published.places import part_of, weight_of
from fp8manifold._published.replaced import INDEX, replacing
from fp8manifold._ranks import share_of
from fp8manifold.huggingface import published_of, reading
from fp8manifold.nn._carried import turn
from fp8manifold.nn._loading import put_codes
from fp8manifold.nn._tensor_files import FileTensors, files_of
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws

__all__ = ["load_fp8", "published_weights", "save_fp8"]

Activations = Literal["float", "as stored"]
_ACTIVATIONS: Final = ("float", "as stored")
_BY: Final = "load_fp8"
_INPUT: Final = ("input_scale", "activation_scale")
#: names under which PEFT's modules have the layer that they adapt or train a copy of
_BESIDE_ADAPTERS: Final = frozenset({"base_layer", "original_module"})
#: experts of gpt-oss
_TRANSPOSED: Final = "_blocks"
#: files of a repository that are downloaded: weights, settings and a tokenizer's
_WANTED: Final = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_fp8(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    activations: Activations = "float",
    rounding: Rounding = "stochastic",
    draws: Draws = "independent",
    seed: int = 0,
    **options: Any,
) -> Any:
    """Read a published FP8 model into a model of transformers whose weights are codes
    that can be trained.

    .. math:: w = s \\cdot \\operatorname{decode}(code)

    Codes, formats and scales are those of the files, in the layouts of DeepSeek
    (squares of 128 x 128), compressed-tensors, ModelOpt, torchao, MXFP8 and MXFP4. A
    linear layer becomes a :class:`QuantizedLinear`, and experts and other weights an
    :class:`FP8Parameter` where they are; floats stay float. :func:`save_fp8` writes the
    model back, also after ``save_pretrained``. Reading takes the memory of the codes
    and of one tensor.

    Args:
        folder: with ``*.safetensors`` and ``config.json``, or a model's name on the
            Hub. The files are those that transformers reads: ``model.safetensors``,
            else those of the index; without either, all.
        dtype: of the floats, and the one that weights in codes appear in:
            ``torch.bfloat16`` or ``torch.float32``.
        device: where the weights go, one at a time.
        activations: ``float`` leaves inputs as they are; ``as stored`` rounds them at
            the files' ``input_scale``.
        rounding, draws, seed: of the weights, as in :func:`fp8manifold.quantize_model`.
        options: of transformers' ``from_pretrained``: ``subfolder``, for the Hub
            ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and
            ``force_download``; ``attn_implementation``, ``experts_implementation``,
            ``generation_config`` and those of kernels; and settings of ``config.json``
            (``attention_dropout=0.1``), which :func:`save_fp8` does not write. Others
            are refused.

    Returns:
        The model, of the class that ``config.json`` names, in evaluation mode.

    NaN and -0 among the codes are preserved, and tensors without a place in the model
    are written back as they were.

    Raises:
        ImportError, FileNotFoundError: transformers is missing; no such folder, or one
            without weights or settings.
        TypeError, ValueError: no weight in codes; an unsupported layout, dtype or
            option; a tensor that the model or the files lack; scales that one parameter
            can't hold where the model fuses weights; floats that ``dtype`` does not
            hold exactly; ``activations="as stored"`` where no layer has an
            ``input_scale``.

    Example:
        >>> import fp8manifold as fm
        >>> model = fm.load_fp8("Qwen/Qwen3-8B-FP8")  # doctest: +SKIP
        >>> fm.save_fp8(model, "trained")  # doctest: +SKIP
        >>> fm.load_fp8("Qwen3-8B-FP8", activations="e4m3")
        Traceback (most recent call last):
        ValueError: activations='e4m3' is unknown: one of float, as stored; did you mean 'as stored'?

    Source: DeepSeek-V3 (arXiv 2412.19437); compressed-tensors (vllm-project);
    Model-Optimizer; OCP MX Formats 1.0.
    """
    check_choice("activations", activations, _ACTIVATIONS)
    check_int("seed", seed, 0, 2**31 - 1)
    given = sorted_options(options, dtype, device)
    library = import_optional("transformers", "hf", _BY)
    place = _folder_of(folder, given.hub, given.subfolder)
    with closing(FileTensors(files_of(place))) as tensors:
        layout = Layout(described(place, tensors))
        if not layout.stored:
            raise ValueError(
                f"{str(place)!r} has no weight in FP8 codes: read it with from_pretrained"
            )
        how: dict[str, Any] = {"rounding": rounding, "draws": draws}
        how |= {"dtype": given.dtype, "device": given.device}
        reader = _Reader(tensors, layout, how, seed, activations)
        config = _settings_of(library, place, given.settings)
        model, said = _class_of(library, config).from_pretrained(
            None,
            config=config,
            state_dict=reader.floats,
            dtype=given.dtype,
            quantization_config=reading(layout.published, reader),
            output_loading_info=True,
            **given.passed,
        )
        if missing := sorted(said["missing_keys"]):
            raise ValueError(f"the model has {missing[0]!r}, which {str(place)!r} lacks")
        _check_floats_kept(model, tensors, layout)
    _name(model, str(Path(folder, given.subfolder) if Path(folder).is_dir() else folder))
    chosen = given.passed.get("generation_config")
    if chosen is None and model.can_generate() and (place / GENERATION).is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(place)
    return model.to(given.device)


def _settings_of(library: Any, place: Path, changes: dict[str, Any]) -> Any:
    """The settings of a folder with changes to some, as transformers makes them."""
    config, unknown = library.AutoConfig.from_pretrained(
        place, return_unused_kwargs=True, **changes
    )
    for name in changes:
        if name in unknown:
            raise TypeError(
                f"{name!r} is no option of load_fp8 or from_pretrained, and no setting of "
                f"{type(config).__name__}"
            )
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    return config


def _name(model: Any, name: str) -> None:
    """Say where a model was read, for libraries that write its name beside an adapter."""
    model.config.name_or_path = name
    for module in model.modules():
        if "name_or_path" in vars(module):
            module.name_or_path = name


def save_fp8(model: Any, folder: str | Path, *, source: str | Path | None = None) -> None:
    """Write a model that :func:`load_fp8` read in the layout it came in: a server loads
    it as it loads the original.

    .. math:: \\operatorname{save}(\\operatorname{load}(F)) = F

    Names, dtypes, shards, index and settings are those of the folder that was read, a
    weight that was not trained is the same bytes, and the tokenizer's files are copied.
    Floats are not rounded: a parameter that the file's dtype does not hold exactly is
    written in its own dtype.

    Args:
        model: of :func:`load_fp8`, or saved from it and read by ``from_pretrained``,
            also under ``torch.compile``, ``checkpoint_wrapper`` or ``DataParallel``. It
            does not change, except that rows of a fused weight that share a scale in
            the file take their largest (:meth:`FP8Tensor.rescale_`).
        folder: made if it is not there; once all files have been written they replace
            those of the same names, and of an earlier save the weights that would be
            read instead.
        source: the folder that was read, or its name on the Hub; by default where
            :func:`load_fp8` found it.

    NaN and -0 are preserved.

    Raises:
        ImportError: safetensors is missing.
        FileNotFoundError: the folder that tensors without a place in the model are
            copied from is unknown or gone.
        TypeError, ValueError: a sharded model; one that does not say how it was
            published; a weight of another format; a tensor of the files that the model
            has lost (a layer that is gone, or is in a module of another name); a
            parameter that the files have no place for (adapters of PEFT, which
            ``merge_and_unload`` adds to the weights); an adapter or settings of other
            codes in ``folder``.

    Warns:
        UserWarning: the tokenizer's or other files beside the weights that can't be
            copied.

    Example:
        >>> import fp8manifold as fm
        >>> fm.save_fp8(fm.load_fp8("Qwen3-8B-FP8"), "same")  # doctest: +SKIP
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> fm.save_fp8(model, "trained")
        Traceback (most recent call last):
        ValueError: the model was not read by fm.load_fp8, or was decoded since, and knows no \
FP8 layout of files: use fm.export_model for codes, save_pretrained for floats
    """
    base = _base_of(model)
    published = published_of(base)
    if published is None:
        raise ValueError(
            "the model was not read by fm.load_fp8, or was decoded since, and knows no FP8 layout "
            "of files: use fm.export_model for codes, save_pretrained for floats"
        )
    layout = Layout(published)
    _refuse_adapters(base)
    layout.find(base)
    entries = entries_of(base)
    _check_complete(model, base, layout, entries)
    known = published.get("source")
    place = None if known is None else Path(known)
    if source is not None:
        place = _folder_of(source, {})
    texts = dict(published["documents"])
    save_file = import_optional("safetensors.torch", "hf", "save_fp8").save_file
    where: dict[str, str] = {}
    total = 0
    names = [*published["files"], *texts, *([INDEX] if "index" in published else ())]
    with closing(_Source(layout, place)) as origin, replacing(Path(folder), names) as new:
        for file, said in published["files"].items():
            made: dict[str, Tensor] = {}
            for name in said["tensors"]:
                if name not in made:
                    made |= _written(name, layout, entries, origin)
            tensors = _apart(
                {name: made[name].detach().cpu().contiguous() for name in said["tensors"]}
            )
            where |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, new / file, said["metadata"])
        if "index" in published:
            about = dict(published["index"])
            about |= {"total_size": total} if "total_size" in about else {}
            index = {"metadata": about, "weight_map": where}
            texts[INDEX] = json.dumps(index, indent=2, sort_keys=True) + "\n"
        for name, text in texts.items():
            (new / name).write_text(text, "utf-8")
    _copy_others(published["others"], place, Path(folder))


def _base_of(model: Any) -> Any:
    """The model of transformers that torch's wrappers and PEFT's are around."""
    inner: Any = unwrapped(model) if isinstance(model, nn.Module) else model
    if any(kind.__name__ == "PeftModel" for kind in type(inner).__mro__):
        base: Any = inner.get_base_model()
        return unwrapped(base)
    return inner


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse weights whose adapter of PEFT, or whose trained copy, is beside them."""
    for name, module in model.named_modules():
        if not _BESIDE_ADAPTERS.isdisjoint(vars(module)["_modules"]):
            raise ValueError(
                f"{plain_name(name)!r} has an adapter of PEFT, or a copy that PEFT trains, for "
                f"which the files have no place: save the model that merge_and_unload() returns"
            )


def _check_complete(
    model: nn.Module, base: Any, layout: Layout, entries: Mapping[str, Tensor]
) -> None:
    """Refuse a model that has lost a tensor of the files, or has a parameter that they
    have no place for.

    What is lost can't be left out: the settings promise it, and readers would draw it
    anew. ``base`` is the model without the wrappers of ``model``.
    """
    known = {id(entries[place.target]) for place in layout.places.values()}
    missing = base._keys_to_ignore_on_load_missing or ()
    more = [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if id(parameter) not in known and not any(re.search(pattern, name) for pattern in missing)
    ]
    if lost := layout.lost(base):
        instead = f", which has {more[0]!r}" if more else ""
        raise ValueError(
            f"{lost[0]!r}, read from {layout.headers[lost[0]].file!r}, has no place in the model "
            f"any more{instead}: put its module back under the name that it had, or write the "
            f"model as it is with fm.export_model"
        )
    if more:
        raise ValueError(
            f"the model has {more[0]!r}, for which the files that it was read from have no place: "
            f"write it with fm.export_model"
        )


def _copy_others(names: list[str], place: Path | None, folder: Path) -> None:
    """Copy what a server needs beside the weights, such as the tokenizer, from where
    the model was read.
    """
    there = [name for name in names if place is not None and (place / name).is_file()]
    if gone := [name for name in names if name not in there]:
        warnings.warn(
            f"not copied: {', '.join(gone)}; {_missing(place)}", UserWarning, stacklevel=3
        )
    for name in there:
        if (found := cast("Path", place) / name).resolve() != (folder / name).resolve():
            shutil.copyfile(found, folder / name)


def _missing(place: Path | None) -> str:
    """Why nothing can be copied from the folder that was read."""
    why = (
        "the model's settings do not say where it was read"
        if place is None
        else f"not in {str(place)!r} any more"
    )
    return f"{why}: give source=, the folder of the published model"


def published_weights(folder: str | Path, **options: Any) -> dict[str, StoredWeight]:
    """The weights of a published model that are in codes, by the headers of its files:
    no tensor is read.

    Args:
        folder, options: as in :func:`load_fp8`, but only ``subfolder`` and the options
            for the Hub, which a local folder does not need.

    Returns:
        A description of each weight (format, granularity, file and more) by its name;
        empty for a model of floats.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`load_fp8`.

    Example:
        >>> import fp8manifold as fm
        >>> found = fm.published_weights("Qwen3-8B-FP8")  # doctest: +SKIP
        >>> found["model.layers.0.mlp.up_proj.weight"].granularity  # doctest: +SKIP
        'square'
    """
    given = sorted_options(options, torch.bfloat16, "cpu")
    if more := [*given.settings, *given.passed]:
        raise TypeError(f"published_weights has no option {more[0]!r}: it reads headers alone")
    place = _folder_of(folder, given.hub, given.subfolder)
    with closing(FileTensors(files_of(place))) as tensors:
        return Layout(described(place, tensors)).stored


def _folder_of(folder: str | Path, options: Mapping[str, Any], subfolder: str = "") -> Path:
    """A folder, or that of a model's name in the hub's cache, or one inside."""
    place = Path(folder)
    if not place.is_dir():
        hub = import_optional("huggingface_hub", "hf", _BY)
        try:
            place = Path(hub.snapshot_download(str(folder), allow_patterns=_WANTED, **options))
        except (OSError, ValueError) as error:  # of a bad name and of the network
            why = str(error).partition("\n")[0]
            raise FileNotFoundError(
                f"{str(folder)!r} is no folder, and no model on the Hugging Face Hub: {why}"
            ) from error
    if not (place / subfolder).is_dir():
        raise FileNotFoundError(f"{str(folder)!r} has no folder {subfolder!r}")
    return (place / subfolder).resolve() if Path(folder).is_dir() else place / subfolder


def _class_of(library: Any, config: Any) -> Any:
    names = config.architectures or []
    found = next(
        (kind for name in names if (kind := getattr(library, name, None)) is not None), None
    )
    if found is None:
        raise ValueError(
            f"config.json has architectures={names!r}: the name of a transformers class is needed"
        )
    return found


class _Reader:
    """Reads codes before transformers reads the floats, and puts them in afterwards."""

    def __init__(
        self,
        tensors: FileTensors,
        layout: Layout,
        options: dict[str, Any],
        seed: int,
        activations: Activations,
    ) -> None:
        self._tensors, self._layout, self._options, self._seed = tensors, layout, options, seed
        self._activations = activations
        self._made: dict[str, FP8Parameter] = {}
        self._scales: dict[str, Tensor] = {}
        self._aside: list[str] = []
        self.floats: dict[
            str, Any
        ] = {}  #: Floats for transformers to read, once it is known which the model has.

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Reader":
        """Itself: settings are copied, and files are not."""
        return self

    def wants(self, name: str) -> bool:
        """False: no tensor that transformers reads becomes codes."""
        return False

    def begin(self, model: Any) -> None:
        """Read every weight in codes, one tensor at a time, and take its parameter out
        of a model without values.
        """
        layout = self._layout
        turned = [each for each in layout.stored.values() if each.codes.endswith(_TRANSPOSED)]
        modules = dict(model.named_modules())
        for each in turned:
            if not getattr(modules.get(each.name.rpartition(".")[0]), "is_transposed", False):
                raise ValueError(
                    f"{each.codes!r} of {each.file!r} is stored as transposed experts are, and the "
                    f"model has no such "
                    "experts there: this layout is read for models such as gpt-oss only"
                )
        turn(model, names := [each.name for each in turned])
        layout.published |= {"turned": names} if names else {}
        layout.find(model)
        self._keep()
        self._check_left(model)
        layout.record_left()
        self.floats |= {
            name: self._tensors.part(name) for name in layout.floats if name in layout.places
        }
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        by_target: dict[str, list[StoredWeight]] = {}
        for name, stored in layout.stored.items():
            if name in layout.places:
                by_target.setdefault(layout.places[name].target, []).append(stored)
        floats = {layout.places[name].target: name for name in self.floats}
        for number, (target, parts) in enumerate(by_target.items()):
            if target in floats:
                raise ValueError(
                    f"{parts[0].codes!r} is in codes, {floats[target]!r} is not: the model joins "
                    f"them in {target!r}"
                )
            if target in tied or target in tied.values():
                raise ValueError(
                    f"{parts[0].codes!r} is in codes and tied by the model, which can't be read: "
                    f"see "
                    "tie_word_embeddings in config.json"
                )
            own = model.get_parameter(target)
            places = [(layout.places[each.name].index, each) for each in parts]
            seed = (self._seed << 32) + number
            self._made[target] = weight_of(
                target,
                places,
                own.shape,
                self._tensors.read,
                self._tensors.was_read,
                seed=seed,
                **self._options,
            )
            if self._activations != "float":
                self._take_input_scale(target, parts)
            owner, _, entry = target.rpartition(".")
            module = model.get_submodule(owner)
            self._aside.append(target)
            # the initialisation of a module around this one may read its weight
            module._parameters[entry], vars(module)[entry] = None, own
            module._is_hf_initialized = own._is_hf_initialized = True
        if self._activations != "float" and not self._scales:
            raise ValueError(
                "activations='as stored' needs an input_scale, and the files have none: take "
                "'float'"
            )

    def finish(self, model: Any) -> None:
        """Put the codes in."""
        for target in self._aside:
            owner, _, entry = target.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[entry] = vars(module).pop(entry)
        put_codes(model, self._made, self._scales)

    def _keep(self) -> None:
        """Write small tensors that the model has no place for into its settings."""
        layout = self._layout
        small = [name for name in layout.left if layout.headers[name].shape in ((), (1,))]
        layout.published["kept"] = {
            name: self._tensors.read(name).tolist()
            for name in (*sorted(layout.extras), *small)
            if name in layout.headers
        }

    def _check_left(self, model: Any) -> None:
        for name in self._layout.copied:
            if not is_ignored(model, name):
                raise ValueError(
                    f"{name!r} of {self._layout.headers[name].file!r} has no place in the model"
                )

    def _take_input_scale(self, target: str, parts: list[StoredWeight]) -> None:
        names = [name for each in parts for name in each.extras if name.endswith(_INPUT)]
        if len(parts) > 1 and names:
            raise ValueError(
                f"activations='as stored': {target!r} has {len(names)} input scales, not 1: take "
                f"'float'"
            )
        if names:
            self._scales[target] = self._tensors.read(names[0]).float().reshape(())


def _check_floats_kept(model: Any, tensors: FileTensors, layout: Layout) -> None:
    """Refuse a dtype that does not hold a file's floats exactly: they could not be
    written back.
    """
    entries = entries_of(model)
    for name in layout.floats:
        if (place := layout.places.get(name)) is None:
            continue
        held = entries[place.target][place.index]
        dtype = layout.headers[name].dtype
        its = _DTYPES.get(dtype, held.dtype)
        if its == held.dtype or (
            its.is_floating_point and torch.promote_types(its, held.dtype) == held.dtype
        ):
            continue
        value = tensors.read(name)
        if not torch.equal(held.to(value), value):
            raise ValueError(
                f"{name!r} of {layout.headers[name].file!r} is {dtype}, and {held.dtype} can't "
                f"hold all of its values: "
                "give dtype=torch.float32"
            )


class _Source:
    """The folder that a model came from, opened only if it has tensors that the model
    does not.
    """

    def __init__(self, layout: Layout, place: Path | None) -> None:
        names = layout.copied
        self._tensors: FileTensors | None = None
        if not names:
            return
        if place is None or not place.is_dir():
            raise FileNotFoundError(
                f"{names[0]!r}, which the model lacks, can't be copied: {_missing(place)}"
            )
        self._tensors = FileTensors(files_of(place))
        for name in names:
            if (
                self._tensors.names().count(name) != 1
                or self._tensors.header(name) != layout.headers[name]
            ):
                raise ValueError(f"{name!r} in {str(place)!r} has changed since the model was read")

    def read(self, name: str) -> Tensor:
        assert self._tensors is not None
        return self._tensors.read(name)

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()


@torch.no_grad()
def _written(
    name: str, layout: Layout, entries: Mapping[str, Tensor], source: _Source
) -> dict[str, Tensor]:
    """A tensor of the files by its name, with those that are written together with it."""
    kept, header = layout.published["kept"], layout.headers[name]
    if name in kept:
        return {name: torch.tensor(kept[name], dtype=_DTYPES[header.dtype])}
    stored = layout.weight_of.get(name)
    place = layout.places.get(name if stored is None else stored.name)
    if place is None:
        return {name: source.read(name)}
    own = entries[place.target]
    if share_of(own) is not None:
        raise TypeError(f"{place.target!r} is sharded: save the model in one process")
    if stored is not None:
        if not isinstance(own, FP8Parameter):
            raise ValueError(
                f"{place.target!r} is no longer in codes: {name!r} can't be written back"
            )
        return written_parts(stored, part_of(own, place, stored))
    value = own[place.index]
    if isinstance(own, FP8Parameter):
        raise ValueError(
            f"{place.target!r} is in codes, and {name!r} is {header.dtype}: it can't be written "
            f"back"
        )
    narrow = value.to(_DTYPES[header.dtype]) if header.dtype in _DTYPES else value
    return {name: narrow if torch.equal(narrow.to(value.dtype), value) else value}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory: safetensors refuses tied ones."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors
