"""Other packages: one-byte weights of SDNQ and torchao without a master copy, and torchao's float8 training.

SDNQ is under GPL-3.0. It is imported where a run asks for it, and nothing here is its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import is_packaged, parts_of
from nanogpt_bench.system.errors import BenchError, one_line

#: SDNQ's names of its formats
SDNQ_FORMATS = {"E2M5": "float8_e2m5fn", "E4M3": "float8_e4m3fn", "int8": "int8"}

Model = TypeVar("Model", bound=nn.Module)
#: FP8 products take sizes that are multiples of this
MULTIPLE = 16
#: first NVIDIA generation whose tensor cores multiply FP8
FP8_CAPABILITY = (8, 9)


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
    made = {index: _filled(optimizer, places[index], entries) for index, entries in state["state"].items()}
    return {**state, "state": made}


@torch.no_grad()
def _filled(optimizer: Any, place: tuple[Any, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    group, parameter = place
    gradient, parameter.grad = parameter.grad, torch.zeros(parameter.shape, device=parameter.device)
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


def train_in_float8(model: Model, config: Config, device: torch.device) -> Model:
    """Replace the linear layers of the blocks by torchao's, where `model.torchao_float8` names a recipe of scales.

    lm_head stays as it is, and so does a layer whose sizes are no multiples of 16: no hardware multiplies it.
    The weights stay float32. Without FP8 products in hardware, the same roundings are emulated in float32.

    Raises:
        BenchError: torchao is missing or refuses, or there is no layer to replace.
    """
    recipe = config.model.torchao_float8
    if recipe is None:
        return model
    wanted = {name for name, module in model.named_modules() if _takes_float8(name, module)}
    if not wanted:
        raise BenchError(
            f"model.torchao_float8: {recipe!r} needs a layer whose sizes are multiples of {MULTIPLE}; "
            "give another model.n_embd"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(recipe)
        # The class is frozen, and from_recipe_name takes no other argument.
        object.__setattr__(settings, "emulate", not _multiplies_fp8(device))
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in wanted, config=settings)
    except (ImportError, ValueError, AssertionError) as error:
        raise BenchError(f"model.torchao_float8: {one_line(error)}") from None
    return model


def _takes_float8(name: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not name.startswith("blocks."):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
