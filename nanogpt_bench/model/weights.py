"""A model's layers and weights as plain tensors, and their files.

A one-byte weight of this library has five parts in a file (`fm.files.unflatten`).
A weight of another package is a tensor subclass: it is taken apart into the plain
tensors inside it, under names `WEIGHT::PART`. A tied weight is written once.

The second half reads checkpoints of GPT-2 into the model here.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.system.errors import BenchError, DiskError, one_line, refusals
from nanogpt_bench.system.files import refuse_to_replace, replacing

if TYPE_CHECKING:
    import geoopt

#: in a checkpoint, between the name of another package's tensor and the name of a plain
#: tensor inside it
PART = "::"
#: endings of a one-byte weight's name for its parts in a state
#: (`fm.files.unflatten`)
_PARTS = ("", "_scale", "_counter", "_traits", "_remainder")


def is_packaged(value: Any) -> bool:
    """Return whether a tensor is torchao's.

    Such a tensor is a subclass with plain tensors inside, and a `dequantize`.

    >>> weight = fm.FP8Parameter(torch.zeros(2, 2), "E4M3")
    >>> is_packaged(torch.zeros(2)), is_packaged(weight)
    (False, False)
    """
    tensor = value.data if isinstance(value, nn.Parameter) else value
    if not hasattr(tensor, "__tensor_flatten__") or isinstance(tensor, fm.FP8Tensor):
        return False
    return type(tensor).__module__.partition(".")[0] == "torchao"


def rows_of_outputs(layer: Any) -> Tensor:
    """Return a linear layer's weight as (outputs, inputs).

    transformers' GPT-2 stores it transposed.
    """
    weight: Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.mT.contiguous()


def parts_of(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors inside another package's tensor, by name."""
    return {name: getattr(value, name) for name in sorted(value.__tensor_flatten__()[0])}


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in which other packages' tensors are replaced by their parts.

    The parts are plain tensors that share the memory.

    >>> taken_apart({"bias": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    plain_state: dict[str, Any] = {}
    for name, value in state.items():
        if not is_packaged(value):
            plain_state[name] = value
            continue
        for part, tensor in parts_of(value).items():
            plain_state[f"{name}{PART}{part}"] = tensor
    return plain_state


@torch.no_grad()
def put_back(state: dict[str, Any], model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `taken_apart`.

    The parts in `state` are copied into the tensors of `model_state`, and the result is
    the state with these tensors.
    """
    whole = {name: value for name, value in state.items() if PART not in name}
    for name, value in model_state.items():
        if is_packaged(value):
            for part, tensor in parts_of(value).items():
                tensor.copy_(state[f"{name}{PART}{part}"])
            whole[name] = value
    return whole


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's parameters and buffers to a file; a tied weight once.

    A reader sees the file whole or not at all. One-byte weights are written in the
    parts that they have in a state (`fm.files.unflatten`).
    """
    tensors = tensors_of(model)
    refuse_to_replace(
        "--save", path, lambda _: _tensor_names(path) == tensors.keys(), "another folder"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            save_file(tensors, file.name)
    except SafetensorError as error:
        # safetensors' form of an OSError
        raise DiskError(f"weights {str(path)!r} can't be written: {one_line(error)}") from None


def _tensor_names(path: Path) -> set[str]:
    """Return the names of a safetensors file's tensors; empty for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError, ValueError):
        return set()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers as plain tensors, as a file has them.

    A tied weight is there once.
    """
    repeated: set[str] = set()
    for name in _first_names_of_ties(model):
        repeated.update(name + part for part in _PARTS)
    state = {name: value for name, value in model.state_dict().items() if name not in repeated}
    return {name: value.detach().contiguous() for name, value in taken_apart(state).items()}


def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], source: str
) -> None:
    """Fill a model with tensors of `tensors_of`.

    An error, which calls the tensors `source`, leaves the model as it was. `metadata`
    are the texts of a file's header, in which earlier versions described one-byte
    weights.
    """
    model_state = model.state_dict()
    expected = fm.files.unflatten(taken_apart(model_state))
    with refusals(f"{source} can't be read", ValueError):
        state = fm.files.unflatten(tensors, metadata)
    for name, first_name in _first_names_of_ties(model).items():
        if first_name in state:
            state[name] = state[first_name]
    _check_state(state, expected, source, _buffers_of_scales(model))
    model.load_state_dict(put_back(state, model_state))


def _buffers_of_scales(model: nn.Module) -> set[str]:
    """Return the buffers whose shape depends on the inputs that a layer has had."""
    buffers: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, fm.Scale):
            buffers.update((f"{name}.value", f"{name}.history"))
    return buffers


def _first_names_of_ties(model: nn.Module) -> dict[str, str]:
    """Return the first name of a parameter by each of its further names."""
    first_names: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            ties[name] = first_name
    return ties


def _check_state(
    state: dict[str, Tensor],
    expected: dict[str, Tensor],
    source: str,
    buffers_of_scales: set[str],
) -> None:
    """Refuse weights of another model; the error names the first difference."""
    for name in {**expected, **state}:
        if name in buffers_of_scales and name in state and name in expected:
            continue
        description = _describe(state.get(name))
        expected_description = _describe(expected.get(name))
        if description != expected_description:
            raise BenchError(
                f"{source} are of another model: {name} is {description} there, but "
                f"{expected_description} in this model"
            )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    if isinstance(tensor, fm.FP8Tensor):
        return f"{tensor.format.name} codes {tuple(tensor.shape)}"
    dtype = str(tensor.dtype).split(".")[-1]
    return f"{dtype} {tuple(tensor.shape)}"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers by name, quantised or not.

    A head that shares the embedding's weight is among them.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def quantized_layers(model: nn.Module) -> dict[str, fm.QuantizedLinear]:
    """Return the layers whose weights are quantised, by name."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, fm.QuantizedLinear) and module.weight_format is not None:
            layers[name] = module
    return layers


def constrained_weights(model: nn.Module) -> dict[str, "geoopt.ManifoldParameter"]:
    """Return the parameters on geoopt's Stiefel manifold or sphere, by name.

    Without geoopt, which takes long to import, there are none.
    """
    weights: dict[str, Any] = {}
    geoopt = sys.modules.get("geoopt")
    if geoopt is None:
        return weights
    for name, parameter in model.named_parameters():
        manifold = getattr(parameter, "manifold", None)
        if isinstance(manifold, geoopt.Stiefel | geoopt.Sphere):
            weights[name] = parameter
    return weights


def is_rounded(layer: fm.QuantizedLinear) -> bool:
    """Return whether a layer multiplies by values of its format.

    With continuous storage it does not.
    """
    # An FP8Manifold is a StiffnessManifold whose points are rounded.
    on_stiffness = isinstance(layer.manifold, fm.StiffnessManifold)
    is_continuous = on_stiffness and not isinstance(layer.manifold, fm.FP8Manifold)
    return layer.weight_format is not None and not is_continuous


def dequantized(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a plain, detached tensor.

    It is a copy only where codes have to be decoded.
    """
    if isinstance(tensor, fm.FP8Tensor) or is_packaged(tensor):
        return tensor.detach().dequantize()
    return tensor.detach().as_subclass(Tensor)


@torch.no_grad()
def forward_weight(layer: nn.Linear) -> Tensor:
    """Return the weight that the forward pass multiplies by, in float32."""
    weight = layer.quantized_weight() if isinstance(layer, fm.QuantizedLinear) else layer.weight
    return dequantized(weight).float()


#: short names, and their ids on the hub
HUB_IDS = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
#: `GPTShape.gelu` by GPT-2's name of its activation function
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: settings of GPT-2 models that change what they compute, with the values that the
#: model here has
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


class _GPT2Name(NamedTuple):
    """GPT-2's name of a layer or parameter of the model here."""

    name: str
    #: whether GPT-2 stores the weight as (inputs, outputs)
    is_transposed: bool = False


#: parameters outside the blocks
_OUTER_PARAMETERS = {
    "token_embedding.weight": _GPT2Name("transformer.wte.weight"),
    "position_embedding.weight": _GPT2Name("transformer.wpe.weight"),
    "final_norm.weight": _GPT2Name("transformer.ln_f.weight"),
    "final_norm.bias": _GPT2Name("transformer.ln_f.bias"),
    "lm_head.weight": _GPT2Name("lm_head.weight"),
}
#: layers of a block
_BLOCK_LAYERS = {
    "norm1": _GPT2Name("ln_1"),
    "attn.qkv": _GPT2Name("attn.c_attn", is_transposed=True),
    "attn.proj": _GPT2Name("attn.c_proj", is_transposed=True),
    "norm2": _GPT2Name("ln_2"),
    "mlp.fc": _GPT2Name("mlp.c_fc", is_transposed=True),
    "mlp.proj": _GPT2Name("mlp.c_proj", is_transposed=True),
}


def checkpoint_shape(name: str) -> GPTShape:
    """Return the shape of the GPT-2 checkpoint called `name`.

    It is a folder, a short name like gpt2, or an id on the hub.
    """
    from nanogpt_bench.model.causal import pretrained_config

    settings = pretrained_config(_transformers_name(name))
    if settings.model_type != "gpt2":
        raise BenchError(
            f"{name!r} has model_type {settings.model_type!r}; only gpt2 can be loaded"
        )
    allowed = {**_FIXED, "n_inner": 4 * settings.n_embd}
    for key, value in allowed.items():
        if getattr(settings, key) not in (value, None):
            raise BenchError(
                f"{name!r} has {key} {getattr(settings, key)!r}; only {value!r} can be loaded"
            )
    if settings.activation_function not in _GELUS:
        raise BenchError(
            f"{name!r} has activation_function {settings.activation_function!r}; only "
            f"{', '.join(_GELUS)} can be loaded"
        )
    return GPTShape(
        n_layer=settings.n_layer,
        n_head=settings.n_head,
        n_embd=settings.n_embd,
        block_size=settings.n_positions,
        vocab_size=settings.vocab_size,
        bias=True,
        tie_weights=bool(settings.tie_word_embeddings),
        gelu=_GELUS[settings.activation_function],
    )


@torch.no_grad()
def load_checkpoint(model: GPT, name: str, tokenizer: str) -> None:
    """Fill a model of a checkpoint's shape with the checkpoint's weights.

    Errors name the corpus's `tokenizer`.
    """
    vocabulary = checkpoint_shape(name).vocab_size
    if vocabulary != model.shape.vocab_size:
        raise BenchError(
            f"{name!r} has a vocabulary of {vocabulary}, but the corpus (tokenizer {tokenizer}) "
            f"has {model.shape.vocab_size}; prepare it with the checkpoint's own tokenizer (GPT-2: "
            "--tokenizer gpt2)"
        )
    from nanogpt_bench.model.causal import load_causal

    weights = load_causal(_transformers_name(name)).state_dict()
    gpt2_names = _gpt2_names(model.shape.n_layer)
    for key, parameter in model.named_parameters():
        source = gpt2_names[key]
        value = weights[source.name]
        if source.is_transposed:
            value = value.T
        # A model of a shorter context takes the first positions.
        parameter.copy_(value[: len(parameter)])


def _transformers_name(name: str) -> str:
    """Return a model's name for transformers; a folder goes before a short name."""
    return name if Path(name).is_dir() else HUB_IDS.get(name, name)


def _gpt2_names(n_layer: int) -> dict[str, _GPT2Name]:
    """Return GPT-2's name of every parameter of a model with so many blocks."""
    names = dict(_OUTER_PARAMETERS)
    for block in range(n_layer):
        for layer, gpt2_layer in _BLOCK_LAYERS.items():
            source = f"transformer.h.{block}.{gpt2_layer.name}"
            names[f"blocks.{block}.{layer}.weight"] = _GPT2Name(
                f"{source}.weight", gpt2_layer.is_transposed
            )
            names[f"blocks.{block}.{layer}.bias"] = _GPT2Name(f"{source}.bias")
    return names
