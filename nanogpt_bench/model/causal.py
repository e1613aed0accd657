"""A causal language model of transformers: its outline, and its weights.

It is a folder that `save_pretrained` wrote (safetensors only) or that was published in
FP8, a `.gguf` file, whose weights become floats, or an id on the hub. Nothing is
unpickled, and no code that comes with a model is run.

`pretrained_config` reads a model's settings, `outline` its sizes and layers; neither reads a
weight. `load_causal` reads the weights, as floats or in codes, and `load_narrow` keeps
weights of 16 bits as they are stored. Both refuse a model that is not causal or has
values that are not finite.
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
    check_unread_tensors,
    shares_head,
)
from nanogpt_bench.system.errors import BenchError, one_line, refusals, say, shortened
from nanogpt_bench.system.free_memory import check_memory
from nanogpt_bench.system.hub import hub_file

#: the most characters of transformers' error about a file
LONGEST_REASON = 300
#: of the config.json of a model, which is a few thousand bytes long
MOST_SETTINGS_BYTES = 2**20
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
    #: codes and scales in the files by the weight's name (`fm.files.stored_weights`);
    #: empty for a float model
    stored: Mapping[str, Any]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights as they are stored.

        Weights that are not stored in codes count as float32.
        """
        codes = 0
        scales = 0
        for weight in self.stored.values():
            codes += math.prod(weight.shape)
            scales += math.prod(weight.own_scale_shape)
        return 4 * self.parameters - 3 * codes + 4 * scales


def find_model(name: str) -> dict[str, Any]:
    """Return the arguments with which transformers finds the model called `name`."""
    _require("transformers")
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf_file(path, name)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BenchError(
                    f"model {str(path)!r} is not a GGUF file; give a folder or a .gguf file"
                )
        _require("gguf")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        _check_size_of_settings(path / "config.json", name)
    else:
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
            raise BenchError(
                f"model {name!r} does not exist; give a folder that save_pretrained wrote, a .gguf "
                f"file or an id on the hub such as HuggingFaceTB/SmolLM2-135M"
            )
        _check_size_of_settings(hub_file(name, "config.json", asked="model"), name)
    return {"pretrained_model_name_or_path": name}


def _check_size_of_settings(file: Path, name: str) -> None:
    """Refuse a config.json of which transformers would make objects of fifty times its size."""
    size = file.stat().st_size
    if size > MOST_SETTINGS_BYTES:
        raise BenchError(
            f"model {name!r}: its config.json has {size:,} bytes; at most {MOST_SETTINGS_BYTES:,} "
            f"are read"
        )


def _only_gguf_file(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    names = f": {', '.join(file.name for file in files)}" if files else ""
    raise BenchError(
        f"model {name!r} has no config.json and {len(files)} .gguf files{names}; give the path of "
        "one file"
    )


def _require(package: str, extra: str = "hf") -> None:
    if find_spec(package) is None:
        raise BenchError(
            f"models of transformers need {package}; get it with pip install 'fp8manifold[{extra}]'"
        )


@contextmanager
def quiet_transformers(name: str) -> Iterator[Any]:
    """Yield transformers, silenced meanwhile.

    Errors about a model's files become one line.
    """
    import transformers

    shows_progress = transformers.utils.logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    # Not reset: the first forward pass gives advice, too.
    transformers.utils.logging.set_verbosity_error()
    try:
        # The bar of decoding a GGUF can't be disabled.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield transformers
    except BenchError:
        raise
    except MemoryError:
        raise BenchError(f"model {name!r}: out of memory while reading it") from None
    except Exception as error:
        # A damaged file can raise anything.
        reason = shortened(one_line(error), LONGEST_REASON)
        raise BenchError(
            f"model {name!r} can't be read: {type(error).__name__}: {reason}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
        if shows_progress:
            transformers.utils.logging.enable_progress_bar()


def _while_unchanged(function: Callable[[str], _T]) -> Callable[[str], _T]:
    """Cache a function of a model's name until a file of the model changes.

    A file has changed if its size or time has.
    """
    cached = functools.lru_cache(maxsize=4)(lambda name, _: function(name))

    @functools.wraps(function)
    def call(name: str) -> _T:
        try:
            states = _file_states(Path(name).resolve())
        except (OSError, ValueError, RuntimeError):
            # There is no such path, or its links are a loop: the function says so.
            return function(name)
        return cached(name, states)

    return call


def _file_states(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of a file, or of every file of a folder."""
    files: list[Path] = []
    if path.is_dir():
        files = sorted(path.iterdir())
    elif path.is_file():
        files = [path]
    states = []
    for file in files:
        state = file.stat()
        states.append((str(file), state.st_size, state.st_mtime_ns))
    return tuple(states)


@_while_unchanged
def pretrained_config(name: str) -> Any:
    """Return the settings of the model called `name` as transformers' object.

    Models of other kinds are refused.
    """
    location = find_model(name)
    with quiet_transformers(name) as transformers:
        settings = transformers.AutoConfig.from_pretrained(**location, trust_remote_code=False)
    quantization = vars(settings).pop("quantization_config", None)
    if quantization is not None and not stored_of(name):
        method: Any = type(quantization).__name__
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        raise BenchError(
            f"model {name!r} is quantised already ({method}); give the float model from which it "
            "was made"
        )
    _check_causal_kind(settings, name, transformers)
    text_settings = settings.get_text_config()
    if getattr(text_settings, "num_attention_heads", None) is None:
        # Mamba and the like compute with the weights of linear layers without calling
        # the layers.
        raise BenchError(
            f"model {name!r} has type {settings.model_type!r}, which has no attention (no "
            "num_attention_heads in its config.json); only models with attention can be measured "
            "and trained here, such as llama, gpt2 or mixtral"
        )
    check_size(text_settings, name)
    # transformers reads a separate head, whatever the settings are.
    if "gguf_file" not in location and _has_separate_head(settings, name):
        settings.tie_word_embeddings = False
        settings.get_text_config().tie_word_embeddings = False
    return settings


def _check_causal_kind(settings: Any, name: str, transformers: Any) -> None:
    """Refuse a model whose class does not predict the next token."""
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal_class = kinds.get(settings.model_type)
    saved_classes = settings.architectures or []
    is_causal = causal_class is not None and not settings.is_encoder_decoder
    if is_causal and (not saved_classes or causal_class in saved_classes):
        return
    description = saved_classes[0] if saved_classes else f"type {settings.model_type!r}"
    raise BenchError(
        f"model {name!r} ({description}) is not a causal language model (one that predicts the "
        "next token)"
    )


@_while_unchanged
def stored_of(name: str) -> Mapping[str, Any]:
    """Return the codes and scales in the files of the model called `name`.

    They are by the weight's name. No weights are read.
    """
    location = find_model(name)
    if "gguf_file" in location:
        return {}
    folder = Path(name)
    if folder.is_dir():
        may_have_codes = any(folder.glob("*.safetensors"))
    else:
        # Weights are downloaded from the hub only if the settings name a quantisation.
        settings = hub_file(name, "config.json", asked="model").read_text("utf-8")
        may_have_codes = "quantization_config" in settings
    if not may_have_codes:
        return {}
    with quiet_transformers(name), refusals(f"model {name!r}", ValueError):
        return fm.files.stored_weights(name)


def _has_separate_head(settings: Any, name: str) -> bool:
    """Return whether a folder's files have a separate head that its settings tie.

    Its values then differ from the embedding's.
    """
    if not Path(name).is_dir():
        return False
    model = _from_settings(settings, name)
    if not shares_head(model):
        return False
    shared_weight = model.get_input_embeddings().weight
    shared_names = []
    for key, value in model.named_parameters(remove_duplicate=False):
        if value is shared_weight:
            shared_names.append(key)
    values = []
    for file in sorted(Path(name).glob("model*.safetensors")):
        with quiet_transformers(str(file)), safe_open(file, framework="pt") as opened:
            for key in sorted(opened.keys()):
                # A file may leave out a prefix: wte.weight for transformer.wte.weight.
                if any(f".{shared_name}".endswith(f".{key}") for shared_name in shared_names):
                    values.append(opened.get_tensor(key))
    if len(values) < 2:
        return False
    return not all(torch.equal(values[0], value) for value in values[1:])


@_while_unchanged
def outline(name: str) -> Outline:
    """Return the outline of the model called `name`.

    It refuses the models that `pretrained_config` refuses.
    """
    settings = pretrained_config(name).get_text_config()
    model = skeleton(name)
    names_by_weight: dict[int, list[str]] = {}
    for weight_name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_weight.setdefault(id(parameter), []).append(weight_name)
    layers: dict[str, tuple[int, int]] = {}
    shared: dict[str, tuple[str, ...]] = {}
    for layer, module in model.named_modules():
        if not is_linear(module):
            continue
        rows, columns = module.weight.shape
        # A Conv1D stores (inputs, outputs).
        layers[layer] = (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
        names = names_by_weight[id(module.weight)]
        if len(names) > 1:
            shared[layer] = tuple(names)
    return Outline(
        kind=type(model).__name__,
        n_layer=settings.num_hidden_layers,
        n_head=settings.num_attention_heads,
        n_embd=settings.hidden_size,
        positions=getattr(settings, "max_position_embeddings", 2**31),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=layers,
        shared=shared,
        stored=stored_of(name),
    )


def skeleton(name: str) -> Any:
    """Return the model called `name` on torch's meta device; no weight is read."""
    return _from_settings(pretrained_config(name), name)


def _from_settings(settings: Any, name: str) -> Any:
    with quiet_transformers(name) as transformers, torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or a `Conv1D`.

    A `Conv1D` is the linear layer of transformers' GPT-2.
    """
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def load_causal(
    name: str, *, bytes_each: float = 5.0, quantization: Mapping[str, Any] | None = None
) -> Any:
    """Return the model called `name`, in float32 or in codes.

    It has a method `loss(tokens, targets)` as `GPT` has it.

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
    model_outline = outline(name)
    location = find_model(name)
    if "gguf_file" in location:
        # transformers has all floats of a GGUF file twice while reading.
        bytes_while_reading = 8.0
    elif quantization is None:
        bytes_while_reading = 5.0
    else:
        bytes_while_reading = 0.0
    check_memory(
        model_outline.parameters * max(bytes_each, bytes_while_reading),
        f"model {name!r}, {model_outline.parameters:,} parameters,",
    )
    if model_outline.stored:
        model = _read_stored(name, quantization)
    else:
        model = _read_floats(name, location, quantization)
    # Untying gives the model a separate head.
    if (quantization or {}).get("tied") != "untie":
        check_head(model, skeleton(name), name)
    model.config.use_cache = False
    check_finite(model, name)
    # The model gets a method `loss`, and keeps the name of its class.
    model_class = type(model)
    model.__class__ = type(
        model_class.__name__, (_WithLoss, model_class), {"__module__": model_class.__module__}
    )
    check_causal(model, name)
    return model.train()


def _read_stored(name: str, quantization: Mapping[str, Any] | None) -> Any:
    """Read a model whose files have codes; decode it without `quantization`."""
    options = {}
    for key, value in (quantization or {}).items():
        if key in ("rounding", "draws", "seed"):
            options[key] = value
    with quiet_transformers(name):
        model = fm.load(name, dtype=torch.float32, **options)
        if quantization is not None:
            return model
        return without_codes(fm.dequantize_model(model))


def _read_floats(
    name: str, location: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> Any:
    """Read a model whose files have floats; quantise it meanwhile if asked to."""
    from_gguf = "gguf_file" in location
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    if not from_gguf:
        options["use_safetensors"] = True
    with quiet_transformers(name) as transformers:
        options["config"] = pretrained_config(name)
        if quantization is not None and not from_gguf:
            folder = location["pretrained_model_name_or_path"]
            model, loading_info = fm.load(folder, **options, **quantization)
        else:
            auto = transformers.AutoModelForCausalLM
            model, loading_info = auto.from_pretrained(**location, **options)
    if from_gguf:
        file = Path(location["pretrained_model_name_or_path"]) / location["gguf_file"]
        unexpected = loading_info.pop("unexpected_keys", None) or ()
        with quiet_transformers(str(file)):
            unread = check_unread_tensors(model, file, unexpected)
        if unread:
            say(f"{file.name}: {', '.join(unread)} not read, which has no effect")
    elif quantization is None:
        check_floats(model, name)
    _check_weight_names(loading_info, name)
    return without_codes(model)


def _check_weight_names(loading_info: Mapping[str, Any], name: str) -> None:
    """Refuse weights that the files lack, or that the model has no use of."""
    for kind in ("missing", "unexpected"):
        keys = loading_info.get(f"{kind}_keys") or ()
        misfits = sorted(key for key in keys if not key.endswith(_MASK))
        if misfits:
            raise BenchError(
                f"model {name!r} does not fit its config.json: {kind} weight {misfits[0]!r}"
            )


def without_codes(model: Any) -> Any:
    """Return a model without transformers' record of its quantisation.

    It is then saved with the layers it has.
    """
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    return model


def load_narrow(name: str) -> Any | None:
    """Return the model called `name` with weights in 16 bits, to be measured.

    Its losses are those of `load_causal`, to the bit. The result is None where the
    model has to be in float32: if its files are not all of one dtype of 16 bits, or if
    the model would compute something in 16 bits.
    """
    location = find_model(name)
    folder = Path(location["pretrained_model_name_or_path"])
    if "gguf_file" in location or not folder.is_dir():
        return None
    dtype = _only_dtype(folder, name)
    if dtype is None:
        return None
    parameters = outline(name).parameters
    check_memory(parameters * 2.5, f"model {name!r}, {parameters:,} parameters,")
    with quiet_transformers(name) as transformers:
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            **location,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            config=copy.deepcopy(pretrained_config(name)),
            output_loading_info=True,
        )
    if loading_info.get("missing_keys") or loading_info.get("unexpected_keys"):
        return None
    if not computes_in_float32(model):
        return None
    check_head(model, skeleton(name), name)
    model.config.use_cache = False
    model.config.dtype = torch.float32
    check_finite(model, name)
    try:
        check_causal(model, name)
    except RuntimeError:
        # The model computes something in the dtype of a weight.
        return None
    return model.eval()


def _only_dtype(folder: Path, name: str) -> torch.dtype | None:
    """Return the one dtype of 16 bits that all tensors of a folder have, or None."""
    dtypes = set()
    for file in folder.glob("*.safetensors"):
        with quiet_transformers(name), safe_open(file, framework="pt") as opened:
            # A safetensors file is no mapping.
            for key in opened.keys():  # noqa: SIM118
                dtypes.add(opened.get_slice(key).get_dtype())
    if len(dtypes) != 1:
        return None
    return _HALVES.get(dtypes.pop())


def recompute_activations(model: Any) -> None:
    """Let the model store no activations inside a block.

    They are computed again in the backward pass.
    """
    # transformers before 5.23 has only the second name
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable()


class _WithLoss:
    """A base class with `loss`, put before a model's class.

    Names of layers and files stay as they are.
    """

    def loss(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting `targets` from `tokens`.

        Both are (B, T).
        """
        logits = self(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def window_losses(model: Any, windows: Tensor, batch: int) -> list[float]:
    """Return the mean loss of each window (N, T + 1 tokens), in nats per token.

    The model takes `batch` windows at a time.
    """
    losses: list[float] = []
    for rows in windows.split(batch):
        output = model.eval()(rows[:, :-1])
        logits = getattr(output, "logits", output).float()
        token_losses = functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        )
        losses += token_losses.view(len(rows), -1).mean(1).tolist()
    return losses


def computes_in_float32(model: nn.Module) -> bool:
    """Make a model with weights of 16 bits compute in float32.

    Linear layers and embeddings keep their weights and convert them when they run.
    Everything else becomes float32. As every float of 16 bits is a float32, the model
    then computes what one with float32 weights does, to the bit. The result is False,
    and the model is left as it is, if it could differ: a buffer that the model itself
    computed in 16 bits could differ from float32's.
    """
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.dtype in _HALVES.values():
                return False
    narrow_weights = set()
    for module in model.modules():
        forward = _converting_forward(module)
        if forward is not None:
            narrow_weights.add(id(module.weight))
            module.forward = forward
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in narrow_weights and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return True


def _converting_forward(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a forward pass that converts the module's weight to float32, or None."""
    if type(module) is nn.Linear:
        return lambda x: functional.linear(x, module.weight.float(), module.bias)
    if type(module) is nn.Embedding and module.max_norm is None:
        return lambda rows: functional.embedding(rows, module.weight).float()
    if type(module).__name__ != "Conv1D":
        return None

    def conv1d(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        outputs = torch.addmm(module.bias, rows, module.weight.float())
        return outputs.view(*x.shape[:-1], module.nf)

    return conv1d
