"""Weights of other packages, kept in one byte without a master copy: SDNQ's and torchao's.

SDNQ is under GPL-3.0. It is imported where a run asks for it, and nothing here is its code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError, one_line

#: SDNQ's names of its formats
SDNQ_FORMATS = {"E2M5": "float8_e2m5fn", "E4M3": "float8_e4m3fn", "int8": "int8"}
#: between the name of a packaged tensor and that of a plain one inside it, in a checkpoint
PART = "::"

Model = TypeVar("Model", bound=nn.Module)


def keep_peer_weights(model: Model, config: Config) -> Model:
    """Give every linear layer the weights that `model.peer` names, its head among them; embeddings stay float32.

    Raises:
        BenchError: the package is missing or refuses.
    """
    peer = config.model.peer
    if peer is None:
        return model
    package, _, fmt = peer.partition("-")
    try:
        return _in_sdnq(model, fmt) if package == "sdnq" else _in_torchao(model)
    except (ImportError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise BenchError(f"model.peer: {peer!r}: {one_line(error)}") from None


def _in_sdnq(model: Model, fmt: str) -> Model:
    """SDNQ's own defaults, but for its least size of a layer: a scale for 32 weights, products of floats."""
    from sdnq.training import sdnq_training_post_load_quant

    made: Model = sdnq_training_post_load_quant(
        model,
        weights_dtype=SDNQ_FORMATS[fmt],
        add_skip_keys=False,
        minimum_allowed_numel=0,
        minimum_allowed_channel_size=0,
    )
    return made


def _in_torchao(model: Model) -> Model:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())
    return model


def is_packaged(value: Any) -> bool:
    """Whether a tensor is another package's: plain tensors inside, and a `dequantize`.

    >>> is_packaged(torch.zeros(2)), is_packaged(fm.FP8Parameter(torch.zeros(2, 2), "E4M3"))
    (False, False)
    """
    own = value.data if isinstance(value, nn.Parameter) else value
    if not hasattr(own, "__tensor_flatten__") or isinstance(own, fm.FP8Tensor):
        return False
    return type(own).__module__.partition(".")[0] in ("sdnq", "torchao")


def parts_of(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors inside another package's, by name."""
    return {name: getattr(value, name) for name in sorted(value.__tensor_flatten__()[0])}


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the plain tensors of other packages' ones in their place; they share their memory.

    >>> taken_apart({"bias": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return dict(_plain(state))


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if is_packaged(value):
            yield from ((f"{name}{PART}{part}", tensor) for part, tensor in parts_of(value).items())
        else:
            yield name, value


@torch.no_grad()
def put_back(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the parts in a state that was taken apart into the tensors of `own`, and return it with those."""
    kept = {name: value for name, value in state.items() if PART not in name}
    for name, value in own.items():
        if is_packaged(value):
            for part, tensor in parts_of(value).items():
                tensor.copy_(state[f"{name}{PART}{part}"])
            kept[name] = value
    return kept


def sdnq_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an SDNQ optimizer with its own tensors as mappings of their parts, for a checkpoint."""
    apart = {
        index: {name: parts_of(value) if is_packaged(value) else value for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": apart}


def sdnq_state_back(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return what `sdnq_state` took apart, put into new tensors that the optimizer makes.

    Raises:
        KeyError, RuntimeError: parts of another model's or another setting's.
    """
    places = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    made = {
        index: _filled(optimizer, places[index][0], places[index][1], entries)
        for index, entries in state["state"].items()
    }
    return {**state, "state": made}


def _filled(optimizer: Any, group: Any, parameter: Any, entries: Mapping[str, Any]) -> dict[str, Any]:
    gradient, parameter.grad = parameter.grad, torch.zeros(parameter.shape, device=parameter.device)
    with torch.no_grad():
        try:
            fresh = optimizer.init_state(parameter, group, {})
        finally:
            parameter.grad = gradient
        for name, value in entries.items():
            if isinstance(value, Mapping):
                for part, tensor in parts_of(fresh[name]).items():
                    tensor.copy_(value[part])
            else:
                fresh[name] = value
    return dict(fresh)
