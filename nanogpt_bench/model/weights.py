"""A model's layers and weights: as plain tensors, in a safetensors file, and from a
checkpoint of GPT-2.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import geoopt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.system.errors import BenchError, DiskError, one_line, refusals
from nanogpt_bench.system.files import refuse_to_replace, replacing

#: in a checkpoint, between the name of another package's tensor and that of a plain
#: tensor inside it
PART = "::"
#: endings of a one-byte weight's name for its parts in a state
#: (`fm.unflatten_state_dict`)
_PARTS = ("", "_scale", "_counter", "_traits", "_remainder")


def is_packaged(value: Any) -> bool:
    """Return whether a tensor is SDNQ's or torchao's: a subclass with plain tensors
    inside, and a `dequantize`.

    >>> is_packaged(torch.zeros(2)), is_packaged(fm.FP8Parameter(torch.zeros(2, 2), "E4M3"))
    (False, False)
    """
    own = value.data if isinstance(value, nn.Parameter) else value
    if not hasattr(own, "__tensor_flatten__") or isinstance(own, fm.FP8Tensor):
        return False
    return type(own).__module__.partition(".")[0] in ("sdnq", "torchao")


def rows_of_outputs(layer: Any) -> Tensor:
    """Return a linear layer's weight as (outputs, inputs); transformers' GPT-2 stores
    it transposed.
    """
    weight: Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.mT.contiguous()


def parts_of(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors inside another package's tensor, by name."""
    return {name: getattr(value, name) for name in sorted(value.__tensor_flatten__()[0])}


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with other packages' tensors replaced by the plain tensors inside
    them, which share the memory.

    >>> taken_apart({"bias": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    apart: dict[str, Any] = {}
    for name, value in state.items():
        packaged = is_packaged(value)
        apart |= (
            {f"{name}{PART}{part}": tensor for part, tensor in parts_of(value).items()}
            if packaged
            else {name: value}
        )
    return apart


@torch.no_grad()
def put_back(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `taken_apart`: copy the parts in `state` into the tensors of `own`, and
    return the state with these.
    """
    whole = {name: value for name, value in state.items() if PART not in name}
    for name, value in own.items():
        if is_packaged(value):
            for part, tensor in parts_of(value).items():
                tensor.copy_(state[f"{name}{PART}{part}"])
            whole[name] = value
    return whole


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's parameters and buffers to a file, which a reader sees whole or
    not at all; a tied weight once.

    One-byte weights are written in the parts that they have in a state
    (`fm.unflatten_state_dict`).
    """
    tensors = tensors_of(model)
    refuse_to_replace("--save", path, lambda _: _names_in(path) == tensors.keys(), "another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            save_file(tensors, file.name)
    except SafetensorError as error:  # safetensors' form of an OSError
        raise DiskError(f"weights {str(path)!r} can't be written: {one_line(error)}") from None


def _names_in(path: Path) -> set[str]:
    """Return the names of a safetensors file's tensors; empty for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError, ValueError):
        return set()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers as plain tensors, as a file has them; a
    tied weight once.
    """
    again = {name + part for name in _ties(model) for part in _PARTS}
    state = {name: value for name, value in model.state_dict().items() if name not in again}
    return {name: value.detach().contiguous() for name, value in taken_apart(state).items()}


def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], source: str
) -> None:
    """Fill a model with tensors of `tensors_of`; an error, which calls them `source`,
    leaves the model as it was.

    `metadata` are the texts of a file's header, in which earlier versions described
    one-byte weights.
    """
    whole = model.state_dict()
    own = fm.unflatten_state_dict(taken_apart(whole))
    with refusals(f"{source} can't be read", ValueError):
        state = fm.unflatten_state_dict(tensors, metadata)
    state |= {name: state[first] for name, first in _ties(model).items() if first in state}
    _check(state, own, source, _measured(model))
    model.load_state_dict(put_back(state, whole))


def _measured(model: nn.Module) -> set[str]:
    """Return the names of buffers whose shape depends on the inputs that a layer has
    had.
    """
    scales = [name for name, module in model.named_modules() if isinstance(module, fm.Scale)]
    return {f"{name}.{buffer}" for name in scales for buffer in ("value", "history")}


def _ties(model: nn.Module) -> dict[str, str]:
    """Return all but the first names of parameters with several names, each with the
    first.
    """
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def _check(
    state: dict[str, Tensor], own: dict[str, Tensor], source: str, measured: set[str]
) -> None:
    """Refuse weights of another model; the error names the first difference."""
    for name in [*own, *(name for name in state if name not in own)]:
        theirs, ours = (_described(side.get(name)) for side in (state, own))
        if theirs != ours and not (name in measured and name in state and name in own):
            raise BenchError(
                f"{source} are of another model: {name} is {theirs} there, {ours} here"
            )


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    form = (
        f"{tensor.format.name} codes"
        if isinstance(tensor, fm.FP8Tensor)
        else str(tensor.dtype).split(".")[-1]
    )
    return f"{form} {tuple(tensor.shape)}"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers by name, quantised or not, with a head that shares the
    embedding's weight.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def quantized_layers(model: nn.Module) -> dict[str, fm.QuantizedLinear]:
    """Return the layers whose weights are quantised, by name."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, fm.QuantizedLinear)
    }
    return {name: layer for name, layer in layers.items() if layer.weight_format is not None}


def constrained_weights(model: nn.Module) -> dict[str, geoopt.ManifoldParameter]:
    """Return the parameters on geoopt's Stiefel manifold or sphere, by name."""
    kinds = (geoopt.Stiefel, geoopt.Sphere)
    return {
        name: p
        for name, p in model.named_parameters()
        if isinstance(getattr(p, "manifold", None), kinds)
    }


def is_rounded(layer: fm.QuantizedLinear) -> bool:
    """Return whether a layer multiplies by values of its format; with continuous
    storage it does not.
    """
    continuous = isinstance(layer.manifold, fm.StiffnessManifold) and not isinstance(
        layer.manifold, fm.FP8Manifold
    )
    return layer.weight_format is not None and not continuous


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a plain, detached tensor; a copy only where codes
    have to be decoded.
    """
    if isinstance(tensor, fm.FP8Tensor) or is_packaged(tensor):
        return tensor.detach().dequantize()
    return tensor.detach().as_subclass(Tensor)


@torch.no_grad()
def forward_weight(layer: nn.Linear) -> Tensor:
    """Return the weight that the forward pass multiplies by, in float32."""
    weight = layer.quantized_weight() if isinstance(layer, fm.QuantizedLinear) else layer.weight
    return plain(weight).float()


#: short names, and their ids on the hub
HUB_IDS = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
#: GPT-2's names of its activation function, and ours
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: settings of GPT-2 models that change what they compute, with the values that the
#: model here has
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
#: a block's layers: our name, GPT-2's, and whether GPT-2 stores the weight transposed,
#: as (inputs, outputs)
_LAYERS = (
    ("norm1", "ln_1", False),
    ("attn.qkv", "attn.c_attn", True),
    ("attn.proj", "attn.c_proj", True),
    ("norm2", "ln_2", False),
    ("mlp.fc", "mlp.c_fc", True),
    ("mlp.proj", "mlp.c_proj", True),
)


def checkpoint_shape(name: str) -> GPTShape:
    """Return the shape of the GPT-2 checkpoint called `name`: a folder, a short name
    like gpt2, or an id on the hub.
    """
    from nanogpt_bench.model.causal import settings_of

    found = settings_of(_model(name))
    if found.model_type != "gpt2":
        raise BenchError(f"{name!r} is of model_type {found.model_type!r}; only gpt2 can be loaded")
    allowed = {**_FIXED, "n_inner": 4 * found.n_embd}
    for key, value in allowed.items():
        if getattr(found, key) not in (value, None):
            raise BenchError(
                f"{name!r} has {key} {getattr(found, key)!r}; only {value!r} can be loaded"
            )
    if found.activation_function not in _GELUS:
        raise BenchError(
            f"{name!r} has activation_function {found.activation_function!r}; only "
            f"{', '.join(_GELUS)} can be loaded"
        )
    sizes = {key: getattr(found, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    tied, gelu = bool(found.tie_word_embeddings), _GELUS[found.activation_function]
    return GPTShape(**sizes, block_size=found.n_positions, bias=True, tie_weights=tied, gelu=gelu)


@torch.no_grad()
def load_checkpoint(model: GPT, name: str, tokenizer: str) -> None:
    """Fill a model of a checkpoint's shape with the checkpoint's weights; errors name
    the corpus's `tokenizer`.
    """
    theirs, ours = checkpoint_shape(name).vocab_size, model.shape.vocab_size
    if theirs != ours:
        raise BenchError(
            f"{name!r} has a vocabulary of {theirs}, the corpus (tokenizer {tokenizer}) one of "
            f"{ours}; prepare it with "
            "the checkpoint's own tokenizer (GPT-2: --tokenizer gpt2)"
        )
    from nanogpt_bench.model.causal import load_causal

    weights = load_causal(_model(name)).state_dict()
    sources = _sources(model.shape.n_layer)
    for key, parameter in model.named_parameters():
        source, transposed = sources[key]
        value = weights[source]
        parameter.copy_((value.T if transposed else value)[: len(parameter)])


def _model(name: str) -> str:
    """The model's name for transformers; a folder of that name goes before a short
    name.
    """
    return name if Path(name).is_dir() else HUB_IDS.get(name, name)


def _sources(n_layer: int) -> dict[str, tuple[str, bool]]:
    """GPT-2's name for each of our parameters, and whether GPT-2 stores it transposed."""
    ours = (
        "token_embedding.weight",
        "position_embedding.weight",
        "final_norm.weight",
        "final_norm.bias",
    )
    theirs = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
    sources = {own: (f"transformer.{name}", False) for own, name in zip(ours, theirs, strict=True)}
    sources["lm_head.weight"] = ("lm_head.weight", False)
    for block in range(n_layer):
        for own, name, transposed in _LAYERS:
            sources[f"blocks.{block}.{own}.weight"] = (
                f"transformer.h.{block}.{name}.weight",
                transposed,
            )
            sources[f"blocks.{block}.{own}.bias"] = (f"transformer.h.{block}.{name}.bias", False)
    return sources
