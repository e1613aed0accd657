"""A causal language model of transformers: finding it, its outline, and its weights, as
floats or in codes.

It is a folder that `save_pretrained` wrote (safetensors only) or that was published in
FP8, a `.gguf` file, whose weights become floats, or an id on the hub. Nothing is
unpickled, and no code that comes with a model is run.
"""

import copy
import functools
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

import fp8manifold as fm
from nanogpt_bench.model.as_read import (
    check_causal,
    check_finite,
    check_floats,
    check_head,
    check_size,
    check_taken,
    shares_head,
)
from nanogpt_bench.system.errors import BenchError, one_line, refusals, say, shortened
from nanogpt_bench.system.free_memory import check_memory
from nanogpt_bench.system.hub import hub_file

#: the most characters of transformers' error about a file
LONGEST_REASON = 300
#: a constant that GPT-2's older files have beside the weights, and that transformers
#: calls unexpected
_MASK = ".attn.masked_bias"
_T = TypeVar("_T")
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Outline:
    """The sizes and layers of a model, known before a weight is read."""

    kind: str
    n_layer: int
    n_head: int
    n_embd: int
    positions: int
    #: rows of the embedding, which may be more than the tokenizer's tokens
    vocab_size: int
    parameters: int
    #: (inputs, outputs) of every linear layer by its name, in the model's order
    layers: Mapping[str, tuple[int, int]]
    #: all names of the weight of a linear layer that shares its weight with another
    #: module, by the layer's name
    shared: Mapping[str, tuple[str, ...]]
    #: codes and scales in the files by the weight's name (`fm.published_weights`);
    #: empty for a float model
    stored: Mapping[str, Any]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights as they are stored; those not stored in codes count as
        float32.
        """
        codes, scales = (
            sum(math.prod(shape) for shape in shapes)
            for shapes in zip(
                *((each.shape, each.own_scale_shape) for each in self.stored.values()), strict=True
            )
        )
        return 4 * self.parameters - 3 * codes + 4 * scales


def find_model(name: str) -> dict[str, Any]:
    """Return the arguments with which transformers finds the model called `name`."""
    _require("transformers")
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            names = f": {', '.join(each.name for each in found)}" if found else ""
            raise BenchError(
                f"model {name!r} has no config.json and {len(found)} .gguf files{names}; name one "
                f"file"
            )
        path = found[0]
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BenchError(f"model {str(path)!r} is no GGUF file; give a folder or a .gguf")
        _require("gguf")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not path.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
            raise BenchError(
                f"model {name!r} does not exist; give a folder that save_pretrained wrote, a .gguf "
                f"file or an id on "
                "the hub such as HuggingFaceTB/SmolLM2-135M"
            )
        hub_file(name, "config.json", asked="model")
    return {"pretrained_model_name_or_path": name}


def _require(package: str, extra: str = "hf") -> None:
    if find_spec(package) is None:
        raise BenchError(
            f"models of transformers need {package}; get it with pip install 'fp8manifold[{extra}]'"
        )


@contextmanager
def reading(name: str) -> Iterator[Any]:
    """Yield transformers, silenced meanwhile, and turn its errors about a model's files
    into one line.
    """
    import transformers

    show = transformers.utils.logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    # Not reset: the first forward pass gives advice, too
    transformers.utils.logging.set_verbosity_error()
    try:
        # The bar of decoding a GGUF can't be disabled.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield transformers
    except BenchError:
        raise
    except MemoryError:
        raise BenchError(f"model {name!r}: out of memory while it was read") from None
    except Exception as error:  # a damaged file can raise anything
        reason = shortened(one_line(error), LONGEST_REASON)
        raise BenchError(
            f"model {name!r} can't be read: {type(error).__name__}: {reason}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
        if show:
            transformers.utils.logging.enable_progress_bar()


def _while_unchanged(function: Callable[[str], _T]) -> Callable[[str], _T]:
    """Cache a function of a model's name until the size or time of one of the model's
    files changes.
    """
    known = functools.lru_cache(maxsize=4)(lambda name, _: function(name))

    @functools.wraps(function)
    def said(name: str) -> _T:
        try:
            path = Path(name).resolve()
            files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
            facts = tuple(
                (str(file), stat.st_size, stat.st_mtime_ns)
                for file in files
                for stat in [file.stat()]
            )
        except (OSError, ValueError):  # no such path: the function says so
            return function(name)
        return known(name, facts)

    return said


@_while_unchanged
def settings_of(name: str) -> Any:
    """Return the settings of the model called `name` as transformers' object; refuse
    models of other kinds.
    """
    where = find_model(name)
    with reading(name) as transformers:
        found = transformers.AutoConfig.from_pretrained(**where, trust_remote_code=False)
    quantised = vars(found).pop("quantization_config", None)
    if quantised is not None and not stored_of(name):
        how = (
            quantised.get("quant_method")
            if isinstance(quantised, dict)
            else type(quantised).__name__
        )
        raise BenchError(
            f"model {name!r} is quantised already ({how}); give the float model it was made from"
        )
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    own, saved = kinds.get(found.model_type), found.architectures or []
    if own is None or found.is_encoder_decoder or (saved and own not in saved):
        what = saved[0] if saved else f"of type {found.model_type!r}"
        raise BenchError(
            f"model {name!r} is {what}, no causal language model (one that predicts the next token)"
        )
    if getattr(found.get_text_config(), "num_attention_heads", None) is None:
        # Mamba and the like compute with the weights of linear layers without calling
        # the layers.
        raise BenchError(
            f"model {name!r} is of type {found.model_type!r}, without attention (no "
            f"num_attention_heads in its "
            "config.json); only models with attention can be measured and trained here, such as "
            "llama, gpt2 or mixtral"
        )
    check_size(found.get_text_config(), name)
    if "gguf_file" not in where and _has_own_head(
        found, name
    ):  # transformers reads it, whatever the settings are
        found.tie_word_embeddings = found.get_text_config().tie_word_embeddings = False
    return found


@_while_unchanged
def stored_of(name: str) -> Mapping[str, Any]:
    """Return the codes and scales in the files of the model called `name`, by the
    weight's name; reads no weights.
    """
    where, folder = find_model(name), Path(name)
    if folder.is_dir():
        speaks = any(folder.glob("*.safetensors"))
    else:  # on the hub, from which weights are downloaded only if the settings name a quantisation
        settings = (
            None
            if "gguf_file" in where
            else hub_file(name, "config.json", asked="model").read_text("utf-8")
        )
        speaks = settings is not None and "quantization_config" in settings
    if "gguf_file" in where or not speaks:
        return {}
    with reading(name), refusals(f"model {name!r}", ValueError):
        return fm.published_weights(name)


def _has_own_head(settings: Any, name: str) -> bool:
    """Return whether a folder's files have a separate head although its settings tie
    the head to the embedding.
    """
    if not Path(name).is_dir():
        return False
    model = _from_settings(settings, name)
    if not shares_head(model):
        return False
    shared = model.get_input_embeddings().weight
    names = [
        key for key, value in model.named_parameters(remove_duplicate=False) if value is shared
    ]
    values = []
    for file in sorted(Path(name).glob("model*.safetensors")):
        with reading(str(file)), safe_open(file, framework="pt") as opened:
            known = [
                key
                for key in sorted(opened.keys())
                if any(f".{own}".endswith(f".{key}") for own in names)
            ]
            values += [opened.get_tensor(key) for key in known]
    return len(values) > 1 and not all(torch.equal(values[0], other) for other in values[1:])


@_while_unchanged
def outline(name: str) -> Outline:
    """Return the outline of the model called `name`; refuses the same models as
    `settings_of`.
    """
    settings, model = settings_of(name), skeleton(name)
    owners: dict[int, list[str]] = {}
    for weight, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(weight)
    linear = {layer: module for layer, module in model.named_modules() if is_linear(module)}
    shared = {layer: tuple(owners[id(module.weight)]) for layer, module in linear.items()}
    shapes = {layer: tuple(module.weight.shape) for layer, module in linear.items()}
    shapes |= {
        layer: shapes[layer][::-1]
        for layer, module in linear.items()
        if not isinstance(module, nn.Linear)
    }
    own = settings.get_text_config()
    return Outline(
        kind=type(model).__name__,
        n_layer=own.num_hidden_layers,
        n_head=own.num_attention_heads,
        n_embd=own.hidden_size,
        positions=getattr(own, "max_position_embeddings", 2**31),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers={layer: (shape[1], shape[0]) for layer, shape in shapes.items()},
        shared={layer: names for layer, names in shared.items() if len(names) > 1},
        stored=stored_of(name),
    )


def skeleton(name: str) -> Any:
    """Return the model called `name` on torch's meta device; no weight is read."""
    return _from_settings(settings_of(name), name)


def _from_settings(settings: Any, name: str) -> Any:
    with reading(name) as transformers, torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a `Conv1D`, that of transformers'
    GPT-2.
    """
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def load_causal(
    name: str, *, bytes_each: float = 5.0, quantization: Mapping[str, Any] | None = None
) -> Any:
    """Return the model called `name`, in float32 or in codes, with a method
    `loss(tokens, targets)` as `GPT` has it.

    Args:
        name: a folder, a .gguf file, or an id on the hub.
        bytes_each: bytes per parameter that the whole use of the model will take; 5:
            the weight and its code.
        quantization: arguments of `fm.quantize_model`, with which weights become codes
            while they are read. Not so from a .gguf file, which transformers reads as
            floats: the caller has to quantise the model. Weights that the files have in
            codes stay as they are stored, and use only the arguments `rounding`,
            `draws` and `seed`; without `quantization` they are decoded.
    """
    found, where = outline(name), find_model(name)
    copies = (
        4.0 if "gguf_file" in where else 0.0
    )  # transformers has all floats of a GGUF file twice while reading
    floats = 0.0 if quantization is not None and not copies else max(5.0, 4.0 + copies)
    check_memory(
        found.parameters * max(bytes_each, floats),
        f"model {name!r}, {found.parameters:,} parameters,",
    )
    read = _as_stored if found.stored else _from_floats
    model = read(name, where, quantization)
    if (quantization or {}).get("tied") != "untie":  # untying has given the model its own head
        check_head(model, skeleton(name), name)
    model.config.use_cache = False
    check_finite(model, name)
    own = type(model)
    model.__class__ = type(own.__name__, (_WithLoss, own), {"__module__": own.__module__})
    check_causal(model, name)
    return model.train()


def _as_stored(name: str, where: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Any:
    """Read a model whose files have codes: in codes, or decoded without `quantization`."""
    options = {
        key: value
        for key, value in (quantization or {}).items()
        if key in ("rounding", "draws", "seed")
    }
    with reading(name):
        model = fm.load_fp8(name, dtype=torch.float32, **options)
        return model if quantization is not None else without_codes(fm.dequantize_model(model))


def _from_floats(
    name: str, where: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> Any:
    """Read a model whose files have floats: as floats, or quantised while it is read."""
    copies = "gguf_file" in where
    with reading(name) as transformers:
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "trust_remote_code": False,
            "output_loading_info": True,
        }
        options |= {} if copies else {"use_safetensors": True}
        if quantization is not None and not copies:
            options["quantization_config"] = fm.huggingface.quantization_config(**quantization)
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            **where, config=settings_of(name), **options
        )
    if copies:
        file = Path(where["pretrained_model_name_or_path"]) / where["gguf_file"]
        with reading(str(file)):
            left = check_taken(model, file, said.pop("unexpected_keys", None) or ())
        if left:
            say(f"{file.name}: {', '.join(left)} left out: their values change nothing")
    else:
        check_floats(model, name)
    for kind in ("missing", "unexpected"):
        keys = sorted(key for key in said.get(f"{kind}_keys") or () if not key.endswith(_MASK))
        if keys:
            raise BenchError(
                f"model {name!r} does not fit its config.json: {kind} weight {keys[0]!r}"
            )
    return without_codes(model)


def without_codes(model: Any) -> Any:
    """Return a model without transformers' record of its quantisation, so that it is
    saved with the layers it has.
    """
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    return model


def load_narrow(name: str) -> Any | None:
    """Return the model called `name` with weights in 16 bits, to be measured; None
    where it has to be in float32.

    Its losses are those of `load_causal`, to the bit. It has to be in float32 if its
    files are not all of one dtype of 16 bits, or if the model would compute something
    in 16 bits.
    """
    where = find_model(name)
    folder = Path(where["pretrained_model_name_or_path"])
    if "gguf_file" in where or not folder.is_dir():
        return None
    dtypes = set()
    for file in folder.glob("*.safetensors"):
        with reading(name), safe_open(file, framework="pt") as opened:
            dtypes |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118  (no mapping)
    if len(dtypes) != 1 or (dtype := _HALVES.get(dtypes.pop())) is None:
        return None
    check_memory(
        outline(name).parameters * 2.5, f"model {name!r}, {outline(name).parameters:,} parameters,"
    )
    with reading(name) as transformers:
        options: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": False,
            "use_safetensors": True,
        }
        options |= {"config": copy.deepcopy(settings_of(name)), "output_loading_info": True}
        model, said = transformers.AutoModelForCausalLM.from_pretrained(**where, **options)
    if said.get("missing_keys") or said.get("unexpected_keys") or not computes_in_float32(model):
        return None
    check_head(model, skeleton(name), name)
    model.config.use_cache, model.config.dtype = False, torch.float32
    check_finite(model, name)
    try:
        check_causal(model, name)
    except RuntimeError:  # the model computes something in the dtype of a weight
        return None
    return model.eval()


def recompute_activations(model: Any) -> None:
    """Let the model store no activations inside a block, and compute them again in the
    backward pass.
    """
    # transformers before 5.23 has only the second name
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable()


class _WithLoss:
    """A base class with `loss`, put before a model's own class, so that names of layers
    and files stay the same.
    """

    def loss(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting `targets` (B, T) from
        `tokens` (B, T).
        """
        logits = self(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def window_losses(model: Any, windows: Tensor, batch: int) -> list[float]:
    """Return the mean loss of each window (N, T + 1 tokens), in nats per token; takes
    `batch` windows at a time.
    """
    losses: list[float] = []
    for rows in windows.split(batch):
        given = model.eval()(rows[:, :-1])
        logits = getattr(given, "logits", given).float()
        each = functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        )
        losses += each.view(len(rows), -1).mean(1).tolist()
    return losses


def computes_in_float32(model: nn.Module) -> bool:
    """Make a model with weights of 16 bits compute in float32; return False if its
    results could differ from float32's.

    Otherwise it computes the same as a model with float32 weights, to the bit, as every
    float of 16 bits is a float32. Linear layers and embeddings keep their weights and
    convert them when they run; everything else becomes float32. A buffer that the model
    itself computed in 16 bits could differ from float32's: then the result is False.
    """
    for module in model.modules():
        made = [module._buffers[name] for name in module._non_persistent_buffers_set]
        if any(x is not None and x.dtype in _HALVES.values() for x in made):
            return False
    linear = {id(module.weight) for module in model.modules() if _run_of(module) is not None}
    for module in model.modules():
        if (run := _run_of(module)) is not None:
            module.forward = run
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in linear and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return True


def _run_of(module: nn.Module) -> Any:
    """Return a forward pass for a module that converts its weight to float32; None for
    other modules.
    """
    if type(module) is nn.Linear:
        return lambda x: functional.linear(x, module.weight.float(), module.bias)
    if type(module) is nn.Embedding and module.max_norm is None:
        return lambda rows: functional.embedding(rows, module.weight).float()
    if type(module).__name__ != "Conv1D":
        return None
    own: Any = module
    return lambda x: torch.addmm(own.bias, x.reshape(-1, x.shape[-1]), own.weight.float()).view(
        *x.shape[:-1], own.nf
    )
