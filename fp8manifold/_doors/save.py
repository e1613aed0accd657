r"""One way out: `save` writes a model in the layout that it was read in, or as floats.

::

    save(model, folder)              model.save_pretrained(folder)
              \                        /
               published layout?  --> its published layout, and a side file with counts
               else               --> transformers' own save_pretrained, given floats,
                                      and a side file with scales and counts

`save_pretrained` of every quantised model of transformers comes here by the guard of
`_savers`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.after_import import when_imported
from fp8manifold._base.checks import check_choice
from fp8manifold._base.tensor_writer import ready, write_tensors
from fp8manifold._base.wrappers import plain_name
from fp8manifold._doors.exchange import (
    ExportedActivations,
    has_own_head,
    is_transformers_model,
    save_in_layout,
)
from fp8manifold._doors.float_files import default_shard_size, files_of_tensors, write_shards
from fp8manifold._doors.grids import Decoded
from fp8manifold._doors.plain import Saved, is_quantized, saved_form
from fp8manifold._doors.published import (
    base_of,
    refuse_adapters,
    save_published,
)
from fp8manifold._doors.quantizer import published_of
from fp8manifold._doors.side_file import CODES, Content, SideFile
from fp8manifold._published.replace_files import CODES_FILE, WEIGHTS_FILE, replacing
from fp8manifold.nn._parts import PARTS, is_in_codes
from fp8manifold.nn._savers import guard_saver, prepare, save_with

_IS_SAVING: Final = "_fp8_is_saving"
"""An attribute of a model that transformers is saving as floats."""
_ADAPTERS: Final = "_hf_peft_config_loaded"


class SaveLayout(StrEnum):
    """A layout that `save` writes."""

    FLOATS = "floats"
    CODES = "codes"
    COMPRESSED_TENSORS = "compressed-tensors"
    TORCHAO = "torchao"
    FP8 = "fp8"


def save(
    model: Any,
    folder: str | Path,
    layout: str | None = None,
    *,
    activations: ExportedActivations = "float",
    source: str | Path | None = None,
) -> None:
    r"""Write a model of transformers to a folder that :func:`load` reads to the bit.

    .. math:: \operatorname{load}(\operatorname{save}(model)) = model

    - None: the published layout from which the model was read, in which a weight that
      was not trained keeps its bytes; for any other model ``floats``.
      ``model.save_pretrained(folder)`` does the same.
    - ``floats``: ``model.safetensors`` has the values that the model computes with, in
      bfloat16 where it holds them exactly, else in float32. Any library reads them. The
      file ``fp8manifold.grids`` beside it has formats, scales, seeds and counts, from
      which :func:`load` restores the exact codes. For float storages that file has
      their floats.
    - ``codes``: ``codes.safetensors`` has one byte per weight, under names that no float
      layer has (``weight_codes``). Only :func:`load` reads it.
    - ``compressed-tensors``, ``torchao``, ``fp8`` (DeepSeek's squares): the tensors of
      :func:`fp8manifold.files.layout_state_dict`, and a ``config.json`` by which
      ``from_pretrained`` reads them with that library. Counts of stochastic rounding
      are not in these.

    Args:
        model: a quantised model, also under wrappers of torch. Saving changes it in one
            case: if a published layout has one scale for rows that the model joins, and
            the scales of these rows have become different, the rows share the largest
            scale from then on.
        folder: created if it is missing. Weights of an earlier save are replaced. A
            folder with files that would be read beside the new weights is refused.
        layout: one of the above.
        activations: ``E4M3`` lets readers of ``compressed-tensors`` round inputs, as in
            :func:`fp8manifold.files.layout_state_dict`.
        source: for a published layout, the folder from which the model was read, or its
            name on the Hub; by default where it was found. Tensors that the model has
            no place for are copied from it.

    Floats and codes preserve NaN and -0. Save the tokenizer separately.

    Raises:
        ImportError: transformers or safetensors is missing.
        TypeError, ValueError: not a transformers model, or one without a quantised
            layer; an unknown layout, or one that can't describe the model; an option of
            another layout; adapters of PEFT; a sharded model; a file in ``folder`` that
            would be read beside the weights; for a published layout, a tensor of the
            files that the model no longer has, or a parameter that the files have no
            place for.
        FileNotFoundError: ``source`` is needed, but not known or no longer there.

    Warns:
        UserWarning: for a published layout, files of the tokenizer or others that can't
            be copied; with ``fp8``, matrices that end in a partial square after a whole
            one, which transformers' ``dequantize=True`` reads wrongly.

    Example:
        >>> import fp8manifold as fm
        >>> from tempfile import mkdtemp
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 8}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
        >>> model = fm.quantize_model(LlamaForCausalLM(config), {"*": "E4M3"}, tied="untie")
        >>> folder = mkdtemp()
        >>> fm.save(model, folder)
        >>> floats = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        >>> same = fm.load(folder)
        >>> torch.equal(floats["lm_head.weight"], same.lm_head.weight.dequantize())
        True
        >>> torch.equal(same.lm_head.weight.codes, model.lm_head.weight.codes)
        True

    Source: safetensors; compressed-tensors 0.20; torchao 0.18; DeepSeek-V3 (arXiv
    2412.19437).
    """
    if layout is not None:
        check_choice("layout", layout, [str(known) for known in SaveLayout])
    base = base_of(model)
    if not is_transformers_model(base):
        raise TypeError(
            f"model is a {type(base).__name__}, not a transformers model: save its state_dict() "
            "with safetensors.torch.save_file"
        )
    refuse_adapters(base)
    _refuse_parameters_outside(model, base)
    if not is_quantized(base):
        raise ValueError("the model has no quantised layer: save it with save_pretrained")
    chosen = None if layout is None else SaveLayout(layout)
    _refuse_options_of_others(base, chosen, activations, source)
    match chosen:
        case None if source is not None:
            _save_published(base, Path(folder), {}, source)
        case None:
            _save_by_transformers(type(base).save_pretrained, base, Path(folder), {})
        case SaveLayout.FLOATS:
            _save_floats(type(base).save_pretrained, base, Path(folder), {})
        case SaveLayout.CODES:
            _save_codes(base, Path(folder))
        case _:
            exported: Any = chosen.value
            save_in_layout(base, folder, exported, activations=activations)


def _refuse_parameters_outside(model: nn.Module, base: nn.Module) -> None:
    """Refuse parameters of a wrapper, such as PEFT's prompts, which would be lost."""
    inside = {id(parameter) for parameter in base.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise ValueError(
                f"the parameter {plain_name(name)!r} is outside of the transformers model, so its "
                "files have no place for it: save the two separately"
            )


def _refuse_options_of_others(
    model: Any, layout: SaveLayout | None, activations: str, source: str | Path | None
) -> None:
    """Refuse options that only mean something in another layout."""
    if activations != "float" and layout is not SaveLayout.COMPRESSED_TENSORS:
        raise ValueError(
            f"activations={activations!r} needs layout='compressed-tensors', not {layout!s}"
        )
    if source is not None and (layout is not None or published_of(model) is None):
        raise ValueError(
            f"source={str(source)!r} is for a model that was read from a published layout, and "
            "written back in it: leave source and layout out"
        )


def _save_guarded(save_pretrained: Callable[..., Any], model: Any, arguments: Any) -> Any:
    """Run ``save_pretrained`` of a model of transformers, as the guard's saver."""
    if hasattr(model, _IS_SAVING) or not is_quantized(model):
        return save_pretrained(model, **arguments)
    has_quantizer = getattr(model, "hf_quantizer", None) is not None
    is_older_way = has_quantizer or getattr(model, _ADAPTERS, False)
    if is_older_way or arguments.get("distributed_checkpoint"):
        prepare(model, arguments)
        return save_pretrained(model, **arguments)
    options = dict(arguments)
    folder = Path(options.pop("save_directory"))
    return _save_by_transformers(save_pretrained, model, folder, options)


def _guard_models(module: ModuleType) -> None:
    """Guard transformers' models: one that is unpickled was never quantised here."""
    kind = getattr(module, "PreTrainedModel", None)
    if kind is not None:
        guard_saver(kind)


save_with("PreTrainedModel", _save_guarded)
when_imported("transformers.modeling_utils", _guard_models)


def _save_by_transformers(
    save_pretrained: Callable[..., Any], model: Any, folder: Path, options: dict[str, Any]
) -> Any:
    """Write a model in the layout that it was published in, else as floats."""
    if options.get("push_to_hub"):
        raise ValueError(
            "push_to_hub=True uploads while the files are written: save to a folder, and upload it "
            "with huggingface_hub.upload_folder"
        )
    if published_of(model) is None:
        return _save_floats(save_pretrained, model, folder, options)
    return _save_published(model, folder, options)


def _save_floats(
    save_pretrained: Callable[..., Any], model: Any, folder: Path, options: dict[str, Any]
) -> Any:
    """Write a model's floats by transformers, and the side file."""
    if options.get("variant") is not None:
        raise ValueError(
            f"variant={options['variant']!r}: fm.load reads {WEIGHTS_FILE!r} only; leave variant "
            "out, and give another folder"
        )
    options = dict(options)
    form = saved_form(model, options.pop("state_dict", None))
    with _as_floats(model, form):
        if not options.get("is_main_process", True):
            return save_pretrained(model, folder, state_dict=form.tensors, **options)
        tensors = files_of_tensors(model, form.floats, options)
        with replacing(folder) as new_folder:
            form.side.write(new_folder)
            if tensors is None:
                return save_pretrained(model, new_folder, state_dict=form.tensors, **options)
            result = save_pretrained(model, new_folder, state_dict={}, **options)
            write_shards(model, tensors, new_folder, options, {})
            return result


@contextmanager
def _as_floats(model: Any, form: Saved) -> Iterator[None]:
    """Let transformers take a quantised model for one of floats while it saves it."""
    names = ("config", "hf_quantizer", "_keys_to_ignore_on_save")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    try:
        setattr(model, _IS_SAVING, True)
        model.config = _config_of_floats(model)
        model.hf_quantizer = None
        # A class may leave out what it can compute; codes have other values.
        ignored = {*(model._keys_to_ignore_on_save or ())} - form.weights.keys()
        model._keys_to_ignore_on_save = ignored
        yield
    finally:
        for name in (*names, _IS_SAVING):
            vars(model).pop(name, None)
        vars(model).update(before)


def _config_of_floats(model: Any) -> Any:
    """Return a copy of a model's settings, without quantisation."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    if has_own_head(model):
        config.tie_word_embeddings = False
    return config


def _save_published(
    model: Any,
    folder: Path,
    options: Mapping[str, Any],
    source: str | Path | None = None,
) -> None:
    """Write a model in its published layout, with a side file of counts."""
    if not options.get("is_main_process", True):
        return
    _refuse_options_of_floats(model, options)
    given_state = options.get("state_dict")
    if given_state is not None and not _is_own_state(model, given_state):
        raise ValueError(
            "state_dict= is not the model's own state, but a published layout is written from the "
            "model: save with fm.save(model, folder)"
        )
    # After the weights, whose rows may share another scale from then on.
    save_published(model, folder, source=source, write_more=partial(_write_counts, model))


def _write_counts(model: Any, folder: Path) -> None:
    """Write the side file of a published layout: the seeds and counts of weights."""
    form = saved_form(model, with_floats=False)
    counts = SideFile(Content.PUBLISHED, [], [], [])
    for name in form.weights:
        for suffix in PARTS[2:]:
            if name + suffix in form.side.tensors:
                counts.tensors[name + suffix] = form.side.tensors[name + suffix]
    counts.write(folder)


def _refuse_options_of_floats(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse options of ``save_pretrained`` that a published layout leaves no room for."""
    fixed = {
        "max_shard_size": default_shard_size(model),
        "variant": None,
        "save_original_format": True,
        "safe_serialization": True,
    }
    for name, value in fixed.items():
        if options.get(name) not in (None, value):
            raise ValueError(
                f"{name}={options[name]!r:.60}: a published layout is written with the names and "
                "files that it was read from; leave it out, or give fm.save a layout"
            )


def _is_own_state(model: nn.Module, given_state: Mapping[str, Tensor]) -> bool:
    """Return whether a state is the whole state of a model, to the bit."""
    own_state = {plain_name(name): value for name, value in model.state_dict().items()}
    named_state = {plain_name(name): value for name, value in given_state.items()}
    return named_state.keys() == own_state.keys() and all(
        _have_same_bits(own, named_state[name]) for name, own in own_state.items()
    )


def _have_same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    # As bytes, where NaN equals itself and 0 is not -0.
    first_bytes, second_bytes = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    )
    return torch.equal(first_bytes, second_bytes.to(first_bytes.device))


def _save_codes(model: Any, folder: Path) -> None:
    """Write one byte per weight, under names that no float layer has."""
    form = saved_form(model, with_floats=False)
    form.side.content = Content.CODES
    tensors = {name + CODES: ready(weight.codes) for name, weight in form.weights.items()}
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    config = _config_of_floats(model)
    for name, value in form.floats.items():
        first = form.floats.get(ties.get(name, ""))
        if isinstance(value, Decoded) or is_in_codes(value) or _is_same_memory(value, first):
            continue
        tensors[name] = ready(value)
    with replacing(folder, (CODES_FILE,)) as new_folder:
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.save_pretrained(new_folder)
        if model.can_generate():
            model.generation_config.save_pretrained(new_folder)
        write_tensors(new_folder / CODES_FILE, tensors, {"format": "pt"})
        form.side.write(new_folder)


def _is_same_memory(value: Tensor, other: Any) -> bool:
    """Return whether a tensor of a state is another one of it: tied, and not only equal."""
    if not isinstance(other, Tensor):
        return False
    return value.shape == other.shape and value.data_ptr() == other.data_ptr()
