r"""One way out: `save` writes a model in the layout that it was read in, or as floats.

::

    save(model, folder)              model.save_pretrained(folder)
              \                        /
               published layout?  --> save_fp8, and a side file with counts
               else               --> transformers' own save_pretrained, given floats,
                                      and a side file with scales and counts

`save_pretrained` of every quantised model of transformers comes here by the guard of
`_savers`, unless the model was attached by `huggingface.attach`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._base.checks import check_choice, import_optional
from fp8manifold._base.wrappers import plain_name
from fp8manifold._doors.plain import Saved, is_quantized, saved_form
from fp8manifold._doors.side_file import CODES, Content, SideFile
from fp8manifold._published.replace_files import CODES_FILE, WEIGHTS_FILE, replacing
from fp8manifold.checkpoints import base_of, refuse_adapters, save_fp8, without_shared_memory
from fp8manifold.exchange import export_model, has_own_head, is_transformers_model
from fp8manifold.huggingface import published_of
from fp8manifold.nn._parts import PARTS, is_in_codes
from fp8manifold.nn._savers import prepare, save_with

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


def save(model: Any, folder: str | Path, layout: str | None = None) -> None:
    r"""Write a model of transformers to a folder that :func:`load` reads to the bit.

    .. math:: \operatorname{load}(\operatorname{save}(model)) = model

    - None: as the model was read, where that was a published layout; otherwise
      ``floats``. ``model.save_pretrained(folder)`` does the same.
    - ``floats``: ``model.safetensors`` has the values that the model computes with, in
      bfloat16 where it holds them exactly, else in float32. Any library reads them. A
      file beside, ``fp8manifold.grids``, has formats, scales, seeds and counts, from
      which :func:`load` makes the very codes. Float storages have their floats there.
    - ``codes``: ``codes.safetensors`` has one byte per weight, under names that no float
      layer has (``weight_codes``). Only :func:`load` reads it.
    - ``compressed-tensors``, ``torchao``, ``fp8``: as :func:`export_model` writes them.
      Counts of stochastic rounding are not in these.

    Args:
        model: quantised, also under wrappers of torch. It does not change.
        folder: made if it is not there. Weights of an earlier save are replaced, and
            what would be read beside the new ones is refused.
        layout: one of the above.

    Floats and codes preserve NaN and -0. Save the tokenizer by itself.

    Raises:
        ImportError: transformers or safetensors is missing.
        TypeError, ValueError: no model of transformers; one without a quantised layer;
            an unknown layout, or one that can't describe the model; adapters of PEFT;
            a sharded model; a file in ``folder`` that would be read beside the weights.

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

    Source: safetensors; the layouts of :func:`export_model`.
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
    if not is_quantized(base):
        raise ValueError("the model has no quantised layer: save it with save_pretrained")
    chosen = None if layout is None else SaveLayout(layout)
    match chosen:
        case None:
            _save_by_transformers(type(base).save_pretrained, base, Path(folder), {})
        case SaveLayout.FLOATS:
            _save_floats(type(base).save_pretrained, base, Path(folder), {})
        case SaveLayout.CODES:
            _save_codes(base, Path(folder))
        case _:
            exported: Any = chosen.value
            export_model(base, folder, exported)


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


save_with("PreTrainedModel", _save_guarded)


def _save_by_transformers(
    save_pretrained: Callable[..., Any], model: Any, folder: Path, options: dict[str, Any]
) -> Any:
    """Write a model in the layout that it was published in, else as floats."""
    if published_of(model) is None:
        return _save_floats(save_pretrained, model, folder, options)
    return _save_published(model, folder, options)


def _save_floats(
    save_pretrained: Callable[..., Any], model: Any, folder: Path, options: dict[str, Any]
) -> Any:
    """Write a model's floats by transformers, and the side file."""
    if options.get("variant") is not None:
        raise ValueError(
            f"variant={options['variant']!r}: {WEIGHTS_FILE!r} is what fm.load reads; give another "
            "folder"
        )
    options = dict(options)
    form = saved_form(model, options.pop("state_dict", None))
    with _as_floats(model, form):
        if not options.get("is_main_process", True):
            return save_pretrained(model, folder, state_dict=form.floats, **options)
        if options.get("push_to_hub"):
            # Transformers uploads the folder by its name.
            folder.mkdir(parents=True, exist_ok=True)
            form.side.write(folder)
            return save_pretrained(model, folder, state_dict=form.floats, **options)
        with replacing(folder) as new_folder:
            form.side.write(new_folder)
            return save_pretrained(model, new_folder, state_dict=form.floats, **options)


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


def _save_published(model: Any, folder: Path, options: Mapping[str, Any]) -> None:
    """Write a model in its published layout, with a side file of counts."""
    if not options.get("is_main_process", True):
        return
    given_state = options.get("state_dict")
    if given_state is not None and not _is_own_state(model, given_state):
        raise ValueError(
            "state_dict= is not the model's own state, and its published layout is written from "
            "the model: save with fm.save(model, folder)"
        )
    if options.get("push_to_hub"):
        raise ValueError(
            "push_to_hub=True: the published layout is written to a folder; upload it with "
            "huggingface_hub.upload_folder"
        )
    save_fp8(model, folder)
    form = saved_form(model, with_floats=False)
    counts = SideFile(Content.PUBLISHED, [], [], [])
    for name in form.weights:
        for suffix in PARTS[2:]:
            if name + suffix in form.side.tensors:
                counts.tensors[name + suffix] = form.side.tensors[name + suffix]
    counts.write(folder)


def _is_own_state(model: nn.Module, given_state: Mapping[str, Tensor]) -> bool:
    """Return whether a state is that of a model: the same memory, or equal traits."""
    own_state = {plain_name(name): value for name, value in model.state_dict().items()}
    for name, value in given_state.items():
        own = own_state.get(plain_name(name))
        if own is None or own.shape != value.shape:
            return False
        if own.data_ptr() != value.data_ptr() and not torch.equal(own, value):
            return False
    return True


def _save_codes(model: Any, folder: Path) -> None:
    """Write one byte per weight, under names that no float layer has."""
    save_file = import_optional("safetensors.torch", "hf", "save").save_file
    form = saved_form(model, with_floats=False)
    form.side.content = Content.CODES
    tensors = {name + CODES: weight.codes for name, weight in form.weights.items()}
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    config = _config_of_floats(model)
    for name, value in form.floats.items():
        if is_in_codes(value) or name in ties:
            continue
        tensors[name] = value
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder, (CODES_FILE,)) as new_folder:
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.save_pretrained(new_folder)
        if model.can_generate():
            model.generation_config.save_pretrained(new_folder)
        save_file(without_shared_memory(tensors), new_folder / CODES_FILE, {"format": "pt"})
        form.side.write(new_folder)
