"""A baseline: torchao's float8 training, whose linear layers cast their operands and gradients to FP8 at every product.

The weights stay float32. Without FP8 products in hardware, the same roundings are emulated in float32.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError, one_line

#: FP8 products take sizes that are multiples of this
MULTIPLE = 16
#: first NVIDIA generation whose tensor cores multiply FP8
FP8_CAPABILITY = (8, 9)

Model = TypeVar("Model", bound=nn.Module)


def train_in_float8(model: Model, config: Config, device: torch.device) -> Model:
    """Replace the linear layers of the blocks by torchao's, where `model.torchao_float8` names a recipe of scales.

    lm_head stays as it is, and so does a layer whose sizes are no multiples of 16: no hardware multiplies it.

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
